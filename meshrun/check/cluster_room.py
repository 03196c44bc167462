"""Machines on this machine: nodes with a network, a name, processes and a /dev/shm of their own, joined by a switch.

    class Cluster(Room): …                         # the same with Slurm on it: see cluster.py
    room.run("n1", ["ping", "-c1", "n2"])
    room.cut("n2"); room.heal("n2")                # its cable
    room.rate("n2", "50mbit")

All stand in one room: namespaces for processes, mounts and the switch, held by one process. When that one ends, or
whoever started it, the kernel ends all the rest; nothing has a name outside that could be left behind.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from meshrun.check.cluster_conf import Plan, bucket, cable_names, node_script, room_script
from meshrun.check.cluster_process import Process, descendant, enter, until
from meshrun.errors import RunFailed

BOOT_S = 20.0
"""Seconds for a node to boot, or to end."""
SHM = "1g"
SPACES = ("--net", "--uts", "--ipc", "--mount", "--pid")
OWN = ("--fork", "--kill-child=KILL", "--mount-proc", "--propagation", "private")


class Room:
    """Nodes that are on, and their cables."""

    def __init__(
        self,
        folder: Path | str,
        nodes: int = 4,
        gpus: int = 4,
        cpus: int = 8,
        name: str = "virtual",
        networks: int = 1,
        config: Iterable[str] = (),
    ) -> None:
        self.plan = Plan(Path(folder), nodes, gpus, cpus, name, networks, tuple(config))
        self._processes: dict[str, Process] = {}
        """The first process of the room and of every node that is on."""
        self._started: dict[str, subprocess.Popen[bytes]] = {}
        """What this object has started and must reap."""

    @property
    def folder(self) -> Path:
        return self.plan.folder

    def command(self, node: str, argv: Sequence[object], cwd: Path | str, env: Mapping[str, str] | None) -> list[str]:
        """The words that start a program on a node; it ends when whoever started it does."""
        process = self._processes.get(node)
        if process is None or not process.alive:
            raise RunFailed(f"node {node} is off: on are {', '.join(self.nodes_on()) or 'none'}")
        own = {"TMPDIR": str(self.folder.resolve() / "tmp" / node), **(env or {})}
        inside = ["setpriv", "--pdeathsig", "KILL", "env", *(f"{name}={value}" for name, value in own.items())]
        return [*enter(process, SPACES), f"--wdns={Path(cwd).resolve()}", *inside, *map(str, argv)]

    def run(
        self,
        node: str,
        argv: Sequence[object],
        cwd: Path | str = ".",
        env: Mapping[str, str] | None = None,
        timeout: float | None = 60.0,
        check: bool = False,
        given: str = "",
    ) -> subprocess.CompletedProcess[str]:
        """Run a program on a node to its end; `given` is its standard input, `env` is added to this environment."""
        command = self.command(node, argv, cwd, env)
        ended = subprocess.run(command, input=given, capture_output=True, text=True, timeout=timeout, check=False)
        if check and ended.returncode:
            raise RunFailed(
                f"{shlex.join(map(str, argv))} on {node} ended with status {ended.returncode}: "
                f"{ended.stderr.strip() or ended.stdout.strip() or 'it said nothing'}"
            )
        return ended

    def start(
        self,
        node: str,
        argv: Sequence[object],
        cwd: Path | str = ".",
        env: Mapping[str, str] | None = None,
        **more: Any,
    ) -> subprocess.Popen[str]:
        """Start a program on a node; `more` goes to Popen, and output is kept in pipes unless told otherwise."""
        kept = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **more}
        return subprocess.Popen(self.command(node, argv, cwd, env), text=True, **kept)

    def nodes_on(self) -> list[str]:
        return [name for name, process in self._processes.items() if name != "room" and process.alive]

    def power_off(self, node: str) -> None:
        """At once, as if its plug was pulled: nobody gets a last word from it."""
        if node not in self._processes:
            return
        # The cables first: a kernel that ends a process says good-bye to all that it was connected with.
        self._switch(*(f"link del {cable}" for cable in cable_names(self.plan, node)))
        process = self._processes.pop(node)
        process.kill()
        until(lambda: not process.alive, BOOT_S, f"node {node} did not end")
        if reaped := self._started.pop(node, None):
            reaped.wait()
        self._remember()

    def cut(self, node: str) -> None:
        """Pull its cables: whatever is sent is lost, in silence."""
        self._switch(*(f"link set {cable} down" for cable in cable_names(self.plan, node)))

    def heal(self, node: str) -> None:
        self._switch(*(f"link set {cable} up" for cable in cable_names(self.plan, node)))

    def rate(self, node: str, rate: str | None) -> None:
        """Let no more than that through its fast cable, such as 50mbit, in both directions; None: all again."""
        change = f"replace dev {{}} root {bucket(rate)}" if rate else "del dev {} root"
        switch = enter(self._processes["room"], ["--net"])
        for place, device in ((switch, cable_names(self.plan, node)[0]), (self.command(node, [], "/", None), "eth0")):
            words = [*place, "tc", "qdisc", *change.format(device).split()]
            # There is nothing to take away from a cable that was never slow: that is no failure.
            subprocess.run(words, capture_output=True, check=bool(rate))

    def plugged(self) -> list[str]:
        """The nodes with their cable in."""
        links = re.findall(r"^\d+: (.+)@.*\bUP\b", self._switch("link show"), re.MULTILINE)
        return [node for node in self.plan.everyone if cable_names(self.plan, node)[0] in links]

    def start_room(self, lasting: bool) -> None:
        """Where nodes stand. A lasting one stays when this process ends."""
        bound = [] if lasting else ["setpriv", "--pdeathsig", "KILL"]
        words = [*bound, "prlimit", "--core=0:0", "unshare", "--mount", "--net", "--pid", *OWN]
        started = self._popen("room", words, room_script(self.plan))
        self._until_there("room")
        self._processes["room"] = descendant(started.pid, 1)
        self._remember()

    def boot(self, nodes: Sequence[str], shm: str = SHM) -> None:
        """All at once: each one waits for its cables, which can be laid as soon as it is there."""
        words = [*enter(self._processes["room"], ["--mount", "--pid"]), "unshare", *SPACES, *OWN]
        for node in nodes:
            for name in (node, f"{node}.wired"):
                (self.folder / "run" / name).unlink(missing_ok=True)
        launched = {node: self._popen(node, words, node_script(self.plan, node, shm)) for node in nodes}
        for node in nodes:
            self._until_there(node)
            self._processes[node] = descendant(launched[node].pid, 2)
        self._switch(*(line for node in nodes for line in self._cables(node)))
        for node in nodes:
            self._until_there(f"{node}.wired")
        self._remember()

    def end_room(self) -> None:
        """With all that is in it."""
        if room := self._processes.get("room"):
            room.kill()
            until(lambda: not room.alive, BOOT_S, "the room of the virtual nodes did not end")
        for each in self._started.values():
            each.kill()
            each.wait()
        self._processes, self._started = {}, {}
        (self.folder / "cluster.json").unlink(missing_ok=True)

    def _cables(self, node: str) -> list[str]:
        number, pid = self.plan.number(node), self._processes[node].pid
        lines = []
        for index, cable in enumerate(cable_names(self.plan, node)):
            # A fixed hardware address: a node that was off is known to its neighbours at once.
            address = f"02:00:00:00:{index:02x}:{number:02x}"
            lines += [
                f"link add {cable} type veth peer name eth{index} address {address} netns {pid}",
                f"link set {cable} master br{index}",
                f"link set {cable} up",
            ]
        return lines

    def _popen(self, name: str, words: Sequence[str], script: str) -> subprocess.Popen[bytes]:
        with (self.folder / "log" / f"{name}.boot").open("wb") as log:
            self._started[name] = subprocess.Popen(
                [*words, "bash", "-c", script],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                start_new_session=True,
            )
        return self._started[name]

    def _until_there(self, name: str) -> None:
        """Wait for what the first process of a node says; its own words if it cannot."""
        who = name.partition(".")[0]
        there = self.folder / "run" / name
        until(lambda: there.exists() or self._started[who].poll() is not None, BOOT_S, f"{who} did not boot")
        if not there.exists():
            said = (self.folder / "log" / f"{who}.boot").read_text(errors="replace").strip()
            raise RunFailed(f"{who} of the virtual cluster did not boot: {said or 'it said nothing'}")

    def _switch(self, *lines: str) -> str:
        """Commands of `ip` where all cables end."""
        words = [*enter(self._processes["room"], ["--net"]), "ip", "-batch", "-"]
        ended = subprocess.run(words, input="\n".join(lines), capture_output=True, text=True, check=False)
        if ended.returncode:
            raise RunFailed(f"the switch of the virtual cluster refused: {ended.stderr.strip()}")
        return ended.stdout

    def _remember(self) -> None:
        """What another process needs to find it again."""
        plan = {name: value for name, value in asdict(self.plan).items() if name != "folder"}
        processes = {name: [each.pid, each.born] for name, each in self._processes.items()}
        (self.folder / "cluster.json").write_text(json.dumps({"plan": plan, "processes": processes}))

"""A cluster on this machine: the real Slurm on virtual nodes, each with its own network, name, processes and /dev/shm.

    with Cluster(folder, nodes=4, gpus=4) as cluster:
        cluster.run("ctl", ["sbatch", "--wait", "-N2", "job.sh"], cwd=shared)   # clients run on the control node
        cluster.cut("n2"); cluster.heal("n2")                                   # its cable
        cluster.power_off("n1"); cluster.power_on("n1")

    python -m meshrun.check.cluster up FOLDER             # stays until: python -m meshrun.check.cluster down FOLDER
    python -m meshrun.check.cluster sh FOLDER ctl sinfo

It needs root, Slurm and munge, and says what it lacks with `Cluster.missing()`. All disks of the machine are seen by
all nodes; there is no way out to any other network. Clusters in different folders know nothing of each other. Nothing
is left when whoever made one is killed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from meshrun.check.cluster_conf import CONTROL, files
from meshrun.check.cluster_process import Process, until, what_is_missing
from meshrun.check.cluster_room import BOOT_S, SHM, Room
from meshrun.errors import RunFailed, UserError

IDLE_S = 60.0
"""Seconds for Slurm to have all nodes back: it asks silent ones every 27 s or so."""
ENDING_S = 1.0
"""Seconds that a cluster may take to vanish whose maker was killed."""
STATES = ("sinfo", "-h", "-N", "-o", "%N %T")
ACTIONS = "down mend cut heal rate power-off power-on kill-slurmd start-slurmd restart-slurmd restart-slurmctld"
"""Methods that are commands too."""


@dataclass(frozen=True)
class NodeState:
    """How a node is, as Slurm sees it and as it is."""

    slurm: str
    on: bool
    cut: bool


class Cluster(Room):
    """Virtual nodes n1, n2, … and the control node `ctl`, with Slurm on them."""

    @classmethod
    def at(cls, folder: Path | str) -> Cluster:
        """The cluster that is up in a folder, whoever made it."""
        try:
            about = json.loads((Path(folder) / "cluster.json").read_text())
        except FileNotFoundError:
            raise UserError(f"there is no cluster in {folder}: give the folder of one that is up") from None
        cluster = cls(folder, **about["plan"])
        cluster._processes = {name: Process(*known) for name, known in about["processes"].items()}
        return cluster

    @staticmethod
    def missing() -> str:
        """Why no cluster can run here, in a sentence; "" if one can."""
        return what_is_missing()

    def __enter__(self) -> Cluster:
        self.up()
        return self

    def __exit__(self, *error: object) -> None:
        self.down()

    def up(self, lasting: bool = False) -> None:
        """Start it all, and return when every node is idle. A lasting one stays when this process ends."""
        if why := self.missing():
            raise UserError(f"a virtual cluster cannot run here: {why}")
        if any(each.isspace() for each in str(self.folder.resolve())):
            raise UserError(
                f"the cluster's folder {str(self.folder)!r} has white space in its name, which Slurm refuses"
            )
        self._refuse_if_there_is_one()
        try:
            self._write()
            self.start_room(lasting)
            self.boot(self.plan.everyone)
            self.run(CONTROL, ["slurmctld"], check=True)
            for node in self.plan.workers:
                self.start_slurmd(node)
            self.until_idle()
        except BaseException:
            self.down()
            raise

    def down(self) -> None:
        """End all its processes; its files stay, for whoever wants to read logs."""
        self.end_room()
        for name in ("run", "state", "spool", "tmp"):
            shutil.rmtree(self.folder / name, ignore_errors=True)

    def power_on(self, node: str, shm: str = SHM) -> None:
        """Boot it; Slurm has it back when slurmd has told so."""
        if node not in self._processes:
            self.boot([node], shm)
            if node == CONTROL:
                self.run(CONTROL, ["slurmctld"], check=True)
            else:
                self.start_slurmd(node)

    def start_slurmd(self, node: str) -> None:
        self.run(node, ["slurmd"], check=True)

    def kill_slurmd(self, node: str) -> None:
        """Only the daemon: the steps of jobs go on, as they do on a real node."""
        self._end_daemon(node, f"/run/slurmd.{node}.pid", signal.SIGKILL)

    def restart_slurmd(self, node: str) -> None:
        self._end_daemon(node, f"/run/slurmd.{node}.pid", signal.SIGTERM)
        self.start_slurmd(node)

    def restart_slurmctld(self) -> None:
        self._end_daemon(CONTROL, "/run/slurmctld.pid", signal.SIGTERM)
        self.run(CONTROL, ["slurmctld"], check=True)

    def state(self) -> dict[str, NodeState]:
        """Every node but the control node."""
        slurm, on, plugged = self._slurm_states(), self.nodes_on(), self.plugged()
        return {
            node: NodeState(slurm.get(node, "unknown"), node in on, node in on and node not in plugged)
            for node in self.plan.workers
        }

    def until_idle(self, seconds: float = IDLE_S) -> None:
        """Wait until Slurm has all nodes, and nothing runs on them."""
        all_idle = dict.fromkeys(self.plan.workers, "idle")
        until(lambda: self._slurm_states() == all_idle, seconds, "not all nodes became idle")

    def mend(self) -> None:
        """Cancel all jobs, and make every node as it was at first."""
        if not self._processes.get(CONTROL):
            self.power_on(CONTROL)
        for node in self.plan.workers:
            self.power_on(node)
            self.heal(node)
            self.rate(node, None)
            if not self._daemon(node, f"/run/slurmd.{node}.pid"):
                self.start_slurmd(node)
        self.run(CONTROL, ["scancel", "--quiet", "--user=root", "--signal=KILL", "--full"])
        self.run(CONTROL, ["scancel", "--quiet", "--user=root"])
        until(lambda: not self.run(CONTROL, ["squeue", "-h"]).stdout.strip(), IDLE_S, "jobs did not end")
        for node in self.plan.workers:
            self.run(node, ["find", "/dev/shm", "-mindepth", "1", "-delete"], check=True)
        # A node that Slurm has given up on says by itself that it is back, but not at once.
        down = [node for node, state in self.state().items() if state.slurm not in ("idle", "completing")]
        for node in down:
            self.restart_slurmd(node)
            self.run(CONTROL, ["scontrol", "update", f"nodename={node}", "state=resume"])
        self.until_idle()

    def _write(self) -> None:
        for name in ("etc", "run", "log", "state", "spool", "tmp"):
            folder = self.folder / name
            if name in ("run", "state", "spool"):
                shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True, exist_ok=True)
        for node in self.plan.everyone:
            (self.folder / "tmp" / node).mkdir(exist_ok=True)
            (self.folder / "spool" / node).mkdir(exist_ok=True)
        for name, text in files(self.plan).items():
            (self.folder / "etc" / name).write_text(text)
        (self.folder / "etc" / "task_prolog").chmod(0o755)
        key = self.folder / "etc" / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))

    def _daemon(self, node: str, pid_file: str) -> str:
        """Its process as the node counts; "" if there is none."""
        test = f'pid=$(cat {pid_file}) && kill -0 "$pid" && echo "$pid"'
        return self.run(node, ["sh", "-c", test]).stdout.strip()

    def _end_daemon(self, node: str, pid_file: str, number: int) -> None:
        pid = self._daemon(node, pid_file)
        if pid:
            self.run(node, ["kill", f"-{number}", pid])
            until(lambda: self._daemon(node, pid_file) != pid, BOOT_S, f"the daemon of {node} did not end")

    def job(self, number: int | str) -> dict[str, str]:
        """What Slurm says of a job, by its words for it; nothing while it does not answer, or once it has forgotten."""
        told = self.run(CONTROL, ["scontrol", "show", "job", "--oneliner", number]).stdout
        return dict(re.findall(r"(\w+)=(\S*)", told))

    def _slurm_states(self) -> dict[str, str]:
        return dict(line.split() for line in self.run(CONTROL, STATES).stdout.splitlines())

    def _refuse_if_there_is_one(self) -> None:
        if not (self.folder / "cluster.json").exists():
            return
        room = Cluster.at(self.folder)._processes["room"]
        try:
            until(lambda: not room.alive, ENDING_S, "it did not end")
        except RunFailed:
            raise UserError(
                f"there is a cluster in {self.folder} already: python -m meshrun.check.cluster down {self.folder}"
            ) from None


def main(words: Sequence[str] | None = None) -> int:
    """The command line, for whoever works on meshrun itself."""
    parser = argparse.ArgumentParser(prog="python -m meshrun.check.cluster", description="A virtual Slurm cluster.")
    commands = parser.add_subparsers(dest="what", required=True)
    up = commands.add_parser("up", help="start one that stays until `down`")
    up.add_argument("folder", type=Path, help="where its files go")
    up.add_argument("--nodes", type=int, default=4)
    up.add_argument("--gpus", type=int, default=4)
    for what in ("sh", "state", *ACTIONS.split()):
        command = commands.add_parser(what)
        command.add_argument("folder", type=Path)
        command.add_argument("rest", nargs=argparse.REMAINDER, help="sh: NODE COMMAND…; else a node, or nothing")
    given = parser.parse_args(words)
    try:
        return _do(given)
    except (UserError, RunFailed) as error:
        print(error, file=sys.stderr)
        return 2 if isinstance(error, UserError) else 1


def _do(given: argparse.Namespace) -> int:
    if given.what == "up":
        Cluster(given.folder, nodes=given.nodes, gpus=given.gpus).up(lasting=True)
        return 0
    cluster = Cluster.at(given.folder)
    if given.what == "sh":
        return subprocess.run(cluster.command(given.rest[0], given.rest[1:], Path.cwd(), None), check=False).returncode
    if given.what == "state":
        print(json.dumps({node: asdict(state) for node, state in cluster.state().items()}, indent=1))
        return 0
    getattr(cluster, given.what.replace("-", "_"))(*given.rest)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Slurm's commands for a job that is played on one machine: `srun` starts a process for each task of each node here.

    put_up(folder)                               # folder/bin with srun, sbatch, squeue, scontrol, module, …
    stand_in(folder, ["srun", "--export=ALL", "hostname"])      # what these files call

They read what the job was granted from `folder/job.json` and leave notes for whoever plays Slurm: `step-N/argv.json`
for each step that has begun, `requeued` and `submitted.json` for the next link. A flag that they do not know is
refused, since it might change what a job does; a command that they do not play is refused too, and never reaches the
Slurm of this machine.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from meshrun import strict_json
from meshrun.config import write_json
from meshrun.errors import RunFailed, UserError
from meshrun.world.environment import python_for
from meshrun.world.hostlist import expand_hosts
from meshrun.world.played import HOST, Allocation, of_task, without_foreign_interfaces

JOB = "job.json"
REQUEUED, SUBMITTED = "requeued", "submitted.json"
NOT_PLAYED = ("salloc", "scancel", "sinfo", "sacct", "sstat", "sattach", "sbcast", "sprio", "sshare", "sacctmgr")
"""Commands of Slurm that would reach the real one; no script of ours calls them."""

_OF_SRUN = {
    **dict.fromkeys(("--export", "--kill-on-bad-exit", "--nodes", "--ntasks", "--ntasks-per-node"), True),
    # These bind, name or bound what runs, which changes nothing where all nodes are one machine.
    **dict.fromkeys(("--cpu-bind", "--mem-bind", "--gpu-bind", "--distribution", "--hint", "--wait", "--mpi"), True),
    **dict.fromkeys(("--cpus-per-task", "--gres", "--gpus", "--gpus-per-node", "--gpus-per-task", "--mem"), True),
    **dict.fromkeys(("--job-name", "--time", "--threads-per-core", "--network", "--mem-per-cpu"), True),
    **dict.fromkeys(("--no-kill", "--label", "--unbuffered", "--exact", "--overlap", "--exclusive", "--quiet"), False),
}
"""Flags of srun that can be played, and whether each has a value."""
_SHORT = {"-N": "--nodes", "-n": "--ntasks", "-c": "--cpus-per-task", "-l": "--label", "-u": "--unbuffered"}
_SHORT |= {"-K": "--kill-on-bad-exit", "-k": "--no-kill", "-t": "--time", "-J": "--job-name", "-W": "--wait"}
_OF_SBATCH = {"--parsable": False, "--dependency": True, "--array": True}
_OF_SQUEUE = {"--noheader": False, "--states": True, "--array": False, "--jobs": True, "--user": True, "--format": True}
_SHORT_OF_SQUEUE = {"-h": "--noheader", "-j": "--jobs", "-u": "--user", "-o": "--format", "-t": "--states"}
_ACTIONS_OF_MODULES = (
    "load",
    "add",
    "unload",
    "rm",
    "swap",
    "switch",
    "use",
    "unuse",
    "purge",
    "reset",
    "restore",
    "list",
)
_WITHOUT_NAMES = ("purge", "reset", "restore", "list")


@dataclass(frozen=True)
class PlayedJob:
    """A job that is played: what it was granted, and how Slurm would show it."""

    granted: Allocation
    script: str
    began: float
    ends: float

    def save(self, folder: Path) -> None:
        write_json(folder / JOB, dataclasses.asdict(self))

    @classmethod
    def load(cls, folder: Path) -> PlayedJob:
        document = strict_json.loads((folder / JOB).read_text())
        granted = document["granted"]
        array = tuple(granted["array"]) if granted["array"] else None
        return cls(**{**document, "granted": Allocation(**{**granted, "array": array})})


@dataclass(frozen=True)
class Words:
    """The words after a command: its flags with their values, and the rest."""

    flags: dict[str, str] = field(default_factory=dict)
    rest: tuple[str, ...] = ()

    def number(self, flag: str, usual: int) -> int:
        text = self.flags.get(flag, str(usual))
        if not text.isdecimal() or int(text) < 1:
            raise UserError(f"srun {flag} is {text!r}; it must be a whole number of at least 1")
        return int(text)


def put_up(folder: Path) -> Path:
    """Write the commands; the folder that they are in is to be the first of PATH."""
    bin = folder / "bin"
    bin.mkdir(parents=True, exist_ok=True)
    for name in (*COMMANDS, *NOT_PLAYED):
        file = bin / name
        command = python_for(["-m", "meshrun", "stand-in", str(folder), name])
        file.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
        file.chmod(0o755)
    return bin


def stand_in(folder: Path, words: Sequence[str]) -> int:
    """Be one of Slurm's commands, in a job that is played; returns its exit status."""
    name, *rest = words
    if name not in COMMANDS:
        raise UserError(f"{name} is not played in a rehearsal: it would ask the real Slurm about a job that is none")
    return COMMANDS[name](folder, rest)


def srun(folder: Path, words: Sequence[str]) -> int:
    """Start the tasks of a step here, and wait for all of them; ends as srun does."""
    given = parsed("srun", words, _OF_SRUN, _SHORT, stops_at_first=True)
    job = PlayedJob.load(folder).granted
    nodes = given.number("--nodes", job.nodes)
    per_node = given.number("--ntasks-per-node", job.tasks_per_node)
    tasks = given.number("--ntasks", nodes * per_node)
    if not given.rest:
        raise UserError("srun is given no command to run")
    if given.flags.get("--export", "ALL") != "ALL":
        raise UserError(f"srun --export={given.flags['--export']} is not played in a rehearsal; only ALL is")
    if nodes > job.nodes or tasks % nodes:
        raise RunFailed(
            f"srun asks for {tasks} tasks on {nodes} nodes, but the job has {job.nodes} nodes, and only equal shares "
            "of tasks can be played"
        )
    step = _begin_step(folder, given.rest)
    inherited, left_away = without_foreign_interfaces()
    for each in left_away:
        print(f"rehearsal: {each} is left away, since this machine has no such interface", file=sys.stderr)
    per_node = tasks // nodes
    places = [(node, local) for node in range(nodes) for local in range(per_node)]
    environments = [inherited | of_task(job, step, *place, per_node, nodes) for place in places]
    kill = given.flags.get("--kill-on-bad-exit", "0") != "0"
    return _Step(given.rest, environments, [node for node, _ in places]).run(kill)


class _Step:
    """The tasks of one step, which live no longer than this process."""

    def __init__(self, command: Sequence[str], environments: Sequence[Mapping[str, str]], nodes: Sequence[int]) -> None:
        self._nodes = nodes
        self._tasks: list[subprocess.Popen[bytes] | None] = []
        for environment, node in zip(environments, nodes, strict=True):
            try:
                self._tasks.append(
                    subprocess.Popen(
                        command, env=dict(environment), stdin=subprocess.DEVNULL, preexec_fn=_die_with(os.getpid())
                    )
                )
            except OSError as error:
                what = f"execve(): {command[0]}: {error.strerror}"
                print(f"slurmstepd-{HOST}{node + 1}: error: {what}", file=sys.stderr, flush=True)
                self._tasks.append(None)

    def run(self, kill_on_bad_exit: bool) -> int:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
            signal.signal(number, self._hand_on)
        worst, open_ = 0, dict(enumerate(self._tasks))
        while open_:
            for rank, task in list(open_.items()):
                code = 2 if task is None else task.poll()
                if code is None:
                    continue
                del open_[rank]
                if code == 0:
                    continue
                # As srun has it: the highest status of all tasks, 128 and the signal for one that was killed.
                worst = max(worst, code if code > 0 else 128 - code)
                how = f"Exited with exit code {code}" if code > 0 else signal.strsignal(-code)
                print(f"srun: error: {HOST}{self._nodes[rank] + 1}: task {rank}: {how}", file=sys.stderr, flush=True)
                if kill_on_bad_exit:
                    self._send(signal.SIGKILL)
            time.sleep(0.02)
        return worst

    def _hand_on(self, number: int, _frame: FrameType | None) -> None:
        self._send(number)

    def _send(self, number: int) -> None:
        for task in self._tasks:
            if task is not None and task.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    task.send_signal(number)


def _begin_step(folder: Path, command: Sequence[str]) -> int:
    """The next free number; mkdir decides."""
    step = 0
    while True:
        try:
            (folder / f"step-{step}").mkdir()
            break
        except FileExistsError:
            step += 1
    write_json(folder / f"step-{step}" / "argv.json", {"argv": list(command)})
    return step


def _die_with(parent: int) -> Callable[[], None]:
    """For a child before it becomes another program: the kernel ends it when `parent` is gone."""
    prctl = ctypes.CDLL(None).prctl

    def called() -> None:
        prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os._exit(1)

    return called


def sbatch(folder: Path, words: Sequence[str]) -> int:
    """Note that a script is to be played after this one."""
    given = parsed("sbatch", words, _OF_SBATCH)
    if len(given.rest) != 1:
        raise UserError(f"sbatch is given {len(given.rest)} scripts in a rehearsal; it must be one")
    job = PlayedJob.load(folder).granted
    new = str(int(job.id) + 1)
    write_json(folder / SUBMITTED, {"id": new, "script": given.rest[0], "flags": given.flags})
    print(new if "--parsable" in given.flags else f"Submitted batch job {new}")
    return 0


def squeue(folder: Path, words: Sequence[str]) -> int:
    """Show the job that is played, in the form that is asked for."""
    given = parsed("squeue", words, _OF_SQUEUE, _SHORT_OF_SQUEUE)
    if "--format" not in given.flags:
        raise UserError("squeue is played with --format only")
    job = PlayedJob.load(folder)
    if given.flags.get("--jobs", job.granted.id).partition("_")[0] != job.granted.id:
        print("slurm_load_jobs error: Invalid job id specified", file=sys.stderr)
        return 1
    shown = f"{job.granted.id}_{job.granted.array[0]}" if job.granted.array else job.granted.id
    spent, limit = int(time.time() - job.began), int(job.ends - job.began)
    fields = {
        "%A": job.granted.id,
        "%i": shown,
        "%T": "RUNNING",
        "%r": "None",
        "%M": f"{spent // 60}:{spent % 60:02}",
        "%l": f"{limit // 60}:{limit % 60:02}",
        "%S": _moment(job.began),
        "%e": _moment(job.ends),
        "%D": str(job.granted.nodes),
        "%N": job.granted.hosts,
        "%o": job.script,
    }
    text = given.flags["--format"]
    unknown = sorted(set(re.findall("%.", text)) - set(fields))
    if unknown:
        raise UserError(f"squeue --format has {', '.join(unknown)}, which is not played; known are {', '.join(fields)}")
    print(re.sub("%.", lambda found: fields[found[0]], text))
    return 0


def scontrol(folder: Path, words: Sequence[str]) -> int:
    """Show the job, write out host names, or note that the job is to be played again."""
    job = PlayedJob.load(folder)
    match list(words):
        case ["show", "hostnames" | "hostname", *hosts]:
            print("\n".join(expand_hosts(hosts[0] if hosts else job.granted.hosts)))
        case ["show", "job", id] if id.partition("_")[0] == job.granted.id:
            print(
                f"JobId={job.granted.id} JobName={job.granted.name}\n"
                f"   JobState=RUNNING Reason=None Restarts={job.granted.restarts}\n"
                f"   StartTime={_moment(job.began)} EndTime={_moment(job.ends)}\n"
                f"   NumNodes={job.granted.nodes} NodeList={job.granted.hosts}"
            )
        case ["requeue", id] if id.partition("_")[0] == job.granted.id:
            (folder / REQUEUED).touch()
        case _:
            raise UserError(
                f"scontrol {shlex.join(words)} is not played in a rehearsal; show job, show hostnames and requeue are, "
                f"of job {job.granted.id}"
            )
    return 0


def module(_folder: Path, words: Sequence[str]) -> int:
    """Check the form of a module command; whether there is such a module is known at the site only."""
    flags, rest = [each for each in words if each.startswith("-")], [each for each in words if not each.startswith("-")]
    action = rest[0] if rest else ""
    if action not in _ACTIONS_OF_MODULES:
        raise UserError(f"module {shlex.join(words)}: {action!r} is none of {', '.join(_ACTIONS_OF_MODULES)}")
    if len(rest) == 1 and action not in _WITHOUT_NAMES:
        raise UserError(f"module {action} names no module")
    del flags
    return 0


def ml(folder: Path, words: Sequence[str]) -> int:
    """Lmod's short form: `ml NAME` loads, `ml -NAME` unloads."""
    known = bool(words) and words[0] in _ACTIONS_OF_MODULES
    return module(folder, words) if known or not words else 0


COMMANDS: dict[str, Callable[[Path, Sequence[str]], int]] = {
    "srun": srun,
    "sbatch": sbatch,
    "squeue": squeue,
    "scontrol": scontrol,
    "module": module,
    "ml": ml,
}


def parsed(
    command: str,
    words: Sequence[str],
    known: Mapping[str, bool],
    short: Mapping[str, str] | None = None,
    stops_at_first: bool = False,
) -> Words:
    """The flags and the rest; the first word that is no flag ends the flags of a command that runs another."""
    flags: dict[str, str] = {}
    rest: list[str] = []
    left = list(words)
    while left:
        word = left.pop(0)
        if not word.startswith("-") or word == "-":
            rest.append(word)
            if stops_at_first:
                rest += left
                break
            continue
        name, equals, value = word.partition("=")
        if short and not word.startswith("--"):
            name, value = short.get(word[:2], word), word[2:].removeprefix("=")
            equals = value
        if name not in known:
            raise UserError(
                f"{command} {word} is not played in a rehearsal: what it does to a job is not known here; known are "
                f"{', '.join(sorted(known))}"
            )
        if known[name] and not equals:
            # --kill-on-bad-exit alone means 1, and does not take the next word.
            value = "1" if name == "--kill-on-bad-exit" else left.pop(0) if left else ""
        flags[name] = value
    return Words(flags, tuple(rest))


def _moment(seconds: float) -> str:
    """A time as Slurm writes it, or in the format that was asked for with SLURM_TIME_FORMAT; both are read."""
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(seconds))

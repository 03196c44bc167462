"""Processes in namespaces, as a virtual cluster is made of: known by number and birth, entered, waited for.

process = descendant(started.pid, generations=2)     # what `nsenter … unshare --fork` has started in the end
subprocess.run([*enter(process, ["--net"]), "ip", "link"])
"""

from __future__ import annotations

import functools
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from meshrun.errors import RunFailed

PROGRAMS = "unshare nsenter setpriv prlimit ip tc munged slurmctld slurmd sbatch srun squeue scancel scontrol"
LOOK = 0.02
"""Seconds between two looks for what is awaited."""


@dataclass(frozen=True)
class Process:
    """A process of this machine, known by its number and by when it was born: numbers come again."""

    pid: int
    born: int

    @property
    def alive(self) -> bool:
        return _born(self.pid) == self.born

    def kill(self) -> None:
        if self.alive:
            os.kill(self.pid, signal.SIGKILL)


def _born(pid: int) -> int | None:
    """When a process was born, in ticks since this machine was; None if it is gone or a zombie."""
    try:
        about = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if about[0] in "ZX" else int(about[19])


def children(pid: int) -> list[int]:
    try:
        return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def descendant(pid: int, generations: int) -> Process:
    """The first child of the first child, and so on."""
    for _ in range(generations):
        (pid, *_) = children(pid)
    born = _born(pid)
    assert born is not None
    return Process(pid, born)


def enter(process: Process, spaces: Iterable[str]) -> list[str]:
    """The words before a command that is to run where a process is."""
    # A crash in there leaves a core of hundreds of megabytes otherwise.
    return ["prlimit", "--core=0:0", "nsenter", f"--target={process.pid}", *spaces]


def until(condition: Callable[[], object], seconds: float, otherwise: str) -> None:
    """Wait for a condition; RunFailed when it does not come true in time."""
    give_up = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > give_up:
            raise RunFailed(f"{otherwise} within {seconds:.0f} s")
        time.sleep(LOOK)


@functools.cache
def what_is_missing() -> str:
    """Why no virtual cluster can run on this machine, in a sentence; "" if one can."""
    if os.geteuid() != 0:
        return "it needs root"
    absent = [program for program in PROGRAMS.split() if shutil.which(program) is None]
    if absent:
        return f"{', '.join(absent)} {'is' if len(absent) == 1 else 'are'} not installed (make launchers)"
    try_it = [
        "unshare",
        "--net",
        "--uts",
        "--ipc",
        "--mount",
        "--pid",
        "--fork",
        "mount",
        "-t",
        "tmpfs",
        "tmpfs",
        "/run",
    ]
    tried = subprocess.run(try_it, capture_output=True, text=True, check=False)
    return f"namespaces are not allowed here: {tried.stderr.strip()}" if tried.returncode else ""

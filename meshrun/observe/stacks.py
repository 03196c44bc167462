"""Where each thread of a rank and of its data readers is, asked from outside.

    answer_into(folder, rank)                        # on the rank, before it forks its readers: they answer too
    thread_stacks(ask(pid, file))                    # on the launcher: {thread: [Frame, …]}, innermost first

The answer is given by C code inside a signal handler, so a thread that holds Python's lock in an endless loop is seen
too. A process that is stopped answers nothing. The signal is a real-time one: SIGUSR1 belongs to Slurm's users.
"""

from __future__ import annotations

import contextlib
import faulthandler
import linecache
import os
import re
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SIGNAL = signal.SIGRTMIN + 8

_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<function>.*)')
_THREAD = re.compile(r"(?:Current thread|Thread) 0x(?P<ident>[0-9a-f]+)")
_open: list[int] = []
"""The file of the answers must stay open as long as the process lives."""


@dataclass(frozen=True)
class Frame:
    """A line of code that a thread is in."""

    file: str
    line: int
    function: str

    @property
    def code(self) -> str:
        """The line itself, without the comment behind it."""
        return linecache.getline(self.file, self.line).strip().partition("  #")[0]

    def __str__(self) -> str:
        code = f" ({self.code})" if self.code else ""
        return f"{Path(self.file).name}:{self.line} {self.function}{code}"


def path_of(folder: Path, rank: int) -> Path:
    return folder / f"stacks-{rank:05d}"


def answer_into(folder: Path, rank: int) -> None:
    """Have this process, and those that it forks from now on, write their stacks there when asked."""
    file = os.open(path_of(folder, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_TRUNC, 0o600)
    os.set_inheritable(file, False)
    faulthandler.register(SIGNAL, file=file, all_threads=True, chain=False)
    while _open:
        os.close(_open.pop())
    _open.append(file)


def ask(pid: int, file: Path, patience: float = 0.4) -> str:
    """What a process answers; nothing where it cannot, or where the signal would end it as it expects none.

    Processes that share a file are asked one after the other.
    """
    if not _handles(pid):
        return ""
    begin = file.stat().st_size if file.exists() else 0
    try:
        os.kill(pid, SIGNAL)
    except (ProcessLookupError, PermissionError):
        return ""
    give_up, size, still = time.monotonic() + patience, begin, 0
    while time.monotonic() < give_up and still < 3:
        time.sleep(0.01)
        with contextlib.suppress(OSError):
            now = file.stat().st_size
            still = still + 1 if now == size > begin else 0
            size = now
    try:
        with file.open("rb") as answers:
            answers.seek(begin)
            return answers.read(size - begin).decode(errors="replace")
    except OSError:
        return ""


def thread_stacks(text: str) -> dict[int, list[Frame]]:
    """The frames of each thread, innermost first."""
    found: dict[int, list[Frame]] = {}
    frames: list[Frame] = []
    for line in text.splitlines():
        if thread := _THREAD.match(line):
            frames = found.setdefault(int(thread["ident"], 16), [])
        elif (frame := _FRAME.match(line)) and frame["line"].isdigit():
            frames.append(Frame(frame["file"], int(frame["line"]), frame["function"]))
    return found


def state_of(pid: int) -> str:
    """The letter that the kernel has for what a process does: R, S, D, T, Z; nothing for one that is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return text.rpartition(")")[2].split()[0]


def children_of(pid: int) -> Sequence[int]:
    """All processes below one, those of their own included."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    found, below = [], {pid}
    while below:
        below = {child for child, parent in parents.items() if parent in below}
        found += sorted(below)
    return found


def _handles(pid: int) -> bool:
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)", text, re.MULTILINE)
    return caught is not None and bool(int(caught[1], 16) >> (SIGNAL - 1) & 1)

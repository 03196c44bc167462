"""What a rank is at, in a small file that its launcher maps into its own memory: a sign of life that needs no message.

    pulse = Pulse.open(memory, rank, generation)     # on the rank, before its process group and its data readers exist
    pulse.mark("computing", step=12)                 # about a microsecond: no lock, no system call
    pulse.waiting("the gradients of step 12")        # None when the wait is over
    pulse.finished(step=12, seconds=0.3, data_wait=0.01)

    view = PulseView(memory, rank)                   # on the launcher
    view.read().silent                               # seconds since the last change

Every mark is progress, also one with the same words. A thread of the rank beats beside it twice a second: it tells a
process that cannot run at all from one whose main thread is stuck, and it answers when the launcher asks for the
records of its collectives. The clock is the machine's monotonic one, which all of its processes share.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from meshrun.config import use_reserve
from meshrun.errors import RunFailed
from meshrun.observe import flight, stacks

BEAT_EVERY = 0.5
SNIFF_EVERY = 10.0
LONG_PHASES = ("starting", "compiling", "evaluating", "saving", "done", "after")
"""Phases that may take their time: how long is not known from the pace of the steps."""
SCRIPT_PHASES = ("script", "ended")
"""Of a plain script, which has no steps: it runs, or has come to its end and its process is about to end."""

_HEAD = struct.Struct("<8sqqqQd")
"""Magic, pid, rank, generation, identity of the main thread, when it was opened."""
_BEAT = struct.Struct("<Qd")
_NUMBER = struct.Struct("<Q")
_MARK = struct.Struct("<dq16s200sQ")
"""Time, step, phase, what it waits for, and its number, which also stands before it: the same in a whole mark."""
_STEPS = struct.Struct("<Qqqdddddd")
"""Number, steps finished here, number of the last one, its seconds, the longest, the sums of seconds, of the wait
for data and of processor time, and how long the sniff test took."""
_EVALS = struct.Struct("<Qd")
"""Evaluations that came to their end, and the longest time between two marks in one."""

_AT_BEAT = _HEAD.size
_AT_NUMBER = _AT_BEAT + _BEAT.size
_AT_MARK = _AT_NUMBER + _NUMBER.size
_AT_STEPS = _AT_MARK + _MARK.size
_AT_EVALS = _AT_STEPS + _STEPS.size
_AT_ASKED = _AT_EVALS + _EVALS.size
SIZE = _AT_ASKED + _NUMBER.size
_MAGIC = b"pulse-01"


@dataclass(frozen=True)
class Reading:
    """A pulse at one moment."""

    rank: int
    pid: int
    generation: int
    thread: int
    """The identity of the main thread, as stacks name it."""
    beats: int
    beat_age: float
    marks: int
    silent: float
    """Seconds since the last mark."""
    step: int
    phase: str
    what: str
    """What it waits for, or nothing."""
    finished: int
    """Steps that this process has finished."""
    last: int
    """The number of the last one."""
    longest: float
    """Seconds of the longest step; the first, which pays for starting, counts only while there is no other."""
    seconds: float
    data_wait: float
    cpu: float
    sniff: float
    evaluations: int
    longest_evaluating: float


def path_of(folder: Path, rank: int) -> Path:
    return folder / f"pulse-{rank:05d}"


class Pulse:
    """The rank's side. Marks are made by its main thread."""

    def __init__(self, file: mmap.mmap, folder: Path, rank: int) -> None:
        self._file, self._folder, self._rank = file, folder, rank
        self._marks, self._at, self._step = 0, time.monotonic(), 0
        self._phase, self._what = b"starting", b""
        self._finished, self._longest = 0, 0.0
        self._seconds = self._data_wait = self._cpu = self._sniffed = 0.0
        self._evaluations, self._longest_evaluating = 0, 0.0
        self._cpu_mark, self._sniff_due = time.thread_time(), 0.0
        self.sniff: Callable[[], float] | None = None
        """Times a small piece of fixed work, between two steps and not often: see `stragglers.sniff_on`."""
        self._over = threading.Event()
        self._beats = 0
        self._thread = threading.Thread(target=self._beat, name="pulse", daemon=True)

    @classmethod
    def open(cls, folder: Path, rank: int, generation: int) -> Pulse:
        """Begin to be seen: the file, the answer to a question for stacks, and the beat."""
        folder.mkdir(parents=True, exist_ok=True)
        path = path_of(folder, rank)
        beside = path.with_name(f".{path.name}.{os.getpid()}")
        use_reserve(folder)
        try:
            beside.write_bytes(bytes(SIZE))
        except OSError as error:
            raise RunFailed(
                f"{folder} cannot take the {SIZE} bytes in which a rank shows where it is: {error.strerror}; make room "
                f"there (df {folder} shows how much there is), then resume the run"
            ) from error
        with beside.open("r+b") as file:
            mapped = mmap.mmap(file.fileno(), SIZE)
        thread = threading.main_thread().ident or 0
        _HEAD.pack_into(mapped, 0, _MAGIC, os.getpid(), rank, generation, thread, time.monotonic())
        _BEAT.pack_into(mapped, _AT_BEAT, 0, time.monotonic())
        pulse = cls(mapped, folder, rank)
        pulse.mark("starting", 0)
        # Readers must never find the file of a process before this one, or a file that is half made.
        beside.replace(path)
        stacks.answer_into(folder, rank)
        pulse._thread.start()
        return pulse

    def mark(self, phase: str, step: int) -> None:
        """The rank begins something, or has got on with it."""
        now = time.monotonic()
        if self._phase == b"evaluating":
            self._evaluated(now - self._at, over=phase != "evaluating")
        self._phase, self._step, self._at = phase.encode(), step, now
        self._write(now)

    def waiting(self, what: str | None) -> None:
        """The rank begins to wait for others, or nobody keeps it waiting any more."""
        now = time.monotonic()
        if self._phase == b"evaluating":
            self._evaluated(now - self._at, over=False)
        self._what, self._at = what.encode() if what else b"", now
        self._write(now)

    def finished(self, step: int, seconds: float, data_wait: float) -> None:
        """A step is done; `step` counts from 1."""
        cpu = time.thread_time()
        self._finished += 1
        self._longest = seconds if self._finished <= 2 else max(self._longest, seconds)
        self._seconds += seconds
        self._data_wait += data_wait
        self._cpu += cpu - self._cpu_mark
        self._cpu_mark = cpu
        if self.sniff is not None and (now := time.monotonic()) >= self._sniff_due:
            self._sniffed, self._sniff_due = self.sniff(), now + SNIFF_EVERY
            self._cpu_mark = time.thread_time()
        _STEPS.pack_into(
            self._file, _AT_STEPS, self._finished, self._finished, step, seconds, self._longest, self._seconds,
            self._data_wait, self._cpu, self._sniffed,
        )  # fmt: skip
        self.mark("reading", step + 1)

    def close(self) -> None:
        """Stop beating; what was marked last stays readable."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def _write(self, now: float) -> None:
        self._marks = number = self._marks + 1
        # One after the other: within one call, struct clears all of the bytes before it writes the first.
        _NUMBER.pack_into(self._file, _AT_NUMBER, number)
        _MARK.pack_into(self._file, _AT_MARK, now, self._step, self._phase, self._what, number)

    def _evaluated(self, gap: float, over: bool) -> None:
        self._evaluations += over
        self._longest_evaluating = max(self._longest_evaluating, gap)
        _EVALS.pack_into(self._file, _AT_EVALS, self._evaluations, self._longest_evaluating)

    def _beat(self) -> None:
        answered = 0
        while not self._over.wait(BEAT_EVERY):
            self._beats += 1
            _BEAT.pack_into(self._file, _AT_BEAT, self._beats, time.monotonic())
            asked = _NUMBER.unpack_from(self._file, _AT_ASKED)[0]
            if asked != answered:
                answered = asked
                with contextlib.suppress(Exception):  # evidence is welcome, but must not end a rank
                    flight.write_own(self._folder, self._rank, asked)


class PulseView:
    """The launcher's side of one rank's pulse."""

    def __init__(self, file: mmap.mmap, path: Path) -> None:
        self._file, self.path = file, path

    @classmethod
    def open(cls, folder: Path, rank: int) -> PulseView | None:
        """None while the rank has not made its file."""
        path = path_of(folder, rank)
        try:
            with path.open("r+b") as file:
                view = cls(mmap.mmap(file.fileno(), SIZE), path)
        except (OSError, ValueError):
            return None
        return view if view._file[:8] == _MAGIC else None

    def read(self) -> Reading:
        now = time.monotonic()
        _, pid, rank, generation, thread, _ = _HEAD.unpack_from(self._file, 0)
        beats, beat_at = _BEAT.unpack_from(self._file, _AT_BEAT)
        number, at, step, phase, what = self._mark()
        _, finished, last, _, longest, seconds, data_wait, cpu, sniff = _STEPS.unpack_from(self._file, _AT_STEPS)
        evaluations, longest_evaluating = _EVALS.unpack_from(self._file, _AT_EVALS)
        return Reading(
            rank=rank, pid=pid, generation=generation, thread=thread, beats=beats, beat_age=now - beat_at,
            marks=number, silent=max(0.0, now - at), step=step, phase=_text(phase), what=_text(what),
            finished=finished, last=last, longest=longest, seconds=seconds, data_wait=data_wait, cpu=cpu, sniff=sniff,
            evaluations=evaluations, longest_evaluating=longest_evaluating,
        )  # fmt: skip

    @property
    def marks(self) -> int:
        """How many marks there were: all that a quick look needs."""
        return int(_NUMBER.unpack_from(self._file, _AT_NUMBER)[0])

    def ask(self) -> int:
        """Have the rank write the records of its collectives at its next beat; returns the number of the question."""
        number = int(_NUMBER.unpack_from(self._file, _AT_ASKED)[0]) + 1
        _NUMBER.pack_into(self._file, _AT_ASKED, number)
        return number

    def touch(self) -> None:
        """Mark progress for a rank that marks none itself."""
        number, _, step, phase, what = self._mark()
        _NUMBER.pack_into(self._file, _AT_NUMBER, number + 1)
        _MARK.pack_into(self._file, _AT_MARK, time.monotonic(), step, phase, what, number + 1)

    def _mark(self) -> tuple[int, float, int, bytes, bytes]:
        """A whole mark: its end is read before its begin, which the writer writes the other way round."""
        for _ in range(100):
            end = _NUMBER.unpack_from(self._file, _AT_STEPS - _NUMBER.size)[0]
            at, step, phase, what, _ = _MARK.unpack_from(self._file, _AT_MARK)
            if self.marks == end:
                break
        return end, at, step, phase, what


def _text(field: bytes) -> str:
    return field.rstrip(b"\0").decode(errors="replace")

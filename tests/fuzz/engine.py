"""Gives damaged inputs to a format's reader, in forked processes, and judges what the reader does with each.

    found = fuzz([table["tokens"]], inputs=10_000, seed=1, jobs=2, out=Path("fuzz-findings"))

A reader may return a value, which the format checks where it can, or raise one of meshrun's own errors with a sentence.
Anything else is a finding: another exception, a signal, more than `SECONDS`, more than `MEMORY` bytes, a wrong value.
"""

from __future__ import annotations

import json
import mmap
import os
import random
import resource
import signal
import struct
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from meshrun.errors import CutOff, RunFailed, UserError
from tests.fuzz.mutations import Mutator, of_bytes

SECONDS = 60.0
"""Time for one input; most take a millisecond, and a machine may be busy."""
MEMORY = 100 << 20
"""Bytes that a reader may take for one input, all of which are small."""
SLACK = 32 << 20
"""Bytes beside: stacks of threads, and arenas of allocators."""
BLOCK = 500
"""Inputs for one forked process."""
CORPUS = Path(__file__).parent / "corpus"

Read = Callable[[bytes, Path], Any]


class WrongValue(Exception):
    """A reader has returned what the input does not say."""


@dataclass(frozen=True)
class Format:
    """A format that meshrun reads."""

    name: str
    examples: Callable[[Path], Sequence[bytes]]
    """Makes valid inputs; the folder is for files in between."""
    read: Read
    """Reads an input as meshrun does, in a folder of its own that is kept from input to input; returns a value."""
    mutate: Mutator = of_bytes
    check: Callable[[bytes, Any], None] | None = None
    """Raises WrongValue where the value is not what the input says."""


@dataclass(frozen=True)
class Finding:
    """An input that broke the rule."""

    format: str
    input: str
    """The name of a file of the corpus, or the number of a drawn input."""
    path: str
    what: str
    """An exception, a signal, a hang, an allocation."""
    where: str = ""

    def told(self) -> str:
        repeat = f"python -m tests.fuzz {self.format} --input {self.path}"
        return f"{self.format} {self.input}: {self.what}\n{self.where}    input: {self.path}\n    again: {repeat}\n"


@dataclass
class Tally:
    """What became of the inputs of one format."""

    format: str
    inputs: int = 0
    read: int = 0
    refused: int = 0
    seconds: float = 0.0
    """Of all processes together."""
    slowest: float = 0.0
    memory: int = 0
    """Most bytes that one input took."""
    findings: list[Finding] = field(default_factory=list)

    def told(self) -> str:
        rate = self.inputs / self.seconds if self.seconds else 0.0
        return (
            f"{self.format:<20} {self.inputs:>7,} inputs: {self.read:>6,} read, {self.refused:>6,} refused, "
            f"{len(self.findings):>3} findings; {rate:>6,.0f}/s, slowest {self.slowest * 1e3:>6,.0f} ms, "
            f"{self.memory >> 20:>3} MB"
        )


def fuzz(
    formats: Sequence[Format], inputs: int, seed: int, jobs: int, out: Path, tell: Callable[[str], None] = print
) -> list[Tally]:
    """Give each format its corpus, its examples and so many damaged inputs; findings are written to `out`."""
    with tempfile.TemporaryDirectory(prefix="meshrun-fuzz-", dir=_memory()) as folder:
        return [_fuzz(each, inputs, seed, jobs, out, Path(folder), tell) for each in formats]


def drawn(format: Format, examples: Sequence[bytes], seed: int, number: int) -> bytes:
    """The damaged input of that number."""
    return format.mutate(random.Random(f"{format.name} {seed} {number}"), examples)


def judged(format: Format, data: bytes, folder: Path) -> tuple[bool, str, str]:
    """Whether the reader has returned a value, and what is wrong with how it ended, and where; texts are empty where
    all is well."""
    try:
        value = format.read(data, folder)
        if format.check is not None:
            format.check(data, value)
    except CutOff as error:
        return False, f"says that it may go well another time: {error}", ""
    except (UserError, RunFailed) as error:
        text = str(error)
        if not text.strip() or "Traceback" in text:
            return False, f"is no sentence: {text[:200]!r}", ""
        return False, _too_much(error), ""
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)[-4:]
        where = "".join(f"    {frame.filename}:{frame.lineno} in {frame.name}\n" for frame in frames)
        return False, f"{type(error).__name__}: {str(error)[:300]}", where
    return True, "", ""


def _too_much(error: BaseException | None) -> str:
    """What a sentence hides: that memory was asked for which the kernel has refused here, and gives elsewhere."""
    while error is not None:
        if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
            return f"asked for more than {MEMORY >> 20} MB of memory: {type(error).__name__}: {str(error)[:200]}"
        error = error.__cause__ or error.__context__
    return ""


def _fuzz(
    format: Format, inputs: int, seed: int, jobs: int, out: Path, folder: Path, tell: Callable[[str], None]
) -> Tally:
    tally, began = Tally(format.name), time.monotonic()
    examples = folder / f"{format.name}.examples"
    _in_child(lambda: _write_examples(format, examples))
    kept = sorted((CORPUS / format.name).glob("*")) + sorted(examples.iterdir())
    blocks = [_Block(format, seed, range(at, min(at + BLOCK, inputs)), [], examples) for at in range(0, inputs, BLOCK)]
    blocks.insert(0, _Block(format, seed, range(0), kept, examples))
    running: list[_Running] = []
    told = began
    while blocks or running:
        while blocks and len(running) < jobs:
            running.append(_Running(blocks.pop(0), folder))
        for each in list(running):
            if not each.over():
                continue
            running.remove(each)
            rest = each.collect(tally, out)
            if rest is not None:
                blocks.insert(0, rest)
        if time.monotonic() - told > 5:
            told = time.monotonic()
            tell(f"{format.name}: {tally.inputs:,} of {inputs:,}, {len(tally.findings)} findings")
        time.sleep(0.002)
    tell(tally.told())
    for finding in tally.findings[:10]:
        tell(finding.told())
    return tally


def _write_examples(format: Format, folder: Path) -> None:
    work = folder.with_suffix(".work")
    for each in (folder, work):
        each.mkdir()
    for number, data in enumerate(format.examples(work)):
        (folder / f"example-{number}").write_bytes(data)


@dataclass(frozen=True)
class _Block:
    """Inputs for one process: files, then drawn numbers."""

    format: Format
    seed: int
    numbers: range
    files: list[Path]
    examples: Path

    def inputs(self) -> Iterator[tuple[int, str, bytes]]:
        """The place of each input in the block, its name, and its bytes."""
        examples = [path.read_bytes() for path in sorted(self.examples.iterdir())]
        for place, path in enumerate(self.files):
            yield place, path.name, path.read_bytes()
        for place, number in enumerate(self.numbers, len(self.files)):
            yield place, f"{self.seed}-{number}", drawn(self.format, examples, self.seed, number)

    def after(self, place: int) -> _Block | None:
        """The inputs behind that place."""
        skipped = max(0, place + 1 - len(self.files))
        rest = _Block(self.format, self.seed, self.numbers[skipped:], self.files[place + 1 :], self.examples)
        return rest if rest.files or rest.numbers else None

    def input_at(self, place: int) -> tuple[str, bytes]:
        return next((name, data) for at, name, data in self.inputs() if at == place)


_STATE = struct.Struct("<qdqqdq")
"""Shared with a process: place of its input, when that began, inputs read and refused, seconds of the slowest, most
memory."""


class _Running:
    """A forked process that gives inputs to a reader."""

    def __init__(self, block: _Block, folder: Path) -> None:
        self._block, self._began = block, time.monotonic()
        self._state = mmap.mmap(-1, _STATE.size)
        self._state[:] = _STATE.pack(-1, time.monotonic(), 0, 0, 0.0, 0)
        self._work = Path(tempfile.mkdtemp(dir=folder))
        self._found = self._work / "findings"
        self._status: int | None = None
        self._hangs = False
        sys.stdout.flush()
        sys.stderr.flush()
        self._pid = os.fork()
        if self._pid == 0:
            _child(lambda: self._read_all())

    def _read_all(self) -> None:
        work = self._work / "work"
        work.mkdir()
        os.chdir(work)
        for path in sorted(self._block.examples.iterdir()):  # what libraries load and keep is no cost of an input
            judged(self._block.format, path.read_bytes(), work)
        read = refused = memory = 0
        slowest, peak = 0.0, 0
        with self._found.open("w") as found:
            for place, name, data in self._block.inputs():
                began, before = time.monotonic(), _limit_memory()
                self._state[:] = _STATE.pack(place, began, read, refused, slowest, memory)
                accepted, what, where = judged(self._block.format, data, work)
                taken = time.monotonic() - began
                highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
                used = highest - before if highest > peak else 0
                peak = max(peak, highest)
                read, refused = read + accepted, refused + (not accepted)
                slowest, memory = max(slowest, taken), max(memory, used)
                if not what and used > MEMORY:
                    what = f"took {used >> 20} MB of memory"
                if not what and name.startswith("example-") and not accepted:
                    what = "is a valid example, and was refused"
                if what:
                    print(json.dumps([place, what, where]), file=found, flush=True)
        self._state[:] = _STATE.pack(place + 1, time.monotonic(), read, refused, slowest, memory)

    def over(self) -> bool:
        """Whether the process has ended; one that takes too long is ended here."""
        pid, status = os.waitpid(self._pid, os.WNOHANG)
        if pid:
            self._status = status
            return True
        began = _STATE.unpack(self._state[:])[1]
        if time.monotonic() - began > SECONDS and not self._hangs:
            self._hangs = True
            os.kill(self._pid, signal.SIGKILL)
        return False

    def collect(self, tally: Tally, out: Path) -> _Block | None:
        """Add what was found; returns the inputs that the process did not come to."""
        place, _, read, refused, slowest, memory = _STATE.unpack(self._state[:])
        tally.read, tally.refused = tally.read + read, tally.refused + refused
        tally.slowest, tally.memory = max(tally.slowest, slowest), max(tally.memory, memory)
        tally.seconds += time.monotonic() - self._began
        tally.inputs += read + refused
        for line in self._found.read_text().splitlines() if self._found.exists() else ():
            tally.findings.append(self._finding(*json.loads(line), out))
        assert self._status is not None
        if self._status == 0:
            return None
        tally.inputs += 1
        if self._hangs:
            what = f"hangs: not over after {SECONDS:.0f} s"
        elif os.WIFSIGNALED(self._status):
            what = f"is ended by {signal.Signals(os.WTERMSIG(self._status)).name}"
        else:
            what = f"ends its process with exit status {os.WEXITSTATUS(self._status)}"
        if place < 0:
            raise RuntimeError(f"the process for {self._block.format.name} {what} before its first input")
        tally.findings.append(self._finding(place, what, "", out))
        return self._block.after(place)

    def _finding(self, place: int, what: str, where: str, out: Path) -> Finding:
        name, data = self._block.input_at(place)
        path = out / f"{self._block.format.name}-{name}"
        out.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return Finding(self._block.format.name, name, str(path), what, where)


def _limit_memory() -> int:
    """Let this process have `MEMORY` bytes more than it has; returns how many of its bytes are in memory now."""
    pages = Path("/proc/self/statm").read_bytes().split()
    limit = int(pages[5]) * resource.getpagesize() + MEMORY + SLACK
    resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))
    return int(pages[1]) * resource.getpagesize()


def _child(body: Callable[[], None]) -> NoReturn:
    """Do this in a process that was forked, and end it."""
    status = 1
    try:
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        os.dup2(null, 1)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        body()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def _in_child(body: Callable[[], None]) -> None:
    """Do this in a process of its own: libraries start threads, and a process that has some must not be forked."""
    pid = os.fork()
    if pid == 0:
        _child(body)
    if os.waitpid(pid, 0)[1]:
        raise RuntimeError("the examples could not be made; the traceback is above")


def _memory() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None

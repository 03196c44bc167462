"""Sides that take turns, each in a process of its own, and what comes of comparing them.

    taken = take_turns([Entry("meshrun", make_a, 64), Entry("bare", make_b, 64)], rounds=5, steps=20, device=device)
    ratios(taken["meshrun"], taken["bare"])             # (median, lower quartile, upper quartile)

A process of its own keeps what one side switches on (kernels, caches, patches) away from the others. Rounds alternate,
in an order that is drawn anew each time, and a ratio is the median over rounds of one side's rate over the other's in
the same round: a machine that is slower for a while is so for all. On a GPU a side gives the memory that it does not
hold for good back after its turn; where even that is too much for all sides together, those that are soon built again
are let go, and sides of like hunger come one after the other.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import multiprocessing
import os
import random
import signal
import statistics
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from meshrun.check.bench_task import Side
from meshrun.errors import UserError

PRELOADED = ["meshrun.check.bench_peers", "torch._dynamo"]
"""What every side needs: on a CPU imported once, in the process that all of them are forks of."""
COMPARED = 3
"""First losses that must agree."""
FULL = 0.93
"""Of a GPU's memory that sides may take together; the rest is for what is no tensor."""
EASE = 1.15
"""Times what it needs that a side is given: one that saves memory where there is little must not see a reason to."""


@dataclass(frozen=True)
class Entry:
    """A side that is to have its turns."""

    name: str
    make: Callable[[], Side]
    """Called in the side's process, so it must pickle."""
    samples: int
    """Of one update."""
    packages: tuple[str, ...] = ()
    """What it needs to import, which is not counted as its start."""
    needed: bool = False
    """Whether there is nothing to compare without it: then what it fails with is raised at once."""


@dataclass(frozen=True)
class Built:
    """What it took to get a side to its first updates."""

    first_step_s: float
    losses: list[float]
    peak: int
    held: int
    """Bytes of GPU memory at most, and between turns."""
    chosen: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    """What was chosen for it, and what there is to say of that, where the side tells."""


@dataclass(frozen=True)
class Turn:
    """So many updates, timed."""

    steps: int
    seconds: float
    cpu_s: float
    data_wait: float
    """Share of the time, where the side tells."""


@dataclass(frozen=True)
class Taken:
    """A side after all its turns; without turns where it failed, which `error` says."""

    entry: Entry
    built: Built | None = None
    turns: tuple[Turn, ...] = ()
    error: str | None = None

    @property
    def rates(self) -> list[float]:
        """Samples a second of each turn."""
        return [self.entry.samples * turn.steps / turn.seconds for turn in self.turns]

    @property
    def rate(self) -> float | None:
        return statistics.median(self.rates) if self.turns else None

    @property
    def step_s(self) -> float | None:
        return statistics.median(turn.seconds / turn.steps for turn in self.turns) if self.turns else None

    @property
    def cpu_s(self) -> float | None:
        """Of a sample."""
        if not self.turns:
            return None
        return statistics.median(turn.cpu_s / turn.steps / self.entry.samples for turn in self.turns)


def ratios(one: Taken, other: Taken) -> tuple[float, float, float] | None:
    """The median over rounds of how many times as fast one is, and the quartiles."""
    if not one.turns or not other.turns:
        return None
    each = [a / b for a, b in zip(one.rates, other.rates, strict=True)]
    if len(each) == 1:
        return each[0], each[0], each[0]
    low, median, high = statistics.quantiles(each, n=4, method="inclusive")
    return median, low, high


def apart(one: Built, other: Built) -> float:
    """The largest relative difference of the first losses of two sides."""
    pairs = list(zip(one.losses[:COMPARED], other.losses[:COMPARED], strict=False))
    return max((abs(a - b) / max(abs(a), 1e-12) for a, b in pairs), default=0.0)


def to_be_let_go(wanted: int, held: dict[str, int], cost: dict[str, float], total: int) -> list[str]:
    """Which sides must go so that another can take so much of the memory: no more than needed, and first those whose
    memory costs least to fill again."""
    going: list[str] = []
    for name in sorted((each for each in held if held[each]), key=lambda each: cost[each] / held[each]):
        if wanted + sum(size for each, size in held.items() if each not in going) <= FULL * total:
            break
        going.append(name)
    return going


def in_order(peaks: dict[str, int], held: dict[str, int], total: int, number: int) -> list[str]:
    """Who comes after whom in a round: drawn where all fit together, else by hunger, up and down in turns."""
    names = list(peaks)
    if max(peaks.values(), default=0) + sum(held.values()) <= FULL * total:
        return random.Random(number).sample(names, len(names))
    return sorted(names, key=lambda name: peaks[name], reverse=number % 2 == 0)


def take_turns(
    entries: Sequence[Entry],
    rounds: int,
    steps: int,
    device: torch.device,
    warm_up: int = 3,
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, Taken]:
    """Build every side once, then let them take turns; a `SideFailed` only of one that is needed."""
    with contextlib.ExitStack() as stack:
        sides = [stack.enter_context(_Side(entry, device)) for entry in entries]
        for side in sides:
            side.prepare()
        total = sides[0].ask(_memory, device) if device.type == "cuda" and sides else 0
        for side in sides:
            _with_room(side, sides, total, lambda side: side.build(warm_up))
            how = f"first step after {side.taken.built.first_step_s:.1f} s" if side.taken.built else side.taken.error
            say(f"{side.entry.name}: {how}")
        for number in range(rounds):
            say(f"round {number + 1} of {rounds}")
            peaks = {side.entry.name: side.peak for side in sides}
            held = {side.entry.name: side.held for side in sides}
            for name in in_order(peaks, held, total, number):
                side = next(each for each in sides if each.entry.name == name)
                _with_room(side, sides, total, lambda side: side.turn(steps, warm_up))
        return {side.entry.name: side.taken for side in sides}


def _with_room(side: _Side, sides: list[_Side], total: int, act: Callable[[_Side], None]) -> None:
    """Have a side do something, with as much of the GPU's memory as it needs."""
    if side.taken.error is not None:
        return
    others = {each.entry.name: each for each in sides if each is not side}
    if total:
        # What is not known yet is as much as the hungriest so far.
        wanted = int(EASE * (side.peak or max(each.peak for each in sides)))
        held = {name: each.held for name, each in others.items()}
        total -= sum(each.lost for each in others.values())
        cost = {name: each.taken.built.first_step_s if each.taken.built else 0.0 for name, each in others.items()}
        for name in to_be_let_go(wanted, held, cost, total):
            others[name].let_go()
    for last in (False, True):
        try:
            act(side)
        except OutOfMemory as error:
            if last:
                side.fail(error)
            for each in sides:  # this one too: what is left of a build that failed is in the way of the next
                each.let_go()
        except SideFailed as error:
            side.fail(error)
            side.let_go()
        else:
            return
        if side.taken.error is not None:
            return


class SideFailed(Exception):
    """Something went wrong in a side's process."""


class OutOfMemory(SideFailed):
    """And it is that the GPU's memory is full."""


class Refused(SideFailed):
    """And it is what the user gave, which the sentence says."""


FAILURES = {"memory": OutOfMemory, "user": Refused, "error": SideFailed}


class Process:
    """Another process, which calls what it is asked to."""

    def __init__(self, device: torch.device) -> None:
        # Forks are soon there, but CUDA does not survive one: there every process is a new one.
        context: Any = multiprocessing.get_context("spawn" if device.type == "cuda" else "forkserver")
        if device.type == "cpu":
            context.set_forkserver_preload(PRELOADED)
        self._pipe, theirs = context.Pipe()
        # Not a daemon, which could have no readers; `_end_with_parent` sees to it that none is left behind.
        self._process = context.Process(target=_serve, args=(theirs,), daemon=False)
        self._process.start()
        theirs.close()
        self._due = 0
        """Answers that nobody has waited for yet."""

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.close()
        self._process.join(5.0)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def begin(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Have it call a function, without waiting for what that returns."""
        self._pipe.send((function, arguments))
        self._due += 1

    def ask(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What the function returns there."""
        self.begin(function, *arguments)
        failed: SideFailed | None = None
        while self._due:
            try:
                kind, result = self._pipe.recv()
            except (EOFError, ConnectionError):
                self._process.join(5.0)
                raise SideFailed(f"its process ended with status {self._process.exitcode}") from None
            self._due -= 1
            if kind != "fine" and failed is None:
                failed = FAILURES[kind](result)
        if failed is not None:
            raise failed
        return result


class _Side(Process):
    """A side in its process."""

    def __init__(self, entry: Entry, device: torch.device) -> None:
        super().__init__(device)
        self.entry, self.device = entry, device
        self.taken = Taken(entry)
        self.lost = 0
        """Bytes of GPU memory that are taken though the side was let go."""
        self._is_built = False

    @property
    def peak(self) -> int:
        return self.taken.built.peak if self.taken.built is not None else 0

    @property
    def held(self) -> int:
        return self.taken.built.held if self._is_built and self.taken.built is not None else 0

    def prepare(self) -> None:
        """Import what it needs, beside the other sides."""
        self.begin(_imported, self.entry.packages)

    def build(self, warm_up: int) -> None:
        built = self.ask(_build, self.entry.make, self.device, max(warm_up, COMPARED))
        self._is_built, self.lost = True, 0
        if self.taken.built is None:
            self.taken = replace(self.taken, built=built)

    def turn(self, steps: int, warm_up: int) -> None:
        if not self._is_built:
            self.build(warm_up)
        turn = self.ask(_turn, self.device, steps)
        self.taken = replace(self.taken, turns=(*self.taken.turns, turn))

    def let_go(self) -> None:
        if self._process.is_alive():
            with contextlib.suppress(SideFailed):
                self.lost = self.ask(_let_go, self.device)
        self._is_built = False

    def fail(self, error: SideFailed) -> None:
        if self.entry.needed:
            raise error
        self.taken = replace(self.taken, error=str(error), turns=())


def _serve(pipe: Connection) -> None:
    """A process's life: call what it is asked to, until nobody is there to ask."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # CTRL-C is for who asks
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # Readers are forked, as in a run: those of a server of forks would not end with this process.
    multiprocessing.set_start_method("fork", force=True)
    silent = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):  # peers greet, advise and warn
        os.dup2(silent, stream)
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            function, arguments = pipe.recv()
            try:
                answer = ("fine", function(*arguments))
            except torch.OutOfMemoryError as error:
                answer = ("memory", f"out of memory: {str(error).partition('. ')[0]}")
            except UserError as error:
                answer = ("user", str(error))
            except BaseException as error:
                where = traceback.extract_tb(error.__traceback__)[-1]
                text = f"{type(error).__name__}: {error}".strip().partition("\n")[0]
                answer = ("error", f"{text} ({where.filename}:{where.lineno})")
            pipe.send(answer)


def _end_with_parent() -> None:
    """End this process when the one that asks is gone, even amid a turn.

    The kernel's own signal would not do: on a CPU the parent that it knows is the server of forks, which stays as long
    as one of them. Readers end with this process by themselves.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


@dataclass
class _Own:
    """What a side's process has."""

    side: Side | None = None
    losses: list[float] = field(default_factory=list)


_own = _Own()


def _imported(packages: tuple[str, ...]) -> None:
    for package in packages:
        importlib.import_module(package)


def _memory(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).total_memory


def _build(make: Callable[[], Side], device: torch.device, warm_up: int) -> Built:
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize(device)  # before it nothing is known of the device, not even its statistics
        torch.cuda.reset_peak_memory_stats(device)
    began = time.perf_counter()
    _own.side = make()
    losses = [_loss(next(_own.side))]
    first = time.perf_counter() - began
    losses += [_loss(next(_own.side)) for _ in range(warm_up - 1)]
    peak = torch.cuda.max_memory_allocated(device) if on_gpu else 0
    chosen, notes = getattr(_own.side, "chosen", {}), getattr(_own.side, "notes", ())
    return Built(first, losses, peak, _settled(device), dict(chosen), tuple(notes))


def _turn(device: torch.device, steps: int) -> Turn:
    side = _own.side
    assert side is not None
    for _ in range(2 if device.type == "cuda" else 1):  # has memory again, and the host is ahead of the device
        next(side)
    _wait(device)
    cpu, began, waited = _cpu_s(), time.perf_counter(), 0.0
    for _ in range(steps):
        waited += getattr(next(side), "data_wait", 0.0)
    _wait(device)
    seconds = time.perf_counter() - began
    turn = Turn(steps, seconds, _cpu_s() - cpu, waited / seconds)
    _settled(device)
    return turn


def _let_go(device: torch.device) -> int:
    side, _own.side = _own.side, None
    if side is not None and hasattr(side, "close"):
        side.close()
    del side
    return _settled(device)


def _settled(device: torch.device) -> int:
    """Give back what is not held for good; returns how much is."""
    if device.type != "cuda":
        return 0
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved(device)


def _loss(result: Any) -> float:
    return float(getattr(result, "loss", result))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _cpu_s() -> float:
    """CPU time of this process and of those that read for it."""
    ticks = 0
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            for child in (task / "children").read_text().split():
                fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
                ticks += int(fields[11]) + int(fields[12])
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")

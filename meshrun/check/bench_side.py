"""One side of a comparison: a training in a process of its own, which is built, has its turns and is let go.

    with SideProcess(Entry("meshrun", make, samples=64), device) as side:
        side.build(warm_up=3)
        side.turn(steps=20, warm_up=3)
        side.taken.rate                                  # samples a second

A process of its own keeps what one side switches on (kernels, caches, patches) away from the others.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from meshrun.check.bench_process import Process, SideFailed
from meshrun.check.bench_task import Side

COMPARED = 3
"""First losses that must agree."""


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


class SideProcess(Process):
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


@dataclass
class _Own:
    """What a side's process has."""

    side: Side | None = None
    losses: list[float] = field(default_factory=list)


_own = _Own()


def _imported(packages: tuple[str, ...]) -> None:
    for package in packages:
        importlib.import_module(package)


def memory_of(device: torch.device) -> int:
    """All that a GPU has, in bytes."""
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

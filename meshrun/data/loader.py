"""Reads the samples that `order` names: this rank's micro-batches of each step, from any step on.

    loader = Loader(dataset, order, part=1, of=3, reading=Reading(Cut(micro=16)))
    for step in loader.steps(start=0, stop=100):
        for batch in step.batches: …

The cursor, a step number, is the loader's only state: to resume is to start there. Which samples are read is decided
here; `samples` makes batches of them, and `readers` does so in other processes.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils.data import TensorDataset

from meshrun.data import cache
from meshrun.data.effort import measured
from meshrun.data.feed import Move
from meshrun.data.order import Cut, Order, slice_of
from meshrun.data.permutation import Ids
from meshrun.data.readers import by_readers, no_room_for
from meshrun.data.samples import NO_EFFORT, Collate, Effort, Read, Samples, Wanted, may_draw
from meshrun.errors import RunFailed
from meshrun.experiment import MapDataset


@dataclass(frozen=True)
class Reading:
    """How a rank reads: pieces as `cut` says, by `workers` processes that keep `prefetch` pieces ready."""

    cut: Cut = field(default_factory=Cut)
    workers: int = 0
    prefetch: int = 2
    pin: bool = False
    collate: Collate | None = None
    seed: int = 0
    """Of what the dataset draws from global generators, and of what the reading processes draw besides."""
    skip_bad: bool = False
    """Go on without samples that cannot be read."""


@dataclass(frozen=True)
class StepData:
    """What this rank computes in one step. `waited` is the time that reading it held up the training, in seconds."""

    step: int
    ids: Ids
    """The whole global batch."""
    pieces: list[list[int]]
    """This rank's part of it, one list a micro-batch."""
    real: list[int]
    """How many samples of each piece count: those after them only fill it up."""
    batches: list[Any]
    waited: float
    bad: tuple[tuple[int, str], ...] = ()
    """Samples of this rank's part that are not there, as they cannot be read, and why."""
    effort: Effort = NO_EFFORT
    """What it took to read them, in whatever process."""
    augmented: bool = False
    """Whether inputs have been changed at random already."""

    def moved(self, move: Move) -> StepData:
        """With its batches somewhere else."""
        return replace(self, batches=[move(batch) for batch in self.batches])

    def after(self, waited: float) -> StepData:
        """Where not reading but something else behind it has held up the training."""
        return replace(self, waited=waited)


@dataclass(frozen=True)
class Evaluated:
    """A batch of an evaluation set: its samples, and how many of them count."""

    ids: list[int]
    real: int
    batch: Any
    bad: tuple[tuple[int, str], ...] = ()

    def moved(self, move: Move) -> Evaluated:
        """With its batch somewhere else."""
        return replace(self, batch=move(self.batch))


Plan = tuple[Ids, list[Wanted]]
"""The global batch, and a replica's pieces of it."""


class Loader:
    """The micro-batches of one of `of` replicas."""

    def __init__(self, dataset: MapDataset, order: Order, part: int, of: int, reading: Reading) -> None:
        self.dataset, self.order, self.part, self.of, self.reading = dataset, order, part, of, reading

    def plan(self, step: int) -> Plan:
        """The global batch of a step, and this replica's micro-batches of it."""
        ids, cut, epoch = self.order.batch_ids(step), self.reading.cut, step // self.order.steps_per_epoch
        return ids, [Wanted(piece, real, cut.equal, epoch) for piece, real in cut.of(ids, self.part, self.of)]

    def steps(self, start: int, stop: int) -> Generator[StepData, None, None]:
        """Every step from `start` up to `stop`, read ahead from now on."""
        # Readers plan ahead of the loop, or just behind it where there are none: whoever comes second finds the plan.
        plans: dict[int, Plan] = {}

        def ahead() -> Iterator[Wanted]:
            for step in range(start, stop):
                plan = plans.get(step) or self.plan(step)
                if plan[1]:
                    plans[step] = plan
                yield from plan[1]

        # Not at the first step, for which a thread may ask: readers go with the thread that has forked them.
        return self._steps(range(start, stop), plans, _read(self.dataset, ahead(), self.reading))

    def _steps(
        self, steps: range, plans: dict[int, Plan], reads: Generator[Read, None, None]
    ) -> Generator[StepData, None, None]:
        try:
            for step in steps:
                ids, pieces = plans[step] = plans.get(step) or self.plan(step)
                began = time.perf_counter()
                found = [next(reads) for _ in pieces]
                del plans[step]
                waited = time.perf_counter() - began
                made = [read.of(piece) for read, piece in zip(found, pieces, strict=True)]
                yield StepData(
                    step,
                    ids,
                    [piece.ids for piece in made],
                    [piece.real for piece in made],
                    [read.batch for read in found],
                    waited,
                    tuple(each for read in found for each in read.bad),
                    sum((read.effort for read in found), NO_EFFORT),
                )
        finally:
            reads.close()


def evaluation_batches(
    dataset: MapDataset, part: int, of: int, size: int, reading: Reading
) -> Generator[Evaluated, None, None]:
    """Every sample exactly once over all parts: this part's share in batches of at most `size`, in order.

    In step, every part has as many batches.
    """
    mine = slice_of(range(len(dataset)), part, of)
    most = -(-len(dataset) // of) if reading.cut.in_step else len(mine)

    def pieces() -> Iterator[Wanted]:
        for start in range(0, most, size):
            piece = list(mine[start : start + size])
            short = min(size, most - start) - len(piece) if reading.cut.equal else int(not piece)
            yield Wanted(piece + [piece[-1] if piece else 0] * short, len(piece), reading.cut.equal)

    # Readers are forked for every evaluation, and one without a batch of its own would be for nothing.
    by = replace(reading, workers=min(reading.workers, -(-most // size)))
    return _evaluated(pieces(), _read(dataset, pieces(), by))


def _evaluated(pieces: Iterator[Wanted], reads: Generator[Read, None, None]) -> Generator[Evaluated, None, None]:
    try:
        for wanted, read in zip(pieces, reads, strict=True):
            piece = read.of(wanted)
            yield Evaluated(piece.ids, piece.real, read.batch, read.bad)
    finally:
        reads.close()


def _read(dataset: MapDataset, pieces: Iterator[Wanted], reading: Reading) -> Generator[Read, None, None]:
    """The batches of these samples, by other processes where there are any."""
    samples = Samples(dataset, reading.collate, reading.skip_bad, reading.seed)
    found = (measured(samples, piece) for piece in pieces)
    here = (read.pin_memory() for read in found) if reading.pin else found
    if not reading.workers or (reading.pin and is_decoded(dataset, reading)):
        return here
    if why := no_room_for(reading.workers):
        _refuse_readers(why, reading.pin and may_draw(dataset, reading.collate))
        return here
    by_others = partial(by_readers, count=reading.workers, ahead=reading.prefetch, pin=reading.pin, seed=reading.seed)
    if not reading.pin:
        return by_others(samples, pieces)
    # Beside a GPU a thread reads: what has come to be in memory, it copies sooner than others send it.
    return _one_after_the_other(by_others(samples, _until_decoded(dataset, reading, pieces)), here)


def _refuse_readers(why: str, are_needed: bool) -> None:
    """Say once that a rank reads by itself; where a thread of it may not, the run cannot go on."""
    full = f"/dev/shm, which processes that read ahead need, cannot be used ({why}; df /dev/shm shows how much is free)"
    if are_needed:
        raise RunFailed(f"{full}; make room there, then resume the run")
    if full not in _told:
        _told.add(full)
        cache.note(f"{full}: this rank reads by itself")


_told: set[str] = set()


def is_decoded(dataset: MapDataset, reading: Reading) -> bool:
    """Whether all samples have come to be in memory, in the form in which they are needed."""
    return bool(getattr(dataset, "decoded", False)) and not may_draw(dataset, reading.collate)


def is_for_a_thread(dataset: MapDataset, reading: Reading) -> bool:
    """Whether a thread beside the computation may read: what it runs in this process draws no random numbers.

    The global generators are the model's too. Seeded and put back by a thread, they would give it other numbers.
    """
    return reading.workers > 0 or not may_draw(dataset, reading.collate)


def is_light(dataset: MapDataset) -> bool:
    """Whether reading costs next to nothing, as where all samples have been in memory from the start."""
    return bool(getattr(dataset, "light", isinstance(dataset, TensorDataset | Tensor | list | tuple)))


def _until_decoded(dataset: MapDataset, reading: Reading, pieces: Iterator[Wanted]) -> Iterator[Wanted]:
    """What is left to processes that decode; the rest stays in `pieces`."""
    while not is_decoded(dataset, reading) and (piece := next(pieces, None)) is not None:
        yield piece


def _one_after_the_other(
    first: Generator[Read, None, None], second: Generator[Read, None, None]
) -> Generator[Read, None, None]:
    with closing(first):
        yield from first
    yield from second


def readers_of_a_rank(cores: int, threads: int, on_gpu: bool, light: bool) -> int:
    """How many processes should read for a rank that has so many cores, on which so many threads compute.

    Beside a GPU one core is left to the rank itself; where ranks compute on their cores, readers get what is left. A
    light dataset needs none: the rank reads it by itself, on a GPU beside the computation if it draws nothing.
    """
    if light:
        return 0
    return max(0, min(8, cores - (1 if on_gpu else threads)))

"""Steps of few samples are read, sent to a GPU and augmented several at once, and computed one after the other.

    with closing(coming(loader, 0, 100, on(device), stepper.augmented)) as steps:
        for data in steps: …          # what loader.steps(0, 100) gives, on the device

To find, pin, send and augment a sample costs the host as much as to do so with fifty, and beside a fast GPU that may be
more than the step itself. So consecutive steps of an epoch become one batch, whose rows they get: where the data is in
memory, no collate is given, and a step is one micro-batch. What cannot be read or augmented together is not.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from meshrun.data.effort import measured
from meshrun.data.feed import Lane, Move, fed, mapped
from meshrun.data.loader import Loader, Plan, StepData, is_decoded, is_for_a_thread, is_light
from meshrun.data.samples import Read, Samples, Wanted

MOST_SAMPLES = 64
MOST_BYTES = 16 << 20
"""Of steps that are brought together: augmenting them takes some times as much of the device's memory."""
TRIED = 8
"""Steps that come alone and must be alike: samples may be filled up to the longest of their batch."""
ALIGNED = 64
"""Bytes that a batch of its own begins at a multiple of: libraries choose by that how to compute with it."""

Augment = Callable[[int, Any, list[int]], Any]
"""(step, inputs, ids) -> inputs, changed at random; the step tells the epoch."""


@dataclass(frozen=True)
class Group:
    """Consecutive steps of one epoch."""

    steps: list[StepData]
    batch: Any = None
    """Of all their samples, one step's after the other's; None where each step has its own batches."""

    def moved(self, move: Move) -> Group:
        """With its batches somewhere else."""
        if self.batch is None:
            return replace(self, steps=[data.moved(move) for data in self.steps])
        return replace(self, batch=move(self.batch))

    def after(self, waited: float) -> Group:
        """Where that has held up the training: at the first step, as the others come with it."""
        return replace(self, steps=[self.steps[0].after(waited), *self.steps[1:]])


def coming(
    loader: Loader, start: int, stop: int, lane: Lane | None, augment: Augment
) -> Generator[StepData, None, None]:
    """The steps from `start` up to `stop`, moved down a lane if there is one."""
    if lane is None:
        return loader.steps(start, stop)
    aside = is_for_a_thread(loader.dataset, loader.reading)
    return apart(fed(grouped(loader, start, stop), lane, Group.moved, waited=Group.after, aside=aside), augment)


def grouped(loader: Loader, start: int, stop: int) -> Generator[Group, None, None]:
    """The steps from `start` up to `stop`, as many together as may be."""
    # Not at the first step, for which a thread may ask: readers go with the thread that has forked them.
    return _grouped(loader, loader.steps(start, stop), stop)


def _grouped(loader: Loader, one_by_one: Generator[StepData, None, None], stop: int) -> Generator[Group, None, None]:
    with closing(one_by_one):
        form, after = yield from _first(loader, one_by_one)
    if form is not None:
        yield from _together(loader, form, range(after, stop))


def _first(
    loader: Loader, one_by_one: Generator[StepData, None, None]
) -> Generator[Group, None, tuple[Form | None, int]]:
    """Steps that come alone; returns the form of the samples of those that need not, and which is the first of them."""
    seen: set[Form] = set()
    alone = 0
    for data in one_by_one:
        yield Group([data])
        if len(seen) < 2 and (form := _form_to_group(loader, data)) is not None:
            seen.add(form)
            alone += 1
            if alone == TRIED and len(seen) == 1:
                return form, data.step + 1
    return None, 0


@dataclass(frozen=True)
class Form:
    """What a sample is in a batch: the structure of all that it has, shapes and types."""

    structure: TreeSpec = field(hash=False)
    kinds: tuple[tuple[torch.Size, torch.dtype], ...]
    size: int = field(compare=False)
    """Bytes."""

    @property
    def most(self) -> int:
        """Samples that are brought together."""
        return min(MOST_SAMPLES, MOST_BYTES // max(1, self.size))


def form_of(batch: Any, rows: int) -> Form | None:
    """That of the samples of a pair of inputs and targets; None if it is not made of tensors with a row for each."""
    leaves, structure = tree_flatten(batch)
    if not (isinstance(batch, tuple | list) and len(batch) == 2 and leaves and _has_rows(leaves, rows)):
        return None
    kinds = tuple((each.shape[1:], each.dtype) for each in leaves)
    return Form(structure, kinds, sum(each.nbytes for each in leaves) // rows)


def _has_rows(leaves: list[Any], rows: int) -> bool:
    return all(type(each) is Tensor and each.dim() > 0 and len(each) == rows for each in leaves)


def _form_to_group(loader: Loader, data: StepData) -> Form | None:
    """The form of samples where the steps after this one may come together, else None."""
    dataset, reading, rows = loader.dataset, loader.reading, -(-loader.order.batch // loader.of)
    in_memory = is_decoded(dataset, reading) or (is_light(dataset) and not reading.workers)
    if 2 * rows > MOST_SAMPLES or not in_memory or reading.collate is not None or len(data.pieces) != 1:
        return None
    form = form_of(data.batches[0], len(data.pieces[0]))
    return form if form is not None and 2 * rows <= form.most else None


def _together(loader: Loader, form: Form, steps: range) -> Generator[Group, None, None]:
    alone = Loader(loader.dataset, loader.order, loader.part, loader.of, replace(loader.reading, workers=0))
    samples = Samples(loader.dataset, None, loader.reading.skip_bad, loader.reading.seed)
    epoch = loader.order.steps_per_epoch
    while steps:
        plans = _plans(loader, steps[: epoch - steps[0] % epoch], form.most)
        now, later = steps[: max(1, len(plans))], steps[max(1, len(plans)) :]
        read = _read(samples, plans) if len(plans) > 1 else None
        if read is None or read.bad:
            yield from _each(alone, now)
        elif form_of(read.batch, sum(len(piece.ids) for _, (piece,) in plans)) == form:
            yield _group(now, plans, read.pin_memory() if loader.reading.pin else read)
        else:  # nor will those after them go together
            yield from _each(alone, steps)
            return
        del read
        steps = later


def _plans(loader: Loader, steps: range, most: int) -> list[Plan]:
    """Of the first of these steps, as far as each is one micro-batch that is not filled up."""
    found = []
    for step in steps:
        ids, pieces = loader.plan(step)
        most -= sum(len(piece.ids) for piece in pieces)
        if most < 0 or len(pieces) != 1 or pieces[0].real != len(pieces[0].ids):
            break
        found.append((ids, pieces))
    return found


def _read(samples: Samples, plans: list[Plan]) -> Read:
    ids = [number for _, (piece,) in plans for number in piece.ids]
    try:
        return measured(samples, Wanted(ids, len(ids), epoch=plans[0][1][0].epoch))
    except Exception:  # of shapes that do not go together, or what one of the steps will meet by itself
        return Read(None)


def _each(loader: Loader, steps: range) -> Generator[Group, None, None]:
    with closing(loader.steps(steps.start, steps.stop)) as one_by_one:
        for data in one_by_one:
            yield Group([data])


def _group(steps: range, plans: list[Plan], read: Read) -> Group:
    made = [
        StepData(step, ids, [piece.ids], [piece.real], [], 0.0)
        for step, (ids, (piece,)) in zip(steps, plans, strict=True)
    ]
    return Group([replace(made[0], effort=read.effort), *made[1:]], read.batch)


def apart(groups: Generator[Group, None, None], augment: Augment) -> Generator[StepData, None, None]:
    """The steps of groups; those that came together are augmented together if that is the same."""
    at_once: bool | None = None
    with closing(groups):
        for group in groups:
            if group.batch is None:
                yield from group.steps
                continue
            if at_once is None:
                at_once = _goes_by_rows(group, augment)
            inputs, targets = group.batch
            if at_once:
                inputs = augment(group.steps[0].step, inputs, [each for data in group.steps for each in data.pieces[0]])
            sizes = [len(data.pieces[0]) for data in group.steps]
            for data, *pair in zip(group.steps, _rows(inputs, sizes), _rows(targets, sizes), strict=True):
                yield replace(data, batches=[pair], augmented=at_once)


def _goes_by_rows(group: Group, augment: Augment) -> bool:
    """Whether the samples of several steps become what those of one become. The host waits for the answer.

    A function may look at the whole batch, or draw by itself. It may also change what it is given.
    """
    first, last, inputs = group.steps[0], group.steps[-1], group.batch[0]
    ids = [each for data in group.steps for each in data.pieces[0]]
    rows = len(last.pieces[0])
    try:
        together = augment(first.step, mapped(inputs, Tensor.clone), ids)
        alone = augment(last.step, mapped(inputs, lambda each: each[-rows:].clone()), last.pieces[0])
    except Exception:  # what is wrong with it, each step will meet
        return False
    (found, structure), (expected, of_one) = tree_flatten(together), tree_flatten(alone)
    return (
        structure == of_one
        and _has_rows(found, len(ids))
        and all(isinstance(b, Tensor) and torch.equal(a[-rows:], b) for a, b in zip(found, expected, strict=True))
    )


def _rows(batch: Any, sizes: list[int]) -> list[Any]:
    """The batch in parts of so many rows."""
    leaves, structure = tree_flatten(batch)
    parts = zip(*(map(_aligned, each.split(sizes)) for each in leaves), strict=True) if leaves else [()] * len(sizes)
    return [tree_unflatten(each, structure) for each in parts]


def _aligned(part: Tensor) -> Tensor:
    return part if part.data_ptr() % ALIGNED == 0 else part.clone()

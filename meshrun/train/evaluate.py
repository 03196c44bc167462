"""Evaluation in which every sample counts exactly once, on any number of ranks.

    evaluate(here, placed, experiment, reading)       # {"val": {"loss": 0.07, "count": 2000, "accuracy": 0.98}}

Replicas take contiguous shares that may differ by a sample. Where they need not go in step, nothing is padded and
nothing is sent before the end; where they must, rows that only fill up a batch are computed and not counted.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from meshrun.data.feed import fed, on, to_device
from meshrun.data.loader import Evaluated, Reading, evaluation_batches, is_for_a_thread
from meshrun.errors import SharedError, UserError, WrongTarget
from meshrun.experiment import Experiment, Metric
from meshrun.mesh import Here
from meshrun.parallel.placed import Piece, Placed, Score
from meshrun.train.room import room
from meshrun.train.step import COUNT, as_pair, check_loss, is_count

FULL = 64
"""Samples that keep a GPU busy."""

Scores = dict[str, dict[str, float]]
Bad = Callable[[str, tuple[tuple[int, str], ...]], None]
"""Told of samples of an evaluation set that cannot be read, and why."""


def evaluate(
    here: Here,
    placed: Placed,
    experiment: Experiment,
    reading: Reading,
    at: Callable[[], None] = lambda: None,
    bad: Bad = lambda *_: None,
    fitting: int = 0,
) -> Scores:
    """Loss and metrics of every evaluation set, the same on all ranks; `at` is called for every batch.

    So many samples as are `fitting` may be computed at a time, where a training step has fewer.
    """
    at()
    placed.agree_on_buffers()
    was_training = placed.model.training
    placed.train(False)
    try:
        return {
            name: _evaluate_one(here, placed, experiment, reading, name, at, bad, fitting) for name in experiment.evals
        }
    finally:
        placed.train(was_training)


def _evaluate_one(
    here: Here,
    placed: Placed,
    experiment: Experiment,
    reading: Reading,
    name: str,
    at: Callable[[], None],
    bad: Bad,
    fitting: int,
) -> dict[str, float]:
    named = {"loss": experiment.loss, **experiment.metrics}
    functions = {name: _checked(name, function) for name, function in named.items()}
    with here.waiting(f"the outputs for the evaluation set {name!r}"):  # shards and stages need each other for them
        sums = _own_sums(here, placed, experiment, reading, name, functions, at, bad, fitting)
    with here.waiting(f"the sums of the evaluation set {name!r}"):
        reduction = here.sum(sums)
        if reduction is not None:
            reduction.wait()
    *found, (skipped, _) = sums.tolist()
    rows: dict[str, list[float]] = dict(zip(functions, found, strict=True))
    for each, (_, count) in rows.items():
        if not is_count(count):  # on a GPU, where nobody has looked at it before
            what = "loss" if each == "loss" else f"the metric {each!r}"
            raise SharedError(f"the counts of {what} over evals[{name!r}] add up to {count:g}; each: {COUNT}")
    scores = {each: total / count if count else math.nan for each, (total, count) in rows.items()}
    finished = {each: metric for each, metric in experiment.metrics.items() if isinstance(metric, Metric)}
    scores |= {each: _finished(each, metric, scores[each]) for each, metric in finished.items()}
    count, missing = rows["loss"][1], {"skipped": int(skipped)} if skipped else {}
    # A loss that weighs its samples may count parts of one.
    return {"loss": scores.pop("loss"), "count": int(count) if count.is_integer() else count, **missing, **scores}


def _own_sums(
    here: Here,
    placed: Placed,
    experiment: Experiment,
    reading: Reading,
    name: str,
    functions: dict[str, Score],
    at: Callable[[], None],
    bad: Bad,
    fitting: int,
) -> torch.Tensor:
    """This rank's share: a row of (total, count) for the loss and each metric, and how many samples were skipped."""
    # Without gradients to keep, twice the samples of a training step fit.
    size = 2 * at_once(here, placed, experiment)
    if not placed.cutting.in_step:
        size = wider(size, -(-len(experiment.evals[name]) // here.replicas), fitting)
    read = evaluation_batches(experiment.evals[name], here.replica, here.replicas, size, reading)
    skipped = 0

    def pieces(batches: Iterator[Evaluated]) -> Iterator[Piece]:
        nonlocal skipped
        for each in batches:
            at()
            if each.bad:
                bad(name, each.bad)
                skipped += len(each.bad)
            yield Piece(*as_pair(to_device(each.batch, here.device)), each.ids, each.real)

    aside = is_for_a_thread(experiment.evals[name], reading)
    with contextlib.closing(fed(read, on(here.device), Evaluated.moved, aside=aside)) as batches:
        try:
            sums = placed.scores(pieces(batches), functions)
        except WrongTarget as wrong:
            raise UserError(f"in evals[{name!r}], {wrong}") from None
    # Ranks that share the samples of a replica have skipped the same ones.
    first = not any(here.place(axis) for axis in ("pp", "cp", "tp"))
    return torch.cat([sums, sums.new_tensor([[skipped if first else 0, 0]])])


def at_once(here: Here, placed: Placed, experiment: Experiment) -> int:
    """Samples that a rank trains on at a time."""
    return experiment.micro or max(1, experiment.batch // (here.replicas * placed.cutting.pieces))


def wider(size: int, share: int, fitting: int) -> int:
    """How many samples of `share` are computed at a time: `size`, or more where that is few and more are `fitting`.

    Then all batches are of one size, as far as that goes: for each other one, a GPU's kernels are chosen anew.
    """
    most = min(FULL, fitting)
    return max(size, -(-share // -(-share // most))) if size < most and share else size


def fitting_on(device: torch.device, samples: int) -> int:
    """How many samples fit into half of the memory that a GPU has left, by what training on so many took; else 0."""
    if device.type != "cuda":
        return 0  # where a small batch wastes little
    free, taken = room(device)
    return int(free / 2 / taken * samples) if taken > 0 else 0


def _finished(name: str, metric: Metric, mean: float) -> float:
    """What a metric makes of its mean; a UserError where that is no number."""
    try:
        made: Any = metric.then(mean)
    except OverflowError:  # such as math.exp, for the perplexity of a model that has not learned yet
        return math.inf
    if not isinstance(made, str | bytes):
        with contextlib.suppress(TypeError, ValueError, OverflowError, RuntimeError):  # as tensors may raise
            return float(made)
    raise SharedError(
        f"the metric {name!r} made {made!r:.60} of its mean {mean:g}; Metric(…, then) must return a number"
    )


def _checked(name: str, function: Score) -> Score:
    return lambda outputs, targets: check_loss(function(outputs, targets), name)

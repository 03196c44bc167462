"""Evaluation in which every sample counts exactly once, on any number of ranks.

    evaluate(here, placed, experiment, reading)       # {"val": {"loss": 0.07, "count": 2000, "accuracy": 0.98}}

Replicas take contiguous shares that may differ by a sample. Where they need not go in step, nothing is padded and
nothing is sent before the end; where they must, rows that only fill up a batch are computed and not counted.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator

import torch

from meshrun.data.feed import fed, on, to_device
from meshrun.data.loader import Evaluated, Reading, evaluation_batches
from meshrun.errors import UserError, WrongTarget
from meshrun.experiment import Experiment, Metric
from meshrun.mesh import Here
from meshrun.parallel.placed import Piece, Placed, Score
from meshrun.train.step import as_pair, check_loss

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
) -> Scores:
    """Loss and metrics of every evaluation set, the same on all ranks; `at` is called for every batch."""
    at()
    placed.agree_on_buffers()
    was_training = placed.model.training
    placed.train(False)
    try:
        return {name: _evaluate_one(here, placed, experiment, reading, name, at, bad) for name in experiment.evals}
    finally:
        placed.train(was_training)


def _evaluate_one(
    here: Here, placed: Placed, experiment: Experiment, reading: Reading, name: str, at: Callable[[], None], bad: Bad
) -> dict[str, float]:
    named = {"loss": experiment.loss, **experiment.metrics}
    functions = {name: _checked(name, function) for name, function in named.items()}
    with here.waiting(f"the outputs for the evaluation set {name!r}"):  # shards and stages need each other for them
        sums = _own_sums(here, placed, experiment, reading, name, functions, at, bad)
    with here.waiting(f"the sums of the evaluation set {name!r}"):
        reduction = here.sum(sums)
        if reduction is not None:
            reduction.wait()
    *found, (skipped, _) = sums.tolist()
    rows: dict[str, list[float]] = dict(zip(functions, found, strict=True))
    scores = {each: total / count if count else math.nan for each, (total, count) in rows.items()}
    finished = {each: metric for each, metric in experiment.metrics.items() if isinstance(metric, Metric)}
    scores |= {each: metric.then(scores[each]) for each, metric in finished.items()}
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
) -> torch.Tensor:
    """This rank's share: a row of (total, count) for the loss and each metric, and how many samples were skipped."""
    # Without gradients to keep, twice the samples of a training step fit.
    size = 2 * (experiment.micro or max(1, experiment.batch // (here.replicas * placed.cutting.pieces)))
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

    with contextlib.closing(fed(read, on(here.device), Evaluated.moved)) as batches:
        try:
            sums = placed.scores(pieces(batches), functions)
        except WrongTarget as wrong:
            raise UserError(f"in evals[{name!r}], {wrong}") from None
    # Ranks that share the samples of a replica have skipped the same ones.
    first = not any(here.place(axis) for axis in ("pp", "cp", "tp"))
    return torch.cat([sums, sums.new_tensor([[skipped if first else 0, 0]])])


def _checked(name: str, function: Score) -> Score:
    return lambda outputs, targets: check_loss(function(outputs, targets), name)

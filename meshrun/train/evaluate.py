"""Evaluation in which every sample counts exactly once, on any number of ranks.

    evaluate(here, placed, experiment, reading)       # {"val": {"loss": 0.07, "count": 2000, "accuracy": 0.98}}

Ranks take contiguous shares that may differ by a sample. Nothing is padded, and nothing is sent before the end, so that
ranks with a batch more or less need not wait for each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from meshrun.data.loader import Reading, evaluation_batches, to_device
from meshrun.experiment import Experiment, Loss, MapDataset
from meshrun.mesh import Here
from meshrun.parallel.dp import Replicated, call
from meshrun.train.step import as_pair, as_sums, check_loss, computing

Scores = dict[str, dict[str, float]]


def evaluate(here: Here, placed: Replicated, experiment: Experiment, reading: Reading) -> Scores:
    """Loss and metrics of every evaluation set, the same on all ranks."""
    placed.agree_on_buffers()
    was_training = placed.model.training
    placed.model.eval()
    try:
        return {name: _evaluate_one(here, placed, experiment, reading, name) for name in experiment.evals}
    finally:
        placed.model.train(was_training)


def _evaluate_one(
    here: Here, placed: Replicated, experiment: Experiment, reading: Reading, name: str
) -> dict[str, float]:
    functions = {"loss": experiment.loss, **experiment.metrics}
    sums = _own_sums(here, placed, experiment, reading, experiment.evals[name], functions)
    with here.waiting(f"the sums of the evaluation set {name!r}"):
        reduction = here.sum(sums)
        if reduction is not None:
            reduction.wait()
    rows: dict[str, list[float]] = dict(zip(functions, sums.tolist(), strict=True))
    scores = {each: total / count if count else math.nan for each, (total, count) in rows.items()}
    return {"loss": scores.pop("loss"), "count": rows["loss"][1], **scores}


@torch.no_grad()
def _own_sums(
    here: Here,
    placed: Replicated,
    experiment: Experiment,
    reading: Reading,
    data: MapDataset,
    functions: dict[str, Callable[[Any, Any], Loss]],
) -> torch.Tensor:
    """This rank's share: a row of (total, count) for the loss and each metric."""
    # Without gradients to keep, twice the samples of a training step fit.
    size = 2 * (experiment.micro or max(1, experiment.batch // here.replicas))
    sums = torch.zeros(len(functions), 2, dtype=torch.float64, device=here.device)
    for batch in evaluation_batches(data, here.replica, here.replicas, size, replace(reading, micro=None)):
        inputs, targets = as_pair(to_device(batch, here.device))
        with computing(experiment.precision, here.device):
            outputs = call(placed.model, inputs)
            sums += torch.stack([as_sums(check_loss(each(outputs, targets), name)) for name, each in functions.items()])
    return sums

"""Ready losses and metrics: each returns a sum and a count.

Experiment(loss=cross_entropy, metrics={"accuracy": accuracy}, …)
Experiment(loss=token_cross_entropy, metrics={"perplexity": perplexity}, …)
"""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshrun.experiment import Loss, Metric
from meshrun.parallel.vocabulary import over_vocabulary, split_cross_entropy


def cross_entropy(outputs: Tensor, targets: Tensor) -> Loss:
    """Over classes: outputs (N, classes), targets (N) of class numbers."""
    return Loss(F.cross_entropy(outputs, targets, reduction="sum"), targets.numel())


@over_vocabulary
def token_cross_entropy(outputs: Tensor, targets: Tensor, ignore_index: int = -100) -> Loss:
    """Over tokens: outputs (N, T, vocabulary), targets (N, T); tokens equal to `ignore_index` do not count."""
    flat = targets.reshape(-1)
    if isinstance(outputs, DTensor):
        return Loss(split_cross_entropy(outputs, flat, ignore_index), (flat != ignore_index).sum())
    logits = outputs.reshape(-1, outputs.shape[-1])
    total = F.cross_entropy(logits, flat, ignore_index=ignore_index, reduction="sum")
    return Loss(total, (flat != ignore_index).sum())


def mean_squared_error(outputs: Tensor, targets: Tensor) -> Loss:
    """Over all elements."""
    if outputs.shape != targets.shape:
        raise ValueError(f"outputs have shape {tuple(outputs.shape)} but targets have {tuple(targets.shape)}")
    return Loss((outputs - targets).square().sum(), targets.numel())


def accuracy(outputs: Tensor, targets: Tensor) -> Loss:
    """Share of samples whose largest output is the target class."""
    return Loss((outputs.argmax(-1) == targets).sum(), targets.numel())


def _exponential(mean: float) -> float:
    try:
        return math.exp(mean)
    except OverflowError:  # of a loss above 709, where a model knows nothing
        return math.inf


perplexity = over_vocabulary(Metric(token_cross_entropy, _exponential))
"""Of how many tokens the model is as unsure as of this many equal ones: the exponential of the mean over all tokens."""

"""Ready losses and metrics: each returns a sum and a count.

Experiment(loss=cross_entropy, metrics={"accuracy": accuracy}, …)
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshrun.experiment import Loss
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

"""Ready losses and metrics: each returns a sum and a count.

Experiment(loss=cross_entropy, metrics={"accuracy": accuracy}, …)
Experiment(loss=token_cross_entropy, metrics={"perplexity": perplexity}, …)
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from meshrun.errors import WrongTarget
from meshrun.experiment import Loss, Metric
from meshrun.kernels.cross_entropy import lean_cross_entropy
from meshrun.parallel.dtensor import is_dtensor
from meshrun.parallel.vocabulary import over_vocabulary, split_cross_entropy


def cross_entropy(outputs: Tensor, targets: Tensor) -> Loss:
    """Over classes: outputs (N, classes), targets (N) of numbers or (N, classes) of shares; -100 does not count."""
    classes = outputs.shape[min(1, outputs.dim() - 1)]
    if targets.is_floating_point() and targets.shape == outputs.shape:  # shares of all classes
        return Loss(_entropies(outputs, targets, -100), targets.numel() // classes)
    _refuse_no_classes(targets, classes, -100)
    return Loss(_entropies(outputs, targets, -100), (targets != -100).sum())


@over_vocabulary
def token_cross_entropy(outputs: Tensor, targets: Tensor, ignore_index: int = -100) -> Loss:
    """Over tokens: outputs (N, T, vocabulary), targets (N, T); tokens equal to `ignore_index` do not count."""
    flat = targets.reshape(-1)
    if is_dtensor(outputs):
        return Loss(split_cross_entropy(outputs, flat, ignore_index), (flat != ignore_index).sum())
    _refuse_no_classes(targets, outputs.shape[-1], ignore_index)
    logits = outputs.reshape(-1, outputs.shape[-1])
    return Loss(_entropies(logits, flat, ignore_index), (flat != ignore_index).sum())


def _entropies(logits: Tensor, targets: Tensor, ignore_index: int) -> Tensor:
    """The sum of them all, in fp32 at least; of logits in half that by a way that makes no wider copy of them."""
    halves = logits.dtype in (torch.bfloat16, torch.float16)
    if halves and logits.dim() == 2 and not targets.is_floating_point():
        return lean_cross_entropy(logits, targets.long(), ignore_index)
    return F.cross_entropy(logits, targets, ignore_index=ignore_index, reduction="sum")


def mean_squared_error(outputs: Tensor, targets: Tensor) -> Loss:
    """Over all elements."""
    if outputs.shape != targets.shape:
        raise ValueError(f"outputs have shape {tuple(outputs.shape)} but targets have {tuple(targets.shape)}")
    return Loss((outputs - targets).square().sum(), targets.numel())


def accuracy(outputs: Tensor, targets: Tensor) -> Loss:
    """Share of samples whose largest output is the target class."""
    return Loss((outputs.argmax(-1) == targets).sum(), targets.numel())


def _refuse_no_classes(targets: Tensor, classes: int, ignored: int) -> None:
    """Say which target is no number of a class; on a GPU of what type they are only, since looking at them costs."""
    if targets.dtype not in (torch.int64, torch.uint8):
        kind = str(targets.dtype).removeprefix("torch.")
        raise WrongTarget(f"is of type {kind}; numbers of classes must be int64, from 0 to {classes - 1}", 0)
    if targets.device.type != "cpu":
        return
    wrong = ((targets < 0) | (targets >= classes)) & (targets != ignored)
    if wrong.any():
        place = int(wrong.flatten().nonzero()[0])
        row = place * len(targets) // targets.numel() if targets.dim() else 0
        value = int(targets.flatten()[place])
        raise WrongTarget(f"is {value}; the model tells {classes} classes apart, from 0 to {classes - 1}", row)


def _exponential(mean: float) -> float:
    try:
        return math.exp(mean)
    except OverflowError:  # of a loss above 709, where a model knows nothing
        return math.inf


perplexity = over_vocabulary(Metric(token_cross_entropy, _exponential))
"""Of how many tokens the model is as unsure as of this many equal ones: the exponential of the mean over all tokens."""

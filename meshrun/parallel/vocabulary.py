"""Cross entropy of logits that tp has split over the vocabulary: no rank ever holds all of them.

    @over_vocabulary                    # this loss takes such logits
    def token_cross_entropy(outputs, targets): …
        split_cross_entropy(outputs, targets, ignore_index=-100)

Two small collectives a micro-batch: the largest logit of each token, then its sum of exponentials together with the
logit of its target. The backward pass needs none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshrun.experiment import Loss

Function = TypeVar("Function", bound=Callable[..., Loss])

_MARKED: set[Callable[..., Loss]] = set()


def over_vocabulary(loss: Function) -> Function:
    """Mark a loss or metric that can take logits as a DTensor, split along their last dimension."""
    _MARKED.add(loss)
    return loss


def takes_split(loss: Callable[..., Loss]) -> bool:
    """Whether a loss was marked so."""
    return loss in _MARKED


def split_cross_entropy(logits: DTensor, targets: Tensor, ignore_index: int) -> Tensor:
    """The sum over targets of the cross entropy; the same on every rank that has a part of the vocabulary."""
    group = logits.device_mesh.get_group()
    local = logits.to_local()
    return _CrossEntropy.apply(local.reshape(-1, local.shape[-1]), targets, ignore_index, group)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, ignore_index: int, group: dist.ProcessGroup) -> Tensor:
        wide = logits.float() if logits.dtype != torch.float64 else logits
        size = wide.shape[1]
        place = targets - dist.get_rank(group) * size
        here = (place >= 0) & (place < size) & (targets != ignore_index)
        place = place.clamp(0, size - 1)
        largest = wide.amax(1)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group)
        sums = (wide - largest[:, None]).exp_().sum(1)
        own = wide.gather(1, place[:, None]).squeeze(1).masked_fill(~here, 0.0)
        both = torch.stack([sums, own])
        dist.all_reduce(both, group=group)
        lse = both[0].log() + largest
        counts = targets != ignore_index
        ctx.save_for_backward(logits, lse, place, here, counts)
        return (lse - both[1]).masked_fill(~counts, 0.0).sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        logits, lse, place, here, counts = ctx.saved_tensors
        gradient = (logits.to(lse.dtype) - lse[:, None]).exp_()
        gradient.scatter_add_(1, place[:, None], -here[:, None].to(gradient.dtype))
        gradient *= (gradients[0] * counts)[:, None]
        return gradient.to(logits.dtype), None, None, None

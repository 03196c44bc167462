"""Cross entropy of logits that tp has split over the vocabulary: no rank ever holds all of them.

    @over_vocabulary                    # this loss takes such logits
    def token_cross_entropy(outputs, targets): …
        split_cross_entropy(outputs, targets, ignore_index=-100)

Two small collectives a micro-batch: the largest of each token's sums of exponentials, then their sum together with the
logit of its target. The backward pass needs none, and no rank makes a wider copy of its part.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from meshrun.experiment import Loss
from meshrun.kernels.cross_entropy import softmax_gradient, softmax_rows

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

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
        size = logits.shape[1]
        place = targets - dist.get_rank(group) * size
        counts = targets != ignore_index
        place = place.masked_fill(~counts, -1)  # in nobody's part
        mine, own = softmax_rows(logits, place)
        largest = mine.clone()
        dist.all_reduce(largest, dist.ReduceOp.MAX, group)
        both = torch.stack([(mine - largest).exp_(), own])
        dist.all_reduce(both, group=group)
        lse = both[0].log() + largest
        ctx.save_for_backward(logits, lse, place, counts)
        return (lse - both[1]).masked_fill(~counts, 0.0).sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        logits, lse, place, counts = ctx.saved_tensors
        of_lse = gradients[0] * counts
        return softmax_gradient(logits, lse, place, of_lse, -of_lse), None, None, None

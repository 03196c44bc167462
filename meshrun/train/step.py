"""One update: micro-batches forward and backward, sums and counts over all ranks, one scaling, one optimizer step.

    the layout's part:   every micro-batch forward and backward, of total / samples; gradients over all ranks
    gradients *= samples / count                   so that they are those of the mean over the global batch
    gradients *= clip / norm where that is below 1
    optimizer step

The true divisor, `count`, may be known only after the last forward pass of the last rank (ragged tokens), so backward
divides by the number of samples, which is known, and the difference is made up once at the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from meshrun.data.draws import SampleDraws
from meshrun.data.feed import to_device
from meshrun.data.loader import StepData
from meshrun.errors import UserError
from meshrun.experiment import Loss
from meshrun.mesh import Here
from meshrun.parallel.placed import Asked, Outcome, Piece, Placed, nobody
from meshrun.train.optim import norm_now, norm_on_device, scale_now, scale_on_device

Inspect = Callable[[int, Placed], None]
"""Shown the gradients of a step, scaled and clipped, before the optimizer uses them."""


@dataclass(frozen=True)
class Stepper:
    """All that an update needs beside its data."""

    here: Here
    placed: Placed
    optimizer: Optimizer
    loss: Callable[[Any, Any], Loss]
    clip: float | None
    inspect: Inspect | None = None
    accept: Callable[[list[float]], bool] = lambda values: all(map(math.isfinite, values[:3]))
    """Whether an update with these numbers is applied."""
    looks_first: bool = False
    """Whether the numbers are looked at on a GPU too, which makes the host wait for it."""
    updating: Callable[[], AbstractContextManager[None]] = nullcontext
    """Around the change of the weights."""
    asked: Asked = nobody
    augment: Callable[[Any, SampleDraws], Any] | None = None
    seed: int = 0
    steps_per_epoch: int = 1
    """What `augment` draws by, beside the samples."""

    def __call__(self, data: StepData) -> list[float] | Tensor:
        """Do one update; returns `Update.values`, on a GPU as a tensor."""
        samples, outcome = len(data.ids), self.compute(data)
        gradients = [each.parameter.grad for each in self.placed.shards if each.parameter.grad is not None]
        sums, norm = outcome.sums, outcome.norm
        if sums.is_cuda and not any(each.is_cpu for each in gradients[:1]):
            norm = norm_on_device(gradients) if norm is None else norm
            norm = scale_on_device(gradients, norm, samples / sums[1], self.clip)
            values: list[float] | Tensor = torch.stack([sums[0], sums[1], norm.double(), outcome.own[0], sums[2]])
        else:
            total, count, asked = sums.tolist()
            factor = samples / count if count else math.nan
            whole = norm_now(gradients) if norm is None else norm.item()
            values = [total, count, scale_now(gradients, whole, factor, self.clip), outcome.own[0].item(), asked]
        if self.inspect is not None:
            self.inspect(data.step, self.placed)
        if isinstance(values, Tensor) and self.looks_first:
            values = values.tolist()
        # Where looking at numbers is free, an update that would spoil the weights is not applied.
        if isinstance(values, Tensor) or self.accept(values):
            with self.updating():
                self.optimizer.step()
        self.optimizer.zero_grad()
        return values

    def compute(self, data: StepData) -> Outcome:
        """Forward, backward and reduction: the gradients of one update."""
        here = self.here
        pieces = [
            self._augmented(data.step, Piece(*as_pair(to_device(batch, here.device)), ids, real))
            for batch, ids, real in zip(data.batches, data.pieces, data.real, strict=True)
        ]
        with here.waiting(f"the gradients of step {data.step + 1}"):
            return self.placed.step(data.step, pieces, len(data.ids), self._loss, self.asked)

    @torch.no_grad()
    def _augmented(self, step: int, piece: Piece) -> Piece:
        """The piece with inputs that are changed at random, alike on every rank that has its samples."""
        if self.augment is None:
            return piece
        draws = SampleDraws(self.seed, step // self.steps_per_epoch, piece.ids, self.here.device)
        return replace(piece, inputs=self.augment(piece.inputs, draws))

    def _loss(self, outputs: Any, targets: Any) -> Loss:
        return check_loss(self.loss(outputs, targets), "loss")


def as_pair(batch: Any) -> tuple[Any, Any]:
    if isinstance(batch, tuple | list) and len(batch) == 2:
        return batch[0], batch[1]
    raise UserError(f"a sample is {type(batch).__name__}; a dataset must give pairs of (inputs, targets)")


def check_loss(loss: object, name: str) -> Loss:
    """Refuse what is not a sum and a count, and say what would be."""
    if not isinstance(loss, Loss):
        raise UserError(
            f"{name} returned {type(loss).__name__}; it must return Loss(total, count), a sum and what to divide it "
            f"by, such as Loss(F.cross_entropy(outputs, targets, reduction='sum'), len(targets))"
        )
    if not isinstance(loss.total, Tensor) or loss.total.dim() != 0:
        shape = tuple(loss.total.shape) if isinstance(loss.total, Tensor) else type(loss.total).__name__
        raise UserError(f"{name} returned a Loss whose total is {shape}; it must be a tensor with one value, the sum")
    return loss

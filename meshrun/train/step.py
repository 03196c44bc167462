"""One update: micro-batches forward and backward, sums and counts over all ranks, one scaling, one optimizer step.

    for every micro-batch of this rank:
        forward -> Loss(total, count)              sums += total, count
        the last one: begin to add the sums of all ranks, beside the backward pass
        backward of total * (replicas / samples)   gradients are averaged over replicas by the axis
    gradients *= samples / count                   so that they are those of the mean over the global batch
    gradients *= clip / norm where that is below 1
    optimizer step

The true divisor, `count`, may be known only after the last forward pass of the last rank (ragged tokens), so backward
divides by the number of samples, which is known, and the difference is made up once at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from meshrun.data.loader import StepData, to_device
from meshrun.errors import UserError
from meshrun.experiment import Loss
from meshrun.mesh import Here
from meshrun.parallel.dp import Replicated
from meshrun.train.optim import scale_gradients


@dataclass(frozen=True)
class Stepper:
    """All that an update needs beside its data."""

    here: Here
    placed: Replicated
    optimizer: Optimizer
    loss: Callable[[Any, Any], Loss]
    precision: str
    clip: float | None

    def __call__(self, data: StepData) -> Tensor:
        """Do one update; returns (global loss total, global count, gradient norm, own total) on the device."""
        here, samples = self.here, len(data.ids)
        sums = torch.zeros(2, dtype=torch.float64, device=here.device)
        self.placed.begin_step(every_rank_has_samples=samples >= here.replicas)
        reduction = None
        own = sums
        if not data.batches:
            reduction = here.sum(sums)
        with here.waiting(f"the gradients of step {data.step + 1}"):
            for number, batch in enumerate(data.batches):
                last = number == len(data.batches) - 1
                with self.placed.accumulating(reduce=last):
                    loss = self._loss(to_device(batch, here.device))
                    sums += as_sums(loss)
                    if last:
                        own = sums.clone()
                        reduction = here.sum(sums)
                    (loss.total * (here.replicas / samples)).backward()
            self.placed.finish_reduction()
            if reduction is not None:
                reduction.wait()
        norm = scale_gradients(self.placed.parameters, samples / sums[1], self.clip)
        values = torch.stack([sums[0], sums[1], norm.double(), own[0]])
        if here.device.type == "cpu" and not torch.isfinite(values[:3]).all():
            self.optimizer.zero_grad()
            return values
        self.optimizer.step()
        self.optimizer.zero_grad()
        return values

    def _loss(self, batch: Any) -> Loss:
        inputs, targets = as_pair(batch)
        with computing(self.precision, self.here.device):
            return check_loss(self.loss(self.placed.forward(inputs), targets), "loss")


def computing(precision: str, device: torch.device) -> AbstractContextManager[Any]:
    """The arithmetic of forward passes."""
    return torch.autocast(device.type, torch.bfloat16) if precision == "bf16" else nullcontext()


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


def as_sums(loss: Loss) -> Tensor:
    """A loss as a tensor of two: total and count."""
    total = loss.total.detach().double()
    if isinstance(loss.count, Tensor):
        return torch.stack([total, loss.count.detach().to(total)])
    # Filled on the device: copying a number from the host would make the host wait.
    return torch.stack([total, torch.full_like(total, loss.count)])

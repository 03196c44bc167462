"""One update: micro-batches forward and backward, sums and counts over all ranks, one scaling, one optimizer step.

    for every micro-batch of this rank:
        forward -> Loss(total, count)              sums += total, count
        the last one: its backward pass also adds the sums of all ranks
        backward of total * (replicas / samples)   gradients are averaged over replicas by the axis
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
from meshrun.train.optim import scale_now, scale_on_device


@dataclass(frozen=True)
class Stepper:
    """All that an update needs beside its data."""

    here: Here
    placed: Replicated
    optimizer: Optimizer
    loss: Callable[[Any, Any], Loss]
    precision: str
    clip: float | None

    def __call__(self, data: StepData) -> list[float] | Tensor:
        """Do one update; returns (global loss total, global count, gradient norm, own total), on a GPU as a tensor."""
        here, samples = self.here, len(data.ids)
        self.placed.begin_step(every_rank_has_samples=samples >= here.replicas)
        own: Tensor | None = None
        with here.waiting(f"the gradients of step {data.step + 1}"):
            if not data.batches:
                own = torch.zeros(2, dtype=torch.float64, device=here.device)
                self.placed.backward(None, own)
            for number, batch in enumerate(data.batches):
                last = number == len(data.batches) - 1
                with self.placed.accumulating(reduce=last):
                    loss = self._loss(to_device(batch, here.device))
                    own = as_sums(loss) if own is None else own + as_sums(loss)
                    self.placed.backward(loss.total * (here.replicas / samples), own if last else None)
            sums = self.placed.finish_reduction()
        assert own is not None
        parameters = self.placed.parameters
        if sums.is_cuda:
            norm = scale_on_device(parameters, samples / sums[1], self.clip)
            values: list[float] | Tensor = torch.stack([sums[0], sums[1], norm.double(), own[0]])
        else:
            total, count = sums.tolist()
            factor = samples / count if count else math.nan
            values = [total, count, scale_now(parameters, factor, self.clip), own[0].item()]
        # Where looking at numbers is free, an update that would spoil the weights is not applied.
        if isinstance(values, Tensor) or all(map(math.isfinite, values[:3])):
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
    if not loss.total.is_cuda:
        # One small tensor instead of four: on a CPU looking at a number costs nothing.
        return torch.tensor([loss.total.item(), float(loss.count)], dtype=torch.float64)
    total = loss.total.detach().double()
    if isinstance(loss.count, Tensor):
        return torch.stack([total, loss.count.detach().to(total)])
    # Filled on the device: copying a number from the host would make the host wait.
    return torch.stack([total, torch.full_like(total, loss.count)])

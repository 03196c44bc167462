"""One update: micro-batches forward and backward, sums and counts over all ranks, one scaling, one optimizer step.

    the layout's part:   every micro-batch forward and backward, of total / samples; gradients over all ranks
    gradients *= samples / count                   so that they are those of the mean over the global batch
    gradients *= clip / norm where that is below 1
    optimizer step                                 these three may be one pass over memory (`update`)

The true divisor, `count`, may be known only after the last forward pass of the last rank (ragged tokens), so backward
divides by the number of samples, which is known, and the difference is made up once at the end.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from meshrun.data.draws import SampleDraws
from meshrun.data.feed import to_device
from meshrun.data.loader import StepData
from meshrun.errors import UserError
from meshrun.experiment import Loss
from meshrun.kernels.here import available
from meshrun.mesh import Here
from meshrun.parallel.placed import Asked, Outcome, Piece, Placed, nobody
from meshrun.train.graphs import Graphed
from meshrun.train.in_backward import InBackward
from meshrun.train.optim import clipped_now, clipped_on_device, norm_now, norm_on_device
from meshrun.train.recording import Recorder
from meshrun.train.states import EightBit, Kept
from meshrun.train.update import Plain, Update, fastest, scale

COUNT = "it must be a finite number of at least 0, such as len(targets)"
"""What the count of a Loss must be."""
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
    recorder: Recorder | None = None
    """Where steps may be recorded and replayed; `graphs` None leaves it to how long they take."""
    graphs: bool | None = None
    total_steps: int = 0
    note: Callable[[str], None] = lambda _: None
    in_backward: bool = False
    """Whether weights change while gradients are computed."""

    def __call__(self, data: StepData) -> list[float] | Tensor:
        """Do one update; returns `Update.values`, on a GPU as a tensor."""
        if self.in_backward:
            given = data.step, self.pieces(data), len(data.ids), self._loss, self.asked, self.updating
            return self.changing_at_once(*given)
        if self.recorder is not None:
            return self.apply(data.step, *self._replayed(data))
        values, factor = self.weigh(self.compute(data), len(data.ids))
        return self.apply(data.step, values, factor)

    @cached_property
    def graphed(self) -> Graphed:
        assert self.recorder is not None
        return Graphed(
            self._scaled, self.placed, self.here.device, self.recorder, self.graphs, self.total_steps, self.note
        )

    @cached_property
    def changing_at_once(self) -> InBackward:
        return InBackward(self.here, self.placed, self.optimizer, self.update)

    def _replayed(self, data: StepData) -> tuple[Tensor, float | Tensor]:
        """What `weigh` returns, from a recording where there is one."""
        values, factor = self.graphed(data.step, self.pieces(data), len(data.ids))
        if asked := self.asked():  # no part of what was recorded
            values = values.clone()
            values[4] += asked
        return values, factor

    def _scaled(self, step: int, pieces: list[Piece], samples: int) -> tuple[Tensor, float | Tensor]:
        """What is recorded: all of a step that its weights do not change by."""
        outcome = self.placed.step(step, pieces, samples, self._loss, nobody)
        values, factor = self.weigh(outcome, samples)
        assert isinstance(values, Tensor)
        if isinstance(self.update, Plain):
            scale(self.update.gradients(), factor)
            factor = 1.0
        return values, factor

    @cached_property
    def update(self) -> Update:
        """What changes the weights."""
        return self._fitting()

    def _fitting(self) -> Update:
        # Who wants to see gradients before they are used wants them where they belong, and scaled.
        if isinstance(self.optimizer.state, Kept):
            return EightBit(self.optimizer, self.placed, collects=self.inspect is not None)
        choose = fastest if self.inspect is None else Plain.of
        return choose(self.optimizer, self.placed)

    def chosen(self) -> dict[str, Any]:
        """How the weights change, for the record of what was decided."""
        plain = isinstance(self._fitting(), Plain)
        by_kernel = not plain and all(available(each.parameter.device) for each in self.placed.shards)
        fused = plain and all(group.get("fused") for group in self.optimizer.param_groups)
        return {
            "update": "one-pass" if by_kernel else "fused" if fused else "torch",
            "states": "8bit" if isinstance(self.optimizer.state, Kept) else "fp32",
            "update_in_backward": self.in_backward,
        }

    def weigh(self, outcome: Outcome, samples: int) -> tuple[list[float] | Tensor, float | Tensor]:
        """`Update.values`, and what the gradients are to be multiplied by; on a GPU as tensors that nobody looks at."""
        sums, norm, gradients = outcome.sums, outcome.norm, self.update.gradients()
        if norm is None and not gradients:
            raise UserError(
                "no trained parameter of the model has a gradient, since the loss does not depend on any; compute its "
                "total from the outputs of the model"
            )
        if self.recorder is not None or (sums.is_cuda and not any(each.is_cpu for each in gradients[:1])):
            norm = norm_on_device(gradients) if norm is None else norm
            norm, factor = clipped_on_device(norm, samples / sums[1], self.clip)
            return torch.stack([sums[0], sums[1], norm.double(), outcome.own[0], sums[2]]), factor
        total, count, asked = sums.tolist()
        whole = norm_now(gradients) if norm is None else norm.item()
        whole, multiplied = clipped_now(whole, samples / count if count else math.nan, self.clip)
        return [total, count, whole, outcome.own[0].item(), asked], multiplied

    def apply(self, step: int, values: list[float] | Tensor, factor: float | Tensor) -> list[float] | Tensor:
        """Let what was computed and weighed change the weights, if it may, and forget it."""
        if self.inspect is not None:
            scale(self.update.gradients(), factor)
            self.inspect(step, self.placed)
            factor = 1.0
        if isinstance(values, Tensor) and self.looks_first:
            values = values.tolist()
        # Where looking at numbers is free, an update that would spoil the weights is not applied.
        if isinstance(values, Tensor) or self.accept(values):
            with self.updating():
                self.update(factor)
        if self.recorder is not None and self.graphed.keeps_gradients:
            self.placed.chosen["graphs"] = True  # not known before a step was replayed
        else:
            self.update.forget()
        return values

    def compute(self, data: StepData) -> Outcome:
        """Forward, backward and reduction: the gradients of one update."""
        pieces = self.pieces(data)
        with self.here.waiting(f"the gradients of step {data.step + 1}"):
            return self.placed.step(data.step, pieces, len(data.ids), self._loss, self.asked)

    def pieces(self, data: StepData) -> list[Piece]:
        """The micro-batches of a step, on the device."""
        found = []
        for batch, ids, real in zip(data.batches, data.pieces, data.real, strict=True):
            inputs, targets = as_pair(to_device(batch, self.here.device))
            found.append(
                Piece(inputs if data.augmented else self.augmented(data.step, inputs, ids), targets, ids, real)
            )
        return found

    @torch.no_grad()
    def augmented(self, step: int, inputs: Any, ids: list[int]) -> Any:
        """Inputs of the samples of some steps of an epoch, changed at random, alike on every rank that has them."""
        if self.augment is None:
            return inputs
        return self.augment(inputs, SampleDraws(self.seed, step // self.steps_per_epoch, ids, self.here.device))

    def _loss(self, outputs: Any, targets: Any) -> Loss:
        found = check_loss(self.loss(outputs, targets), "loss")
        if not found.total.requires_grad:
            raise UserError(
                "loss returned a Loss whose total has no gradient; compute it from the outputs, without detach(), "
                "item() or torch.no_grad(), in the model as in the loss"
            )
        return found


def as_pair(batch: Any) -> tuple[Any, Any]:
    if isinstance(batch, tuple | list) and len(batch) == 2:
        return batch[0], batch[1]
    raise UserError(
        f"a sample is {type(batch).__name__}; a dataset must give pairs of (inputs, targets), or "
        f"Experiment(collate=…) must make such a pair of a list of samples"
    )


def check_loss(loss: object, name: str) -> Loss:
    """Refuse what is not a sum and a count, and say what would be."""
    what = "loss" if name == "loss" else f"the metric {name!r}"
    if not isinstance(loss, Loss):
        sum_of_losses = "F.cross_entropy(outputs, targets, reduction='sum')"
        example = sum_of_losses if name == "loss" else "(outputs.argmax(1) == targets).sum()"
        raise UserError(
            f"{what} returned {type(loss).__name__}; it must return Loss(total, count), a sum and what to divide it "
            f"by, such as Loss({example}, len(targets))"
        )
    if not isinstance(loss.total, Tensor) or loss.total.dim() != 0:
        shape = tuple(loss.total.shape) if isinstance(loss.total, Tensor) else type(loss.total).__name__
        raise UserError(f"{what} returned a Loss whose total is {shape}; it must be a tensor with one value, the sum")
    if loss.total.is_complex() or loss.total.is_meta:
        kind = "on the meta device" if loss.total.is_meta else "a complex number"
        raise UserError(f"{what} returned a Loss whose total is {kind}; it must be a real number, the sum")
    count = loss.count
    one = count.numel() == 1 and not (count.is_complex() or count.is_meta) if isinstance(count, Tensor) else True
    if not one or not isinstance(count, Tensor | Real):
        described = f"a tensor of shape {tuple(count.shape)}" if isinstance(count, Tensor) else f"{count!r:.60}"
        raise UserError(f"{what} returned a Loss whose count is {described}; it must be a number, such as len(targets)")
    # Those on a GPU are looked at with the numbers of a finished update: the host would have to wait for them here.
    if not (isinstance(count, Tensor) and count.is_cuda) and not is_count(count):
        raise UserError(f"{what} returned a Loss whose count is {count!r:.60}; {COUNT}")
    return loss


def is_count(count: Any) -> bool:
    """Whether a sum can be divided by a number, or can be of nothing."""
    return bool(0 <= count <= sys.float_info.max)

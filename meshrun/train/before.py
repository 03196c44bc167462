"""What a step changes beside gradients, and the way back: so that it can be computed twice and count once.

    before = Before(placed, device)
    ...                                  # a step
    before.objection()                   # why a recording of it would not do the same, or None
    before.restore()

Gradients are not among it: who computes a step twice clears them.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from meshrun.data.drawn import Drawn, draw_on
from meshrun.parallel.moment import Moment
from meshrun.parallel.placed import Placed


class Before:
    """What a step may change beside gradients, as it was before it.

    It also tells what a recording would miss: a buffer that is replaced and not written to, a number that the model
    counts up on the host, random numbers that are drawn there.
    """

    def __init__(self, placed: Placed, device: torch.device) -> None:
        self._model, self._device = placed.model, device
        self._buffers = [(name, each, each.detach().clone()) for name, each in self._model.named_buffers()]
        self._places = [each.data_ptr() for _, each, _ in self._buffers]
        self._placed, self._numbers = placed, _numbers(self._model)
        self._drawn = Drawn.now(device)

    def objection(self) -> str | None:
        """Why the step that was computed since then cannot be recorded, or None."""
        now = dict(self._model.named_buffers())
        for (name, before, _), place in zip(self._buffers, self._places, strict=True):
            if now.get(name) is not before or before.data_ptr() != place:
                return f"the model replaces its buffer {name} in a step instead of writing to it"
        for name, number in _numbers(self._model).items():
            if self._numbers.get(name, number) != number:
                return f"the model changes the number {name} in a step"
        # Masks are drawn by the number of the step: unless that is read on the device, the same is dropped for ever.
        moment = drawing(self._placed)
        if moment is not None and not (moment.in_place and moment.device == self._device):
            return "the model has dropout"
        if not replace(self._drawn, cuda=None).same(replace(Drawn.now(self._device), cuda=None)):
            return "random numbers are drawn on the host in a step"
        return None

    @torch.no_grad()
    def restore(self) -> None:
        for _, buffer, values in self._buffers:
            buffer.copy_(values)
        draw_on(self._drawn.tensors(), self._device)


def drawing(placed: Placed) -> Moment | None:
    """What the model has drawn by key from in its last forward pass; None if it has drawn nothing."""
    moment: Moment | None = getattr(placed, "moment", None)
    return moment if moment is not None and any(int(each) for each in moment.turns.values()) else None


def _numbers(model: nn.Module) -> dict[str, float]:
    """Plain numbers that the modules of a model have."""
    return {
        f"{prefix}.{name}" if prefix else name: value
        for prefix, module in model.named_modules()
        for name, value in module.__dict__.items()
        if isinstance(value, int | float)
    }

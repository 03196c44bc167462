"""Gradients of weights that are computed later than those of activations, to fill the idle time of a pipeline.

    later = Later()
    put_off(part, later)              # its nn.Linear layers
    later.place = (stage, piece)      # while a micro-batch goes forward
    later.now((stage, piece))         # computes what its backward pass has put off

Only matrix products are put off: they are what the time goes into.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


class Later:
    """What is left to compute, by the place that it belongs to."""

    def __init__(self) -> None:
        self.place: Hashable = None
        self.at_once = False
        """Nothing is put off while this is set."""
        self._left: dict[Hashable, list[tuple[nn.Parameter, Tensor, Tensor]]] = defaultdict(list)

    def add(self, place: Hashable, weight: nn.Parameter, gradient: Tensor, inputs: Tensor) -> None:
        self._left[place].append((weight, gradient, inputs))
        if self.at_once:
            self.now(place)

    def now(self, place: Hashable) -> None:
        """Compute and add the gradients of weights of one place."""
        with torch.no_grad():
            for weight, gradient, inputs in self._left.pop(place, ()):
                whole = gradient.flatten(0, -2).t() @ inputs.flatten(0, -2)
                weight.grad = whole.to(weight.dtype) if weight.grad is None else weight.grad.add_(whole)
                for hook in (weight._post_accumulate_grad_hooks or {}).values():
                    hook(weight)

    def all_now(self) -> None:
        for place in list(self._left):
            self.now(place)


class _Product(torch.autograd.Function):
    """inputs @ weight.T, whose backward pass gives the gradient of the inputs only."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: nn.Parameter, later: Later) -> Tensor:
        # Under autocast the product is in its type, as nn.Linear's would be.
        kind = torch.get_autocast_dtype(inputs.device.type)
        cast = kind if torch.is_autocast_enabled(inputs.device.type) else inputs.dtype
        rounded, rounded_weight = inputs.to(cast), weight.to(cast)
        ctx.save_for_backward(rounded, rounded_weight)
        ctx.weight, ctx.later, ctx.place, ctx.kind = weight, later, later.place, inputs.dtype
        return rounded @ rounded_weight.t()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        inputs, weight = ctx.saved_tensors
        ctx.later.add(ctx.place, ctx.weight, gradients[0], inputs)
        return (gradients[0] @ weight).to(ctx.kind), None, None


def put_off(part: nn.Module, later: Later) -> None:
    """Make the linear layers of a part compute their weights' gradients later; those that tp has split stay."""
    for module in part.modules():
        if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward and not _is_split(module):
            module.forward = partial(_forward, module, later)  # type: ignore[method-assign]


def _forward(module: nn.Linear, later: Later, inputs: Tensor) -> Tensor:
    if not torch.is_grad_enabled() or not module.weight.requires_grad or not inputs.requires_grad:
        return nn.functional.linear(inputs, module.weight, module.bias)
    product = _Product.apply(inputs, module.weight, later)
    return product if module.bias is None else product + module.bias.to(product.dtype)


def _is_split(module: nn.Linear) -> bool:
    return hasattr(module.weight, "placements")

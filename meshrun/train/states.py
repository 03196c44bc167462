"""`--states 8bit`: the moments of the user's Adam or AdamW in 8 bits, a quarter of their memory.

    in_eight_bits(optimizer)                     # once, before its first step
    update = EightBit(optimizer, placed)         # what makes its steps from then on

The optimizer stays the user's own. Its state has the names that torch gives it, with `Eight` for the moments of what is
not small; whatever is put into it in fp32, as by a resume, is turned into that at once. Checkpoints hold moments in
fp32, in the shape of their parameter, so any layout goes on from them, with `--states 8bit` or without.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer

from meshrun.errors import UserError
from meshrun.kernels.adamw import Rule
from meshrun.kernels.eightbit import LEAST, Eight, adamw8_
from meshrun.train.fused import ODD
from meshrun.train.update import InOnePass

SIGNED = {"exp_avg": True, "exp_avg_sq": False}
"""What is kept in 8 bits, and whether it has numbers of both signs."""


class Kept(defaultdict[Tensor, Any]):
    """An optimizer's state whose moments are in 8 bits."""

    def __setitem__(self, parameter: Tensor, state: dict[str, Any]) -> None:
        if parameter.numel() >= LEAST:
            # One after the other: both in fp32 beside each other would be what there is no memory for.
            for key, signed in SIGNED.items():
                if isinstance(state.get(key), Tensor):
                    state[key] = Eight.of(state[key], signed)
        super().__setitem__(parameter, state)


def in_eight_bits(optimizer: Optimizer) -> None:
    """Let an optimizer keep its moments so; refuses those whose steps are not known here."""
    known = type(optimizer) in (Adam, AdamW)
    odd = [name for name in ODD if _any(optimizer, name)]
    if not known or odd or any(isinstance(group["lr"], Tensor) for group in optimizer.param_groups):
        found = type(optimizer).__name__ + (f" with {odd[0]}" if odd else "" if not known else " with lr as a tensor")
        raise UserError(
            f"the optimizer is {found}, but only the moments of torch's own AdamW and Adam, without amsgrad, maximize, "
            f"differentiable, capturable and tensors as lr, can be kept in 8 bits (--states fp32)"
        )
    optimizer.state = Kept(dict, optimizer.state)


def _any(optimizer: Optimizer, name: str) -> bool:
    return any(group.get(name) for group in optimizer.param_groups)


@dataclass(frozen=True)
class EightBit(InOnePass):
    """The steps of an optimizer whose state is `Kept`."""

    collects: bool = False
    """Whether somebody wants to see gradients where they belong, in the masters."""

    def gradients(self) -> list[Tensor]:
        if self.collects:
            self.placed.collect()
        return super().gradients()

    def _state(self, parameter: nn.Parameter) -> dict[str, Any]:
        state = self.optimizer.state[parameter]
        if not state and parameter.numel() >= LEAST:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state |= {key: Eight.zeros(parameter, signed) for key, signed in SIGNED.items()}
        return super()._state(parameter)

    def _change(
        self,
        parameters: Sequence[Tensor],
        gradients: Sequence[Tensor],
        exp_avgs: Sequence[Any],
        exp_avg_sqs: Sequence[Any],
        copies: Sequence[Tensor | None],
        rule: Rule,
        factor: float | Tensor,
    ) -> None:
        rest = []
        for each in zip(parameters, gradients, exp_avgs, exp_avg_sqs, copies, strict=True):
            if isinstance(each[2], Eight):
                adamw8_(*each[:4], rule, copy=each[4], factor=factor)
            else:
                rest.append(each)
        if rest:
            some, theirs, first, second, rounded = zip(*rest, strict=True)
            super()._change(some, theirs, first, second, rounded, rule, factor)

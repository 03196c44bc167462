"""Adam's moments in 8 bits: a quarter of their memory, blocks of 256 elements with one fp32 scale each.

    exp_avg, exp_avg_sq = Eight.zeros(parameter, signed=True), Eight.zeros(parameter, signed=False)
    adamw8_(parameter, gradient, exp_avg, exp_avg_sq, factor=1.0, step=7, lr=1e-3, …)   # as `adamw_`
    exp_avg.read(parameter)                        # fp32, of the parameter's shape
    Eight.of(tensor, signed=True)                  # and back: what was read gives the same codes again

What is stored is the square root of a value's share of the largest one in its block: codes are densest near 0, since in
a block some gradients are a thousand times smaller than others, and the update divides one moment by the other. Of
`exp_avg_sq` it is the share of its own root, by which the update divides. There the smallest code above 0 is for all
that is not 0: what is small never becomes 0 to divide by, and what is stored too large only makes an update smaller.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from meshrun.kernels.adamw import Rule, adamw_, runs_in_one_kernel

BLOCK = 256
"""Elements that share a scale."""
LEAST = 4096
"""Elements below which a parameter's moments are not worth it."""


@dataclass(frozen=True, eq=False)
class Eight:
    """A tensor in 8 bits; of numbers of both signs as ±scale (code/127)², of others as (scale (code/255)²)²."""

    codes: Tensor
    """int8 where numbers have signs, else uint8; flat, in whole blocks."""
    scales: Tensor
    """fp32, one a block: the largest number, or the root of it."""

    @property
    def signed(self) -> bool:
        return self.codes.dtype == torch.int8

    @classmethod
    def zeros(cls, like: Tensor, signed: bool) -> Eight:
        """Of the size and on the device of a tensor."""
        blocks, device = math.ceil(like.numel() / BLOCK), like.device
        codes = torch.zeros(blocks * BLOCK, dtype=torch.int8 if signed else torch.uint8, device=device)
        return cls(codes, torch.zeros(blocks, dtype=torch.float32, device=device))

    @classmethod
    def of(cls, values: Tensor, signed: bool) -> Eight:
        """The nearest codes of a tensor's values."""
        made = cls.zeros(values, signed)
        made.write(values)
        return made

    def read(self, like: Tensor) -> Tensor:
        """The values in fp32, with a tensor's shape."""
        shares = self.codes.view(-1, BLOCK).float() / (127 if self.signed else 255)
        if self.signed:
            values = self.scales[:, None] * (shares * shares.abs())
        else:
            values = (self.scales[:, None] * (shares * shares)).square_()
        return values.view(-1)[: like.numel()].view(like.shape)

    def write(self, values: Tensor) -> None:
        """Replace the values."""
        flat = torch.nn.functional.pad(values.detach().reshape(-1).float(), (0, len(self.codes) - values.numel()))
        blocks = flat.view(-1, BLOCK)
        sizes = blocks.abs() if self.signed else blocks.sqrt()
        self.scales.copy_(sizes.amax(1))
        shares = torch.where(sizes > 0, sizes / self.scales[:, None], 0.0).sqrt_()
        codes = (shares * (127 if self.signed else 255) + 0.5).floor_()
        codes = codes * blocks.sign() if self.signed else torch.where(sizes > 0, codes.clamp(min=1), codes)
        self.codes.copy_(codes.view(-1))


def adamw8_(
    parameter: Tensor,
    gradient: Tensor,
    exp_avg: Eight,
    exp_avg_sq: Eight,
    rule: Rule,
    *,
    copy: Tensor | None = None,
    factor: Tensor | float,
) -> None:
    """What `adamw_` does, with moments in 8 bits that are fp32 only while they are used."""
    if parameter.is_contiguous() and runs_in_one_kernel(parameter, gradient, copy):
        from meshrun.kernels import _eightbit_triton

        states = exp_avg.codes, exp_avg.scales, exp_avg_sq.codes, exp_avg_sq.scales
        factor = factor if isinstance(factor, Tensor) else float(factor)
        _eightbit_triton.launch(parameter, gradient, *states, copy, factor, rule.numbers(), rule.decoupled)
        return
    moments = exp_avg.read(parameter), exp_avg_sq.read(parameter)
    adamw_(parameter, gradient, *moments, rule, copy=copy, factor=factor)
    exp_avg.write(moments[0])
    exp_avg_sq.write(moments[1])

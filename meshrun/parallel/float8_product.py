"""The product of a linear layer in float8: its three matrix products take 8-bit numbers, and give bf16.

    outputs = linear(inputs, weight, bias)         # as F.linear, but for the rounding

    outputs  = inputs8  · weight8ᵀ       each token of the inputs and each row of the weight has a scale of its own
    d inputs = gradient8 · weight8       each token of the gradient too
    d weight = gradient8ᵀ · inputs8

A float8 number (e4m3) has 3 bits after the point and reaches from 2⁻⁹ to 448, so values are divided by a scale before.
Scales are found anew at every use, and they are powers of two, so that dividing by one is exact, and so is taking it
into other factors. That is what makes a scale a token cheap, and worth it:

- The largest value of a token is found by the kernel that computes the token (a norm, an activation). The largest value
  of a whole tensor is known only after that: all would be read once more.
- A token's scale does not depend on the other tokens of the micro-batch: however samples are cut over micro-batches and
  ranks, they are rounded the same.
- Where a product sums over what has the scales (tokens for the weight's gradient, rows of the weight for that of the
  inputs), numbers are brought under the largest scale first: exactly, but for what is 2¹⁷ times smaller than others.
- Elsewhere scales are multiplied into the result, which costs nothing where what comes next is fused with it.

Between the passes inputs are kept in 8 bits. The hardware wants both factors with the summed dimension last, hence the
transposed copies in the backward pass. Where there is no such hardware (CPU), the same 8-bit numbers are multiplied in
bf16, which holds them exactly.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from meshrun.kernels.turned import FORMAT, turned

MULTIPLE = 16
"""What sizes of matrices must be a multiple of."""
SCALING = "row"
"""What of inputs and gradients has one scale: "row" for a token, "tensor" for all of a micro-batch."""
FAST = frozenset({"outputs", "inputs"})
"""Which of the products "outputs", "inputs", "weight" (the gradients of these) are added up with fewer bits, which is
faster on Hopper. The weight's gradient is not: it is added up over all tokens, and over the steps of a training."""
TURNED_EARLY = True
"""Whether compiled code transposes inputs in the forward pass, where they are at hand, once for all layers that share
them, and keeps them so. Else it computes them again in the backward pass where that is cheap: a byte less a number is
kept, and much more memory is read."""

_CARRY, _TOP = (1 << 21) - 1, 8
"""The largest number is 1.75 * 2**8: three quarters of the way from one power of two to the next."""
_ONE = 127 << 23
"""The bits of 1.0."""
_LEAST = 64
"""Scales are at least 2**(64 - 127): two of them can be multiplied."""


def quantised(values: Tensor, scaling: str = "row") -> tuple[Tensor, Tensor]:
    """Numbers in float8, and by row (or all in one) the power of two that they must be multiplied with."""
    scale = _scales(values, scaling)
    return (values.detach().float() * _inverse(scale)).to(FORMAT).contiguous(), scale


def _scales(values: Tensor, scaling: str = "row") -> Tensor:
    """By the bits of the largest value, since a logarithm would be off by one now and then. What is not finite has a
    scale that is not, and so are the results.
    """
    # Wide before the maximum: a compiler rounds what it writes down and not what it still has at hand, and a largest
    # value that rounds over a power of two would give two scales for one row.
    largest = values.detach().float().abs().amax(-1, keepdim=True)
    if scaling == "tensor":
        largest = largest.amax(0, keepdim=True)
    above = (largest.view(torch.int32) + _CARRY) >> 23
    exponent = torch.where(above < 255, (above - _TOP).clamp(min=_LEAST), 255)
    return (exponent << 23).view(torch.float32)


def _inverse(scale: Tensor) -> Tensor:
    """By bits too: a division on a GPU need not be exact."""
    return (2 * _ONE - scale.view(torch.int32)).view(torch.float32)


def linear(inputs: Tensor, weight: Tensor, bias: Tensor | None, weight8: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """`inputs` (…, in) to (…, out). `weight8` is the quantised weight, where somebody has made it: then `weight` is
    only what the gradient is for, and nobody looks at its values.
    """
    on = inputs.device.type
    casts = on != "meta" and torch.is_autocast_enabled(on)
    kind = torch.get_autocast_dtype(on) if casts else inputs.dtype
    rows = inputs.reshape(-1, inputs.shape[-1])
    # The weight's gradient is summed over rows: zeros change nothing.
    missing = -rows.shape[0] % MULTIPLE
    if missing:
        rows = F.pad(rows, (0, 0, 0, missing))
    outputs = _Product.apply(rows, weight, *(weight8 or (None, None)))
    if missing:
        outputs = outputs[:-missing]
    # As F.linear shapes its result: one that whoever takes it may change in place.
    outputs = torch.ops.aten._unsafe_view(outputs, [*inputs.shape[:-1], outputs.shape[-1]]).to(kind)
    return outputs if bias is None else outputs + bias.to(kind)


class _Product(torch.autograd.Function):
    """inputs · weightᵀ, of matrices."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, made: Tensor | None, made_scale: Tensor | None) -> Tensor:
        inputs8, scale = quantised(inputs, SCALING)
        if made is None or made_scale is None:
            weight8, weight_scale = quantised(weight)
            # The backward pass makes it of the weight again, rather than that it is kept for all layers until then.
            ctx.save_for_backward(inputs8, scale, weight)
        else:
            weight8, weight_scale = made, made_scale
            ctx.save_for_backward(inputs8, scale, weight8, weight_scale)
        ctx.kinds = inputs.dtype, weight.dtype
        product = _multiplied(inputs8, weight8.t(), fast="outputs" in FAST)
        return product * scale.to(product.dtype) * weight_scale.t().to(product.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        inputs8, scale, *weights = ctx.saved_tensors
        gradient8, gradient_scale = quantised(gradients[0], SCALING)
        for_inputs = for_weight = None
        if ctx.needs_input_grad[0]:
            if len(weights) == 2:
                columns, common = _turned(weights[0], weights[1], gradient_scale)
            else:
                common = _scales(weights[0]).amax()
                columns = turned(weights[0].detach(), _inverse(common), gradient_scale)
            product = _multiplied(gradient8, columns.t(), common, fast="inputs" in FAST)
            for_inputs = (product * gradient_scale.to(product.dtype)).to(ctx.kinds[0])
        if ctx.needs_input_grad[1]:
            rows, common = _turned(gradient8, gradient_scale * scale, gradient_scale)
            columns = turned(inputs8, None, None if TURNED_EARLY else gradient_scale)
            for_weight = _multiplied(rows, columns.t(), common, kind=ctx.kinds[1], fast="weight" in FAST)
        return for_inputs, for_weight, None, None


def _turned(values8: Tensor, scale: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
    """The transposed matrix, with one scale for all of it where there was one a row.

    `after` are scales of the gradient: without them, a compiler that cuts the passes apart would do this in the forward
    pass already, and keep copies of all weights for the backward pass.
    """
    common = scale.amax()
    if scale.shape[0] == 1:
        return turned(values8, None, after), common
    bits = scale.view(torch.int32) - common.view(torch.int32) + _ONE
    return turned(values8, bits.clamp(min=0).view(torch.float32), after), common


def _multiplied(
    left: Tensor, right: Tensor, scale: Tensor | None = None, kind: torch.dtype = torch.bfloat16, fast: bool = False
) -> Tensor:
    """The product of two matrices of float8, the first one row by row in memory, the second one column by column."""
    one = torch.ones((), device=left.device)
    if left.is_cuda:
        return torch._scaled_mm(left, right, one if scale is None else scale, one, out_dtype=kind, use_fast_accum=fast)
    product = left.to(torch.bfloat16) @ right.to(torch.bfloat16)
    return (product if scale is None else product * scale.to(product.dtype)).to(kind)

"""One parameter's update by Adam in one kernel: gradient -> moments -> parameter -> its bfloat16 copy.

With a bfloat16 gradient and copy it moves 28 bytes of memory an element; scaling, torch's fused Adam and copying are
three passes that move 46.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def _kernel(
    parameter,
    gradient,
    exp_avg,
    exp_avg_sq,
    copy,
    factor,
    size,
    beta1,
    rest1,
    beta2,
    rest2,
    eps,
    decay,
    step_size,
    root2,
    DECOUPLED: tl.constexpr,
    COPIES: tl.constexpr,
    LOADS_FACTOR: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # Offsets in 64 bits: a parameter may have more than 2^31 elements.
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    p = tl.load(parameter + at, mask=inside)
    g = tl.load(gradient + at, mask=inside).to(tl.float32)
    m = tl.load(exp_avg + at, mask=inside)
    v = tl.load(exp_avg_sq + at, mask=inside)
    if LOADS_FACTOR:
        g *= tl.load(factor)
    else:
        g *= factor
    if DECOUPLED:
        p -= decay * p
    else:
        g += decay * p
    m = beta1 * m + rest1 * g
    v = beta2 * v + rest2 * g * g
    p -= step_size * tl.div_rn(m, tl.div_rn(tl.sqrt_rn(v), root2) + eps)
    tl.store(exp_avg + at, m, mask=inside)
    tl.store(exp_avg_sq + at, v, mask=inside)
    tl.store(parameter + at, p, mask=inside)
    if COPIES:
        tl.store(copy + at, p.to(copy.dtype.element_ty), mask=inside)


def launch(
    parameter: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    copy: Tensor | None,
    factor: Tensor | float,
    numbers: dict[str, Any],
    decoupled: bool,
) -> None:
    """Update in place; all tensors have the same elements in the same order of memory."""
    size = parameter.numel()
    with torch.cuda.device_of(parameter):
        _kernel[(triton.cdiv(size, BLOCK),)](
            parameter,
            gradient,
            exp_avg,
            exp_avg_sq,
            parameter if copy is None else copy,
            factor,
            size,
            **numbers,
            DECOUPLED=decoupled,
            COPIES=copy is not None,
            LOADS_FACTOR=isinstance(factor, Tensor),
            BLOCK=BLOCK,
            num_warps=4,
        )

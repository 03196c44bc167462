"""One parameter's update by Adam with moments in 8 bits, in one kernel: see `eightbit.py`, whose codes these are."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 4
"""Blocks of elements with one scale that a program has at once."""


@triton.jit
def _kernel(
    parameter,
    gradient,
    codes1,
    scales1,
    codes2,
    scales2,
    copy,
    factor,
    size,
    blocks,
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
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = rows[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = at < size
    there = rows < blocks
    p = tl.load(parameter + at, mask=inside, other=0.0)
    g = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32)
    # Divided, not multiplied by the inverse: the largest of a block must come back as it was.
    share1 = tl.div_rn(tl.load(codes1 + at, mask=inside, other=0).to(tl.float32), 127.0)
    share2 = tl.div_rn(tl.load(codes2 + at, mask=inside, other=0).to(tl.float32), 255.0)
    m = tl.load(scales1 + rows, mask=there, other=0.0)[:, None] * (share1 * tl.abs(share1))
    root = tl.load(scales2 + rows, mask=there, other=0.0)[:, None] * (share2 * share2)
    v = root * root
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
    root = tl.sqrt_rn(v)
    p -= step_size * tl.div_rn(m, tl.div_rn(root, root2) + eps)
    tl.store(parameter + at, p, mask=inside)
    if COPIES:
        tl.store(copy + at, p.to(copy.dtype.element_ty), mask=inside)

    # What is beyond the last element is 0, and weight decay makes nothing else of it.
    high1 = tl.max(tl.abs(m), 1)
    high2 = tl.max(root, 1)
    share1 = tl.sqrt_rn(tl.div_rn(tl.abs(m), tl.where(high1 > 0, high1, 1.0)[:, None]))
    share2 = tl.sqrt_rn(tl.div_rn(root, tl.where(high2 > 0, high2, 1.0)[:, None]))
    code1 = tl.floor(share1 * 127.0 + 0.5)
    code1 = tl.where(m < 0, -code1, code1)
    code2 = tl.floor(share2 * 255.0 + 0.5)
    code2 = tl.where(root > 0, tl.maximum(code2, 1.0), code2)
    tl.store(codes1 + at, code1.to(tl.int32).to(tl.int8), mask=inside)
    tl.store(codes2 + at, code2.to(tl.int32).to(tl.uint8), mask=inside)
    tl.store(scales1 + rows, high1, mask=there)
    tl.store(scales2 + rows, high2, mask=there)


def launch(
    parameter: Tensor,
    gradient: Tensor,
    codes1: Tensor,
    scales1: Tensor,
    codes2: Tensor,
    scales2: Tensor,
    copy: Tensor | None,
    factor: Tensor | float,
    numbers: dict[str, Any],
    decoupled: bool,
) -> None:
    """Update in place; all tensors are contiguous."""
    blocks = len(scales1)
    with torch.cuda.device_of(parameter):
        _kernel[(triton.cdiv(blocks, ROWS),)](
            parameter,
            gradient,
            codes1,
            scales1,
            codes2,
            scales2,
            parameter if copy is None else copy,
            factor,
            parameter.numel(),
            blocks,
            **numbers,
            DECOUPLED=decoupled,
            COPIES=copy is not None,
            LOADS_FACTOR=isinstance(factor, Tensor),
            ROWS=ROWS,
            BLOCK=len(codes1) // blocks,
            num_warps=4,
        )

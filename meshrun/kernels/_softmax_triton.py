"""Rows of logits in one pass each way: see `cross_entropy.py`, whose numbers these are."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST = 8192
"""Logits that a program has in its registers at once."""


@triton.jit
def _logarithm(logits, classes: tl.constexpr, BLOCK: tl.constexpr):
    """Of the sum of exponentials of a row."""
    largest = -float("inf")
    total = 0.0
    for begin in range(0, classes, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        x = tl.load(logits + at, mask=at < classes, other=-float("inf")).to(tl.float32)
        highest = tl.maximum(largest, tl.max(x, 0))
        # Where all logits so far are minus infinity, any finite number does, and that one would give NaN.
        shift = tl.where(highest == -float("inf"), 0.0, highest)
        total = total * tl.exp(largest - shift) + tl.sum(tl.exp(x - shift), 0)
        largest = highest
    return largest + tl.log(total)


@triton.jit
def _rows(logits, targets, lse, own, stride, classes: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    target = tl.load(targets + row)
    tl.store(lse + row, _logarithm(logits, classes, BLOCK))
    inside = (target >= 0) & (target < classes)
    tl.store(own + row, tl.load(logits + target, mask=inside, other=0.0).to(tl.float32))


@triton.jit
def _write(logits, target, logarithm, gradient, of_lse, of_own, at, classes: tl.constexpr):
    """The gradient of some of a row's logits."""
    inside = at < classes
    x = tl.load(logits + at, mask=inside, other=-float("inf")).to(tl.float32)
    # A row that does not count has the gradient 0, whatever is in it: infinities too.
    found = tl.where(of_lse == 0, 0.0, tl.exp(x - logarithm) * of_lse)
    found = tl.where(at == target, found + of_own, found)
    tl.store(gradient + at, found.to(gradient.dtype.element_ty), mask=inside)


@triton.jit
def _write_row(logits, target, logarithm, gradient, by, classes: tl.constexpr, BLOCK: tl.constexpr):
    """The gradient of `by` times a row's loss."""
    for begin in range(0, classes, BLOCK):
        _write(logits, target, logarithm, gradient, by, -by, begin + tl.arange(0, BLOCK), classes)


@triton.jit
def _losses(
    logits,
    targets,
    losses,
    lse,
    gradient,
    stride,
    gradient_stride,
    ignored,
    above,
    classes: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    target = tl.load(targets + row)
    counts = target != ignored
    logarithm = _logarithm(logits, classes, BLOCK)
    inside = (target >= 0) & (target < classes)
    own = tl.load(logits + target, mask=inside, other=0.0).to(tl.float32)
    loss = tl.where(inside, logarithm - own, float("nan"))
    tl.store(losses + row, tl.where(counts, loss, 0.0))
    tl.store(lse + row, logarithm)
    # A row has just been read: it comes from a cache now.
    by = tl.where(counts, above, 0.0)
    _write_row(logits, target, logarithm, gradient + row * gradient_stride, by, classes, BLOCK)


@triton.jit
def _again(
    logits,
    targets,
    lse,
    above,
    gradient,
    stride,
    gradient_stride,
    ignored,
    made,
    classes: tl.constexpr,
    BLOCK: tl.constexpr,
):
    by = tl.load(above).to(tl.float32)
    if by != made:
        row = tl.program_id(0).to(tl.int64)
        target = tl.load(targets + row)
        by = tl.where(target != ignored, by, 0.0)
        into = gradient + row * gradient_stride
        _write_row(logits + row * stride, target, tl.load(lse + row), into, by, classes, BLOCK)


@triton.jit
def _gradients(
    logits, lse, targets, of_lse, of_own, gradient, stride, gradient_stride, classes: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    target, logarithm = tl.load(targets + row), tl.load(lse + row)
    into = gradient + row * gradient_stride
    _write(logits + row * stride, target, logarithm, into, tl.load(of_lse + row), tl.load(of_own + row), at, classes)


def _block(classes: int) -> tuple[int, int]:
    """How many logits at once, and by how many warps."""
    block = min(MOST, max(16, triton.next_power_of_2(classes)))
    return block, max(1, min(16, block // 512))


def rows(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Logarithm of the sum of exponentials of each row, and its logit at its target (0 where that is no class)."""
    count, classes = logits.shape
    lse = torch.empty(count, dtype=torch.float32, device=logits.device)
    own = torch.empty_like(lse)
    block, warps = _block(classes)
    with torch.cuda.device_of(logits):
        _rows[(count,)](logits, targets, lse, own, logits.stride(0), classes, BLOCK=block, num_warps=warps)
    return lse, own


def losses(logits: Tensor, targets: Tensor, ignored: int, above: float) -> tuple[Tensor, Tensor, Tensor]:
    """The loss of each row, its logarithm of the sum of exponentials, and the gradient of `above` times all losses."""
    count, classes = logits.shape
    found, lse = (torch.empty(count, dtype=torch.float32, device=logits.device) for _ in range(2))
    gradient = torch.empty(count, classes, dtype=logits.dtype, device=logits.device)
    block, warps = _block(classes)
    numbers = logits.stride(0), gradient.stride(0), ignored, above
    with torch.cuda.device_of(logits):
        _losses[(count,)](logits, targets, found, lse, gradient, *numbers, classes, BLOCK=block, num_warps=warps)
    return found, lse, gradient


def again(
    gradient: Tensor, made: float, above: Tensor, logits: Tensor, targets: Tensor, lse: Tensor, ignored: int
) -> None:
    """The gradient of `above` times all losses, in place of that of `made` times. Where these are the same, which the
    host need not know, nothing is read.
    """
    count, classes = gradient.shape
    block, warps = _block(classes)
    numbers = logits.stride(0), gradient.stride(0), ignored, made
    with torch.cuda.device_of(gradient):
        _again[(count,)](logits, targets, lse, above, gradient, *numbers, classes, BLOCK=block, num_warps=warps)


def gradients(logits: Tensor, lse: Tensor, targets: Tensor, of_lse: Tensor, of_own: Tensor) -> Tensor:
    """What `rows` hands back to the logits, in their type."""
    count, classes = logits.shape
    found = torch.empty(count, classes, dtype=logits.dtype, device=logits.device)
    block, warps = _block(classes)
    with torch.cuda.device_of(logits):
        _gradients[(count, triton.cdiv(classes, block))](
            logits,
            lse,
            targets,
            of_lse,
            of_own,
            found,
            logits.stride(0),
            found.stride(0),
            classes,
            BLOCK=block,
            num_warps=warps,
        )
    return found

"""Cross entropy of bfloat16 logits without a copy of them in fp32, which is often the largest tensor of a training.

    total = lean_cross_entropy(logits, targets, ignore_index=-100)     # (N, V), (N) -> the sum, in fp32
    lse, own = softmax_rows(logits, targets)                           # its parts, for logits split over ranks
    gradient = softmax_gradient(logits, lse, targets, of_lse, of_own)

The numbers are those of `F.cross_entropy(logits.float(), targets, reduction="sum")`. What is kept for the backward pass
is the logits as they are and one number a row; beside them only the gradient is ever as large, and it has their type.
Where Triton runs each way is one kernel, or both are one, if it is said that the backward pass follows; elsewhere rows
are taken some at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from meshrun.kernels.here import available

AT_ONCE = 1 << 24
"""Logits that are in fp32 at once where rows are taken some at a time: 64 MB."""


def lean_cross_entropy(logits: Tensor, targets: Tensor, ignore_index: int = -100) -> Tensor:
    """The sum over rows of logits (N, V) whose target, int64, is not `ignore_index`.

    A target that is no class makes it NaN: on a GPU looking at targets beforehand would make the host wait.
    """
    # The compiler takes the operators as they are, and cannot follow the question where they run.
    if not torch.compiler.is_compiling():
        in_kernels, above = _in_kernels(logits), _above.get()
        if not in_kernels and logits.numel() <= AT_ONCE:
            # Nothing to save, and torch's own is quicker on few rows.
            return F.cross_entropy(logits.to(_wide(logits)), targets, ignore_index=ignore_index, reduction="sum")
        if in_kernels and above is not None and logits.requires_grad and torch.is_grad_enabled():
            return _Trained.apply(logits, targets, ignore_index, above)
    return _CrossEntropy.apply(logits, targets, ignore_index)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, ignore_index: int) -> Tensor:
        counts = targets != ignore_index
        lse, own = softmax_rows(logits, targets)
        ctx.save_for_backward(logits, lse, targets, counts)
        losses = torch.where((targets >= 0) & (targets < logits.shape[1]), lse - own, torch.nan)
        return torch.where(counts, losses, 0.0).sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        logits, lse, targets, counts = ctx.saved_tensors
        return _of_total(logits, lse, targets, gradients[0] * counts), None, None


def _of_total(logits: Tensor, lse: Tensor, targets: Tensor, above: Tensor) -> Tensor:
    """The gradient of logits from those of each row's loss."""
    return softmax_gradient(logits, lse, targets, above, -above)


_above: ContextVar[float | None] = ContextVar("above", default=None)


@contextmanager
def backward_follows(gradient: float) -> Iterator[None]:
    """Losses that are computed in here get this gradient from above, and as soon as they are there."""
    before = _above.set(gradient)
    try:
        yield
    finally:
        _above.reset(before)


class _Trained(torch.autograd.Function):
    """The same with the gradient made in the forward pass already, while a row is at hand: it is read once less.

    Should the gradient from above be another one than was said, it is made again.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, ignore_index: int, above: float) -> Tensor:
        losses, lse, ctx.gradient = torch.ops.meshrun.softmax_losses(logits, targets, ignore_index, above)
        ctx.save_for_backward(logits, targets, lse)
        ctx.ignore_index, ctx.above = ignore_index, above
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        logits, targets, lse = ctx.saved_tensors
        found, ctx.gradient = ctx.gradient, None
        if found is None:  # it was handed out before
            found = _of_total(logits, lse, targets, gradients[0] * (targets != ctx.ignore_index))
        else:
            given = gradients[0], logits, targets, lse
            torch.ops.meshrun.softmax_again_(found, ctx.above, *given, ctx.ignore_index)
        return found, None, None, None


def softmax_rows(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Each row's logarithm of the sum of exponentials, and its logit at its target, 0 where that is no class."""
    found: tuple[Tensor, Tensor] = torch.ops.meshrun.softmax_rows(logits, targets)
    return found


def softmax_gradient(logits: Tensor, lse: Tensor, targets: Tensor, of_lse: Tensor, of_own: Tensor) -> Tensor:
    """The gradient of logits, in their type, from those of what `softmax_rows` gave, one number a row each.

    A row whose `of_lse` is 0 gets nothing but that of its target, whatever its logits are.
    """
    found: Tensor = torch.ops.meshrun.softmax_gradient(logits, lse, targets, of_lse, of_own)
    return found


def _rows(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    if _in_kernels(logits):
        from meshrun.kernels import _softmax_triton

        return _softmax_triton.rows(_rows_in_memory(logits), targets.contiguous())
    count, classes = logits.shape
    kind = _wide(logits)
    place = targets.clamp(0, classes - 1)[:, None]
    own = logits.gather(1, place).squeeze(1).to(kind).masked_fill((targets < 0) | (targets >= classes), 0.0)
    lse = torch.empty(count, dtype=kind, device=logits.device)
    for some in _some_rows(logits):
        torch.logsumexp(logits[some].to(kind), 1, out=lse[some])
    return lse, own


def _gradient(logits: Tensor, lse: Tensor, targets: Tensor, of_lse: Tensor, of_own: Tensor) -> Tensor:
    if _in_kernels(logits):
        from meshrun.kernels import _softmax_triton

        rows = (each.contiguous() for each in (lse, targets, of_lse, of_own))
        return _softmax_triton.gradients(_rows_in_memory(logits), *rows)
    classes = logits.shape[1]
    inside = (targets >= 0) & (targets < classes)
    place, chosen = targets.clamp(0, classes - 1)[:, None], (of_own * inside).to(lse.dtype)[:, None]
    found = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    for some in _some_rows(logits):
        part = (logits[some].to(lse.dtype) - lse[some, None]).exp_().mul_(of_lse[some, None])
        part.masked_fill_((of_lse[some] == 0)[:, None], 0.0)
        found[some] = part.scatter_add_(1, place[some], chosen[some])
    return found


def _losses(logits: Tensor, targets: Tensor, ignored: int, above: float) -> tuple[Tensor, Tensor, Tensor]:
    from meshrun.kernels import _softmax_triton

    return _softmax_triton.losses(_rows_in_memory(logits), targets.contiguous(), ignored, above)


def _again(
    gradient: Tensor, made: float, above: Tensor, logits: Tensor, targets: Tensor, lse: Tensor, ignored: int
) -> None:
    from meshrun.kernels import _softmax_triton

    rows = _rows_in_memory(logits), targets.contiguous(), lse
    _softmax_triton.again(gradient, made, above, *rows, ignored)


def _in_kernels(logits: Tensor) -> bool:
    return logits.dtype != torch.float64 and logits.numel() > 0 and available(logits.device)


def _rows_in_memory(logits: Tensor) -> Tensor:
    return logits if logits.stride(1) == 1 else logits.contiguous()


def _wide(logits: Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def _some_rows(logits: Tensor) -> list[slice]:
    count, classes = logits.shape
    at_once = max(1, AT_ONCE // max(1, classes))
    return [slice(begin, begin + at_once) for begin in range(0, count, at_once)]


def _rows_shape(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return logits.new_empty(targets.shape, dtype=_wide(logits)), logits.new_empty(targets.shape, dtype=_wide(logits))


def _losses_shape(logits: Tensor, targets: Tensor, _: int, __: float) -> tuple[Tensor, Tensor, Tensor]:
    return (*_rows_shape(logits, targets), logits.new_empty(logits.shape))


def _gradient_shape(logits: Tensor, *_: Tensor) -> Tensor:
    return logits.new_empty(logits.shape)


# Operators of torch, so that torch.compile takes them as they are. Not by `custom_op`, whose first call imports the
# whole compiler: two seconds of every start.
_LIBRARY = torch.library.Library("meshrun", "DEF")
_LIBRARY.define("softmax_rows(Tensor logits, Tensor targets) -> (Tensor, Tensor)")
_LIBRARY.define("softmax_gradient(Tensor logits, Tensor lse, Tensor targets, Tensor of_lse, Tensor of_own) -> Tensor")
_LIBRARY.define("softmax_losses(Tensor logits, Tensor targets, int ignored, float above) -> (Tensor, Tensor, Tensor)")
_LIBRARY.define(
    "softmax_again_(Tensor(a!) gradient, float made, Tensor above, Tensor logits, Tensor targets, Tensor lse, "
    "int ignored) -> ()"
)
_LIBRARY.impl("softmax_rows", _rows, "CompositeExplicitAutograd")
_LIBRARY.impl("softmax_gradient", _gradient, "CompositeExplicitAutograd")
_LIBRARY.impl("softmax_losses", _losses, "CUDA")
_LIBRARY.impl("softmax_again_", _again, "CUDA")
torch.library.register_fake("meshrun::softmax_losses", _losses_shape, lib=_LIBRARY)
torch.library.register_fake("meshrun::softmax_again_", lambda *_: None, lib=_LIBRARY)
torch.library.register_fake("meshrun::softmax_rows", _rows_shape, lib=_LIBRARY)
torch.library.register_fake("meshrun::softmax_gradient", _gradient_shape, lib=_LIBRARY)

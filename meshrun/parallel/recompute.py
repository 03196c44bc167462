"""Activation recomputation: less memory for more arithmetic, segment by segment.

apply(list(enumerate(segments)), "full", moment)

none        every activation of the forward pass is kept for the backward pass
full        a segment keeps its inputs only, and computes the rest again
every-2     the same for every second segment (or any other number)
selective   a segment keeps the results of matrix products and attention, and computes the cheap rest again
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from meshrun.errors import UserError
from meshrun.parallel.dropout import Moment, replay

_KEPT = [
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.baddbmm.default,
    torch.ops.aten.convolution.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
]


def every(text: str) -> int:
    """Every how many segments one is recomputed; 0 for none. A `UserError` for what is no level."""
    if text in ("auto", "none", "full", "selective"):
        return 0 if text in ("auto", "none") else 1
    found = re.fullmatch(r"every-([1-9]\d{0,3})", text)
    if found is None:
        raise UserError(
            f"recompute is {text!r}; it must be auto, none, full, selective, or every-K for every K-th segment (--recompute)"
        )
    return int(found[1])


def apply(segments: Sequence[tuple[int, nn.Module]], level: str, moment: Moment) -> None:
    """Make segments, given with their numbers in the model, forget and recompute, in place, under their own names."""
    stride = every(level)
    for number, segment in segments:
        if stride and number % stride == stride - 1:
            contexts = functools.partial(_contexts, level, moment)
            segment.forward = functools.partial(_forward, segment.forward, contexts)


def _contexts(level: str, moment: Moment) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Around the first and around the second computation: the second must draw the first one's random numbers."""
    before, again = replay(moment)
    if level != "selective":
        return before, again
    keeping, kept = create_selective_checkpoint_contexts(_policy)
    return _Both(before, keeping), _Both(again, kept)


def _policy(_: Any, operation: Any, *__: Any, **___: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE


class _Both:
    """Two contexts as one that may be entered again."""

    def __init__(self, outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> None:
        self.outer, self.inner = outer, inner

    def __enter__(self) -> None:
        self.outer.__enter__()
        self.inner.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.inner.__exit__(*error)
        self.outer.__exit__(*error)


def _forward(forward: Callable[..., Any], contexts: Callable[[], Any], *inputs: Any, **named: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*inputs, **named)
    return checkpoint(forward, *inputs, use_reentrant=False, context_fn=contexts, **named)

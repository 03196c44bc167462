"""Activation recomputation: less memory for more arithmetic, segment by segment.

    twice = Recomputing("full")
    apply(list(enumerate(segments)), twice, moment)
    twice.level = "every-2"                # from the next forward pass on

none        every activation of the forward pass is kept for the backward pass
full        a segment keeps its inputs only, and computes the rest again
every-2     the same for every second segment (or any other number)
selective   a segment keeps the results of matrix products and attention, and computes the cheap rest again

The second computation is around what a segment does, compiled or not: all levels run the same compiled code. Such code
computes the cheap rest again by itself, so for it selective is the same as none. Where the level is left to us, it is
code that keeps more (`ample`) where there is memory for that.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from meshrun.errors import UserError
from meshrun.parallel.moment import Moment, replay

_KEPT = [
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.baddbmm.default,
    torch.ops.aten._scaled_mm.default,
    torch.ops.aten.convolution.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
]
KEEPS_ITS_INPUTS = (nn.Linear, nn.Embedding)
"""What keeps nothing but its inputs anyway: to compute it twice would save nothing."""


def every(text: str) -> int:
    """Every how many segments one is recomputed; 0 for none. A `UserError` for what is no level."""
    if text in ("auto", "none", "full", "selective"):
        return 0 if text in ("auto", "none") else 1
    found = re.fullmatch(r"every-([1-9]\d{0,3})", text)
    if found is None:
        raise UserError(
            f"recompute is {text!r}; it must be auto, none, full, selective, or every-K for every K-th segment "
            f"(--recompute)"
        )
    return int(found[1])


def covers(level: str, number: int) -> bool:
    """Whether the segment of this number is computed twice."""
    stride = every(level)
    return stride > 0 and number % stride == stride - 1


class Code(Protocol):
    """Compiled code, which may keep more for the backward pass than it must."""

    @property
    def keeps_more(self) -> bool:
        """Whether it does."""

    def keep_more(self) -> None:
        """Keep also what is quicker kept than made again."""

    def keep_less(self) -> None:
        """Keep what it must."""


@dataclass
class Recomputing:
    """What is computed twice now; all segments of a model share one of these."""

    level: str
    compiled: bool = False
    measured: Measured | None = None
    """Filled with what segments would have kept, while it is there."""
    settled: Callable[[str], None] = lambda _: None
    """Told the level where it was left to us, once it is known and whenever it changes."""
    code: list[Code] = field(default_factory=list)
    """What of the model is compiled."""

    @property
    def keeps_more(self) -> bool:
        """Whether compiled code keeps what is quicker kept than made again."""
        return any(each.keeps_more for each in self.code)

    def covers(self, number: int) -> bool:
        return covers(self.level, number) and not (self.compiled and self.level == "selective")


@dataclass
class Measured:
    """What each segment keeps where it is not computed twice, seen when it is computed again."""

    allocated: Callable[[], int]
    """Bytes that are in use now."""
    largest: dict[int, int] = field(default_factory=dict)
    """Segment -> bytes of one forward pass."""
    most: Counter[int] = field(default_factory=Counter)
    """Segment -> how many forward passes waited for their backward pass at once."""
    _waiting: Counter[int] = field(default_factory=Counter)

    def forward(self, number: int) -> None:
        self._waiting[number] += 1
        self.most[number] = max(self.most[number], self._waiting[number])

    def again(self, number: int, more: int) -> None:
        self._waiting[number] -= 1
        self.largest[number] = max(more, self.largest.get(number, 0))

    def kept(self) -> dict[int, int]:
        """Segment -> bytes that it would keep at most."""
        return {number: size * self.most[number] for number, size in self.largest.items()}


def apply(segments: Sequence[tuple[int, nn.Module]], twice: Recomputing, moment: Moment) -> None:
    """Let segments, given with their numbers in the model, forget and recompute, in place, under their own names."""
    for number, segment in segments:
        if not isinstance(segment, KEEPS_ITS_INPUTS):
            contexts = functools.partial(_contexts, twice, number, moment, _Buffers(segment))
            own = segment.forward if "forward" in vars(segment) else functools.partial(_by_its_class, segment)
            segment.forward = functools.partial(_forward, own, twice, number, contexts)


def remove(segments: Sequence[tuple[int, nn.Module]]) -> None:
    """Let segments compute as before `apply`."""
    for _, segment in segments:
        around = vars(segment).get("forward")
        if isinstance(around, functools.partial) and around.func is _forward:
            own = around.args[0]
            if isinstance(own, functools.partial) and own.func is _by_its_class:
                del segment.forward
            else:
                segment.forward = own


def _by_its_class(segment: nn.Module, *inputs: Any, **named: Any) -> Any:
    """What a segment does as what it is by then: bf16 makes norms ones of another class, after this is around them."""
    return type(segment).forward(segment, *inputs, **named)


def _forward(
    forward: Callable[..., Any],
    twice: Recomputing,
    number: int,
    contexts: Callable[[], Any],
    *inputs: Any,
    **named: Any,
) -> Any:
    if not twice.covers(number) or not torch.is_grad_enabled():
        return forward(*inputs, **named)
    return checkpoint(forward, *inputs, use_reentrant=False, context_fn=contexts, **named)


def _contexts(
    twice: Recomputing, number: int, moment: Moment, buffers: _Buffers
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Around the first and around the second computation: the second must draw the first one's random numbers."""
    before, again = replay(moment)
    noting = _Noting(buffers)
    first, second = [before, noting], [again, _Aside(noting)]
    if twice.level == "selective":
        keeping, kept = create_selective_checkpoint_contexts(_policy)
        first.append(keeping)
        second.append(kept)
    if twice.measured is not None:
        twice.measured.forward(number)
        second.insert(0, _Seen(twice.measured, number))
    return _Nested(first), _Nested(second)


def _policy(_: Any, operation: Any, *__: Any, **___: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE


class _Nested:
    """Several contexts as one that may be entered again."""

    def __init__(self, contexts: Sequence[AbstractContextManager[Any]]) -> None:
        self.contexts = contexts

    def __enter__(self) -> None:
        for each in self.contexts:
            each.__enter__()

    def __exit__(self, *error: Any) -> None:
        for each in reversed(self.contexts):
            each.__exit__(*error)


Buffers = dict[tuple[nn.Module, str], Tensor]
"""Buffers by their module and name."""


class _Buffers:
    """The buffers of a segment, and which modules change theirs in a forward pass: running statistics, counters."""

    def __init__(self, segment: nn.Module) -> None:
        self._modules = [each for each in segment.modules() if each._buffers]
        self.changing: set[nn.Module] | None = None
        """None before the first forward pass, when any may."""

    def now(self) -> Buffers:
        found = {(each, name): buffer for each in self._modules for name, buffer in each._buffers.items()}
        return {key: buffer for key, buffer in found.items() if buffer is not None}

    def copied(self) -> Buffers:
        """Copies of those that change; what is one buffer of several modules stays one."""
        now = {key: each for key, each in self.now().items() if self.changing is None or key[0] in self.changing}
        return _copies(now)


class _Noting:
    """Around the first computation: keeps the values that buffers have before it, where it changes them."""

    def __init__(self, buffers: _Buffers) -> None:
        self.buffers = buffers
        self.before: Buffers = {}
        self._versions: dict[tuple[nn.Module, str], tuple[Tensor, int]] = {}

    def __enter__(self) -> None:
        self.before = self.buffers.copied()
        self._versions = {key: (buffer, buffer._version) for key, buffer in self.buffers.now().items()}

    def __exit__(self, *error: Any) -> None:
        now, changing = self.buffers.now(), self.buffers.changing
        same = {key for key, (each, _) in self._versions.items() if now.get(key) is each}
        same -= {key for key in same if now[key]._version != self._versions[key][1]}
        if changing is None:  # the values are looked at once: batch_norm writes to its statistics behind versions
            same -= {key for key in same if not torch.equal(now[key], self.before[key])}
        self.buffers.changing = (changing or set()) | {module for module, _ in self._versions.keys() - same}
        self.before = {key: each for key, each in self.before.items() if key[0] in self.buffers.changing}
        self._versions = {}


class _Aside:
    """Around the second computation: it begins with the buffers that the first began with, and changes copies."""

    def __init__(self, noting: _Noting) -> None:
        self._noting = noting
        self._kept: Buffers = {}

    def __enter__(self) -> None:
        buffers = self._noting.buffers
        self._kept = buffers.now()
        # Of a module that had never changed its buffers before, nothing older than the present values is there.
        for (module, name), copy in (buffers.copied() | _copies(self._noting.before)).items():
            module._buffers[name] = copy

    def __exit__(self, *error: Any) -> None:
        for (module, name), buffer in self._kept.items():
            module._buffers[name] = buffer


@torch.no_grad()
def _copies(buffers: Buffers) -> Buffers:
    copies = {id(each): each.detach().clone() for each in buffers.values()}
    return {key: copies[id(each)] for key, each in buffers.items()}


class _Seen:
    """Sees how much more memory is in use when a segment was computed again: what it would have kept."""

    def __init__(self, measured: Measured, number: int) -> None:
        self.measured, self.number = measured, number
        self.before = 0

    def __enter__(self) -> None:
        self.before = self.measured.allocated()

    def __exit__(self, *error: Any) -> None:
        self.measured.again(self.number, self.measured.allocated() - self.before)

"""Gradients are summed over ranks while the backward pass still computes others.

    sums = Overlapped(sources, group)          # in the order in which the model has them
    sums.begin()                               # before a step
    sums.last = True                           # before the last backward pass of what they belong to
    sums.finish()                              # after it: every source's gradient is the sum over the group

Gradients travel in buckets, each as soon as it is full. Backward passes go through a model from its end, so buckets are
filled in that order; every rank sends them in it, whatever is ready first. What is not ready when the backward pass is
over (a parameter that this rank's samples did not need) is sent then, as zeros if there is nothing.

A gradient that grows after it was sent would be lost, so it is counted in the first step which ones come in several
parts (`Counted`). Those, and others that have to wait, are for `summed`, which does the same when all is computed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshrun.errors import RunFailed
from meshrun.parallel.dtensor import is_dtensor

BUCKET = 25 << 20
"""Bytes of gradients that travel together."""


@dataclass(frozen=True, eq=False)
class Source:
    """Where a gradient comes from, and where its sum goes."""

    name: str
    computed: nn.Parameter
    """What the model computes with."""
    collects: nn.Parameter
    """Whose gradient it is once it is computed: `computed` itself, or its master."""
    kept: nn.Parameter
    """The plain tensor that is trained: it gets the sum."""

    def is_here(self) -> bool:
        """Whether this rank has its gradient without asking others."""
        gradient = self.collects.grad
        if is_dtensor(gradient):
            assert is_dtensor(self.collects)
            return gradient.placements == self.collects.placements
        return gradient is not None

    def taken(self) -> Tensor:
        """The gradient, which is then nowhere else."""
        gradient, self.collects.grad = self.collects.grad, None
        assert gradient is not None
        return gradient.to_local() if is_dtensor(gradient) else gradient

    def rest(self) -> Tensor:
        """What was not sent during the backward pass, by then a plain tensor at its place."""
        gradient = self.kept.grad
        return torch.zeros_like(self.kept) if gradient is None else gradient


class Counted:
    """Finds out in a first step whose gradients come in several parts: they are to be summed when all is computed."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = list(sources)
        self._hooks = [each.computed.register_post_accumulate_grad_hook(self._came) for each in sources]
        self.begin()

    def begin(self) -> None:
        self.last = False
        """Whether it is the last backward pass of the step that is going on."""
        self._times = Counter[nn.Parameter]()

    def _came(self, computed: Any) -> None:
        self._times[computed] += self.last

    def again(self) -> set[str]:
        return {each.name for each in self._sources if self._times[each.computed] > 1}

    def end(self) -> None:
        for each in self._hooks:
            each.remove()


class Overlapped:
    """Sums over a group, begun as gradients become ready."""

    def __init__(self, sources: Sequence[Source], group: dist.ProcessGroup) -> None:
        self.sources, self.group = list(reversed(sources)), group
        self._buckets = _bucketed([each.kept for each in self.sources])
        self._bucket_of = {number: place for place, bucket in enumerate(self._buckets) for number in bucket}
        for number, source in enumerate(self.sources):
            source.computed.register_post_accumulate_grad_hook(partial(self._came, number))
        self.begin()

    def begin(self) -> None:
        """Nothing of the step that begins is ready or sent."""
        self.last = False
        """Whether it is the last backward pass of the step that is going on."""
        self._missing = [set(bucket) for bucket in self._buckets]
        self._sent: list[tuple[dist.Work, Tensor]] = []

    def _came(self, number: int, _: Tensor) -> None:
        if not self.last:
            return
        place, source = self._bucket_of[number], self.sources[number]
        if place < len(self._sent):
            raise RunFailed(
                f"the gradient of {source.name!r} came in several parts in one backward pass, as it did not in the "
                f"first step; compute what uses it the same way in every step"
            )
        if source.is_here():
            self._missing[place].discard(number)
        while len(self._sent) < len(self._buckets) and not self._missing[len(self._sent)]:
            self._send([self.sources[each].taken() for each in self._buckets[len(self._sent)]])

    def _send(self, gradients: list[Tensor]) -> None:
        flat = _flat(gradients)
        self._sent.append((_begun(flat, self.group), flat))

    def finish(self) -> None:
        """Send what is left, and put the sums where they belong."""
        while len(self._sent) < len(self._buckets):
            self._send([self.sources[each].rest() for each in self._buckets[len(self._sent)]])
        for bucket, (work, flat) in zip(self._buckets, self._sent, strict=True):
            work.wait()
            kept = [self.sources[each].kept for each in bucket]
            for one, total in zip(kept, flat.split([each.numel() for each in kept]), strict=True):
                one.grad = total.view(one.shape)
        self.begin()


def summed(gradients: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Sum gradients over a group in place, several at a time."""
    sent: list[tuple[dist.Work, Tensor, list[Tensor]]] = []
    for bucket in _bucketed(gradients):
        tensors = [gradients[number] for number in bucket]
        flat = _flat(tensors)
        sent.append((_begun(flat, group), flat, tensors))
    for work, flat, tensors in sent:
        work.wait()
        for one, total in zip(tensors, flat.split([each.numel() for each in tensors]), strict=True):
            if type(one) is not Tensor or total.data_ptr() != one.data_ptr():  # else it was summed where it is
                one.copy_(total.view_as(one))


def _flat(gradients: list[Tensor]) -> Tensor:
    """Several gradients as one; one that fills a bucket alone is summed where it is."""
    if len(gradients) == 1 and type(gradients[0]) is Tensor:
        return gradients[0].reshape(-1)
    return torch.cat([each.reshape(-1) for each in gradients])


def _begun(flat: Tensor, group: dist.ProcessGroup) -> dist.Work:
    work = dist.all_reduce(flat, group=group, async_op=True)
    assert work is not None
    return work


def _bucketed(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Neighbours of one type that travel together, by number."""
    buckets: list[list[int]] = []
    size = 0
    for number, each in enumerate(tensors):
        if not buckets or size >= BUCKET or tensors[number - 1].dtype != each.dtype:
            buckets.append([])
            size = 0
        buckets[-1].append(number)
        size += each.numel() * each.element_size()
    return buckets

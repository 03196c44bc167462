"""What a rank holds of a tensor: a rectangle of it. And the arithmetic of rectangles.

    region = Region("model/head.weight", local, shape=(2048, 96), start=(1024, 0), copy=0, copies=2)
    written = take([region])              # the part of it that this rank writes

A rectangle is a `Box`: where it starts and how far it goes in every dimension of the whole tensor.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor

from meshrun.state.shards import BLOCK


class Box(NamedTuple):
    """A rectangle of a tensor."""

    start: tuple[int, ...]
    size: tuple[int, ...]

    def common(self, other: Box) -> Box | None:
        """What is in both; None when nothing is."""
        start = tuple(map(max, self.start, other.start))
        ends = (min(a + n, b + m) for a, n, b, m in zip(*self, *other, strict=True))
        size = tuple(end - begin for end, begin in zip(ends, start, strict=True))
        return Box(start, size) if all(extent > 0 for extent in size) else None

    def without(self, inner: Box) -> Iterator[Box]:
        """The rest of this one around a rectangle inside it, in rectangles."""
        start, size = list(self.start), list(self.size)
        for dim, (begin, extent) in enumerate(zip(*inner, strict=True)):
            before = begin - start[dim]
            after = start[dim] + size[dim] - (begin + extent)
            if before:
                yield Box(tuple(start), (*size[:dim], before, *size[dim + 1 :]))
            if after:
                yield Box((*start[:dim], begin + extent, *start[dim + 1 :]), (*size[:dim], after, *size[dim + 1 :]))
            start[dim], size[dim] = begin, extent


@dataclass(frozen=True)
class Region:
    """This rank's rectangle of a tensor, in this rank's memory. The ranks with copy 0, 1, … hold the very same one."""

    name: str
    tensor: Tensor
    shape: tuple[int, ...]
    """Of the whole tensor."""
    start: tuple[int, ...]
    copy: int = 0
    copies: int = 1

    @property
    def box(self) -> Box:
        return Box(tuple(self.start), tuple(self.tensor.shape))

    @classmethod
    def whole(cls, name: str, tensor: Tensor, copy: int = 0, copies: int = 1) -> Region:
        """All of a tensor."""
        return cls(name, tensor, tuple(tensor.shape), (0,) * tensor.dim(), copy, copies)


def take(regions: Iterable[Region]) -> list[Region]:
    """What this rank writes: a large tensor that several ranks hold is shared out, a small one goes to one of them."""
    taken = (region if region.copies == 1 else _share(region) for region in regions)
    return [region for region in taken if region is not None and region.tensor.numel()]


def _share(region: Region) -> Region | None:
    tensor, copies = region.tensor, region.copies
    rows = tensor.shape[0] if tensor.dim() else 0
    if tensor.numel() * tensor.element_size() < BLOCK or rows < copies:
        return region if zlib.crc32(region.name.encode()) % copies == region.copy else None
    first, end = (rows * number // copies for number in (region.copy, region.copy + 1))
    start = (region.start[0] + first, *region.start[1:])
    return replace(region, tensor=tensor[first:end], start=start, copy=0, copies=1)

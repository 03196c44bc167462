"""Decoded pictures of a small set, kept in memory that all readers share: each is decoded once.

kept = Kept("photos", count=155, size=224, keep=None)     # None: when the set is small
kept.take(np.array([3, 1]), pixels, decode)      # decode(number, into) where there is nothing yet
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from meshrun.data.cache import fence, free_memory, shared

HANDY = 256 << 20
"""Bytes of a set that is as quickly copied from memory as it is sent by another process, batch by batch."""
SMALL = 1 << 30
"""Most bytes that are kept without being asked to."""


def is_small(size: int) -> bool:
    """Whether so many bytes may be kept by every rank of a node without anybody having asked for it."""
    return size <= SMALL and size <= free_memory() // 10


class Kept:
    """Squares of three colours by number; a flag each says that it is there."""

    _pixels: NDArray[np.uint8]
    _there: NDArray[np.uint8]
    _all_there: bool

    def __init__(self, key: str, count: int, size: int, keep: bool | None) -> None:
        self.key, self.count, self.size = key, count, size
        self.on = is_small(count * 3 * size * size) if keep is None else keep
        self._map()

    @property
    def all_there(self) -> bool:
        """Whether nothing is left to decode, of a set that is handy."""
        if not self._all_there and self.on and self._pixels.nbytes <= HANDY:
            self._all_there = bool(self._there.all())
        return self._all_there

    def _map(self) -> None:
        self._all_there = False
        if self.on:
            pixels = self.count * 3 * self.size * self.size
            self._memory = shared(f"kept {self.key} {self.count} {self.size}", pixels + self.count)
            self._pixels = self._memory.bytes[:pixels].reshape(self.count, 3, self.size, self.size)
            self._there = self._memory.bytes[pixels:]

    def take(self, wanted: NDArray[np.int64], into: Tensor, decode: Callable[[int, Tensor], None]) -> None:
        """The pictures of these numbers, in order."""
        if not self.on:
            for place in np.argsort(wanted).tolist():  # in the order in which they lie in their file, if it is one
                decode(int(wanted[place]), into[place])
            return
        for number in np.unique(wanted[self._there[wanted] == 0]).tolist():
            decode(number, torch.from_numpy(self._pixels[number]))
            fence()  # nobody sees the flag before the picture; two who decode the same write the same
            self._there[number] = 1
        fence()
        np.take(self._pixels, wanted, axis=0, out=into.numpy(), mode="clip")

    def __getstate__(self) -> dict[str, object]:
        return {"key": self.key, "count": self.count, "size": self.size, "on": self.on}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._map()

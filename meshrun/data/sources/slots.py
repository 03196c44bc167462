"""Unpacked chunks in memory that all readers share: each is unpacked once, by whoever needs it first.

    slots = Slots("train.h5 images", 1000, (64, 3, 96, 96), np.dtype("u1"), load)    # load(number, into) -> rows
    slots.take(numbers, places, into)       # rows numbers[i] -> into[places[i]]

Nobody waits for anybody. A slot carries the number of its chunk, written after the chunk and taken away before the slot
is filled anew; a reader looks at it before it copies rows out and again afterwards. Who fills a slot has it alone (the
kernel's lock on a byte, which dies with its holder); who does not get it unpacks for itself.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshrun.data.cache import fence, free_memory, shared
from meshrun.data.sources.kept import is_small

Numbers = NDArray[np.int64]
Places = Numbers | slice
Wanted = tuple[int, Places, Places]
"""A chunk's number, rows of it, and where they go."""
Load = Callable[[int, NDArray[Any]], int]

LEAST, CHUNKS = 256 << 20, 64
"""Where not all chunks can be kept: so many bytes, and so many chunks, twice those of a window of the usual size."""
WAYS = 8
"""Slots that a chunk may be in: with one only, chunks of a shuffled window would often push each other out."""
_APART = 0.6180339887
"""A step around the circle with which any number of processes begin far from each other."""


class Slots:
    """Chunks of rows, `shape` each, by number."""

    def __init__(self, key: str, chunks: int, shape: tuple[int, ...], dtype: np.dtype[Any], load: Load) -> None:
        self.key, self.shape, self.dtype, self.load = key, shape, dtype, load
        self.size = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        if is_small(chunks * self.size):
            self.ways, self.sets = 1, chunks
        else:
            self.ways = WAYS
            # Ranks of a node share them if they find the same size, and each finds somewhat more or less that is free.
            wanted = min(max(LEAST, CHUNKS * self.size), 1 << (free_memory() // 8).bit_length() >> 1)
            self.sets = max(1, wanted // (self.size * WAYS))
        self._map()

    def _map(self) -> None:
        count = self.ways * self.sets
        head = 32 * count  # three numbers a slot; a fourth keeps what follows on a boundary that suits any type
        self._memory = shared(f"slots {self.key} {self.shape} {self.dtype}", head + self.size * count)
        numbers = self._memory.bytes[: 24 * count].view(np.int64).reshape(3, self.sets, self.ways)
        # The chunk's number from 1, when it was last asked for, and how often the slot has been filled.
        self._chunks, self._used, self._fillings = numbers
        data = self._memory.bytes[head:].view(self.dtype)
        self._data = data.reshape(self.sets, self.ways, *self.shape)

    def take(self, numbers: Numbers, places: Numbers, into: NDArray[Any]) -> None:
        """Copies sorted rows to these places."""
        rows = self.shape[0]
        units = numbers // rows
        edges = [0, *(np.flatnonzero(np.diff(units)) + 1).tolist(), len(units)]
        self._gather(
            [
                (int(units[start]), numbers[start:stop] - units[start] * rows, places[start:stop])
                for start, stop in itertools.pairwise(edges)
            ],
            into,
        )

    def span(self, start: int, stop: int, into: NDArray[Any]) -> None:
        """Copies all rows from `start` up to `stop`."""
        rows = self.shape[0]
        wanted: list[Wanted] = []
        for unit in range(start // rows, -(-stop // rows)):
            first, last = max(start, unit * rows), min(stop, (unit + 1) * rows)
            wanted.append((unit, slice(first - unit * rows, last - unit * rows), slice(first - start, last - start)))
        self._gather(wanted, into)

    def _gather(self, wanted: list[Wanted], into: NDArray[Any]) -> None:
        missing = [each for each in wanted if not self._copy(*each, into)]
        begin = int(os.getpid() * _APART % 1 * len(missing))
        for each in missing[begin:] + missing[:begin]:
            if not self._copy(*each, into):
                self._unpack(*each, into)

    def _copy(self, unit: int, rows: Places, places: Places, into: NDArray[Any]) -> bool:
        """Whether the chunk is there, and was all the time while its rows were copied."""
        group = unit % self.sets
        there = self._chunks[group].tolist()
        if unit + 1 not in there:
            return False
        way = there.index(unit + 1)
        filling = self._fillings[group, way]
        fence()
        _copy_rows(self._data[group, way], rows, places, into)
        fence()
        if self._chunks[group, way] != unit + 1 or self._fillings[group, way] != filling:
            return False
        self._used[group, way] = time.monotonic_ns()
        return True

    def _unpack(self, unit: int, rows: Places, places: Places, into: NDArray[Any]) -> None:
        group = unit % self.sets
        way = int(np.argmin(np.where(self._chunks[group] == 0, -1, self._used[group])))
        with self._memory.alone(group * self.ways + way) as mine:
            if mine:
                self._chunks[group, way] = 0
                self._fillings[group, way] += 1
                fence()
                chunk = self._data[group, way]
                self.load(unit, chunk)
                fence()
                self._chunks[group, way], self._used[group, way] = unit + 1, time.monotonic_ns()
            else:
                chunk = np.empty(self.shape, self.dtype)
                self.load(unit, chunk)
            _copy_rows(chunk, rows, places, into)

    def __getstate__(self) -> dict[str, Any]:
        mapped = ("_memory", "_chunks", "_used", "_fillings", "_data")
        return {name: value for name, value in self.__dict__.items() if name not in mapped}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._map()


def _copy_rows(chunk: NDArray[Any], rows: Places, places: Places, into: NDArray[Any]) -> None:
    if isinstance(rows, slice) or isinstance(places, slice):
        into[places] = chunk[rows]
        return
    for row, place in zip(rows.tolist(), places.tolist(), strict=True):
        into[place] = chunk[row]

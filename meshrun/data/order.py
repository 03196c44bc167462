"""Which samples step s trains on: a pure function of (seed, step, length, batch, shuffle), never of the world.

    order = Order(length=60_000, batch=64, seed=0)
    order.batch_ids(12)              # the global batch of step 12, as an array
    slice_of(order.batch_ids(12), part=1, of=3)      # what the second of three replicas computes
    micro_batches(ids, 16)           # that, in pieces of at most 16
    Order.of(dataset, batch=64, seed=0, shuffle="window:65536")

Each epoch is a permutation of all samples and its last batch may be short. The permutation is computed, not stored: a
billion samples cost no more than a thousand, and jumping to any step costs nothing, so a step number is all the state
that the data has.

    full      any sample may come at any time
    window    chunks of neighbours in permuted order, and the samples of a window of them permuted: big files are read
              nearly from front to back
    length    the samples of some batches of the full order, sorted by length and cut into batches, which come in
              permuted order: less to pad
    none      as they are numbered
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from meshrun.data.permutation import Ids, Words, mix, permute, round_keys, unpermute
from meshrun.data.shuffle import CHUNK, FULL, Shuffle
from meshrun.errors import UserError
from meshrun.experiment import MapDataset

Run = TypeVar("Run", Ids, range)
Lengths = Callable[[Ids], ArrayLike]

# Positions permuted at a time: enough to spread numpy's cost a call over several batches, few enough for 0.3 ms.
_BLOCK = 1024
_AHEAD = 8
"""Blocks of windows that are computed together by who goes through them in order."""
_KEPT = _AHEAD + 4
"""Blocks that are kept: a batch may lie on two, and readers are ahead of the loop."""
_CHUNKS, _INSIDE, _BATCHES, _ROWS = range(1, 5)
"""What a permutation is of, in its keys: those of one epoch are independent."""


@dataclass(frozen=True)
class Order:
    """The order in which a training of any length visits a dataset."""

    length: int
    batch: int
    seed: int = 0
    shuffle: Shuffle = FULL
    lengths: Lengths | None = field(default=None, compare=False, repr=False)
    """How long samples are, which only a shuffle by length asks."""
    _kept: dict[tuple[int, int], Ids] = field(default_factory=dict, init=False, compare=False, repr=False)

    @classmethod
    def of(cls, dataset: MapDataset, batch: int, seed: int, shuffle: str) -> Order:
        """The order that was asked for by name, with the numbers that it takes from the dataset."""
        asked = Shuffle.parse(shuffle)
        lengths: Lengths | None = getattr(dataset, "lengths", None)
        if asked.kind == "length" and lengths is None:
            raise UserError(
                f"shuffle is {shuffle!r}, but the training set, of type {type(dataset).__name__}, cannot say how long "
                f"its samples are; give it a method lengths(ids), or use full, window or none (--shuffle)"
            )
        said = getattr(dataset, "chunk", None)
        chunk = said if isinstance(said, int) and said > 0 else CHUNK  # a tensor's `chunk` is something else
        return cls(len(dataset), batch, seed, asked.settled(batch, min(chunk, len(dataset))), lengths)

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.length // self.batch)

    def batch_ids(self, step: int) -> Ids:
        """The sample numbers of the global batch of a step, in order."""
        epoch, within = divmod(step, self.steps_per_epoch)
        start = within * self.batch
        stop = min(start + self.batch, self.length)
        if self.shuffle.kind == "none":
            return np.arange(start, stop, dtype=np.int64)
        size = self._block_size
        first = start // size
        blocks = [self._block(epoch, block) for block in range(first, (stop - 1) // size + 1)]
        whole = blocks[0] if len(blocks) == 1 else np.concatenate(blocks)
        return whole[start - first * size : stop - first * size].copy()

    @property
    def _block_size(self) -> int:
        """Positions computed at a time; the order does not depend on it but where batches are sorted together."""
        if self.shuffle.kind == "length":
            return self.shuffle.size * self.batch
        return max(self.batch, _BLOCK // 4 if self.shuffle.kind == "window" else _BLOCK)

    def _block(self, epoch: int, block: int) -> Ids:
        found = self._kept.get((epoch, block))
        if found is None:
            # Who comes from the block before will want the next ones too, and several at once cost little more.
            many = _AHEAD if self.shuffle.kind == "window" and (epoch, block - 1) in self._kept else 1
            for oldest in list(self._kept)[: many - _KEPT]:  # threads may be at this together: none must mind another's
                self._kept.pop(oldest, None)
            size, computed = self._block_size, self._computed(epoch, block, many)
            blocks = range(block, block - (-len(computed) // size))
            self._kept.update(((epoch, each), computed[(each - block) * size :][:size]) for each in blocks)
            found = computed[:size]
        return found

    def _computed(self, epoch: int, block: int, many: int) -> Ids:
        start, size = block * self._block_size, many * self._block_size
        positions = np.arange(start, min(start + size, self.length), dtype=np.uint64)
        if self.shuffle.kind == "window":
            return self._in_windows(epoch, positions)
        ids = permute(positions, self.length, round_keys(self.seed, epoch))
        return self._by_length(epoch, block, ids) if self.shuffle.kind == "length" else ids

    def _in_windows(self, epoch: int, positions: Words) -> Ids:
        """Chunks change places, all but one of them of the same size; then samples do inside windows of chunks."""
        chunk, wide = self.shuffle.chunk, self.shuffle.size // self.shuffle.chunk
        chunks = -(-self.length // chunk)
        keys = round_keys(self.seed, epoch, _CHUNKS)
        short_by = chunks * chunk - self.length
        # Where the short chunk comes, which is the last one of the dataset; all after it begin that much earlier.
        short_at = int(unpermute(np.array([chunks - 1], dtype=np.uint64), chunks, keys)[0])

        def start_of(place: int) -> int:
            return place * chunk - (short_by if place > short_at else 0)

        def place_of(position: int) -> int:
            return position // chunk if position < start_of(short_at + 1) else (position + short_by) // chunk

        found, at, last = [], int(positions[0]), int(positions[-1])
        while at <= last:
            window = place_of(at) // wide
            start, end = start_of(window * wide), start_of(min((window + 1) * wide, chunks))
            here = np.arange(at, min(end, last + 1), dtype=np.uint64) - np.uint64(start)
            found.append(permute(here, end - start, round_keys(self.seed, epoch, _INSIDE, window)) + start)
            at = end
        inside = np.concatenate(found)
        even = inside + np.where(inside >= start_of(short_at + 1), short_by, 0)
        places, of = np.unique(even // chunk, return_inverse=True)
        return (permute(places.astype(np.uint64), chunks, keys) * chunk)[of] + even % chunk

    def _by_length(self, epoch: int, block: int, ids: Ids) -> Ids:
        """Sorted, cut into batches of which a short one comes last, whatever the lengths of its samples are."""
        assert self.lengths is not None
        lengths = np.asarray(self.lengths(ids))
        if lengths.shape != ids.shape or lengths.dtype.kind not in "biuf" or not np.isfinite(lengths).all():
            raise UserError(
                f"lengths(ids) of the training set returned {_seen(lengths)} for {len(ids)} samples; it must return a "
                f"finite number for each (--shuffle full needs none)"
            )
        ids = ids[np.argsort(lengths, kind="stable")]
        count = -(-len(ids) // self.batch)
        order = permute(np.arange(count, dtype=np.uint64), count, round_keys(self.seed, epoch, _BATCHES, block))
        sizes = np.full(count, self.batch)
        sizes[order[-1]] -= count * self.batch - len(ids)
        # Ranks take a batch in contiguous parts: left sorted, the last one would have all the work.
        (key,) = round_keys(self.seed, epoch, _ROWS, block)[:1]
        places = np.argsort(order)  # where each batch comes
        return ids[np.lexsort((mix(ids.astype(np.uint64) ^ key), np.repeat(places, sizes)))]


def _seen(lengths: NDArray[Any]) -> str:
    if lengths.dtype.kind == "f" and not np.isfinite(lengths).all():
        return f"{lengths[~np.isfinite(lengths)].flat[0]}"
    return f"an array of shape {lengths.shape} and type {lengths.dtype}"


def slice_of(ids: Run, part: int, of: int) -> Run:
    """Part number `part` of `of` contiguous parts whose sizes differ by at most one (and may be 0)."""
    size, larger = divmod(len(ids), of)
    start = part * size + min(part, larger)
    return ids[start : start + size + (part < larger)]


def micro_batches(ids: Ids, most: int | None) -> list[Ids]:
    """The ids in the fewest pieces of at most `most`, as even as can be; nothing for no ids."""
    if len(ids) == 0:
        return []
    pieces = -(-len(ids) // most) if most else 1
    return [slice_of(ids, piece, pieces) for piece in range(pieces)]


@dataclass(frozen=True)
class Cut:
    """How a replica's samples are cut into pieces: at most `micro` samples each.

    Where ranks must go in step with each other (`in_step`), every replica has the same number of pieces, at least
    `pieces` of them if there are samples, and a multiple of `multiple_of`; a piece without samples of its own borrows
    one. With `equal`, all pieces have the same number of rows.
    """

    micro: int | None = None
    in_step: bool = False
    equal: bool = False
    pieces: int = 1
    multiple_of: int = 1

    def of(self, ids: Ids, part: int, parts: int) -> list[tuple[list[int], int]]:
        """One replica's pieces of a global batch: sample ids, and how many of them count."""
        mine = slice_of(ids, part, parts)
        if not self.in_step:
            return [(piece.tolist(), len(piece)) for piece in micro_batches(mine, self.micro)]
        most = -(-len(ids) // parts)
        wanted = -(-most // self.micro) if self.micro else min(self.pieces, most)
        count = -(-wanted // self.multiple_of) * self.multiple_of
        rows = -(-most // count)
        found = []
        for number in range(count):
            piece = slice_of(mine, number, count).tolist()
            short = rows - len(piece) if self.equal else int(not piece)
            found.append((piece + [piece[-1] if piece else int(ids[0])] * short, len(piece)))
        return found

"""Which samples step s trains on: a pure function of (seed, step, length, batch), never of the world.

    order = Order(length=60_000, batch=64, seed=0)
    order.batch_ids(12)              # the global batch of step 12, as an array
    slice_of(order.batch_ids(12), part=1, of=3)      # what the second of three replicas computes
    micro_batches(ids, 16)           # that, in pieces of at most 16

Each epoch is a permutation of all samples and its last batch may be short. The permutation is computed, not stored: a
Feistel network over the bits of the position, walked until it lands inside the dataset. A billion samples cost no
more than a thousand, and jumping to any step costs nothing, so a step number is all the state that the data has.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
Run = TypeVar("Run", Ids, range)

# An even number, so that halves of unequal width are back in their places at the end. Below about six rounds
# neighbouring positions of small datasets stay correlated; ten leaves a margin.
_ROUNDS = 10
_LEAST_BITS = 6
# Positions permuted at a time: enough to spread numpy's cost a call over several batches, few enough for 0.3 ms.
_BLOCK = 1024


@dataclass(frozen=True)
class Order:
    """The order in which a training of any length visits a dataset."""

    length: int
    batch: int
    seed: int = 0
    shuffle: bool = True

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.length // self.batch)

    def batch_ids(self, step: int) -> Ids:
        """The sample numbers of the global batch of a step, in order."""
        epoch, within = divmod(step, self.steps_per_epoch)
        start = within * self.batch
        stop = min(start + self.batch, self.length)
        if not self.shuffle:
            return np.arange(start, stop, dtype=np.int64)
        first = start // _BLOCK
        blocks = [_block(self.seed, epoch, self.length, block) for block in range(first, (stop - 1) // _BLOCK + 1)]
        whole = blocks[0] if len(blocks) == 1 else np.concatenate(blocks)
        return whole[start - first * _BLOCK : stop - first * _BLOCK].copy()


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


@lru_cache(maxsize=4)
def _block(seed: int, epoch: int, length: int, block: int) -> Ids:
    start = block * _BLOCK
    positions = np.arange(start, min(start + _BLOCK, length), dtype=np.uint64)
    return permute(positions, length, round_keys(seed, epoch))


def round_keys(seed: int, epoch: int) -> NDArray[np.uint64]:
    """Independent keys for the rounds of one epoch's permutation."""
    # A word each: in one number of 64 bits the upper half of a seed would stand where another seed has its epoch.
    words = [seed & 0xFFFFFFFF, epoch, seed >> 32 & 0xFFFFFFFF]
    return np.random.SeedSequence(words).generate_state(_ROUNDS, np.uint64).astype(np.uint64)


def permute(positions: NDArray[np.uint64], length: int, keys: NDArray[np.uint64]) -> Ids:
    """Where a keyed permutation of range(length) sends each position."""
    bits = max(_LEAST_BITS, (length - 1).bit_length())
    values = _feistel(positions, bits, keys)
    outside = values >= length
    while outside.any():
        values[outside] = _feistel(values[outside], bits, keys)
        outside = values >= length
    return values.astype(np.int64)


def _feistel(values: NDArray[np.uint64], bits: int, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    low_bits = np.uint64(bits // 2)
    high_bits = np.uint64(bits - bits // 2)
    high, low = values >> low_bits, values & ((np.uint64(1) << low_bits) - np.uint64(1))
    widths = (high_bits, low_bits)
    for number, key in enumerate(keys):
        # The half that is changed alternates, and each keeps its own width: a bijection whatever _mix returns.
        mask = (np.uint64(1) << widths[number % 2]) - np.uint64(1)
        high, low = low, high ^ (_mix(low ^ key) & mask)
    return (high << low_bits) | low


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Spreads every input bit over all output bits (the finaliser of the SplitMix64 generator)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))

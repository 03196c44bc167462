"""Keyed permutations that are computed and not stored: a billion numbers cost no more than a thousand.

    keys = round_keys(seed, epoch)
    permute(np.arange(64, dtype=np.uint64), 10**9, keys)      # where the first 64 of a billion positions go
    unpermute(…, 10**9, keys)                                 # and back

A Feistel network over the bits of the position, walked until it lands inside the range.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
Words = NDArray[np.uint64]

# An even number, so that halves of unequal width are back in their places at the end. Below about six rounds
# neighbouring positions of small ranges stay correlated; ten leaves a margin.
_ROUNDS = 10
_LEAST_BITS = 6


def round_keys(seed: int, epoch: int, *more: int) -> Words:
    """Independent keys for the rounds of one permutation."""
    # A word each: in one number of 64 bits the upper half of a seed would stand where another seed has its epoch.
    words = [seed & 0xFFFFFFFF, epoch, seed >> 32 & 0xFFFFFFFF, *more]
    return np.random.SeedSequence(words).generate_state(_ROUNDS, np.uint64).astype(np.uint64)


def permute(positions: Words, length: int, keys: Words) -> Ids:
    """Where a keyed permutation of range(length) sends each position."""
    return _walked(_feistel, positions, length, keys)


def unpermute(values: Words, length: int, keys: Words) -> Ids:
    """The positions that `permute` sends there."""
    return _walked(_feistel_back, values, length, keys)


def _walked(rounds: Callable[[Words, int, Words], Words], start: Words, length: int, keys: Words) -> Ids:
    bits = max(_LEAST_BITS, (length - 1).bit_length())
    values = rounds(start, bits, keys)
    outside = np.flatnonzero(values >= length)
    while len(outside):
        moved = rounds(values[outside], bits, keys)
        values[outside] = moved
        outside = outside[moved >= length]
    return values.astype(np.int64)


def _feistel(values: Words, bits: int, keys: Words) -> Words:
    low_bits, masks = _halves(bits)
    high, low = values >> low_bits, values & masks[1]
    for number, key in enumerate(keys):
        # The half that is changed alternates, and each keeps its own width: a bijection whatever `mix` returns.
        changed = mix(low ^ key)
        changed &= masks[number % 2]
        changed ^= high
        high, low = low, changed
    return (high << low_bits) | low


def _feistel_back(values: Words, bits: int, keys: Words) -> Words:
    low_bits, masks = _halves(bits)
    high, low = values >> low_bits, values & masks[1]
    for number, key in reversed(list(enumerate(keys))):
        high, low = low ^ (mix(high ^ key) & masks[number % 2]), high
    return (high << low_bits) | low


@lru_cache
def _halves(bits: int) -> tuple[np.uint64, tuple[np.uint64, np.uint64]]:
    """How wide the lower half is, and which bits the upper and the lower half have."""
    low = bits // 2
    return np.uint64(low), (np.uint64((1 << bits - low) - 1), np.uint64((1 << low) - 1))


# Made once: making a number of 64 bits costs as much as using it.
_SHIFTS = np.uint64(30), np.uint64(27), np.uint64(31)
_FACTORS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def mix(values: Words) -> Words:
    """Spreads every input bit over all output bits (the finaliser of the SplitMix64 generator)."""
    values = values ^ (values >> _SHIFTS[0])
    values *= _FACTORS[0]
    values ^= values >> _SHIFTS[1]
    values *= _FACTORS[1]
    values ^= values >> _SHIFTS[2]
    return values

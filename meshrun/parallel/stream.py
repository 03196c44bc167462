"""The host's stream of random numbers, drawn by several threads at once: bit for bit what one would draw.

    fill([Draw(tensor, "normal_", (0.0, 0.02)), …], threads=8)

torch's generator is a Mersenne Twister, a linear recurrence over bits: its state n draws later is a polynomial of the
one before, x^n modulo the recurrence's own, applied to it. So a thread can begin anywhere in the stream. A normal_ or
uniform_ of fp32 takes one number of the stream for each element, and sixteen more where a normal_ ends between
multiples of sixteen; parts of a tensor that begin at such multiples are therefore drawn like the whole.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

WORDS, DEGREE = 624, 19937
GROUP = 16
"""A normal_ makes so many numbers of as many others."""
RUN = (1 << 25) // WORDS * WORDS
"""Draws of a thread at a time: enough that beginning elsewhere, 20 ms, is little beside them."""
PIECE = 1 << 23
"""Draws of one call. After each a thread waits for its turn of Python, and whoever imports meanwhile has long turns."""

Words = NDArray[np.uint32]


@dataclass(frozen=True)
class Draw:
    """A contiguous fp32 tensor that is to be filled."""

    tensor: Tensor
    kind: str
    """normal_ or uniform_."""
    parameters: tuple[float, float]

    @property
    def length(self) -> int:
        """How many numbers of the stream it takes."""
        return taken(self.tensor.numel(), self.kind)


def taken(elements: int, kind: str) -> int:
    """How many numbers of the stream a tensor of at least sixteen elements takes."""
    return elements + (GROUP if kind == "normal_" and elements % GROUP else 0)


def fill(draws: Sequence[Draw], threads: int) -> None:
    """Fill tensors in their order, from torch's own generator, which is left where they leave it."""
    state = torch.get_rng_state()
    pieces = list(_pieces(draws))
    with ThreadPoolExecutor(threads) as pool:
        work = []
        for offset, end, begin in _begins(state, pieces[-1][0]):
            own = [each for each in pieces if offset <= each[0] < end]
            if own:
                work.append(pool.submit(_fill, begin, offset, own))
        for each in work:
            state = each.result()
    torch.set_rng_state(state)


def _pieces(draws: Sequence[Draw]) -> Iterator[tuple[int, Draw]]:
    """Parts of the tensors, with where in the stream they begin."""
    offset = 0
    for draw in draws:
        flat = draw.tensor.view(-1)
        for first in range(0, len(flat), PIECE):
            # What is left must not be too short to be drawn like a part of the whole.
            last = len(flat) if len(flat) - first < PIECE + GROUP else first + PIECE
            if first < last and (not first or len(flat) - first >= GROUP):
                yield offset + first, Draw(flat[first:last], draw.kind, draw.parameters)
        offset += draw.length


def _fill(state: Tensor, offset: int, pieces: list[tuple[int, Draw]]) -> Tensor:
    """Fill some pieces from a state that is at an offset of the stream; returns the state after them."""
    generator = torch.Generator()
    generator.set_state(_skipped(state, pieces[0][0] - offset))
    with torch.no_grad():
        for _, draw in pieces:
            first, second = draw.parameters
            if draw.kind == "normal_":
                draw.tensor.normal_(first, second, generator=generator)
            else:
                draw.tensor.uniform_(first, second, generator=generator)
    return generator.get_state()


def _begins(state: Tensor, last: int) -> Iterator[tuple[int, int, Tensor]]:
    """States along the stream, with where each is and where the next one is: this one, then one every `RUN` draws."""
    _, used = _twister(state)
    # A block that the generator has made itself: of the very first one, bits are there that were never drawn from.
    aligned = 2 * WORDS - used
    words, _ = _twister(_skipped(state, aligned))
    yield 0, aligned + RUN, state
    for offset in range(aligned + RUN, last + 1, RUN):
        words = _jumped(words)
        yield offset, offset + RUN, _torch_state(state, words, WORDS)


def _twister(state: Tensor) -> tuple[Words, int]:
    """The words of a state of torch's, and how many of them were used."""
    data = state.numpy()
    words = data[24 : 24 + 8 * WORDS].view(np.uint64).astype(np.uint32)
    left, used = int(data[8:12].view(np.int32)[0]), int(data[16:24].view(np.uint64)[0])
    return words, WORDS if left == 1 else used


def _torch_state(like: Tensor, words: Words, used: int) -> Tensor:
    """A state of torch's with these words."""
    data = like.numpy().copy()
    data[24 : 24 + 8 * WORDS] = words.astype(np.uint64).view(np.uint8)
    data[8:12] = np.array([1 if used == WORDS else WORDS + 1 - used], np.int32).view(np.uint8)
    data[16:24] = np.array([used], np.uint64).view(np.uint8)
    return torch.from_numpy(data)


def _numpy_twister(words: Words, used: int) -> np.random.MT19937:
    twister = np.random.MT19937()
    twister.state = {"bit_generator": "MT19937", "state": {"key": words, "pos": used}}
    return twister


def _skipped(state: Tensor, draws: int) -> Tensor:
    """The state some draws later, one by one."""
    if not draws:
        return state
    twister = _numpy_twister(*_twister(state))
    twister.random_raw(draws, output=False)
    after = twister.state["state"]
    return _torch_state(state, after["key"], after["pos"])


def _jumped(words: Words) -> Words:
    """The block that comes `RUN` draws after this one: the sum of those blocks that the polynomial has a term for."""
    twister = _numpy_twister(words, WORDS)
    blocks = [words]
    for _ in range(DEGREE // WORDS + 1):
        twister.random_raw(WORDS, output=False)
        blocks.append(twister.state["state"]["key"])
    windows = np.lib.stride_tricks.sliding_window_view(np.concatenate(blocks), WORDS)
    terms = _terms()
    parts = [np.bitwise_xor.reduce(windows[terms[each : each + 512]]) for each in range(0, len(terms), 512)]
    found: Words = np.bitwise_xor.reduce(np.stack(parts))
    return found


@functools.cache
def _terms() -> NDArray[np.int64]:
    """The exponents of x^RUN modulo the recurrence's polynomial."""
    taps = _taps()
    found = 1
    for bit in bin(RUN)[2:]:
        found = _reduced(_squared(found) << int(bit), taps)
    return np.array([each for each in range(DEGREE) if found >> each & 1])


def _squared(polynomial: int) -> int:
    """Over two elements the square of a sum is the sum of squares: bits move apart."""
    return int(bin(polynomial)[2:], 4)


def _reduced(polynomial: int, taps: Sequence[int]) -> int:
    while high := polynomial >> DEGREE:
        polynomial &= (1 << DEGREE) - 1
        for each in taps:
            polynomial ^= high << each
    return polynomial


@functools.cache
def _taps() -> tuple[int, ...]:
    """The lower terms of the recurrence's polynomial, which is the shortest that its bits obey (Berlekamp, Massey)."""
    twister = np.random.MT19937(0)
    twister.random_raw(WORDS, output=False)
    blocks = []
    for _ in range(2 * DEGREE // WORDS + 1):
        twister.random_raw(WORDS, output=False)
        blocks.append(twister.state["state"]["key"])
    bits = (np.concatenate(blocks)[: 2 * DEGREE] >> np.uint32(31)).tolist()
    found, before, length, since, seen = 1, 1, 0, 1, 0
    for number, bit in enumerate(bits):
        seen = (seen << 1 | bit) & ((1 << DEGREE + 1) - 1)
        if (found & seen).bit_count() % 2:
            changed = found ^ before << since
            if 2 * length <= number:
                length, before, since = number + 1 - length, found, 0
            found = changed
        since += 1
    assert length == DEGREE
    return tuple(DEGREE - each for each in range(1, DEGREE + 1) if found >> each & 1)

"""Where the generators of random numbers stand that a program may draw from, and the way back there.

    before = Drawn.now(here.device)
    ...
    before.same(Drawn.now(here.device))      # whether nothing was drawn in between
    draw_on(before.tensors(), here.device)   # the same numbers again

It is asked after every step and around every batch that is read, so what is slow about it is done once.
"""

from __future__ import annotations

import ctypes
import math
import random
from _random import Random as Words
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

_last_of_numpy: tuple[bytes, tuple[Any, ...]] = b"", ()


def _of_numpy() -> tuple[Any, ...]:
    """Where numpy's generator stands; what numpy makes of that is kept as long as its words are the same."""
    global _last_of_numpy
    words, (before, state) = b"", _last_of_numpy
    bits = np.random.mtrand._rand._bit_generator
    if isinstance(bits, np.random.MT19937):
        words = ctypes.string_at(bits.ctypes.state_address, 625 * 4)
    # Of two normal numbers, which are drawn together, the second one comes without a change of these words.
    if not words or words != before or state[3]:
        state = np.random.get_state(legacy=True)  # type: ignore[assignment]
        _last_of_numpy = words, state
    return state


_WORDS_OF_PYTHON = 625 * 4
_last_of_python: tuple[bytes, Any, tuple[Any, ...]] = b"", None, ()


def _words_of(generator: random.Random) -> bytes:
    """The words of a generator of Python's: they stand behind the head that all objects have."""
    return ctypes.string_at(id(generator) + object.__basicsize__, _WORDS_OF_PYTHON)


def _are_words_there() -> bool:
    """Whether that is so in this Python, of which nothing promises it."""
    if Words.__basicsize__ < object.__basicsize__ + _WORDS_OF_PYTHON:
        return False
    tried = random.Random(5)
    for _ in range(3):
        tried.random()
        *words, position = tried.getstate()[1]
        if _words_of(tried) != np.array([position, *words], dtype=np.uint32).tobytes():
            return False
    return True


_SEES_WORDS = _are_words_there()


def _of_python() -> tuple[Any, ...]:
    """Where Python's generator stands; the numbers that Python makes of its words are kept as those of numpy are."""
    global _last_of_python
    generator = random._inst
    if not _SEES_WORDS or type(generator) is not random.Random:
        return random.getstate()
    words, gauss, state = _last_of_python
    now, second = _words_of(generator), generator.gauss_next  # type: ignore[attr-defined]
    if now != words or second != gauss:
        state = generator.getstate()
        _last_of_python = now, second, state
    return state


def _same_of_numpy(state: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    # The second half of a pair of normal numbers is drawn without moving on.
    return state[2:4] == other[2:4] and np.array_equal(state[1], other[1])


@dataclass(frozen=True)
class Drawn:
    """Where the generators stand that a program may draw from: torch's, Python's, numpy's and the GPU's."""

    generator: Tensor
    """torch's own."""
    python: tuple[Any, ...]
    numpy: tuple[Any, ...]
    cuda: Tensor | None

    @classmethod
    def now(cls, device: torch.device) -> Drawn:
        cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        return cls(torch.get_rng_state(), _of_python(), _of_numpy(), cuda)

    def same(self, other: Drawn) -> bool:
        """Whether nothing was drawn between the two."""
        # States that are kept are one object: comparing their words again would take three times as long as all else.
        return (
            torch.equal(self.generator, other.generator)
            and (self.python is other.python or self.python == other.python)
            and (self.numpy is other.numpy or _same_of_numpy(self.numpy, other.numpy))
            and (self.cuda is None or other.cuda is None or torch.equal(self.cuda, other.cuda))
        )

    def restore(self) -> None:
        """Let the generators of the host go on from here."""
        torch.set_rng_state(self.generator)
        random.setstate(self.python)
        np.random.set_state(self.numpy)

    def tensors(self) -> dict[str, Tensor]:
        _, words, gauss = self.python
        _, numbers, position, has_gauss, cached = self.numpy
        found = {
            "torch": self.generator,
            "python": torch.tensor(words, dtype=torch.int64),
            "python_gauss": torch.tensor(math.nan if gauss is None else gauss, dtype=torch.float64),
            "numpy": torch.from_numpy(np.append(numbers.astype(np.int64), [position, has_gauss])),
            "numpy_gauss": torch.tensor(cached, dtype=torch.float64),
        }
        return found if self.cuda is None else {**found, "cuda": self.cuda}


def draw_on(states: Mapping[str, Tensor], device: torch.device) -> None:
    """Let all generators go on from where these say."""
    torch.set_rng_state(states["torch"])
    gauss = states["python_gauss"].item()
    random.setstate((3, tuple(states["python"].tolist()), None if math.isnan(gauss) else gauss))
    *numbers, position, has_gauss = states["numpy"].tolist()
    words = np.array(numbers, dtype=np.uint32)
    np.random.set_state(("MT19937", words, position, has_gauss, states["numpy_gauss"].item()))
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)

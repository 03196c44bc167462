"""Python's, NumPy's and torch's global generators, seeded by sample: random transforms are the same on every mesh.

    before = snapshot()
    data[17]
    before.same(snapshot())            # whether reading the sample has drawn from none of the generators

    with put_back():
        seed_for(seed=0, epoch=3, sample=17)
        data[17]                       # the same on every rank, in every reader, after every resume

A dataset that draws nothing costs two snapshots per batch, some ten microseconds together; seeding costs ten
microseconds per sample, most of it in `random.seed`.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from meshrun.data.drawn import Drawn

_HOST = torch.device("cpu")


def snapshot() -> Drawn:
    """Where the generators of the host stand."""
    return Drawn.now(_HOST)


@contextlib.contextmanager
def put_back() -> Iterator[None]:
    """Inside, the generators may be seeded; after it they go on as if nothing had been drawn."""
    before = snapshot()
    try:
        yield
    finally:
        before.restore()


def seed_for(seed: int, epoch: int | None, sample: int | Sequence[int]) -> None:
    """Seed the generators for a sample, or for a batch of these samples; evaluation has no epoch."""
    seed_with(word_for(seed, epoch, sample))


def seed_with(word: int) -> None:
    """Seed the three generators, each with another number."""
    torch.default_generator.manual_seed(word)
    random.seed(word ^ 0x9E3779B97F4A7C15)
    np.random.seed((word >> 16) & 0xFFFFFFFF)


def word_for(seed: int, epoch: int | None, sample: int | Sequence[int]) -> int:
    """63 bits that stand for a sample in an epoch."""
    text = f"{seed} {epoch} {sample}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1

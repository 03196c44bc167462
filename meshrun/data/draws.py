"""Random numbers for the samples of a batch: a function of seed, epoch, sample and call, never of the mesh.

    draws = SampleDraws(seed=0, epoch=3, ids=[17, 4], device=torch.device("cuda"))
    draws.uniform(2)         # (2, 2) numbers from 0 up to 1, on the device
    draws.uniform(2)         # others
    draws.on_host(2)         # again others, where a GPU would only be kept busy with arithmetic on a few numbers

They are computed on the host, bit for bit the same everywhere: a few numbers a sample are soon sent.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from meshrun.data.permutation import mix

_OF_SAMPLES = 5
"""Sets these keys apart from those of the order of samples, which has the same seed."""


@functools.lru_cache(64)
def _keys(seed: int, epoch: int, call: int, count: int) -> NDArray[np.uint64]:
    """A key for each column of numbers; the same in all steps of an epoch."""
    words = [seed & 0xFFFFFFFF, epoch, seed >> 32 & 0xFFFFFFFF, _OF_SAMPLES, call]
    return np.asarray(np.random.SeedSequence(words).generate_state(count, np.uint64), dtype=np.uint64)


@dataclass
class SampleDraws:
    """Draws of one micro-batch; every call gives others."""

    seed: int
    epoch: int
    ids: Sequence[int]
    device: torch.device
    calls: int = field(default=0, init=False)

    def uniform(self, count: int = 1) -> Tensor:
        """(samples, count) numbers from 0 up to 1, on the device of the batch."""
        return self.on_host(count).to(self.device, non_blocking=True)

    def on_host(self, count: int = 1) -> Tensor:
        """The same, where they are computed."""
        keys = _keys(self.seed, self.epoch, self.calls, count)
        self.calls += 1
        samples = np.asarray(self.ids, dtype=np.int64).astype(np.uint64)
        # Twice, so that neighbouring samples share nothing before the columns' keys are let in, nor after.
        bits = mix(mix(samples * np.uint64(0x9E3779B97F4A7C15))[:, None] ^ keys[None, :])
        # As many bits as a float holds exactly: no number is rounded up to 1.
        numbers = (bits >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)
        return torch.from_numpy(numbers)

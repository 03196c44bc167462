"""What the tests of state share: one rank alone, regions of known numbers, and a checkpoint that is there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshrun import Here
from meshrun.layout import parse
from meshrun.state import catalog
from meshrun.state.checkpoint import Checkpoint
from meshrun.state.region import Region
from meshrun.state.saver import Saver
from meshrun.world import World

ALONE = Here(World(0, 1, 0, 1, 0, 1, "here", "none"), parse("dp=1").resolve(1), torch.device("cpu"), None)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def saved(
    folder: Path, tensors: Mapping[str, Tensor], step: int = 5, state: dict[str, Any] | None = None
) -> Checkpoint:
    """A checkpoint of whole tensors, written by one rank."""
    saver = Saver(folder, ALONE, None, keep=100)
    saver.snapshot([Region.whole(name, tensor) for name, tensor in tensors.items()], step, state or {})
    saver.begin()
    saver.close()
    (found,) = saver.finished()
    assert found.error is None
    assert found.path is not None
    assert found.path in catalog.complete(folder)
    return Checkpoint.open(found.path)

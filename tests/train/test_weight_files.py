"""Best and last weights on a disk that refuses them for a while: tried again, and newer ones never replaced."""

from __future__ import annotations

import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from meshrun.train.weight_files import WeightFiles


class Run:
    """One rank, its only weight, and the notes on it."""

    def __init__(self, folder: Path, rank: int = 0) -> None:
        self.weight, self.notes = torch.zeros(2), list[str]()
        here: Any = SimpleNamespace(rank=rank, size=2, device=torch.device("cpu"), gathered=lambda _: None)
        here.waiting = lambda _: nullcontext()
        placed: Any = SimpleNamespace(weights=lambda: [("w", self.weight)])
        self.files = WeightFiles(folder, here, placed, self.tell, lambda _: None)

    def tell(self, _kind: str, text: str) -> None:
        self.notes.append(text)

    def keep_best(self, value: float) -> None:
        self.weight.fill_(value)
        self.files.keep_best({"step": 1})


def refusing(tmp_path: Path) -> Path:
    """A folder in which nothing can be written: a file has its name."""
    (tmp_path / "weights").touch()
    return tmp_path / "weights"


def kept(folder: Path, name: str) -> float:
    return load_file(folder / f"{name}.safetensors")["w"][0].item()


def test_best_weights_that_the_disk_refused_are_written_at_the_end(tmp_path: Path):
    folder = refusing(tmp_path)
    run = Run(folder)
    run.keep_best(1.0)
    assert len(run.notes) == 1 and "tries again" in run.notes[0]
    assert run.files.write_late() is not None
    run.weight.fill_(2.0)
    assert len(run.files.keep_last({"step": 2})) == 2, "neither file could be written"
    folder.unlink()
    assert run.files.keep_last({"step": 2}) == []
    assert (kept(folder, "best"), kept(folder, "last")) == (1.0, 2.0)


def test_a_disk_that_refuses_again_is_told_of_again(tmp_path: Path):
    folder = refusing(tmp_path)
    run = Run(folder)
    for _ in range(2):
        run.keep_best(1.0)
    folder.unlink()
    assert run.files.write_late() is None and kept(folder, "best") == 1.0
    shutil.rmtree(folder)
    folder.touch()
    run.keep_best(2.0)
    assert len(run.notes) == 2


def test_late_weights_do_not_replace_newer_ones(tmp_path: Path):
    folder = refusing(tmp_path)
    run = Run(folder)
    run.keep_best(1.0)
    folder.unlink()
    run.keep_best(2.0)
    assert run.files.write_late() is None
    assert kept(folder, "best") == 2.0


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_0_alone_writes(tmp_path: Path, rank: int):
    run = Run(tmp_path, rank)
    run.keep_best(1.0)
    run.files.keep_last({})
    assert len(list(tmp_path.iterdir())) == (2 if rank == 0 else 0)

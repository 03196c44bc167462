"""A file of weights that is written beside the training has the weights of the moment when that began."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from meshrun.train import writing
from meshrun.train.writing import Writing


def test_weights_that_change_while_they_are_written_are_written_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    go, save = threading.Event(), writing.save_weights

    def slowly(*about: Any) -> None:
        assert go.wait(30)
        save(*about)

    monkeypatch.setattr(writing, "save_weights", slowly)
    weight = torch.ones(2)
    begun = Writing.begin({"w": weight}, tmp_path / "best.safetensors", {"step": 1})
    weight.fill_(5.0)
    go.set()
    assert begun.finish() is None
    assert load_file(tmp_path / "best.safetensors")["w"].tolist() == [1.0, 1.0]


def test_a_disk_that_refuses_once_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    errors: list[Exception | None] = [OSError("no space"), None]

    def save(*_: Any) -> None:
        if (error := errors.pop(0)) is not None:
            raise error

    monkeypatch.setattr(writing, "save_weights", save)
    begun = Writing.begin({}, tmp_path / "best.safetensors", {})
    assert str(begun.finish()) == "no space"
    assert begun.try_again() is None


def test_an_error_that_is_not_the_disks_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def save(*_: Any) -> None:
        raise ValueError("a tensor of no kind")

    monkeypatch.setattr(writing, "save_weights", save)
    with pytest.raises(ValueError, match="a tensor of no kind"):
        Writing.begin({}, tmp_path / "best.safetensors", {}).finish()

"""Checkpoints that a training must not go on from, and what it says of them."""

from __future__ import annotations

import pickle
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from meshrun import Experiment, UserError, mesh
from meshrun.state import catalog
from meshrun.state.checkpoint import Checkpoint
from meshrun.train.interval import Every
from meshrun.train.loop import Trainer
from meshrun.train.recovery import Keeping
from tests.train.small import points, start_on_cpu
from tests.train.test_resume import noisy


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    start_on_cpu(1)
    yield
    mesh.finish()
    mesh.use(mesh.Meeting())


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Checkpoints of steps 2, 4 and 6."""
    trainer = Trainer(noisy(6), mesh.start(), keeping=Keeping(tmp_path, every=Every(steps=2), keep=3))
    trainer.train()
    assert [path.name for path in catalog.complete(tmp_path)] == ["step-00000002", "step-00000004", "step-00000006"]
    return tmp_path


def resumed(folder: Path, experiment: Experiment | None = None) -> tuple[dict[str, Any] | None, list[str]]:
    told: list[str] = []
    trainer = Trainer(
        experiment or noisy(8),
        mesh.start(),
        keeping=Keeping(folder, every=Every(never=True)),
        record=lambda kind, **fields: told.append(fields["text"]) if kind == "note" else None,
    )
    return trainer.resume(), told


def flip(path: Path, at: int = -100) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_taken(saved: Path):
    flip(saved / "step-00000006" / "rank-00000.safetensors")
    found, told = resumed(saved)
    assert found is not None and found["step"] == 4
    (sentence,) = told
    assert re.search(r"step-00000006 is damaged: .*rank-00000.safetensors.*; the one before it is tried", sentence)
    assert [path.name for path in catalog.complete(saved)] == ["step-00000002", "step-00000004"]
    assert (saved / ".damaged-step-00000006").is_dir(), "it is still there to be looked at"


@pytest.mark.parametrize("what", ["truncated", "deleted", "manifest", "bomb", "bomb in the manifest"])
def test_whatever_is_wrong_with_the_newest_one_the_run_goes_on_from_the_one_before(what: str, saved: Path):
    file, manifest = (saved / "step-00000006" / name for name in ("rank-00000.safetensors", "manifest.json"))
    mark = saved / "executed"
    if what == "truncated":
        file.write_bytes(file.read_bytes()[:-500])
    elif what == "deleted":
        file.unlink()
    elif what == "manifest":
        flip(manifest)
    else:
        (file if what == "bomb" else manifest).write_bytes(pickle.dumps(Bomb(mark)))
    found, told = resumed(saved)
    assert found is not None and found["step"] == 4
    assert len(told) == 1 and "step-00000006" in told[0]
    assert not mark.exists()


class Bomb:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.mark,)


def test_when_none_can_be_used_the_run_is_refused_and_does_not_begin_anew(saved: Path):
    for path in catalog.complete(saved):
        flip(path / "rank-00000.safetensors")
    with pytest.raises(UserError, match=r"no checkpoint in .* can be used: .*step-00000006 is damaged"):
        resumed(saved)


def test_a_single_checkpoint_that_cannot_be_used_is_not_passed_over_for_a_new_run(saved: Path):
    for path in catalog.complete(saved)[:-1]:
        shutil.rmtree(path)
    flip(saved / "step-00000006" / "manifest.json")
    with pytest.raises(UserError, match=r"no checkpoint in .* can be used: .*step-00000006"):
        resumed(saved)


def test_a_half_written_checkpoint_is_passed_over_and_one_without_a_manifest_is_named(saved: Path):
    shutil.copytree(saved / "step-00000006", saved / ".partial-0123-step-00000008")
    (saved / "step-00000009").mkdir()
    shutil.copy(saved / "step-00000006" / "rank-00000.safetensors", saved / "step-00000009")
    found, told = resumed(saved)
    assert found is not None and found["step"] == 6
    (sentence,) = told
    assert "step-00000009: manifest.json: No such file" in sentence


def test_checkpoints_of_a_newer_format_are_refused_and_the_run_does_not_begin_anew(saved: Path):
    for path in catalog.complete(saved):
        manifest = path / "manifest.json"
        manifest.write_text(manifest.read_text().replace('"format":1', '"format":2', 1))
    with pytest.raises(UserError, match=r"has format 2, which a newer meshrun wrote"):
        resumed(saved)
    assert len(catalog.named(saved)) == 3, "none of them is put aside"


def test_a_folder_that_cannot_be_read_is_a_sentence(saved: Path):
    folder = saved / "a file"
    folder.write_text("")
    with pytest.raises(UserError, match=r"cannot read .*a file: Not a directory"):
        resumed(folder)


def test_a_checkpoint_of_another_model_is_refused_with_the_names_that_differ(saved: Path):
    class Wider(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(5, 9), nn.BatchNorm1d(9), nn.GELU(), nn.Dropout(0.2), nn.Linear(9, 3))
            self.more = nn.Parameter(torch.zeros(1))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.body(inputs) * self.more

    with pytest.raises(UserError) as refused:
        resumed(saved, replace(noisy(8), model=Wider))
    sentence = str(refused.value)
    assert "is of another model: more is not in the checkpoint; unused is only in the checkpoint" in sentence
    assert "body.0.weight is (9, 5) but (8, 5) in the checkpoint" in sentence


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"batch": 10}, "was trained with batch 12 but batch is 10 now"),
        ({"seed": 6}, "was trained with seed 5 but seed is 6 now"),
        ({"shuffle": "none"}, r"was trained with shuffle full but shuffle is none now.*resume with full \(--shuffle\)"),
        ({"train": points(61)}, "was trained on 60 samples but the training set has 61 now.*; put back"),
        ({"optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1)}, "the state of the optimizer Adam but"),
    ],
)
def test_a_training_of_other_samples_or_another_optimizer_is_refused(
    change: dict[str, Any], sentence: str, saved: Path
):
    with pytest.raises(UserError, match=sentence):
        resumed(saved, replace(noisy(8), **change))


class Marked(TensorDataset):
    """Says in a word what it holds."""

    fingerprint = "one"


def test_data_that_is_other_than_it_was_is_refused_where_it_can_be_told(tmp_path: Path):
    data = Marked(*points(60).tensors)
    Trainer(replace(noisy(2), train=data), mesh.start(), keeping=Keeping(tmp_path, every=Every(steps=2))).train()
    assert resumed(tmp_path, replace(noisy(4), train=data))[0] is not None
    assert resumed(tmp_path, noisy(4))[0] is not None, "this one does not say what it holds"
    data.fingerprint = "two"
    with pytest.raises(
        UserError, match=r"on other data than the training set has now, whose fingerprint is two and was one; put"
    ):
        resumed(tmp_path, replace(noisy(4), train=data))


def test_a_checkpoint_from_before_there_were_other_orders_goes_on_in_the_full_one(
    saved: Path, monkeypatch: pytest.MonkeyPatch
):
    whole = Checkpoint.open

    def older(*words: Any) -> Checkpoint:
        checkpoint = whole(*words)
        for name in ("shuffle", "fingerprint"):
            checkpoint.state["data"].pop(name, None)
        return checkpoint

    monkeypatch.setattr(Checkpoint, "open", older)
    assert resumed(saved)[0] is not None
    with pytest.raises(UserError, match="was trained with shuffle full but shuffle is none now"):
        resumed(saved, replace(noisy(8), shuffle="none"))


def test_a_learning_rate_that_was_changed_is_the_new_one_and_all_else_goes_on(saved: Path):
    faster = replace(noisy(8), schedule=None, optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.5))
    trainer = Trainer(faster, mesh.start(), keeping=Keeping(saved, every=Every(never=True)))
    assert trainer.resume() is not None
    assert trainer.optimizer.param_groups[0]["lr"] == 0.5
    state = next(iter(trainer.optimizer.state.values()))
    assert float(state["step"]) == 6 and state["exp_avg"].abs().sum() > 0


def test_a_run_without_checkpoints_begins(tmp_path: Path):
    assert resumed(tmp_path) == (None, [])
    assert resumed(tmp_path / "nowhere") == (None, [])


class Odd(torch.optim.SGD):
    """Keeps what no checkpoint can hold."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["notes"] = ["a", "b"]


def test_an_optimizer_whose_state_cannot_be_saved_is_named(tmp_path: Path):
    odd = replace(noisy(4), optimizer=lambda parameters: Odd(parameters, lr=0.1, momentum=0.9))
    trainer = Trainer(odd, mesh.start(), keeping=Keeping(tmp_path, every=Every(steps=2)))
    with pytest.raises(UserError, match=r"the optimizer Odd keeps 'notes' as a list.*--checkpoint none"):
        trainer.train()

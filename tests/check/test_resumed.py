"""Verify resumes what it has saved: a checkpoint that is lost, and a training that it changes, are findings."""

from __future__ import annotations

import importlib
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from meshrun import mesh
from meshrun.check.probe import CHECKPOINTS, LARGEST, WEIGHTS, Found, Probing, probe
from meshrun.check.resumed import Compared, Resumption, _resumed, resume
from meshrun.check.verify import allow
from meshrun.errors import SharedError
from meshrun.layout import parse
from tests.check.test_verify import verify
from tests.ranks import run_on_ranks


def train(program: str, layout: str, folder: Path, source: Path | None = None) -> None:
    """The body of a rank."""
    mesh.use(mesh.Meeting(layout=layout, device="cpu"))
    experiment = getattr(importlib.import_module("tests.check.programs.mistakes"), program)()
    here, probing = mesh.start(), Probing(folder, saves=True)
    probe(experiment, here, probing)
    if source is not None:
        here.gathered(None)
        resume(experiment, here, probing, folder, 0)
        resume(experiment, here, probing, source, 1)


def compared(program: str, layout: str, folder: Path) -> list[Compared]:
    for name, own, source in (("alone", "dp=1", None), ("layout", layout, folder / "alone")):
        (folder / name).mkdir()
        given = {"program": program, "layout": own, "folder": folder / name, "source": source}
        run_on_ranks(__file__, "train", parse(own).size, given, timeout=50)
    reference, found = Found.read(folder / "alone"), Found.read(folder / "layout")
    allowed = allow(1e-5, None, len(reference.losses))
    return [
        resumption.compared(reference, found, (folder / "alone", weights), allowed)
        for weights, resumption in Resumption.all_in(folder / "layout").items()
    ]


def test_a_program_that_a_checkpoint_holds_goes_on_on_its_own_layout_and_from_one_process(tmp_path: Path):
    own, other = compared("small", "pp=2", tmp_path)
    assert (own.resumption.saved_on, own.resumption.resumed_on, own.resumption.step) == ("pp=2", "pp=2", 3)
    assert (other.resumption.saved_on, other.resumption.resumed_on, other.resumption.step) == ("dp=1", "pp=2", 3)
    for each in (own, other):
        assert each.verdict.ok and each.cause is None and len(each.resumption.losses) == 5


def test_state_that_no_checkpoint_holds_is_found(tmp_path: Path):
    own, _ = compared("slowing_optimizer", "dp=2", tmp_path)
    assert own.cause is not None and own.verdict.first_step == 5
    assert own.cause.startswith("resuming on dp=2 from the checkpoint of step 3, saved on dp=2, changes the training")


@pytest.mark.ranks(2)
def test_a_checkpoint_that_cannot_be_kept_is_found(tmp_path: Path):
    (tmp_path / CHECKPOINTS).write_text("no folder")
    train("small", "fsdp=2", tmp_path, tmp_path)
    lost = Found.read(tmp_path).loss_of_checkpoint
    assert lost is not None
    assert lost.startswith("the checkpoint of step 3 was not kept on fsdp=2: rank 0 on")
    assert not Resumption.all_in(tmp_path)


@pytest.mark.timeout(300)
def test_verify_resumes_on_the_layout_and_in_one_process(tmp_path: Path):
    words = ("--layouts", "dp=2", "--steps", 4, "--json")
    (row,) = verify(tmp_path, "mistakes:slowing_optimizer", *words).document["layouts"]
    assert not row["ok"] and row["loss_diff"] < 1e-5 and "changes the training" in row["cause"]
    places = [(each["saved_on"], each["resumed_on"]) for each in row["resumed"]]
    assert sorted(places) == [("dp=1", "dp=2"), ("dp=2", "dp=1"), ("dp=2", "dp=2")]
    assert not any(each["ok"] for each in row["resumed"])
    (row,) = verify(tmp_path, "mistakes:slowing_optimizer", *words, "--no-resume").document["layouts"]
    assert row["ok"] and row["resumed"] == []


ALONE = Found("dp=1", 1, 1, [2.0, 1.0], [1.0, 1.0], [{}, {}], {}, 8, "ids", {}, [], [1], [], [])


@pytest.mark.parametrize(
    ("losses", "norms", "first"),
    [
        ([2.0, 1.0], [1.0, 1.0], None),
        ([2.0, 1.5], [1.0, 1.0], 2),
        ([2.0, math.nan], [1.0, 1.0], 2),
        ([2.0, 1.0], [1.5, 1.0], 1),
    ],
)
def test_the_losses_and_norms_of_the_resumed_training_are_compared(
    tmp_path: Path, losses: list[float], norms: list[float], first: int | None
):
    for name in (WEIGHTS, LARGEST):
        save_file({"w": torch.ones(2)}, tmp_path / name)
    resumption = Resumption("dp=1", "dp=2", 1, None, losses, norms)
    compared = resumption.compared(ALONE, replace(ALONE, layout="dp=2"), (tmp_path, tmp_path), allow(1e-5, None, 2))
    assert compared.verdict.ok == (first is None) and compared.verdict.first_step == first
    assert (compared.cause is None) == (first is None)
    if first is not None:
        assert f"first at step {first})" in str(compared.cause)


def test_a_resumed_training_is_held_against_one_process_and_not_against_its_own_layout(tmp_path: Path):
    for name in (WEIGHTS, LARGEST):
        save_file({"w": torch.ones(2)}, tmp_path / name)
    apart = replace(ALONE, layout="dp=2", losses=[2.0, 3.0])
    resumption = Resumption("dp=2", "dp=2", 1, None, apart.losses, apart.grad_norms)
    compared = resumption.compared(ALONE, apart, (tmp_path, tmp_path), allow(1e-5, None, 2))
    assert not compared.verdict.ok and compared.verdict.first_step == 2


@pytest.mark.parametrize("found", [None, "another layout"])
def test_a_training_that_finds_no_checkpoint_of_its_own_says_why(found: str | None):
    def resume() -> None:
        if found is not None:
            raise SharedError(found)

    trainer: Any = SimpleNamespace(resume=resume, steps=pytest.fail)
    assert _resumed(trainer) == (found or "there is no checkpoint")


def test_weights_of_a_resumed_training_have_the_running_statistics_of_all_ranks():
    done: list[str] = []
    placed = SimpleNamespace(agree_on_buffers=lambda: done.append("agreed"))
    trainer: Any = SimpleNamespace(
        resume=lambda: {"step": 1}, steps=lambda: (done.append(str(step)) for step in (2, 3)), placed=placed
    )
    assert _resumed(trainer) is None and done == ["2", "3", "agreed"]


@pytest.mark.parametrize("change", [{"saved": None}, {"saved": 3, "unsaved": "the disk is full"}])
def test_a_training_without_a_checkpoint_is_not_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
):
    monkeypatch.setattr(Found, "read", lambda _folder: replace(ALONE, **change))
    nothing: Any = None
    resume(nothing, nothing, Probing(tmp_path), tmp_path, 0)
    assert Resumption.all_in(tmp_path) == {}

"""Verify resumes what it has saved: a checkpoint that is lost, and a training that it changes, are findings."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from meshrun import mesh
from meshrun.check.probe import CHECKPOINTS, Found, Probing, probe
from meshrun.check.resumed import Compared, Resumption, resume
from meshrun.check.verify import allow
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

"""What a rank writes down at the end of its training, and what it refuses to call a success."""

from __future__ import annotations

import dataclasses
import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from meshrun.cli import training
from meshrun.cli.training import Trained, launcher_of, refuse_unsaved
from meshrun.config import RunConfig, RunDirectory
from meshrun.errors import RunFailed
from meshrun.mesh import PeerLost
from meshrun.observe.legs import Leg
from meshrun.train.loop import Stopped
from meshrun.world import World, detect
from tests.cli.in_process import trained
from tests.launch.command import TINY

ALONE = detect({})


class Rank0:
    rank = 0


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(RunConfig("digits", runs=tmp_path))


def left(run: RunDirectory, result: dict[str, Any], unwritten: list[str]) -> list[str]:
    """What is told when rank 0 leaves."""
    here: Any = Rank0()
    told: list[str] = []
    recorder: Any = lambda kind, **_: told.append(kind)  # noqa: E731
    training._leave(run, here, result, recorder, unwritten)
    return told


def test_a_training_that_stopped_in_time_needs_no_weights(run: RunDirectory):
    stopped = {"step": 3, "of": 9, "why": "its time is up", "saved": True}
    assert left(run, {"steps": 3, "stopped": stopped}, ["weights/last.safetensors"]) == ["stopped"]
    found = run.stopped()
    assert found is not None and found["step"] == 3 and run.result() is None


def test_a_training_without_all_of_its_weights_has_no_result(run: RunDirectory):
    with pytest.raises(RunFailed, match=r"not all of it is kept: cannot write x; .*resume .* --from-start`"):
        left(run, {"steps": 9}, ["cannot write x"])
    assert run.result() is None
    (run.checkpoints / "step-00000009").mkdir(parents=True)
    with pytest.raises(RunFailed, match=rf"`meshrun resume {run.path}`"):
        left(run, {"steps": 9}, ["cannot write x"])


def test_a_stop_that_came_too_late_means_no_later_start(run: RunDirectory):
    run.stop_file.touch()
    left(run, {"steps": 9}, [])
    assert run.result() == {"steps": 9} and not run.stop_file.exists()


@pytest.mark.parametrize(
    ("code", "cure"),
    [
        (errno.ENOSPC, "make room"),
        (errno.EDQUOT, "make room"),
        (errno.EISDIR, "move the directory"),
        (errno.EIO, "see"),
    ],
)
def test_what_the_system_refuses_is_told_with_its_cure(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, code: int, cure: str
):
    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(training, "write_json", refuse)
    with pytest.raises(RunFailed, match=rf"{os.strerror(code)}; {cure}"):
        left(run, {"steps": 9}, [])


@pytest.mark.parametrize("stopped", [True, False])
def test_only_a_training_that_has_reached_its_end_fails_for_a_checkpoint_that_was_due(stopped: bool):
    result = {"run": "runs/a-1", **({"stopped": {}} if stopped else {})}
    trained = Trained(result, *[Rank0()] * 2, unsaved="no room")  # type: ignore[arg-type]
    if stopped:
        refuse_unsaved(trained)
    else:
        with pytest.raises(RunFailed, match="its last checkpoint could not be kept: no room"):
            refuse_unsaved(trained)


def test_a_config_json_that_is_damaged_meanwhile_ends_no_training(run: RunDirectory):
    (run.path / "config.json").write_text("{")
    notes: list[str] = []
    recorder: Any = lambda _, text: notes.append(text)  # noqa: E731
    training._save_config(run, RunConfig("digits"), {}, recorder)
    assert len(notes) == 1 and notes[0].endswith("the training goes on")


def test_the_time_of_a_run_is_that_of_all_its_starts(run: RunDirectory, monkeypatch: pytest.MonkeyPatch):
    first = Leg(0.0, 10.0, "meshrun", "dp=2", 2, 0, 5)
    second = dataclasses.replace(first, began=20.0, seconds=1.0, first_step=5, last_step=6)
    monkeypatch.setattr(training, "legs_of", lambda _: [first])
    assert training._whole_run(run, {"seconds": 10.0, "steps": 5}) == {}
    monkeypatch.setattr(training, "legs_of", lambda _: [first, second])
    whole = training._whole_run(run, {"seconds": 4.0, "steps": 9})
    assert whole["seconds"] == 14.0
    assert [(leg["seconds"], leg["last_step"]) for leg in whole["legs"]] == [(10.0, 5), (4.0, 9)]


def test_ranks_of_our_own_launcher_are_not_torchruns(monkeypatch: pytest.MonkeyPatch):
    world: World = dataclasses.replace(ALONE, source="torchrun")
    monkeypatch.setattr(training, "inherited", dict)
    assert (launcher_of(world, False), launcher_of(world, True)) == ("torchrun", "meshrun")
    monkeypatch.setattr(training, "inherited", lambda: {"SLURM_JOB_ID": "7"})
    assert launcher_of(world, True) == "meshrun in slurm"


def test_learning_rates_are_scaled_with_the_batch_where_that_is_asked_for(tmp_path: Path):
    result, told = trained(TINY, tmp_path, {}, steps=1, batch=8, scale_lr=True)
    assert [event["lr"] for event in told if event["kind"] == "step"] == [0.2], "of 0.1 for batches of 4"
    assert 0 < result["seconds"] < 600
    assert not (Path(result["run"]) / "tensorboard").exists(), "it was not wanted"


def test_a_trainer_gets_what_was_asked_for_each_in_its_place(run: RunDirectory, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(training, "Trainer", lambda *_, **given: SimpleNamespace(**given))
    monkeypatch.setattr(training.mesh, "start", lambda: SimpleNamespace(world=dataclasses.replace(ALONE, attempt=3)))
    config = RunConfig("digits", keep=5, mtbf=7.0, on_nan="skip", on_spike="warn", spike=9.0, timeout=11.0, workers=2)
    nobody: Any = None
    for spare in (True, False):
        asked = dataclasses.replace(config, spare=spare)
        found: Any = training._trainer(asked, run, nobody, 2.0, nobody, run.path / "memory", nobody)
        assert found.keeping.memory == (run.path / "memory" if spare else None)
    assert (found.keeping.folder, found.keeping.keep, found.keeping.mtbf) == (run.checkpoints, 5, 7.0)
    assert (found.keeping.generation, found.keeping.timeout) == (3, 11.0)
    assert (found.policy.on_nan, found.policy.on_spike, found.policy.spike) == ("skip", "warn", 9.0)
    assert (found.lr_scale, found.workers, found.weights) == (2.0, 2, run.weights)


@pytest.mark.parametrize(
    ("source", "attempt", "env", "again"),
    [
        ("torchrun", 1, {}, True),
        ("torchrun", 0, {}, False),
        ("slurm", 1, {}, False),
        ("slurm", 0, {"SLURM_JOB_ID": "7"}, True),
        ("none", 0, {}, False),
    ],
)
def test_what_was_asked_of_the_start_before_holds_only_where_ranks_were_started_anew(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, source: str, attempt: int, env: dict[str, str], again: bool
):
    def begin_anew(_run: RunDirectory, again: bool) -> None:
        raise ZeroDivisionError(again)

    place = SimpleNamespace(rank=0, world=dataclasses.replace(ALONE, source=source, attempt=attempt))
    monkeypatch.setattr(training, "start_rank", lambda _: place)
    monkeypatch.setattr(training, "begin_anew", begin_anew)
    monkeypatch.setattr(training, "inherited", lambda: env)
    nobody: Any = None
    with pytest.raises(ZeroDivisionError) as begun:
        training.train(RunConfig("digits"), run, nobody, nobody, None, None, nobody)
    assert begun.value.args == (again,)


@pytest.mark.parametrize(
    ("error", "left"),
    [
        (PeerLost("rank 1 lost rank 0"), [False]),
        (KeyboardInterrupt(), [True]),
        (RuntimeError("shapes do not match"), []),
        (Stopped("a rank was told to stop"), None),
    ],
)
def test_a_training_that_is_cut_off_leaves_its_state_and_is_told_of(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, left: list[bool] | None
):
    def train() -> None:
        raise error

    found: list[bool] = []
    monkeypatch.setattr(training, "hear_of_no_reader", lambda: None)
    totals = SimpleNamespace(result=lambda: {"steps": 3})
    trainer: Any = SimpleNamespace(train=train, keeper=SimpleNamespace(leave=found.append), totals=totals)
    ending: Any = SimpleNamespace(begin=lambda _: None, conclude=lambda _: {"step": 3})
    if left is None:
        assert training._trained(trainer, ending, False) == {"stopped": {"step": 3}, "steps": 3}
        return
    with pytest.raises(type(error)):
        training._trained(trainer, ending, False)
    assert found == left

"""Where a training goes on from: memory first, then the newest checkpoint, and never from half a state."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshrun import Here, RunFailed
from meshrun.state.checkpoint import BadCheckpoint, Checkpoint
from meshrun.train import recovery as module
from meshrun.train.interval import Every
from meshrun.train.loop import Trainer
from meshrun.train.recovery import Keeping
from tests.train.small import small


def trainer_in(folder: Path, here: Here, generation: int = 0, memory: Path | None = None) -> Trainer:
    keeping = Keeping(folder, memory, Every(steps=2), keep=100, generation=generation)
    return Trainer(small(24, 8, steps=6), here, keeping=keeping)


def left_in_memory(trainer: Trainer, steps: int) -> None:
    """Trains so many steps and leaves the state of the last one in memory, as a rank that is asked to stop does."""
    for update in trainer.steps():
        if update.step == steps - 1:
            break
    assert trainer.keeper is not None
    trainer.keeper._last_words(frozenset())


def test_only_ranks_that_were_started_anew_look_into_memory(alone: Here, tmp_path: Path):
    memory = tmp_path / "memory"
    trainer_in(tmp_path, alone).train()
    left_in_memory(trainer_in(tmp_path / "other", alone, memory=memory), 5)
    anew = trainer_in(tmp_path, alone, generation=1, memory=memory).resume()
    assert anew is not None and (anew["step"], anew["source"]) == (5, "memory")
    found = trainer_in(tmp_path, alone, generation=0, memory=memory).resume()
    assert found is not None and (found["step"], found["source"]) == (6, "a checkpoint")


def test_state_in_memory_that_lacks_a_tensor_is_passed_over(
    alone: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    memory = tmp_path / "memory"
    trainer_in(tmp_path, alone).train()
    left_in_memory(trainer_in(tmp_path / "other", alone, memory=memory), 5)
    covers = Checkpoint.covers
    monkeypatch.setattr(Checkpoint, "covers", lambda self, name, *box: "bias" not in name and covers(self, name, *box))
    anew = trainer_in(tmp_path, alone, generation=1, memory=memory).resume()
    assert anew is not None and anew["source"] == "a checkpoint"


def test_state_in_memory_that_another_rank_lacks_is_taken_by_none(
    alone: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    memory = tmp_path / "memory"
    trainer_in(tmp_path, alone).train()
    left_in_memory(trainer_in(tmp_path / "other", alone, memory=memory), 5)
    lacking, taken, restore = ["rank 1 lacks a file"], list[int](), module.restore

    def gathered(_: Here, value: object) -> list[object]:
        return [value, lacking.pop()] if value == "" and lacking else [value]

    def noted(trainer: Trainer, checkpoint: Checkpoint) -> None:
        taken.append(checkpoint.step)
        restore(trainer, checkpoint)

    monkeypatch.setattr(Here, "gathered", gathered)
    monkeypatch.setattr(module, "restore", noted)
    anew = trainer_in(tmp_path, alone, generation=1, memory=memory).resume()
    assert anew is not None and (anew["step"], taken) == (4, [4]), "the one before it, which nobody lacks"


def test_a_state_that_was_put_back_in_part_ends_the_run(alone: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    memory = tmp_path / "memory"
    left_in_memory(trainer_in(tmp_path / "other", alone, memory=memory), 5)

    def half(_: Trainer, checkpoint: Checkpoint) -> None:
        raise BadCheckpoint(f"step {checkpoint.step} is damaged")

    monkeypatch.setattr(module, "restore", half)
    with pytest.raises(RunFailed, match=r"could not be put together again: step \d is damaged"):
        trainer_in(tmp_path, alone, generation=1, memory=memory).resume()


def test_going_back_takes_the_newest_checkpoint_that_is_old_enough_and_whole(alone: Here, tmp_path: Path):
    trainer = trainer_in(tmp_path, alone)
    trainer.train()
    assert trainer.keeper is not None
    recovery = trainer.keeper.recovery
    assert [recovery.go_back(before) for before in (6, 5, 4, 3, 2)] == [6, 4, 4, 2, 2]
    (tmp_path / "step-00000004/manifest.json").write_text("{}")
    assert recovery.go_back(5) == 2
    with pytest.raises(RunFailed, match="no checkpoint of step 1 or before"):
        recovery.go_back(1)

"""Checkpoints of a run by their folders: which is the newest, the best, the one of a step."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest

from meshrun.cli.export import Form, export_command
from meshrun.cli.inspect import inspect_command
from meshrun.errors import RunFailed, UserError
from meshrun.state import catalog
from meshrun.state.checkpoint import Checkpoint

from .places import numbers, saved


@pytest.fixture
def three(tmp_path: Path) -> Path:
    """Checkpoints of steps 5, 9 and 12, of which step 9 was the best when the last was made."""
    for step in (5, 9, 12):
        saved(tmp_path / "checkpoints", {"model/w": numbers(2)}, step, {"best": {"step": 9, "loss": 0.5}})
    return tmp_path


def test_folders_are_in_the_order_of_their_steps_however_long_their_numbers_are(tmp_path: Path):
    for name in ("step-100000000", "step-99999999", "step-00000007", "step-00000007.10", "step-00000007.9"):
        (tmp_path / name).mkdir()
    for other in ("step-1", ".partial-step-00000001", "step-00000001x", "notes"):
        (tmp_path / other).mkdir()
    assert [path.name for path in catalog.named(tmp_path)] == [
        "step-00000007",
        "step-00000007.9",
        "step-00000007.10",
        "step-99999999",
        "step-100000000",
    ]
    assert catalog.named(tmp_path / "none") == []


def test_a_checkpoint_is_found_by_run_folder_or_step(three: Path):
    folder = three / "checkpoints"
    assert catalog.find(three).name == catalog.find(folder).name == "step-00000012"
    assert catalog.find(three, 9) == folder / "step-00000009"
    assert catalog.find(folder / "step-00000005") == folder / "step-00000005"
    assert catalog.newest(folder) == folder / "step-00000012"
    with pytest.raises(UserError, match=r"no checkpoint of step 7; it has steps 5, 9, 12 \(--step\)"):
        catalog.find(three, 7)


def test_the_best_is_that_of_the_last_one_s_scores(three: Path):
    assert catalog.best(three).name == "step-00000009"
    saved(three / "checkpoints", {"w": numbers(2)}, 13, {"best": None})
    with pytest.raises(UserError, match="has not been evaluated"):
        catalog.best(three)


def test_a_damaged_checkpoint_is_set_aside_beside_an_earlier_one(three: Path):
    path = three / "checkpoints/step-00000009"
    for name in (".damaged-step-00000009", ".damaged-step-00000009.1", ".damaged-step-00000009.2"):
        aside = catalog.set_aside(path)
        assert aside.name == name and not path.exists() and (aside / "manifest.json").exists()
        shutil.copytree(aside, path)


def test_pruning_spares_the_newest_and_the_best_alone(three: Path):
    folder = three / "checkpoints"
    assert [path.name for path in catalog.prune(folder, 1, 9)] == ["step-00000005"]
    assert [path.name for path in catalog.prune(folder, 0, None)] == ["step-00000009"]
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000012"]


def test_a_second_checkpoint_of_a_step_has_a_name_of_its_own(three: Path):
    assert catalog.free_name(three / "checkpoints", 9).name == "step-00000009.1"
    assert catalog.free_name(three / "checkpoints", 10).name == "step-00000010"


def test_a_checkpoint_that_is_being_deleted_is_none_from_the_first_moment(three: Path, monkeypatch: pytest.MonkeyPatch):
    folder = three / "checkpoints"
    monkeypatch.setattr(catalog.shutil, "rmtree", lambda *_, **__: None)  # it is cut off before the first file
    catalog.discard(folder / "step-00000012")
    assert catalog.newest(folder) == folder / "step-00000009"
    monkeypatch.undo()
    catalog.remove_partial(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000005", "step-00000009"]


def test_of_two_saves_of_the_best_step_the_later_one_is_spared(three: Path):
    folder = three / "checkpoints"
    assert saved(folder, {"w": numbers(2)}, 9).path.name == "step-00000009.1"
    assert [path.name for path in catalog.prune(folder, 1, 9)] == ["step-00000005", "step-00000009"]


def test_a_checkpoint_is_found_under_any_name(three: Path, tmp_path: Path):
    shutil.copytree(three / "checkpoints/step-00000009", tmp_path / "to-keep")
    assert catalog.find(tmp_path / "to-keep") == tmp_path / "to-keep"


def test_what_a_deletion_that_was_cut_off_has_left_is_in_nobody_s_way(three: Path):
    folder = three / "checkpoints"
    left = folder / ".partial-gone-step-00000012"
    left.mkdir()
    (left / "rank-00000.safetensors").write_bytes(b"half")
    catalog.discard(folder / "step-00000012")
    assert not left.exists() and catalog.newest(folder) == folder / "step-00000009"


def test_a_score_that_names_no_step_makes_no_checkpoint_the_best(three: Path):
    saved(three / "checkpoints", {"w": numbers(2)}, 13, {"best": {"loss": 0.5}})
    with pytest.raises(UserError, match="has not been evaluated"):
        catalog.best(three)


@pytest.mark.parametrize(
    "command",
    [lambda run: inspect_command(run, None, True), lambda run: export_command(run, Form.SAFETENSORS, run / "out")],
)
@pytest.mark.parametrize("after_opening", [False, True])
def test_a_checkpoint_that_its_run_deletes_while_it_is_read_is_not_called_damaged(
    three: Path, command: Callable[[Path], int], after_opening: bool
):
    opened = Checkpoint.open

    def pruned(folder: Path) -> Checkpoint:
        checkpoint = opened(folder) if after_opening else None
        catalog.discard(folder)
        return checkpoint or opened(folder)

    with (
        mock.patch.object(Checkpoint, "open", pruned),
        pytest.raises(RunFailed, match="step-00000012 was deleted while it was read: its run goes on"),
    ):
        command(three)
    assert command(three) == 0


def test_a_checkpoint_that_is_not_there_is_refused_as_what_was_typed(three: Path):
    with pytest.raises(UserError, match="step-00000013 does not exist; give a run directory"):
        catalog.find(three / "checkpoints" / "step-00000013")

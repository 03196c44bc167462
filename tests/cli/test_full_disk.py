"""A run whose directory is on a disk that takes nothing more, for a while or to its end; and one that is deleted."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from safetensors import safe_open

from meshrun.check.disk import Disk, can_mount
from meshrun.cli import training
from meshrun.config import RunConfig, RunDirectory
from meshrun.errors import RunFailed
from meshrun.observe.pulse import PulseView
from meshrun.state.saver import Saver
from tests.cli import in_process
from tests.launch.command import events, meshrun, started

PROGRAM = str(Path(__file__).parent / "programs" / "on_disk.py")
STEPS = 40
RUN = (PROGRAM, "--procs", 2, "--steps", STEPS, "--eval-every", 2, "--checkpoint", 2, "--hang-after", 300)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    if not can_mount():
        pytest.skip("needs the right to mount file systems")
    disk = Disk(tmp_path / "runs")
    disk.mount()
    yield disk
    disk.close()


def until(condition: Callable[[], object]) -> None:
    give_up = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.02)


def reading(run: Path, launcher: int) -> int:
    """The last step that rank 0 has finished, which it shows in memory."""
    view = PulseView.open(RunDirectory(run).memory_of(launcher), 0)
    return view.read().last if view is not None else 0


def about(weights: Path) -> dict[str, object]:
    with safe_open(weights, framework="pt") as file:
        found: dict[str, object] = json.loads(file.metadata()["about"])
    return found


@pytest.mark.parametrize("fails", [Disk.fill, Disk.protect])
def test_a_disk_that_fails_for_a_while_costs_the_run_nothing(tmp_path: Path, disk: Disk, fails: Callable[[Disk], None]):
    run = disk.folder / "on_disk-1"
    (tmp_path / "gate-6").touch()
    (tmp_path / "gate-20").touch()
    process = started(tmp_path, "run", *RUN)
    until(lambda: len(events(run, 0, "step")) >= 5)
    fails(disk)
    (tmp_path / "gate-6").unlink()
    until(lambda: reading(run, process.pid) >= 19)
    disk.heal()
    (tmp_path / "gate-20").unlink()
    _, err = process.communicate(timeout=90)
    assert process.returncode == 0, err
    told = err.count("cannot write runs/on_disk-1/events/rank-00000.jsonl: No space left on device; the run goes on")
    assert told == (fails is Disk.fill), "what is open can be written to on a read-only disk"
    for rank in (0, 1):
        assert [event["step"] for event in events(run, rank, "step")] == list(range(1, STEPS + 1))
    notes = [event["text"] for event in events(run, 0, "note")]
    (refused,) = [text for text in notes if "best.safetensors" in text]
    assert "the training goes on" in refused
    saves = events(run, 0, "checkpoint")
    assert any(event["error"] for event in saves) and saves[-1]["error"] is None
    result = json.loads((run / "result.json").read_text())
    assert about(run / "weights" / "best.safetensors")["step"] == result["best"]["step"] == STEPS
    assert (run / "report.html").is_file() and (run / "checkpoints" / f"step-{STEPS:08d}").is_dir()


def test_a_disk_that_is_full_to_the_end_is_named_and_the_run_goes_on_when_there_is_room(tmp_path: Path, disk: Disk):
    run = disk.folder / "on_disk-1"
    (tmp_path / "gate-6").touch()
    process = started(tmp_path, "run", *RUN)
    until(lambda: len(events(run, 0, "step")) >= 5 and (run / "checkpoints" / "step-00000004").is_dir())
    disk.fill()
    (tmp_path / "gate-6").unlink()
    _, err = process.communicate(timeout=90)
    assert process.returncode == 1
    assert "the training has ended, but not all of it is kept: cannot write" in err
    assert "last.safetensors: No space left on device; make room and `meshrun resume runs/on_disk-1`" in err
    assert not (run / "result.json").exists()
    disk.heal()
    ended = meshrun(tmp_path, "resume", "runs/on_disk-1", "--json")
    assert ended.status == 0 and ended.document["steps"] == STEPS, ended.err


def test_a_run_directory_that_is_deleted_is_named(tmp_path: Path):
    run = tmp_path / "runs" / "on_disk-1"
    (tmp_path / "gate-6").touch()
    process = started(tmp_path, "run", *RUN, "--pause", 0.2)
    until(lambda: len(events(run, 0, "step")) >= 5)
    shutil.rmtree(run, ignore_errors=True)
    (tmp_path / "gate-6").unlink()
    _, err = process.communicate(timeout=90)
    assert process.returncode == 1
    assert "meshrun: runs/on_disk-1 was deleted, moved or unmounted while the run trained (step " in err


@pytest.mark.ranks(1)
def test_a_run_that_could_not_keep_its_last_checkpoint_says_so_and_fails(tmp_path: Path):
    why = "the parts of step 4 do not fit together"
    with (
        mock.patch.object(Saver, "_written", lambda *_: why),
        pytest.raises(RunFailed, match=f"but its last checkpoint could not be kept: {why}") as failed,
    ):
        in_process.trained(PROGRAM, tmp_path, {}, steps=4)
    run = tmp_path / "on_disk-1"
    assert f"its weights and result are in {run}" in str(failed.value)
    assert json.loads((run / "result.json").read_text())["steps"] == 4


@pytest.mark.ranks(1)
def test_a_run_that_keeps_no_checkpoints_does_not_miss_one(tmp_path: Path):
    result, _ = in_process.trained(PROGRAM, tmp_path, {}, steps=4, checkpoint="none")
    assert result["steps"] == 4


@pytest.mark.ranks(1)
@pytest.mark.parametrize(("checkpoint", "flag"), [("1", ""), ("none", " --from-start")])
def test_a_directory_in_place_of_the_result_is_named_and_not_taken_for_a_full_disk(
    tmp_path: Path, checkpoint: str, flag: str
):
    real = RunDirectory.create.__func__

    def created(cls: type[RunDirectory], config: RunConfig) -> RunDirectory:
        run: RunDirectory = real(cls, config)
        (run.path / "result.json").mkdir()
        return run

    with (
        mock.patch.object(RunDirectory, "create", classmethod(created)),
        pytest.raises(
            RunFailed,
            match=f"result.json: Is a directory; move the directory that is in its place and `mesh.*-1{flag}`$",
        ),
    ):
        in_process.trained(PROGRAM, tmp_path, {}, steps=2, checkpoint=checkpoint)


@pytest.mark.ranks(1)
def test_a_config_that_is_damaged_while_the_run_trains_does_not_cost_its_result(tmp_path: Path):
    real, config = training._trained, tmp_path / "on_disk-1" / "config.json"

    def damaged(*args: Any) -> dict[str, Any]:
        config.write_text("{")
        return real(*args)

    with mock.patch.object(training, "_trained", damaged):
        result, told = in_process.trained(PROGRAM, tmp_path, {}, steps=2)
    assert result["steps"] == json.loads((config.parent / "result.json").read_text())["steps"] == 2
    (note,) = [event["text"] for event in told if event["kind"] == "note" and "config.json" in event["text"]]
    assert note.endswith("; the training goes on")

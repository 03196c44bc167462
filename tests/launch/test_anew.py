"""A command that is started anew goes on in the run that it had; any other one begins its own."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from meshrun.config import RunConfig, RunDirectory
from meshrun.launch.anew import FOLDER, run_of
from meshrun.world import detect


def started(runs: Path, env: dict[str, str], **options: object) -> str:
    config = RunConfig("digits", runs=runs, **options)  # type: ignore[arg-type]
    return run_of(config, detect(env), env).path.name


JOB = {"SLURM_JOB_ID": "77"}
STEP = {
    **JOB,
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "0",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_NODEID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_NODELIST": "n[1-2]",
}


def again(env: dict[str, str], count: int) -> dict[str, str]:
    return {**env, "SLURM_RESTART_COUNT": str(count)}


@pytest.mark.parametrize("env", [JOB, STEP])
def test_a_job_that_slurm_starts_anew_goes_on_in_its_run_again_and_again(tmp_path: Path, env: dict[str, str]):
    assert started(tmp_path, env) == "digits-1"
    assert [started(tmp_path, again(env, count)) for count in (1, 2)] == ["digits-1", "digits-1"]


def test_what_has_other_options_another_step_or_another_job_is_another_run(tmp_path: Path):
    assert started(tmp_path, STEP) == "digits-1"
    assert started(tmp_path, again(STEP, 1), steps=7) == "digits-2"
    assert started(tmp_path, again({**STEP, "SLURM_STEP_ID": "1"}, 1)) == "digits-3"
    assert started(tmp_path, again({**STEP, "SLURM_JOB_ID": "78"}, 1)) == "digits-4"
    assert started(tmp_path, again(STEP, 1)) == "digits-1"


def test_the_same_command_twice_in_one_job_makes_two_runs(tmp_path: Path):
    assert [started(tmp_path, JOB) for _ in range(2)] == ["digits-1", "digits-2"]
    assert [started(tmp_path, again(JOB, 1)) for _ in range(2)] == ["digits-2", "digits-3"]


def test_a_job_whose_name_is_no_unicode_has_a_run(tmp_path: Path):
    job = {**STEP, "SLURM_JOB_ID": "caf\udce9"}
    assert [started(tmp_path, each) for each in (job, again(job, 1))] == ["digits-1", "digits-1"]


def test_outside_of_jobs_every_start_is_a_run_of_its_own(tmp_path: Path):
    assert [started(tmp_path, {}) for _ in range(2)] == ["digits-1", "digits-2"]
    assert not (tmp_path / FOLDER).exists()


def test_ranks_that_torchrun_starts_anew_go_on_in_their_run(tmp_path: Path):
    env = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "x"}
    env |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    assert [started(tmp_path, {**env, "TORCHELASTIC_RESTART_COUNT": str(count)}) for count in (0, 1, 2)] == [
        "digits-1"
    ] * 3
    assert started(tmp_path, {**env, "TORCHELASTIC_RESTART_COUNT": "0"}) == "digits-2"


def test_a_run_that_was_removed_is_made_anew(tmp_path: Path):
    started(tmp_path, JOB)
    (tmp_path / "digits-1/config.json").unlink()
    assert started(tmp_path, again(JOB, 1)) == "digits-2"


def test_the_words_of_the_command_do_not_make_another_run(tmp_path: Path):
    assert started(tmp_path, JOB, command=("meshrun", "run", "digits")) == "digits-1"
    assert started(tmp_path, again(JOB, 1), command=("meshrun", "run", "./digits.py")) == "digits-1"


def test_notes_are_for_this_user_alone_whatever_the_umask(tmp_path: Path):
    before = os.umask(0)
    try:
        started(tmp_path, JOB)
    finally:
        os.umask(before)
    (note,) = (tmp_path / FOLDER).iterdir()
    assert [each.stat().st_mode & 0o777 for each in (note.parent, note)] == [0o700, 0o600]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make files of others")
@pytest.mark.parametrize("foreign", ["note", "run", "link"])
def test_a_note_or_a_run_of_another_user_is_not_gone_on_with(tmp_path: Path, foreign: str):
    """Where all may write to the folder of runs: the config.json that a note names decides what is executed."""
    theirs = RunDirectory.create(RunConfig("evil.py", runs=tmp_path / "theirs"))
    assert started(tmp_path, JOB) == "digits-1"
    (note,) = (tmp_path / FOLDER).iterdir()
    note.write_text(json.dumps({"run": str(theirs.path), "start": 0}))
    if foreign == "link":
        note.rename(tmp_path / "note")
        note.symlink_to(tmp_path / "note")
    else:
        os.chown(note if foreign == "note" else theirs.path, 12345, -1)
    assert started(tmp_path, again(JOB, 1)) == "digits-2"


def test_what_another_user_has_put_in_the_place_of_the_notes_keeps_nobody_from_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / FOLDER).write_text("not yours")
    assert [started(tmp_path, again(JOB, count)) for count in (0, 1)] == ["digits-1", "digits-2"]
    told = capsys.readouterr().err
    assert told.count(f"meshrun: cannot write in {tmp_path / FOLDER} (") == 2 and "begins anew" in told

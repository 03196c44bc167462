"""What the launcher looks at while there are no ranks, and what a signal leaves behind."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
from rich.console import Console

from meshrun.cli.launcher import _failure_of, _obeyed, _scene, _stopped_in_time, lookout_of, seldom
from meshrun.config import RunConfig, RunDirectory
from meshrun.errors import CutOff, RunFailed
from meshrun.launch.job import Failure, Interrupted
from meshrun.launch.post import Ends
from meshrun.observe.story import Story

STOPPED = {"step": 3, "of": 9, "why": "its time is up", "saved": True}


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(RunConfig(target="digits", runs=tmp_path))


def test_what_ranks_said_before_they_were_started_anew_is_not_why_they_failed_afterwards(run: RunDirectory):
    began, story = [5.0], Story(Console(quiet=True))
    with _scene(RunConfig("digits", cache="none"), run, "node", story, began) as (_, tell):
        tell("note", text="nothing to begin anew for")
        assert began == [5.0]
        tell("restart", sentence="rank 1 was lost; all ranks are started again")
        assert began[0] > 5.0


@pytest.mark.parametrize(("codes", "again"), [((-9, -9), True), ((-9, 1), False)])
def test_another_start_is_worth_it_only_where_all_ranks_that_failed_were_lost(
    run: RunDirectory, tmp_path: Path, codes: tuple[int, ...], again: bool
):
    failures = [Failure(rank, code, 0.0) for rank, code in enumerate(codes)]
    assert isinstance(_failure_of(run, tmp_path, failures, 0.0, run.config()), CutOff) is again


@pytest.mark.parametrize(("began", "drawn"), [(9.0, True), (1.0, False)])
def test_a_start_that_was_refused_does_not_draw_the_report_of_a_finished_run_anew(
    run: RunDirectory, tmp_path: Path, began: float, drawn: bool
):
    (run.path / "result.json").write_text('{"steps": 3}')
    events = [{"kind": "start", "began": began}, {"kind": "resumed", "step": 3}]
    run.events_of(0).write_text("".join(json.dumps({"time": 9.0, **event}) + "\n" for event in events))
    _failure_of(run, tmp_path, [Failure(0, 2, 9.5)], 5.0, run.config())
    assert (run.path / "report.html").exists() is drawn


def test_slurm_is_asked_again_only_after_some_seconds(monkeypatch: pytest.MonkeyPatch):
    clock = iter([100.0, 104.0, 105.0, 105.5, 106.0, 110.0, 0.0])  # an answer takes half a second
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    ask = seldom(lambda: True, 5.0)
    assert [ask() for _ in range(4)] == [False, True, False, False] and next(clock) == 0.0


def test_a_run_without_ranks_sees_the_stop_file(run: RunDirectory):
    look = lookout_of(run, RunConfig("digits"), {})
    assert look() == ""
    run.stop_file.touch()
    assert look() == f"{run.stop_file} was made"


@pytest.mark.parametrize(("left", "over"), [(-1, True), (100, False)])
def test_a_run_without_ranks_sees_the_clock(run: RunDirectory, left: float, over: bool):
    env = {"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": str(int(time.time() + left)), "PATH": os.devnull}
    why = lookout_of(run, RunConfig("digits"), env)()
    assert why.startswith("the job ends in") if over else why == ""


def test_a_stop_file_does_not_outlive_the_start_that_it_was_made_for(run: RunDirectory):
    with pytest.raises(ZeroDivisionError), _obeyed(run):
        run.stop_file.touch()
        raise ZeroDivisionError
    assert not run.stop_file.exists()


@pytest.mark.parametrize("name", ["stopped.json", "result.json"])
def test_what_a_start_before_has_written_is_no_answer_to_a_signal(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, name: str
):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    document = {**STOPPED, "result": {"steps": 3}} if name == "stopped.json" else {"steps": 3}
    (run.path / name).write_text(json.dumps(document))
    os.utime(run.path / name, (1, 1))
    ends = Ends(run)
    with pytest.raises(CutOff, match="stopped by SIGTERM; no state was saved; "):
        _stopped_in_time(run, Interrupted(signal.SIGTERM), ends)
    (run.path / name).write_text(json.dumps(document))
    assert _stopped_in_time(run, Interrupted(signal.SIGTERM), ends) == {"steps": 3}
    with pytest.raises(RunFailed) as ended:
        _stopped_in_time(run, Interrupted(signal.SIGINT), ends)
    assert not isinstance(ended.value, CutOff)


def test_outside_of_jobs_a_run_that_stopped_in_time_when_asked_to_has_done_so(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    ends = Ends(run)
    run.stopped_file.write_text(json.dumps({**STOPPED, "result": {"steps": 3}}))
    assert _stopped_in_time(run, Interrupted(signal.SIGUSR2), ends) == {"steps": 3}
    with pytest.raises(RunFailed, match="stopped by SIGTERM"):
        _stopped_in_time(run, Interrupted(signal.SIGTERM), ends)

"""What the launcher looks at while there are no ranks, and what a signal leaves behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from meshrun.cli import launcher
from meshrun.cli.command import Asked
from meshrun.cli.launcher import (
    ANSWER_WITHIN,
    NOT_AGAIN,
    RESTARTS,
    Watching,
    _failure_of,
    _job,
    _obeyed,
    _scene,
    _stopped_in_time,
    as_agent,
    lead,
    lookout_of,
    seldom,
    wanted_of,
)
from meshrun.cli.target import find
from meshrun.config import RunConfig, RunDirectory
from meshrun.errors import CutOff, RunFailed, SharedError, UserError
from meshrun.launch.job import Failure, Interrupted, Job, Verdict
from meshrun.launch.post import Ends
from meshrun.observe.hang import Finding
from meshrun.observe.story import Story
from meshrun.world import World
from tests.launch.command import SCRIPT

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


@pytest.mark.parametrize(("target", "restarts"), [("digits", RESTARTS), (SCRIPT, 0)])
def test_a_plain_script_is_started_again_only_where_that_is_asked_for(
    run: RunDirectory, tmp_path: Path, target: str, restarts: int
):
    for asked, made in ((None, restarts), (2, 2)):
        config = RunConfig(target, restarts=asked)
        assert _job(config, run, tmp_path, 2).restarts == made
        failed = _failure_of(run, tmp_path, [Failure(0, -9, 0.0)], 0.0, config)
        assert (NOT_AGAIN in str(failed)) == (target == SCRIPT and asked is None)
        assert NOT_AGAIN not in str(_failure_of(run, tmp_path, [Failure(0, 1, 0.0)], 0.0, config)), (
            "it would fail again"
        )


@pytest.mark.parametrize(
    ("nodes", "there", "found"),
    [("2", 2, (2, 2, 2)), ("1:2", 3, (1, 2, 2)), ("1:4", 3, (1, 4, 3)), ("1", 3, (1, 3, 3))],
)
def test_nodes_are_expected_as_many_as_have_come_and_the_run_takes(nodes: str, there: int, found: tuple[int, int, int]):
    wanted = wanted_of(RunConfig("digits", nodes=nodes), World(0, there, 0, 1, 0, there, "n1", "slurm"))
    assert (wanted.least, wanted.most, wanted.expected) == found


def test_more_nodes_than_have_come_are_refused():
    with pytest.raises(SharedError, match="nodes is 3 but slurm has started this on 2 nodes"):
        wanted_of(RunConfig("digits", nodes="3"), World(0, 2, 0, 1, 0, 2, "n1", "slurm"))


@pytest.mark.parametrize("why", [RunFailed("lost"), KeyboardInterrupt(), None])
def test_other_nodes_hear_that_the_first_one_has_given_up_however_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: BaseException | None
):
    said: list[str] = []

    def lead(*_: object) -> dict[str, Any]:
        if why is not None:
            raise why
        return {}

    monkeypatch.setattr(launcher, "lead", lead)
    for name in ("begin", "give_up", "close_hub"):
        monkeypatch.setattr(launcher.agents, name, lambda *_, name=name: said.append(name))
    asked: Any = SimpleNamespace(config=RunConfig("digits", runs=tmp_path), run=None)
    wanted: Any = None
    with pytest.raises(type(why)) if why is not None else contextlib.nullcontext():
        as_agent(asked, World(0, 2, 0, 1, 0, 2, "n1", "slurm"), wanted, None, lambda: None)
    assert said == ["begin", "give_up" if why is not None else "close_hub"]


@pytest.mark.parametrize(("began", "drawn"), [(9.0, True), (1.0, False)])
def test_a_start_that_was_refused_does_not_draw_the_report_of_a_finished_run_anew(
    run: RunDirectory, tmp_path: Path, began: float, drawn: bool
):
    (run.path / "result.json").write_text('{"steps": 3}')
    events = [{"kind": "start", "began": began}, {"kind": "resumed", "step": 3}]
    run.events_of(0).write_text("".join(json.dumps({"time": 9.0, **event}) + "\n" for event in events))
    _failure_of(run, tmp_path, [Failure(0, 2, 9.5)], 5.0, run.config())
    assert (run.path / "report.html").exists() is drawn


@pytest.mark.parametrize(
    ("target", "several", "hang_after", "action"),
    [
        ("digits", True, None, "end"),
        (SCRIPT, False, None, "report"),
        (SCRIPT, False, 5.0, "end"),
        (SCRIPT, True, 5.0, "report"),
    ],
)
def test_a_script_is_ended_for_a_hang_only_where_that_was_asked_for_and_no_other_node_may_be_at_work(
    run: RunDirectory, tmp_path: Path, target: str, several: bool, hang_after: float | None, action: str
):
    config = RunConfig(target, on_hang="end", hang_after=hang_after)
    watching = Watching(tmp_path, run, config, lambda *_, **__: None, several)
    watching._watcher.look = lambda: Finding(1, "rank 1 hangs")  # type: ignore[method-assign]
    assert watching.look() == Verdict(1, "rank 1 hangs", action)  # type: ignore[arg-type]


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


def test_a_run_without_ranks_stops_in_time_for_what_comes_after_it(run: RunDirectory, monkeypatch: pytest.MonkeyPatch):
    clock = [1000.0]
    monkeypatch.setattr(time, "time", lambda: clock[0])
    look = lookout_of(run, RunConfig("digits", deadline="100s"), {})
    clock[0] += 90
    assert look() == ""
    clock[0] += 5
    assert look() == "the deadline is in 5 s"


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


@pytest.mark.parametrize("as_json", [True, False])
def test_a_run_is_launched_as_asked_and_begins_without_what_a_start_before_has_left(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, as_json: bool
):
    run.stopped_file.write_text("{}")
    run.stop_file.touch()
    jobs: list[Job] = []

    def launch(job: Job, *_: object) -> list[Failure]:
        assert not run.stopped_file.exists(), "a signal now would seem to have been obeyed"
        jobs.append(job)
        (run.path / "result.json").write_text('{"steps": 3}')
        return []

    prints: list[object] = []
    monkeypatch.setattr(launcher, "Story", lambda _, out: Story(Console(quiet=True), prints.append(out)))
    monkeypatch.setattr(launcher, "launch", launch)
    config = RunConfig("digits", procs=2, timeout=7.0, cache="none", device="cpu")
    asked: Any = Asked(find("digits"), config, as_json, run=run, document=run.document())
    assert lead(asked, None, wanted_of(config), lambda *_: None) == {"steps": 3}
    assert [(job.ranks, job.saving) for job in jobs] == [(2, 7.0)]
    assert not run.stop_file.exists() and run.config().procs == 2
    assert prints == [None if as_json else sys.stdout], "which is kept for the document"


def test_a_limit_that_was_extended_is_asked_for_before_a_run_without_ranks_stops(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
):
    waited: list[float] = []
    deadline = SimpleNamespace(slack=0.0, end=time.time() - 5, why="the job ends", ask_while_unknown=lambda: None)
    deadline.ask, deadline.wait = lambda: None, waited.append
    monkeypatch.setattr(launcher, "deadline_of", lambda *_: deadline)
    look = lookout_of(run, RunConfig("digits"), {})
    assert look() == "the job ends"
    deadline.ask = lambda: setattr(deadline, "end", time.time() + 60)
    assert look() == "" and waited == [ANSWER_WITHIN] * 2


@pytest.mark.parametrize(
    ("error", "is_orphan", "said"),
    [
        (RunFailed("n1 is lost"), True, "meshrun: n1 is lost\nmeshrun: the job is queued again\n"),
        (RunFailed("n1 is lost"), False, "meshrun: n1 is lost\n"),
        (UserError("no such folder"), True, "meshrun: no such folder\n"),
        (SharedError("no such disk"), True, ""),
        (RunFailed(""), False, ""),
    ],
)
def test_a_job_goes_back_into_the_queue_only_where_it_has_lost_its_first_node(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: Exception,
    is_orphan: bool,
    said: str,
):
    def find_hub(*_: object) -> None:
        raise error

    excused: list[str] = []
    orphan = SimpleNamespace(is_one=lambda: is_orphan, requeue=lambda: "the job is queued again")
    monkeypatch.setattr(launcher, "_orphan", lambda _: orphan)
    monkeypatch.setattr(launcher.agents, "find_hub", find_hub)
    monkeypatch.setattr(launcher.agents, "excuse", lambda _world, _runs, why: excused.append(why))
    asked: Any = SimpleNamespace(config=RunConfig("digits", procs=1, runs=tmp_path), run=None)
    with pytest.raises(type(error), match=r"^$"):
        as_agent(asked, World(1, 2, 0, 1, 1, 2, "n2", "slurm"), wanted_of(asked.config), None, lambda: None)
    assert capsys.readouterr().err == said
    assert excused == ([str(error)] if isinstance(error, SharedError) else [])

"""What is said of a submitted run: where its job stands, and how it ended, from what it has left behind."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from meshrun.cli import following, listing
from meshrun.cli.following import TAIL, described, ended, follow, tail, watch
from meshrun.cli.listing import adopted, rows
from meshrun.config import RunConfig, RunDirectory, write_json
from meshrun.errors import RunFailed, UserError
from meshrun.launch.chain import Link, Record
from meshrun.launch.slurm import Job, Slurm
from meshrun.launch.submission import Element, Resources, Submission

JOB = Job("7", "7", "RUNNING", "None", "1:00", "2:00", "2026-11-15T12:00:00", 2, "n[1-2]", Path("/runs/a-1/job.sh"))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return RunDirectory.create(RunConfig(target="digits", runs=tmp_path)).path


def recorded(run: Path, what: str = "", sentence: str = "", status: int = 0, links: int = 1) -> Record:
    """The record of job 7, whose only link is over if it is said what was decided."""
    asked = Resources(nodes=2, gpus_per_node=1, procs=1, seconds=3600)
    submission = Submission(run.name, run, ("meshrun",), "/usr/bin/python3", asked, links=links)
    over = (Link("7", status, 5, what, sentence),) if what else ()
    record = Record(submission, ("7",), links=over, ended=sentence)
    record.save(run)
    return record


def log(run: Path, text: str) -> None:
    (run / "logs" / "slurm-7.out").write_text(text)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({}, "job 7 is running on n[1-2]"),
        ({"state": "COMPLETED"}, "job 7 is completed"),
        (
            {"state": "PENDING", "reason": "Resources", "hosts": ""},
            "job 7 is pending: it is next, once enough nodes are free; "
            "Slurm expects it to start at 2026-11-15 12:00:00",
        ),
        (
            {"state": "PENDING", "reason": "Priority", "start": "N/A", "shown": "7_1"},
            "job 7_1 is pending: jobs of a higher priority are before it",
        ),
    ],
)
def test_where_a_job_stands_is_a_line(changes: dict[str, Any], line: str):
    assert described(replace(JOB, **changes)) == line


def test_a_complete_run_has_its_result(run: Path):
    record = recorded(run, "complete", "the training is complete")
    write_json(run / "result.json", {"steps": 1200, "losses": [1.0]})
    end = ended(run, record, None)
    assert (end.state, end.status) == ("complete", 0)
    assert end.sentence == f"complete after 1,200 steps; report: {run}/report.html"
    assert end.document()["losses"] == [1.0] and "error" not in end.document()


def test_a_run_that_stopped_in_time_has_done_what_it_was_asked_to(run: Path):
    record = recorded(run, "over", "stopped after step 5 of 10, since the job ends in 6 s")
    stopped = {"step": 5, "of": 10, "why": "the job ends in 6 s", "saved": True, "result": {"steps": 5}}
    write_json(run / "stopped.json", stopped)
    end = ended(run, record, None)
    assert (end.state, end.status, end.result) == ("stopped", 0, {"steps": 5})
    # A chain was to reach the end, and has not.
    assert ended(run, recorded(run, "over", "all 3 links are used", links=3), None).status == 1


def test_the_first_error_of_any_rank_is_what_is_said_last(run: Path):
    chain = "the training failed with exit status 1"
    record = recorded(run, "failed", chain, status=1)
    failed = "meshrun: rank 3 on n2 failed: ValueError: x\n    /home/me/a b.py:7 in f: g()\n    log: rank-00003.log\n"
    log(run, f"srun: error\n{failed}srun: task 1 ended\nmeshrun: {chain}\n")
    end, path = ended(run, record, None), run / "logs" / "slurm-7.out"
    assert (end.state, end.status, end.explained) == ("failed", 1, True)
    assert tail(end) == path.read_text().splitlines()
    assert end.sentence == f"rank 3 on n2 failed: ValueError: x (a b.py:7); log: {path}"
    log(run, "nothing of ours\n")
    end = ended(run, record, None)
    assert (end.sentence, end.explained) == (f"{chain}; log: {path}", False)
    log(run, "\n".join(map(str, range(100))))
    assert tail(end) == [str(number) for number in range(100 - TAIL, 100)]


def test_what_an_earlier_link_of_a_requeued_job_said_is_not_why_the_last_one_failed(run: Path):
    record = recorded(run, "failed", "the training failed with exit status 3, so no further link follows", links=5)
    first = Link("7", 75, 3, "next", "cut off with all of step 3 saved (exit status 75); link 2 of at most 5 goes on")
    record = replace(record, links=(first, *record.links))
    log(run, f"meshrun: n2 is lost\nmeshrun: {first.sentence}: job 7 is back in the queue\nmeshrun: {record.ended}\n")
    assert ended(run, record, None).sentence.startswith("the training failed with exit status 3, ")


def test_a_stopped_run_that_was_brought_to_its_end_by_hand_is_complete(run: Path):
    record = recorded(run, "over", "stopped after step 5 of 10, since somebody made stop; sbatch job.sh goes on")
    directory = RunDirectory(run)
    directory.save_config(directory.config(), {"steps": 10})
    write_json(run / "result.json", {"steps": 5})
    assert ended(run, record, None).state == "failed", "it was longer then"
    write_json(run / "result.json", {"steps": 10, "eval": {"val": {"loss": 1.25, "count": 9}}})
    end = ended(run, record, None)
    assert (end.state, end.status) == ("complete", 0)
    assert end.sentence == f"complete after 10 steps, val loss 1.2500; report: {run}/report.html"


@pytest.mark.parametrize("by_us", [True, False])
def test_a_cancelled_run_is_cancelled_though_it_had_the_time_to_save(run: Path, by_us: bool):
    record = recorded(run, "cancelled", "the job was cancelled")
    write_json(run / "stopped.json", {"step": 5, "of": 10, "why": "it got SIGTERM", "by": "signal", "saved": True})
    end = ended(run, replace(record, cancelled=by_us), None)
    assert (end.state, end.status, end.sentence) == ("cancelled", 1, "job 7 was cancelled")


def test_a_chain_that_a_person_stopped_has_stopped(run: Path):
    record = recorded(run, "over", "stopped after step 5 of 10, since stop was made", links=5)
    stopped = {"step": 5, "of": 10, "why": "stop was made", "by": "user", "saved": True}
    write_json(run / "stopped.json", stopped)
    assert (ended(run, record, None).state, ended(run, record, None).status) == ("stopped", 0)
    write_json(run / "stopped.json", {**stopped, "by": "clock"})
    assert ended(run, record, None).status == 1


def test_the_runs_of_a_sweep_say_what_they_have_of_their_own(run: Path):
    record = recorded(run, "complete", "the training is complete")
    sweep = (Element(run, "lr=1e-3"), Element(run, "lr=3e-4"))
    record = replace(record, submission=replace(record.submission, sweep=sweep), index=1, jobs=("7_1",))
    record.save(run)
    write_json(run / "result.json", {"steps": 3})
    end = ended(run, record, None)
    assert end.line().startswith(f"{run} (lr=3e-4): complete after 3 steps; ") and end.document()["values"] == "lr=3e-4"
    (row,) = rows(Slurm(lambda argv, _env: subprocess.CompletedProcess(argv, 0, "", "")), run.parent)
    assert row.values == "lr=3e-4" and "  lr=3e-4" in row.line()


@pytest.mark.parametrize("number", ["1" * 5000, "\u0663", "../7", "", "7\n", "--me"])
def test_a_job_whose_number_no_slurm_gives_is_refused(run: Path, number: str):
    record = recorded(run, "complete", "the training is complete")
    replace(record, jobs=("7", number)).save(run)
    with pytest.raises(UserError, match=r"submission\.json cannot be read: it names the job .*Slurm gives to none"):
        Record.load(run)


def test_a_damaged_run_of_another_keeps_nobody_from_finding_a_job_by_its_number(run: Path):
    record = recorded(run)
    for path in (run.parent / "a-1", run.parent / "z-1"):
        path.mkdir()
        (path / "submission.json").write_text("{")
    knows_no_job = Slurm(lambda argv, _env: subprocess.CompletedProcess(argv, 0, "", ""))
    assert listing.found_run(knows_no_job, "7", run.parent) == run and Record.load(run) == record


def test_it_is_told_why_a_link_ended_and_which_one_comes(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    over = Link("7", 0, 5, "next", "stopped after step 5 of 10, since the job ends in 6 s; link 2 of at most 5 goes on")
    begun = recorded(run, links=5)
    going_on = replace(begun, links=(over,))
    done = replace(going_on, links=(over, replace(over, what="complete", sentence="complete")), ended="complete")
    records = iter((begun, going_on, done))
    write_json(run / "result.json", {"steps": 10})
    monkeypatch.setattr(following, "LOOK", 0.0)
    monkeypatch.setattr(following, "ASK", (0.0, 0.0))

    def job(*_: object) -> Job:
        next(records).save(run)
        return JOB

    monkeypatch.setattr(Slurm, "job", job)
    assert follow(Slurm(), run) == 0
    said = capsys.readouterr()
    assert said.err.splitlines() == ["job 7 is running on n[1-2]", over.sentence]
    assert said.out.startswith(f"{run}: complete after 10 steps")


def test_a_job_that_left_no_log_is_one_whose_node_could_not_write_it(run: Path):
    end = ended(run, recorded(run), replace(JOB, state="FAILED"))
    assert end.state == "failed" and "without a word: its node could not write" in end.sentence
    assert end.sentence.endswith("runs must be on a disk that all nodes share (--runs)")


def test_a_job_that_slurm_ended_is_named_with_slurms_word(run: Path):
    log(run, "slurmstepd: error: *** CANCELLED DUE TO TIME LIMIT ***\n")
    end = ended(run, recorded(run), replace(JOB, state="TIMEOUT"))
    assert (end.state, end.explained) == ("timeout", False)
    assert end.sentence == f"job 7 ended as TIMEOUT; log: {run}/logs/slurm-7.out"


def test_a_run_is_followed_through_a_controller_that_does_not_answer(run: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(following, "ASK", (0.0, 0.0))
    monkeypatch.setattr(following, "GRACE", 0.0)
    answers: list[Job | RunFailed | None] = [JOB, RunFailed("down"), replace(JOB, state="NODE_FAIL")]
    monkeypatch.setattr(Slurm, "job", lambda *_: _given(answers))
    log(run, "")
    recorded(run)
    seen = list(watch(Slurm(), run))
    assert [getattr(each, "state", None) for each in seen] == ["RUNNING", "RUNNING", "NODE_FAIL", "node_fail"]


def _given(answers: list[Job | RunFailed | None]) -> Job | None:
    answer = answers.pop(0) if len(answers) > 1 else answers[0]
    if isinstance(answer, RunFailed):
        raise answer
    return answer


def test_ctrl_c_leaves_the_job_and_says_how_to_see_it_again(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    recorded(run)
    monkeypatch.setattr(Slurm, "job", interrupted)
    assert follow(Slurm(), run) == 130
    said = capsys.readouterr().err
    assert f"the job goes on; meshrun follow {run} shows it again, meshrun cancel {run} ends it" in said


@pytest.mark.parametrize("states", [("failed", "complete"), ("complete", "failed"), ("complete", "complete")])
def test_a_sweep_fails_where_any_of_its_runs_did(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], states: tuple[str, str]
):
    record = recorded(run)
    elements = tuple(Element(run, values) for values in ("lr=1", "lr=2"))
    replace(record, submission=replace(record.submission, sweep=elements)).save(run)
    ends = [following.End(run, "7", state, state, None) for state in states]
    monkeypatch.setattr(following, "_together", lambda *_: ends)
    assert follow(Slurm(), run, {}) == ("failed" in states)
    assert json.loads(capsys.readouterr().out)["runs"][0]["state"] == states[0]


@pytest.mark.parametrize(("index", "values"), [(None, ""), (0, "lr=1"), (1, "lr=2"), (2, ""), (-1, "")])
def test_a_place_that_a_sweep_has_not_has_no_values(run: Path, index: int | None, values: str):
    record = recorded(run)
    sweep = tuple(Element(run, text) for text in ("lr=1", "lr=2"))
    assert (
        following.values_of(replace(record, submission=replace(record.submission, sweep=sweep), index=index)) == values
    )


@pytest.mark.parametrize("is_own", [True, False])
def test_the_log_of_a_run_is_read_as_that_of_whose_it_is(run: Path, monkeypatch: pytest.MonkeyPatch, is_own: bool):
    recorded(run)
    seen: list[bool] = []
    monkeypatch.setattr(following, "Follow", lambda *words: seen.append(words[3]) or contextlib.nullcontext())
    monkeypatch.setattr(following, "watch", lambda *_: [following.End(run, "7", "complete", "", None)])
    user = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: user + (not is_own))
    assert follow(Slurm(), run) == 0 and seen == [is_own]


def test_a_job_that_runs_again_is_not_over(run: Path, monkeypatch: pytest.MonkeyPatch):
    recorded(run)
    log(run, "")
    clock = [0.0]
    over = replace(JOB, state="COMPLETED")
    monkeypatch.setattr(following, "ASK", (0.0, 0.0))
    monkeypatch.setattr(following, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(Slurm, "job", lambda *_: over if clock[0] in (0.0, 90.0) else JOB)
    looks = watch(Slurm(), run)
    for clock[0] in (0.0, following.GRACE / 2, 2 * following.GRACE, 90.0, 90.0 + following.GRACE):
        assert isinstance(next(looks), Job)


def test_slurm_is_asked_less_and_less_often_and_never_too_seldom(run: Path, monkeypatch: pytest.MonkeyPatch):
    recorded(run)
    clock, asked = [0.0], list[float]()

    def job(*_: object) -> Job:
        asked.append(clock[0])
        return JOB

    monkeypatch.setattr(following, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(Slurm, "job", job)
    looks = watch(Slurm(), run)
    for _ in range(400):
        next(looks)
        clock[0] += 0.5
    pauses = [later - before for before, later in itertools.pairwise(asked)]
    assert pauses[0] == following.ASK[0] and max(pauses) == pauses[-1] == following.ASK[1]


def test_a_script_that_was_submitted_by_hand_goes_on_with_its_run(run: Path):
    record = recorded(run, "over", "stopped")
    by_hand = replace(JOB, id="9", shown="9", script=run / "job.sh")
    assert adopted(run, record, [replace(by_hand, state="COMPLETED")]) == record
    assert adopted(run, record, [replace(by_hand, shown="7")]) == record
    renewed = adopted(run, record, [by_hand])
    assert (renewed.jobs, renewed.ended) == (("7", "9"), "") and Record.load(run) == renewed


def test_pipes_in_the_run_directory_of_another_keep_nobody_waiting(tmp_path: Path):
    run = RunDirectory(tmp_path)
    run.events.mkdir()
    os.mkfifo(run.events_of(0))
    os.mkfifo(tmp_path / "slurm.out")
    found: list[object] = []

    def look() -> None:
        found.extend([listing._progress(run)[0], following._lines(tmp_path / "slurm.out")])

    looking = threading.Thread(target=look, daemon=True)
    looking.start()
    looking.join(5)
    assert found == [None, []]


@pytest.mark.parametrize(("index", "folder"), [(None, "one"), (1, "sweep")])
def test_logs_of_a_sweep_are_in_its_own_folder(tmp_path: Path, index: int | None, folder: str):
    submission = Submission("sweep", tmp_path / "sweep", ("meshrun",), "/usr/bin/python3", Resources(2, 1, 1, 3600))
    record = Record(submission, ("7",), index=index)
    assert following.log_of(record, tmp_path / "one", "7") == tmp_path / folder / "logs" / "slurm-7.out"

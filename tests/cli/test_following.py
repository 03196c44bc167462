"""What is said of a submitted run: where its job stands, and how it ended, from what it has left behind."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshrun.cli import following
from meshrun.cli.following import described, ended, follow, watch
from meshrun.cli.listing import adopted
from meshrun.config import RunConfig, RunDirectory, write_json
from meshrun.errors import RunFailed
from meshrun.launch.chain import Link, Record
from meshrun.launch.slurm import Job, Slurm
from meshrun.launch.submission import Resources, Submission

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
    chain = "the training failed with exit status 1, so no further link follows"
    record = recorded(run, "failed", chain, status=1)
    log(run, f"srun: error\nmeshrun: rank 3 on n2 failed: ValueError: x\nsrun: task 1 ended\nmeshrun: {chain}\n")
    end = ended(run, record, None)
    assert (end.state, end.status, end.sentence) == ("failed", 1, "rank 3 on n2 failed: ValueError: x")
    log(run, "nothing of ours\n")
    assert ended(run, record, None).sentence == chain


def test_a_job_that_left_no_log_is_one_whose_node_could_not_write_it(run: Path):
    end = ended(run, recorded(run), replace(JOB, state="FAILED"))
    assert end.state == "failed" and "without a word: its node could not write" in end.sentence
    assert end.sentence.endswith("runs must be on a disk that all nodes share (--runs)")


def test_a_job_that_slurm_ended_is_named_with_slurms_word(run: Path):
    log(run, "slurmstepd: error: *** CANCELLED DUE TO TIME LIMIT ***\n")
    end = ended(run, recorded(run), replace(JOB, state="TIMEOUT"))
    assert (end.state, end.sentence) == ("timeout", "job 7 ended as TIMEOUT (meshrun jobs)")


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


def test_a_script_that_was_submitted_by_hand_goes_on_with_its_run(run: Path):
    record = recorded(run, "over", "stopped")
    by_hand = replace(JOB, id="9", shown="9", script=run / "job.sh")
    assert adopted(run, record, [replace(by_hand, state="COMPLETED")]) == record
    assert adopted(run, record, [replace(by_hand, shown="7")]) == record
    renewed = adopted(run, record, [by_hand])
    assert (renewed.jobs, renewed.ended) == (("7", "9"), "") and Record.load(run) == renewed

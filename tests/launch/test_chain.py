"""How a submitted run goes on after each job: complete, failed, over, or another link."""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshrun.cli.next import next_command
from meshrun.config import RunConfig, RunDirectory, write_json
from meshrun.errors import RunFailed, UserError
from meshrun.launch.chain import Link, Record, Seen, decide, seen_of
from meshrun.launch.reasons import explain, pending
from meshrun.launch.slurm import Job, Slurm, is_preempted, parsed
from meshrun.launch.submission import Resources, Rules, Submission
from meshrun.world.rendezvous import publish

ASKED = Resources(nodes=1, gpus_per_node=1, procs=1, seconds=3600)
RECORD = Record(Submission("a-1", Path("/runs/a-1"), ("meshrun",), "/usr/bin/python3", ASKED), ("7",))
STOPPED = {"step": 40, "of": 100, "why": "the job ends in 30 s", "saved": True}


def chain(links: int = 5, *steps: int | None) -> Record:
    """The record of a chain of at most so many links, of which some are over, each at its step."""
    over = tuple(Link("7", 0, step, "next", "went on") for step in steps)
    return replace(RECORD, submission=replace(RECORD.submission, links=links), links=over)


CASES: dict[str, tuple[Record, Seen, tuple[str, int], str]] = {
    "complete": (chain(), Seen(0, True, None, 100), ("complete", 0), "the training is complete"),
    "complete without its checkpoint": (chain(), Seen(1, True, None, 100), ("complete", 1), "failed to keep all of it"),
    "complete though resume refused to go on": (chain(), Seen(2, True, None, 100), ("complete", 0), "complete"),
    "wrong option": (chain(), Seen(2, False, None, None), ("failed", 2), "failed with exit status 2"),
    "a rank failed": (chain(), Seen(1, False, None, 40), ("failed", 1), "failed with exit status 1"),
    "no result": (chain(), Seen(0, False, None, 40), ("failed", 1), "ended without a result"),
    "stopped in time": (
        chain(),
        Seen(0, False, STOPPED, 40),
        ("next", 0),
        "stopped after step 40 of 100, since the job ends in 30 s; link 2 of at most 5 goes on",
    ),
    "stopped under a launcher that was signalled itself": (
        chain(),
        Seen(143, False, STOPPED, 40),
        ("next", 0),
        "link 2",
    ),
    "stopped without a chain": (
        chain(1),
        Seen(0, False, STOPPED, 40),
        ("over", 0),
        "stopped after step 40 of 100, .*; sbatch /runs/a-1/job.sh goes on, and --until-done would do so by itself",
    ),
    "status 128 is of no signal": (chain(), Seen(128, False, None, 30), ("failed", 128), "failed with exit status 128"),
    "status 129 is SIGHUP": (chain(), Seen(129, False, None, 30), ("next", 0), "link 2"),
    "cut off": (chain(), Seen(137, False, None, 30), ("next", 0), "cut off with all of step 30 saved .*; link 2"),
    "cut off without a chain": (chain(1), Seen(137, False, None, 30), ("over", 137), "cut off with all of step 30"),
    "cut off at once": (chain(), Seen(143, False, None, None), ("next", 0), "cut off before its first checkpoint"),
    "nodes lost": (chain(), Seen(75, False, None, 30), ("next", 0), "link 2"),
    "no progress": (chain(5, 40), Seen(0, False, STOPPED, 40), ("over", 1), "it makes no progress, so the chain ends"),
    "no progress in the last link": (chain(5, 10, 40), Seen(0, False, STOPPED, 40), ("over", 1), "makes no progress"),
    "further than the last link": (chain(5, 40, 10), Seen(0, False, STOPPED, 40), ("next", 0), "link 4 of at most 5"),
    "never a checkpoint": (chain(5, None), Seen(137, False, None, None), ("over", 137), "makes no progress"),
    "progress": (chain(5, 20), Seen(0, False, STOPPED, 40), ("next", 0), "link 3 of at most 5"),
    "last link": (chain(3, 10, 20), Seen(0, False, STOPPED, 40), ("over", 1), r"all 3 links are used \(--links\)"),
    "keeps no state": (chain(), Seen(0, False, {**STOPPED, "saved": False}, None), ("over", 1), "--checkpoint none"),
    "cancelled by meshrun": (
        replace(chain(), cancelled=True),
        Seen(0, False, STOPPED, 40),
        ("cancelled", 1),
        "cancelled",
    ),
    "cancelled by scancel": (chain(), Seen(143, False, None, 30, ending=True), ("cancelled", 143), "cancelled"),
    "cancelled without a chain": (
        replace(chain(1), cancelled=True),
        Seen(0, False, STOPPED, 40),
        ("cancelled", 1),
        "^the job was cancelled$",
    ),
    "stopped by a person": (
        chain(),
        Seen(0, False, STOPPED, 40, by_user=True),
        ("over", 0),
        "stopped after step 40 of 100, .*, so no further link follows; sbatch /runs/a-1/job.sh goes on$",
    ),
    "stopped by a person without a chain": (
        chain(1),
        Seen(0, False, STOPPED, 40, by_user=True),
        ("over", 0),
        "since the job ends in 30 s; sbatch /runs/a-1/job.sh goes on$",
    ),
    "failed without a chain": (
        chain(1),
        Seen(1, False, None, 40),
        ("failed", 1),
        "^the training failed with exit status 1$",
    ),
    "requeued by somebody else": (
        *(chain(3), Seen(143, False, None, 40, ending=True, requeued=True), ("queued", 0), "goes on there"),
    ),
    "requeued, but cancelled": (
        *(replace(chain(3), cancelled=True), Seen(143, False, None, 40, ending=True, requeued=True)),
        *(("cancelled", 143), "was cancelled"),
    ),
    "preempted without a chain": (chain(1), Seen(0, False, STOPPED, 40, preempted=True), ("next", 0), "queued again"),
}


@pytest.mark.parametrize("case", CASES)
def test_decision(case: str):
    record, seen, (what, status), words = CASES[case]
    decision = decide(record, seen)
    assert (decision.what, decision.status) == (what, status)
    assert re.search(words, decision.sentence), decision.sentence


class Fake:
    """Slurm's commands, written down instead of run."""

    def __init__(
        self,
        state: str = "RUNNING",
        reason: str = "None",
        requeues: int = 0,
        restarts: int = 0,
        preempted: str = "None",
    ) -> None:
        self.state, self.reason, self.requeues, self.restarts = state, reason, requeues, restarts
        self.preempted = preempted
        self.calls: list[list[str]] = []

    def __call__(self, argv: Any, _env: Any) -> Any:
        self.calls.append(list(argv))
        code, out = 0, ""
        match argv[0], argv[1]:
            case "squeue", _:
                out = "\x1f".join(("7", "7", self.state, self.reason, "1:00", "2:00", "N/A", "1", "n1", "/runs/job.sh"))
            case "scontrol", "show":
                out = f"JobId=7 JobState={self.state} Requeue=1 Restarts={self.restarts} BatchFlag=1"
                out += f" PreemptTime={self.preempted}"
            case "scontrol", "requeue":
                code = self.requeues
            case "sbatch", _:
                out = "8"
        return subprocess.CompletedProcess(argv, code, out, "disabled" if code else "")

    def asked(self, command: str) -> list[list[str]]:
        return [call for call in self.calls if call[0] == command and call[:2] != ["scontrol", "show"]]


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A run that stopped in time, in a chain that may go on."""
    made = RunDirectory.create(RunConfig(target="digits", runs=tmp_path))
    chain(3).save(made.path)
    write_json(made.stopped_file, STOPPED)
    return made


def after(run: RunDirectory, slurm: Fake, monkeypatch: pytest.MonkeyPatch, status: int = 0) -> int:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setattr(Slurm, "here", lambda: Slurm(slurm))
    monkeypatch.setattr("meshrun.cli.next.RETRIES", (0.0, 0.0))
    return next_command(run.path, status, as_json=False)


def test_a_record_that_names_no_job_of_slurm_is_refused(run: RunDirectory):
    replace(Record.load(run.path), jobs=("7", "8 --me")).save(run.path)
    with pytest.raises(UserError, match="it names the job '8 --me', a number that Slurm gives to none"):
        Record.load(run.path)


def test_the_job_is_requeued_and_the_link_is_counted(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    slurm = Fake()
    assert after(run, slurm, monkeypatch) == 0
    assert slurm.asked("scontrol") == [["scontrol", "requeue", "7"]] and not slurm.asked("sbatch")
    record = Record.load(run.path)
    assert [(link.step, link.what) for link in record.links] == [(40, "next")]
    assert (record.jobs, record.used, record.ended) == (("7",), 2, "")
    assert capsys.readouterr().out.startswith("meshrun: stopped after step 40 of 100, ")


def test_a_job_that_is_requeued_from_outside_just_now_is_not_cancelled_and_uses_no_link(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    slurm = Fake("COMPLETING", restarts=2)
    assert after(run, slurm, monkeypatch, status=143) == 0
    assert not slurm.asked("scontrol") and not slurm.asked("sbatch")
    record = Record.load(run.path)
    assert (record.links, record.ended, record.used) == ((), "", 1)
    assert "put back into the queue" in capsys.readouterr().out


def test_a_preempted_job_goes_on_and_uses_no_link(run: RunDirectory, monkeypatch: pytest.MonkeyPatch):
    slurm = Fake(preempted="2026-01-01T00:00:00")
    assert after(run, slurm, monkeypatch) == 0
    assert slurm.asked("scontrol") == [["scontrol", "requeue", "7"]]
    record = Record.load(run.path)
    assert (record.links, record.ended, record.used) == ((), "", 1)


@pytest.mark.parametrize("by", ["clock", "signal", "slurm", "user"])
def test_only_a_person_who_stops_a_run_ends_its_chain(run: RunDirectory, monkeypatch: pytest.MonkeyPatch, by: str):
    write_json(run.stopped_file, {**STOPPED, "by": by})
    slurm = Fake()
    assert after(run, slurm, monkeypatch) == 0
    assert bool(slurm.asked("scontrol")) == (by != "user")
    assert Record.load(run.path).ended.endswith("goes on") == (by == "user")


def test_a_run_that_is_asked_to_rest_after_its_link_was_cut_off_rests(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
):
    run.stopped_file.unlink()
    run.stop_file.write_text("slurm\n")
    slurm = Fake()
    assert after(run, slurm, monkeypatch, status=137) == 0 and slurm.asked("scontrol")
    run.stop_file.write_text("")
    slurm = Fake()
    assert after(run, slurm, monkeypatch, status=137) == 137 and not slurm.asked("scontrol")


def test_a_requeue_that_ends_the_command_itself_starts_no_second_job(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
):
    slurm = Fake(requeues=-15)
    assert after(run, slurm, monkeypatch) == 0
    assert not slurm.asked("sbatch")


@pytest.mark.parametrize(("rules", "requeues"), [(Rules(chain="submit"), 0), (Rules(), 1)], ids=["site", "refused"])
def test_another_job_follows_where_the_site_does_not_requeue(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, rules: Rules, requeues: int
):
    record = chain(3)
    replace(record, submission=replace(record.submission, rules=rules)).save(run.path)
    slurm = Fake(requeues=requeues)
    assert after(run, slurm, monkeypatch) == 0
    assert slurm.asked("sbatch") == [["sbatch", "--parsable", "--dependency=afterany:7", "/runs/a-1/job.sh"]]
    assert Record.load(run.path).jobs == ("7", "8")


def test_an_element_of_a_sweep_goes_on_alone(run: RunDirectory, monkeypatch: pytest.MonkeyPatch):
    record = chain(3)
    submission = replace(record.submission, rules=Rules(chain="submit"))
    replace(record, submission=submission, index=2, jobs=("7_2",)).save(run.path)
    # The last element's own number is that of the whole array.
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "7")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "2")
    slurm = Fake()
    assert after(run, slurm, monkeypatch) == 0
    assert slurm.asked("sbatch")[0][2:4] == ["--dependency=afterany:7_2", "--array=2"]
    assert Record.load(run.path).jobs == ("7_2", "8_2")
    replace(record, index=2, jobs=("7_2",)).save(run.path)
    assert after(run, slurm, monkeypatch) == 0
    assert slurm.asked("scontrol") == [["scontrol", "requeue", "7_2"]]


@pytest.mark.parametrize(
    ("state", "reason", "goes_on"),
    [("RUNNING", "None", True), ("COMPLETING", "TimeLimit", True), ("COMPLETING", "None", False)],
)
def test_a_job_at_its_time_limit_goes_on_and_a_cancelled_one_does_not(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, state: str, reason: str, goes_on: bool
):
    slurm = Fake(state, reason)
    after(run, slurm, monkeypatch, status=143)
    assert bool(slurm.asked("scontrol")) == goes_on
    assert bool(Record.load(run.path).ended) != goes_on


def test_a_run_that_has_reached_its_end_is_complete(run: RunDirectory, monkeypatch: pytest.MonkeyPatch):
    run.stopped_file.unlink()
    write_json(run.path / "result.json", {"steps": 100})
    assert after(run, Fake(), monkeypatch) == 0
    assert Record.load(run.path).links[-1].what == "complete"


def test_a_job_that_is_over_leaves_no_meeting_place_behind(run: RunDirectory, monkeypatch: pytest.MonkeyPatch):
    runs = run.path.parent
    places = [publish(runs, f"slurm-{job}.0.1", 0, "10.0.0.1", 4711) for job in ("7", "77")]
    after(run, Fake(), monkeypatch)
    assert [place.exists() for place in places] == [False, True]


def test_a_chain_that_cannot_go_on_says_so(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    class Down(Fake):
        def __call__(self, argv: Any, _env: Any) -> Any:
            if argv[0] == "sbatch" or argv[1] == "requeue":
                raise RunFailed("sbatch has not answered within 60 s")
            return super().__call__(argv, _env)

    assert after(run, Down(), monkeypatch) == 1
    assert "the next link could not be started: sbatch has not answered" in capsys.readouterr().out
    assert Record.load(run.path).ended


def test_a_record_that_is_none_is_refused_in_a_sentence(tmp_path: Path):
    with pytest.raises(UserError, match=r"was not submitted: it has no submission.json"):
        Record.load(tmp_path)
    for text in ("{", "[]", json.dumps({"format": 1})):
        (tmp_path / "submission.json").write_text(text)
        with pytest.raises(UserError, match=r"submission.json cannot be read: "):
            Record.load(tmp_path)


def test_lines_of_squeue_with_any_path_are_read():
    line = "\x1f".join(("8", "7_1", "PENDING", "Resources", "0:00", "1:00", "N/A", "2", "", "/a b/\x1f|c/job.sh"))

    job = parsed(line)
    assert job == Job("8", "7_1", "PENDING", "Resources", "0:00", "1:00", "N/A", 2, "", Path("/a b/\x1f|c/job.sh"))


def test_a_training_that_rests_has_done_what_it_was_asked_to_whatever_its_status():
    rested = decide(chain(1), Seen(143, False, STOPPED, 40))
    assert (rested.what, rested.status) == ("over", 0)
    cut = decide(chain(1), Seen(143, False, None, 40))
    assert (cut.what, cut.status) == ("over", 143)
    by_user = decide(chain(5), Seen(0, False, STOPPED, 40, by_user=True))
    assert (by_user.what, by_user.status) == ("over", 0)


def test_how_a_run_stands_is_read_from_its_newest_checkpoint_and_its_stop(run: RunDirectory):
    for name in ("step-00000008", "step-00000020", "step-00000020.1", "step-00000009", ".partial-step-00000099"):
        (run.checkpoints / name).mkdir(parents=True)
    run.stopped_file.unlink()
    seen = seen_of(run, 137, False, False, False)
    assert (seen.saved, seen.step, seen.complete, seen.by_user) == (20, 20, False, False)
    write_json(run.path / "result.json", {"steps": 100})
    assert seen_of(run, 0, False, False, False).complete
    write_json(run.stopped_file, {**STOPPED, "by": "user"})
    stopped = seen_of(run, 0, False, False, False)
    assert (stopped.complete, stopped.step, stopped.by_user) == (False, 40, True), "the result is of an earlier end"


def answering(out: str, error: str = "", code: int = 0) -> Slurm:
    return Slurm(lambda argv, _env: subprocess.CompletedProcess(argv, code, out, error))


def test_the_number_of_a_new_job_is_read_also_where_slurm_names_the_cluster():
    assert answering("4711;juwels\n").submit(Path("job.sh")) == "4711"


def test_a_job_that_slurm_has_forgotten_is_none_and_other_errors_are_told():
    assert answering("", "slurm_load_jobs error: Invalid job id specified", 1).job("7") is None
    with pytest.raises(RunFailed, match="squeue failed: Unable to contact"):
        answering("", "Unable to contact slurm controller", 1).job("7")


@pytest.mark.parametrize(("state", "over"), [("TIMEOUT", True), ("PREEMPTED", True), ("RUNNING", False)])
def test_states_in_which_a_job_is_over(state: str, over: bool):
    line = "\x1f".join(("7", "7", state, "None", "1:00", "2:00", "N/A", "1", "n1", "/runs/job.sh"))
    assert parsed(line).over == over


def test_a_job_is_preempted_where_slurm_says_when():
    assert not any(is_preempted({"PreemptTime": word}) for word in ("None", "N/A", "Unknown"))
    assert is_preempted({"PreemptTime": "2026-11-18T04:00:00"}) and not is_preempted({})


def test_a_job_of_less_than_a_minute_is_refused():
    with pytest.raises(UserError, match=r"\(--time\)"):
        replace(ASKED, seconds=59)


def test_the_longest_reason_that_fits_explains_why_a_job_waits():
    assert "meshrun cancel" in pending("DependencyNeverSatisfied")
    assert pending("Dependency") == "it waits for another job to end"
    assert "--partition" in explain("sbatch: error: INVALID PARTITION specified: gpu")

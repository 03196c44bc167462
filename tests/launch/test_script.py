"""Job scripts, byte for byte: one golden file for each site, and for each thing that a job can be asked for.

python -m tests.launch.test_script           # writes the golden files anew, to be read before they are committed
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from meshrun.cli.job_plan import planned
from meshrun.config import RunDirectory
from meshrun.errors import UserError
from meshrun.launch.script import OFFLINE, quoted, script
from meshrun.launch.submission import Element, Resources, Submission
from meshrun.strict_json import of_type
from meshrun.world.sites import SHIPPED
from tests.launch.command import wait_until

GOLDEN = Path(__file__).parent / "golden"
RUNS = ("--runs", "/scratch/project/runs")
TWO = ("--nodes", "2", "--gpus-per-node", "4", "--time", "2h", *RUNS)
SITES = sorted(path.stem for path in SHIPPED.glob("*.toml"))
HOSTILE = 'it\'s 100% "$(touch /tmp/x)" `id` *;&|#é'

WORDS: dict[str, tuple[str, ...]] = {
    **{site: ("digits", "--nodes", "2", "--site", site, "--account", "project", *RUNS) for site in SITES},
    "generic": ("digits", *TWO),
    "cpus": ("digits", "--nodes", "2", "--gpus-per-node", "0", "--procs", "2", "--time", "5min", *RUNS),
    "chain": ("digits", *TWO, "--until-done", "--links", "5"),
    "sweep": ("digits", *TWO, "--sweep", "lr=1e-3,3e-4", "--sweep", "layout=dp=8;dp=4,tp=2"),
    "asked": (
        *("digits", *TWO, "--partition", "big", "--account", "me", "--qos", "high", "--constraint", "a100&ib"),
        *(
            "--cpus-per-gpu",
            "12",
            "--sbatch=--mem=64G",
            "--sbatch=--exclude=n1,n2",
            "--sbatch=--mail-user=a b",
            "--offline",
        ),
    ),
    "hostile": ("digits", *TWO[:-1], f"/scratch/{HOSTILE}/runs", "--name", HOSTILE.replace("/", "")),
    "setup": ("digits", *TWO),
}
SETUP = "module load Python\nexport TOKENS=/data/tokens\n"


def made(name: str) -> str:
    plan = planned(list(WORDS[name]))
    assert plan is not None
    setup = SETUP if name == "setup" else ""
    return script(replace(plan.submission, python="/project/venv/bin/python", python_flags=("-P",), setup=setup))


@pytest.fixture(autouse=True)
def no_account_of_ours(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What whoever runs the tests has set up must not decide."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))


@pytest.mark.parametrize("name", WORDS)
def test_script_is_the_golden_one(name: str):
    assert made(name) == (GOLDEN / f"{name}.sh").read_text()


def test_every_golden_script_is_clean_under_shellcheck():
    if shutil.which("shellcheck") is None:
        pytest.skip("there is no shellcheck on this machine")
    scripts = sorted(GOLDEN.glob("*.sh"))
    checked = subprocess.run(["shellcheck", *scripts], capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stdout) == (0, "")
    assert len(scripts) == len(WORDS)


def test_there_is_a_golden_script_for_each_of_these_and_no_other():
    assert {path.stem for path in GOLDEN.glob("*.sh")} == set(WORDS)


@pytest.mark.parametrize("name", WORDS)
def test_requests_stand_before_the_first_command(name: str):
    """sbatch reads no request after it."""
    lines = made(name).splitlines()
    first = next(at for at, line in enumerate(lines) if line and not line.startswith("#"))
    assert not [line for line in lines[first:] if line.startswith("#SBATCH")]


@pytest.mark.parametrize("text", [HOSTILE, "plain", "", " ", "a'b", 'a"b', "$HOME", "\\", "!x", "~", "-n", "a\\$b"])
def test_quoted_text_is_itself_in_bash(text: str):
    said = subprocess.run(["bash", "-c", f"printf %s {quoted(text)}"], capture_output=True, text=True, check=True)
    assert said.stdout == text


ASKED = Resources(nodes=1, gpus_per_node=1, procs=1, seconds=3600)


def submission(run: Path = Path("/runs/a-1"), **changes: object) -> Submission:
    made = Submission("a-1", run, ("meshrun", "submit", "a"), "/usr/bin/python3", ASKED)
    return replace(made, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("typed", ["a\n#SBATCH --nodes=99", "a\rrm -rf /", "a\n$(touch /tmp/x)", "\x1b[31m", "\u2028x"])
def test_what_was_typed_stays_one_line_of_a_comment(typed: str):
    plain, hostile = (script(submission(command=("meshrun", "submit", word))) for word in ("a", typed))
    assert len(hostile.splitlines()) == len(plain.splitlines())
    differing = [line for line in hostile.splitlines() if line not in plain.splitlines()]
    assert len(differing) == 1 and differing[0].startswith("#   meshrun submit ")
    assert differing[0].isprintable()


@pytest.mark.parametrize("path", ["/runs/a\nb", "/runs/a\tb", "/runs/\x1b", "/runs/back\\slash"])
def test_a_path_that_slurm_cannot_take_is_refused(path: str):
    with pytest.raises(UserError, match=r"the path '.*' has .*\(--runs\)$"):
        submission(Path(path))
    with pytest.raises(UserError, match=r"the path '.*' has .*\(--runs\)$"):
        submission(sweep=(Element(Path(path), "lr=1"),))


@pytest.mark.parametrize("value", ["a b", "a;b", "$(x)", "`x`", 'a"b', "a'b", "a\nb", "", "a\\b"])
@pytest.mark.parametrize("name", ["partition", "account", "qos", "constraint"])
def test_a_request_that_is_no_plain_word_is_refused(name: str, value: str):
    with pytest.raises(UserError, match=rf"^{name} is .* \(--{name}\)$"):
        replace(ASKED, **{name: value})


@pytest.mark.parametrize("flag", ["-p", "mem=3", "--mem=$(x)", '--mem="3', "--mem='3", "--x=`id`", "--a\nb", "--mem="])
def test_an_option_for_sbatch_that_is_none_is_refused(flag: str):
    with pytest.raises(UserError, match=r"^sbatch is .* \(--sbatch\)$"):
        replace(ASKED, more=(flag,))


def test_a_job_is_named_in_letters_that_slurm_takes():
    assert submission(name=HOSTILE).job_name == "it_s_100_touch_tmp_x_id"
    assert submission(name="ß$").job_name == "meshrun"


def test_a_submission_comes_back_from_its_document():
    plan = planned([*WORDS["sweep"], "--site", "clariden", "--account", "x", "--sbatch=--mem=1G"])
    assert plan is not None
    assert of_type(Submission, json.loads(json.dumps(plan.submission.to_json())), "it") == plan.submission


def test_offline_switches_are_set_where_nodes_have_no_internet():
    switches = [f"export {name}={value}\n" for name, value in OFFLINE.items()]
    assert all(line in made("juwels-booster") for line in switches)
    assert not any(line in made("generic") for line in switches)
    assert all(line in made("asked") for line in switches)


SRUN = """#!/bin/bash
[[ $* == *config.json* ]] && exit "${UNSEEN:-0}"
echo started >>"$LOG"; exec "$BASH" -c "sleep ${STEP_S:-0}; exit ${STEP_STATUS:-0}"
"""
PYTHON = """#!/bin/bash
echo "$@" >>"$LOG"
exit 5
"""


@pytest.fixture
def stage(tmp_path: Path) -> tuple[Path, dict[str, str]]:
    """A run directory, and an environment in which srun and Python do next to nothing."""
    run, log = tmp_path / HOSTILE.replace("/", "-") / "a-1", tmp_path / "log"
    run.mkdir(parents=True)
    for name, text in (("srun", SRUN), ("python", PYTHON)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (run / "job.sh").write_text(script(submission(run, python=str(tmp_path / "python"))))
    return run, {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "LOG": str(log)}


def played(run: Path, env: dict[str, str], **more: str) -> tuple[int, str, list[str]]:
    ended = subprocess.run(["bash", run / "job.sh"], env={**env, **more}, capture_output=True, text=True, check=False)
    log = Path(env["LOG"])
    return ended.returncode, ended.stderr, log.read_text().splitlines() if log.exists() else []


@pytest.mark.parametrize("status", [0, 1, 75, 137])
def test_the_steps_exit_status_is_handed_on_and_that_of_next_is_the_jobs(
    stage: tuple[Path, dict[str, str]], status: int
):
    run, env = stage
    assert played(run, env, STEP_STATUS=str(status)) == (
        5,
        "",
        ["started", f"-P -m meshrun next {run} --status {status}"],
    )


def test_a_node_that_does_not_see_the_run_ends_the_job_before_anything_starts(stage: tuple[Path, dict[str, str]]):
    run, env = stage
    status, said, log = played(run, env, UNSEEN="2")
    assert (status, log) == (5, [f"-P -m meshrun next {run} --status 2"])
    assert f"cannot see {run}; runs must be on a disk that all nodes share (--runs)" in said


@pytest.mark.parametrize("number", [signal.SIGUSR2, signal.SIGTERM])
def test_a_signal_to_the_shell_becomes_a_stop_file_and_the_step_is_awaited(
    stage: tuple[Path, dict[str, str]], number: signal.Signals
):
    run, env = stage
    env |= {"STEP_S": "0.6", "STEP_STATUS": "3"}
    job = subprocess.Popen(["bash", run / "job.sh"], env=env)
    try:
        wait_until(lambda: Path(env["LOG"]).exists(), 20)
        for _ in range(2):
            job.send_signal(number)
            wait_until(lambda: (run / "stop").exists(), 20)
            assert RunDirectory(run).asked_to_stop_by() == "slurm"
            (run / "stop").unlink()
        assert job.wait(60) == 5
    finally:
        job.kill()
    assert Path(env["LOG"]).read_text().splitlines()[-1] == f"-P -m meshrun next {run} --status 3"


def test_a_persons_stop_file_stays_one_when_slurm_tells_the_job_to_end_too(stage: tuple[Path, dict[str, str]]):
    run, env = stage
    job = subprocess.Popen(["bash", run / "job.sh"], env={**env, "STEP_S": "0.6"})
    try:
        wait_until(lambda: Path(env["LOG"]).exists(), 20)
        (run / "stop").touch()
        job.send_signal(signal.SIGUSR2)
        job.wait(60)
    finally:
        job.kill()
    assert RunDirectory(run).asked_to_stop_by() == "user"


@pytest.mark.parametrize("line", ["exit 3", "false || exit 3", "module() { exit 3; }; module load x"])
def test_a_set_up_that_ends_the_shell_is_named(stage: tuple[Path, dict[str, str]], line: str):
    run, env = stage
    (run / "job.sh").write_text(script(submission(run, setup=f"{line}\n")))
    status, said, log = played(run, env)
    assert (status, log) == (3, [])
    assert said == "meshrun: the job ends, since --setup ended its shell with exit status 3\n"


def test_a_set_up_line_that_fails_is_named(stage: tuple[Path, dict[str, str]]):
    run, env = stage
    setup = "true\ncd /nowhere/at/all\n"
    (run / "job.sh").write_text(script(submission(run, setup=setup)))
    status, said, log = played(run, env)
    assert (status, log) == (1, [])
    assert re.search(r"\nmeshrun: the job ends, since line \d+ of its script failed: cd /nowhere/at/all\n$", said)


if __name__ == "__main__":
    for each in WORDS:
        (GOLDEN / f"{each}.sh").write_text(made(each))

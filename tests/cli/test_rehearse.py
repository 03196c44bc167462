"""A rehearsal plays the job that would be submitted, and its mistakes show in the job's own words."""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from meshrun import mesh
from meshrun.cli import rehearse
from meshrun.cli.main import main
from meshrun.config import RunDirectory
from meshrun.launch.submission import Element, Resources, Submission
from tests.launch.command import TINY, Ended

Call = Callable[..., Ended]


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Runs a command line from this process, which imports torch once; jobs are processes of their own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    # Slurm's commands may be here without any cluster.
    monkeypatch.setattr("meshrun.launch.probe.is_here", lambda: False)

    def called(*words: object) -> Ended:
        with pytest.raises(SystemExit) as ended:
            main(list(map(str, words)))
        said = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        mesh.finish()
        return Ended(ended.value.code, said.out, said.err)

    return called


def left_over(folder: Path) -> list[str]:
    """Processes that a rehearsal in this folder has left behind."""
    lines = []
    for process in psutil.process_iter(["cmdline"]):
        line = " ".join(process.info["cmdline"] or [])
        if str(folder) in line:
            lines.append(line)
    return lines


@pytest.mark.timeout(240)
def test_a_job_of_two_nodes_is_played_stopped_and_gone_on_with(call: Call, tmp_path: Path):
    words = ("digits", "--nodes", 2, "--gpus-per-node", 2, "--until-done", "--lr", "1e-3")
    played = call("rehearse", *words, "--json")
    assert played.status == 0, played.err
    found = played.document
    assert (found["ok"], found["nodes"], found["ranks"], found["mesh"]) == (True, 2, 4, {"dp": 4})
    assert found["steps"] == 3 and found["saved"] and found["resumed"] in (1, 2)
    assert [(link["job"], link["status"], link["told"]) for link in found["links"]] == [("1", 0, True), ("1", 0, False)]
    # The text is that of the job that would be submitted, but for where its run is.
    dry = call("submit", *words, "--dry-run", "--json").document
    assert (found["run"], found["script"]) == (dry["run"], dry["script"])
    # The small model of the recipe, on the same samples as one process.
    one = "--width 8 --lr 1e-3 --steps 3 --batch 4 --eval-first 4 --device cpu --json"
    alone = call("run", "digits", *one.split())
    assert found["losses"] == pytest.approx(alone.document["losses"], rel=1e-5)
    assert not list(tmp_path.glob("meshrun-rehearsal-*")) and not left_over(tmp_path)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("step 3  val  loss 2.7617", "step 3  val  loss 2.7617"),
        ("digits: 3 steps on 4 ranks  ->  /tmp/played/runs/digits-1", "digits: 3 steps on 4 ranks"),
        ("stopped after step 1 of 3; meshrun resume /tmp/played/runs/digits-1 goes on", "stopped after step 1 of 3"),
        (
            "stopped after step 1 of 3; sbatch /tmp/played/job.sh goes on, and --until-done would do so by itself",
            "stopped after step 1 of 3",
        ),
        ("/tmp/played/job.sh: line 3: x: command not found", "/tmp/played/job.sh: line 3: x: command not found"),
        ("report: /tmp/played/runs/digits-1/report.html", None),
        ("batch 32 -> 4: the linear scaling rule would multiply learning rates by 0.125 (--scale-lr does)", None),
        (
            "    log: /tmp/played/runs/digits-1/logs/rank-00003.log",
            "    log: /tmp/played/runs/digits-1/logs/rank-00003.log",
        ),
    ],
)
def test_what_holds_for_no_rehearsal_is_not_passed_on(line: str, told: str | None):
    said: list[str] = []
    rehearse._pass_on(Path("/tmp/played"), said.append, line)
    assert said == ([] if told is None else [told])


def test_a_target_that_fails_on_one_rank_says_so_in_the_jobs_words(call: Call, tmp_path: Path):
    failed = call("rehearse", TINY, "--nodes", 1, "--gpus-per-node", 4, "--fault", "raise", "--rank", 3, "--step", 1)
    assert failed.status == 1
    last = failed.err.splitlines()[-1]
    assert re.fullmatch(
        r"meshrun: rank 3 on \S+ failed: ValueError: bad luck \(tiny.py:\d+\); the job's log and run are in (\S+)", last
    )
    assert "tiny.py has no REHEARSAL = {…options of a small model…}: its model is played as it is" in failed.err
    log = Path(last.rpartition(" ")[2]) / "runs" / "tiny-1" / "logs" / "slurm-1.out"
    assert "meshrun: the training failed with exit status 1\n" in log.read_text() and not left_over(tmp_path)
    assert "Traceback" not in failed.err and "Traceback" in (log.parent / "rank-00003.log").read_text()


def test_a_line_of_the_setup_that_fails_is_named(call: Call, tmp_path: Path):
    setup = tmp_path / "setup.sh"
    setup.write_text("module load GCC\nno-such-program my-environment\n")
    failed = call("rehearse", "digits", "--nodes", 2, "--gpus-per-node", 2, "--setup", setup)
    assert failed.status == 1
    assert "no-such-program: command not found" in failed.err
    assert re.search(
        r"\nmeshrun: the job ends, since line \d+ of its script failed: no-such-program my-environment; the job's log",
        failed.err,
    )


def test_a_module_line_without_a_name_is_refused(call: Call, tmp_path: Path):
    setup = tmp_path / "setup.sh"
    setup.write_text("module load\n")
    failed = call("rehearse", "digits", "--gpus-per-node", 2, "--setup", setup, "--json")
    assert failed.document["error"].startswith("module load names no module; the job's log")


REFUSALS = {
    "layout": (["--layout", "tp=3"], r"layout 'tp=3' .*4 ranks.*\(--layout\)$"),
    "tensor parallelism across nodes": (["--layout", "tp=4"], r"tp.*--allow-tp-across-nodes"),
    "batch": (["--batch", "0"], r"batch is 0; it must be a whole number of at least 1"),
    "site": (["--site", "juwels-boster"], r"there is no site 'juwels-boster'; did you mean juwels-booster"),
}


@pytest.mark.parametrize(("words", "sentence"), REFUSALS.values(), ids=REFUSALS)
def test_what_cannot_work_is_refused_before_anything_is_played(call: Call, words: list[str], sentence: str):
    refused = call("rehearse", "digits", "--nodes", 2, "--gpus-per-node", 2, *words)
    assert refused.status == 2 and len(refused.sentences) == 1
    assert re.search(sentence, refused.sentences[0]), refused.sentences[0]


def test_a_model_of_which_all_ranks_do_not_fit_is_refused(call: Call, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rehearse, "_free_memory", lambda: 3_000_000_000)
    refused = call("rehearse", "digits", "--nodes", 4, "--gpus-per-node", 4)
    assert refused.status == 2
    assert re.fullmatch(
        r"16 ranks of digits with [\d,]+ parameters need about 4\.2 GB, and this machine has 3\.0 GB free; give "
        r"options of a smaller model as REHEARSAL = \{…\} in its file, or rehearse fewer nodes \(--nodes\)",
        refused.sentences[0],
    )


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("['width']", r"REHEARSAL of own\.py is list; it must be a dict of options"),
        ("{'depth': 2}", r"REHEARSAL of own\.py has 'depth', which is no option of it; its own are: width"),
        ("{'width': 'much'}", r"width is 'much'; it must be a whole number \(--width\)"),
    ],
)
def test_wrong_options_of_a_small_model_are_refused(call: Call, tmp_path: Path, given: str, sentence: str):
    program = tmp_path / "own.py"
    program.write_text(f"REHEARSAL = {given}\ndef experiment(width: int = 1): ...\n")
    refused = call("rehearse", program, "--gpus-per-node", 1)
    assert refused.status == 2 and re.fullmatch(sentence, refused.sentences[0])


def test_options_of_a_small_model_win_and_may_be_those_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    program = tmp_path / "own.py"
    program.write_text(
        "REHEARSAL = {'width': 2, 'micro': 1, 'precision': 'fp32'}\n"
        "from meshrun import Experiment, mean_squared_error\n"
        "from torch import nn\n"
        "def experiment(width: int = 1000, lr: float = 0.1) -> Experiment:\n"
        "    return Experiment(model=lambda: nn.Linear(width, 1), train=[0] * 100, loss=mean_squared_error,\n"
        "        optimizer=print, batch=40, steps=9)\n"
    )
    monkeypatch.chdir(tmp_path)
    words = "--nodes 2 --gpus-per-node 4 --layout pp=2,fsdp=4 --width 500 --compile"
    plan = rehearse.planned([str(program), *words.split()], "rehearse", static=False)
    assert plan is not None
    small = rehearse._small(plan)
    config = small.config
    assert (config.options, config.micro, config.precision) == ({"width": 2}, 1, "fp32")
    assert (config.steps, config.batch, config.procs, config.nodes, config.layout) == (3, 16, 4, "2", "pp=2,fsdp=4")
    assert (config.device, config.backend, config.site, config.eval_first) == ("cpu", "gloo", None, 8)
    assert small.notes == ("nothing is compiled in a rehearsal",)


def test_of_a_sweep_the_first_run_is_played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    plan = rehearse.planned(["digits", "--gpus-per-node", "2", "--sweep", "lr=1e-3,3e-4"], "rehearse", static=False)
    assert plan is not None
    small = rehearse._small(plan)
    assert small.notes == ("of the 2 runs of the sweep the first one is played: lr=1e-3",)
    assert small.config.options == {"width": 8, "lr": 1e-3}
    assert json.loads(json.dumps(small.config.to_json()))["data"] == str(tmp_path / "data")


def test_the_folder_of_a_sweep_is_for_its_owner_and_group_as_its_runs_are(tmp_path: Path):
    """It holds the script that is executed, and the logs of all runs."""
    element = Element(tmp_path / "a-1", "lr=1")
    asked = Resources(nodes=1, gpus_per_node=0, procs=1, seconds=60)
    sweep = Submission("s", tmp_path / "s-1", ("meshrun",), sys.executable, asked, sweep=(element,))
    before = os.umask(0)
    try:
        placed = rehearse._placed(sweep, RunDirectory(tmp_path / "runs" / "a-1"), tmp_path / "runs")
    finally:
        os.umask(before)
    assert placed.run.stat().st_mode & 0o777 == 0o770

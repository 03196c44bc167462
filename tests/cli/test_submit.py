"""`meshrun submit` where there is no Slurm: the script that it prints, how fast, and what it refuses."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshrun.cli import following, job_plan, submit
from meshrun.cli.job_plan import Plan, _cpus, planned
from meshrun.cli.main import main
from meshrun.cli.options import options_of
from meshrun.cli.static import static_options
from meshrun.cli.target import Target, find, recipes
from meshrun.config import RunConfig
from meshrun.errors import RunFailed, UserError
from meshrun.launch.chain import Record
from meshrun.launch.slurm import Slurm
from meshrun.launch.submission import LINKS
from meshrun.layout import parse
from meshrun.train import refusals
from meshrun.world.environment import python_for
from tests.cli.test_bad_input import check_refusal
from tests.launch.command import Ended
from tests.launch.test_probe import recorded_slurm
from tests.pace import SMALL_HELP, cost

EVERY_TYPE = str(Path(__file__).parent / "programs" / "every_type.py")
DRY = ("--nodes", "2", "--gpus-per-node", "4", "--dry-run")

Call = Callable[..., Ended]


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Runs a command line in this process, in a folder of its own and without any Slurm."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("SBATCH_ACCOUNT", raising=False)

    def called(*words: object) -> Ended:
        with pytest.raises(SystemExit) as ended:
            main([*map(str, words)])
        said = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return Ended(ended.value.code, said.out, said.err)

    return called


def test_dry_run_prints_the_script_and_makes_nothing(call: Call, tmp_path: Path):
    shown = call("submit", "digits", *DRY, "--width", 64)
    assert (shown.status, shown.err) == (0, "")
    assert shown.out.startswith("#!/bin/bash\n")
    assert "\n#   meshrun submit digits --nodes 2 --gpus-per-node 4 --width 64\n" in shown.out
    assert (
        f"RUN={tmp_path}/runs/digits-1\n" in shown.out
        and f"\nPYTHON=({shlex.join(python_for(['-m'])[:-1])})\n" in shown.out
    )
    assert "#SBATCH --nodes=2\n" in shown.out and "#SBATCH --gres=gpu:4\n" in shown.out
    assert list(tmp_path.iterdir()) == []


def test_dry_run_as_json_is_one_document_with_the_script(call: Call):
    plain, document = call("submit", "digits", *DRY).out, call("submit", "digits", *DRY, "--json").document
    assert document["script"].replace(" --json", "") == plain


def test_dry_run_loads_neither_torch_nor_the_target():
    program = [sys.executable, "-X", "importtime", "-m", "meshrun", "submit", "llama", *DRY]
    ended = subprocess.run(program, capture_output=True, text=True, check=True)
    loaded = {line.rpartition("|")[2].strip() for line in ended.stderr.splitlines() if line.startswith("import time:")}
    assert "meshrun.launch.script" in loaded and ended.stdout.startswith("#!/bin/bash\n")
    assert not {name for name in loaded if name.split(".")[0] in ("torch", "numpy")}
    assert "meshrun.recipes.llama" not in loaded


def test_dry_run_takes_less_than_three_times_what_the_help_of_a_small_program_does():
    """Which is half a second on an idle machine; it takes 1.6 times as much."""
    assert cost(["-m", "meshrun", "submit", "digits", *DRY], beside=SMALL_HELP, at_most=2.8) < 2.8


def test_without_slurm_submit_says_what_can_be_done_here(call: Call, tmp_path: Path):
    here = r"^no Slurm on this machine: there is no sbatch; run this on a login node of the cluster"
    check_refusal(
        call("submit", "digits", *DRY[:-1]),
        here + r", or look at the job here \(--dry-run prints its script, meshrun rehearse plays it\)$",
    )
    for command in (["jobs"], ["follow", "digits-1"], ["cancel", "digits-1"]):
        check_refusal(call(*command), here + "$")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def on_cluster(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Call:
    """Runs a command line where Slurm's commands say what those of a cluster said; they lie in the folder bin."""
    recorded_slurm(tmp_path / "bin")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return call


def test_dry_run_shows_the_script_that_would_be_sent_here(on_cluster: Call):
    shown = on_cluster("submit", "digits", "--nodes", 4, "--dry-run")
    assert (shown.status, shown.err) == (0, "")
    asked = {line.removeprefix("#SBATCH ") for line in shown.out.splitlines() if line.startswith("#SBATCH")}
    assert {"--nodes=4", "--gres=gpu:4", "--cpus-per-task=8", "--partition=main"} <= asked
    assert "\n# Site: the cluster virtual, Slurm 22.05.8.\n" in shown.out


def test_dry_run_takes_the_profile_of_the_cluster_that_it_is_on(on_cluster: Call, tmp_path: Path):
    assert on_cluster("sites", "probe", "--save", "lab").status == 0
    path = tmp_path / "meshrun/sites/lab.toml"
    path.write_text(path.read_text().replace('"the cluster virtual, Slurm 22.05.8"', '"The lab"'))
    shown = on_cluster("submit", "digits", "--nodes", 4, "--dry-run")
    assert "\n# Site: The lab.\n" in shown.out
    assert shown.out == on_cluster("submit", "digits", "--nodes", 4, "--dry-run", "--site", "lab").out.replace(
        " --site lab", ""
    )


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--gpus-per-node", 9], r"^gpus_per_node is 9, but a node of partition main has 4; "),
        (["--partition", "nope"], r"^there is no partition 'nope'; there are main, short \(--partition\)$"),
        (["--time", "9d"], r"^time is 9-00:00:00, but partition main ends jobs after 1-00:00:00"),
        (["--nodes", 77], r"^nodes is 77, but partition main has 4"),
        (["--checkpoint", "often"], r"^checkpoint is 'often'; "),
    ],
)
@pytest.mark.parametrize("command", ["submit", "rehearse"])
def test_dry_run_and_rehearse_refuse_what_submit_does(
    on_cluster: Call, command: str, words: list[object], sentence: str
):
    dry = ["--dry-run"] if command == "submit" else []
    check_refusal(on_cluster(command, "digits", *words, *dry), sentence)


def test_dry_run_does_not_wait_for_a_controller_that_does_not_answer(
    on_cluster: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "bin" / "scontrol").write_text("#!/bin/sh\nexec /bin/sleep 60\n")
    monkeypatch.setattr("meshrun.cli.submit.PATIENCE", 0.3)
    began = time.monotonic()
    shown = on_cluster("submit", "digits", *DRY)
    assert shown.status == 0 and shown.out.startswith("#!/bin/bash\n") and time.monotonic() - began < 40
    assert shown.sentences == [
        "Slurm has not answered within 0.3 s, so it is not known here which partitions, limits and GPUs there are"
    ]
    asked = on_cluster("submit", "digits", "--dry-run")
    assert asked.status == 2 and asked.sentences[-1].startswith("how many GPUs a node has is not known here; ")


REFUSALS: dict[str, tuple[list[object], str]] = {
    "unknown site": (
        ["--site", "juwels-boster"],
        r"there is no site 'juwels-boster'; did you mean juwels-booster.*\(--site\)$",
    ),
    "more GPUs than the site's nodes have": (
        ["--site", "juwels-booster", "--gpus-per-node", 5, "--account", "x"],
        r"^gpus_per_node is 5, but a node of .* has 4; .*\(--gpus-per-node, --nodes\)$",
    ),
    "a time above the limit": (
        ["--site", "juwels-booster", "--account", "x", "--time", "2d"],
        r"^time is 2-00:00:00, but partition booster ends jobs after .*\(--time, --until-done\)$",
    ),
    "no account where one is needed": (
        ["--site", "juwels-booster"],
        r"takes no job without an account.*\(--account\)$",
    ),
    "a time that is none": (["--time", "soon"], r"^time is 'soon'; it must be one such as 90min.*\(--time\)$"),
    "too short a time": (["--time", "30s"], r"^time is 30 s; .*\(--time\)$"),
    "a time without end": (["--time", "UNLIMITED"], r"^time has no limit; .*\(--time\)$"),
    "no nodes": (["--nodes", 0], r"^nodes is 0; it must be at least 1 \(--nodes\)$"),
    "fewer ranks than GPUs": (["--procs", 3], r"^procs is 3, but each of the 4 GPUs of a node gets one rank; "),
    "a layout that does not fit": (["--layout", "fsdp=3"], r"^layout 'fsdp=3' needs 3 ranks but this run has 8; "),
    "tensor parallel across nodes": (
        ["--layout", "tp=8"],
        r"do not fit inside nodes of 4 ranks.*--allow-tp-across-nodes\)$",
    ),
    "a level of computing twice that is none": (
        ["--recompute", "every-0"],
        r"^recompute is 'every-0'; it must be auto, none, full, selective, or every-K .*\(--recompute\)$",
    ),
    "a sweep over levels that are none": (
        ["--sweep", "recompute=none,blah"],
        r"^recompute is 'blah'; it must be auto, .*\(--recompute\)$",
    ),
    "states that are none": (["--states", "4bit"], r"^states is '4bit'; it must be one of fp32, 8bit \(--states\)$"),
    "a precision that is none": (["--precision", "fp8"], r"^precision is 'fp8'; .* float8 \(--precision\)$"),
    "graphs with a value": (["--graphs=some"], r"^Option '--graphs' does not take a value$"),
    "an order that is none": (["--shuffle", "window:0"], r"^shuffle is 'window:0'; it must be full, .*\(--shuffle\)$"),
    "links of no chain": (["--links", 3], r"^links is 3, which bounds a chain of jobs; .*\(--until-done\)$"),
    "a chain of none": (["--until-done", "--links", 0], r"^links is 0; it must be at least 1 \(--links\)$"),
    "set-up lines that are not there": (["--setup", "none.sh"], r"^cannot read none.sh: No such file.*\(--setup\)$"),
    "a sweep without values": (["--sweep", "lr"], r"^sweep is 'lr'; it must be an option and its values.*\(--sweep\)$"),
    "a sweep over an empty value": (["--sweep", "lr=;1"], r"^sweep is 'lr=;1'; .*\(--sweep\)$"),
    "a sweep over what is no option": (["--sweep", "color=red,blue"], r"No such option: --color"),
    "a sweep over what is no value": (["--sweep", "lr=1e-3,fast"], r"^lr is 'fast'; it must be a number \(--lr\)$"),
    "a sweep over what is none of the run": (["--sweep", "time=1h,2h"], r"changes nothing in the run.*\(--sweep\)$"),
    "a sweep that names an option twice": (
        ["--sweep", "lr=1", "--sweep", "lr=2"],
        r"^a sweep names an option twice; .*\(--sweep\)$",
    ),
    "too large a sweep": (
        ["--sweep", f"lr={','.join(map(str, range(1, 40)))}", "--sweep", f"seed={','.join(map(str, range(40)))}"],
        r"^the sweep has more than 1000 combinations; .*\(--sweep\)$",
    ),
    "a name with a line break": (["--name", "a\nb"], r"^name is 'a\\nb'; it must be a plain file name \(--name\)$"),
    "a folder with a line break": (["--runs", "a\nb"], r"^the path '.*' has characters that no job script can hold"),
    "a folder with a backslash": (["--runs", "a\\b"], r"^the path '.*' has a backslash, .*\(--runs\)$"),
    "an account with a line break": (["--account", "a\n#SBATCH -x"], r"^account is 'a\\n#SBATCH -x'; .*\(--account\)$"),
    "a partition that is shell code": (["--partition", "$(id)"], r"^partition is '\$\(id\)'; .*\(--partition\)$"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_cannot_be_submitted_is_refused_in_a_sentence(call: Call, tmp_path: Path, case: str):
    words, sentence = REFUSALS[case]
    given = {str(word) for word in words}
    usual = [] if "--site" in given else ["--gpus-per-node", 4]
    nodes = [] if "--nodes" in given else ["--nodes", 2]
    check_refusal(call("submit", "digits", "--dry-run", *nodes, *usual, *words), sentence)
    assert list(tmp_path.iterdir()) == []


def test_the_option_that_was_meant_is_named(call: Call, tmp_path: Path):
    (tmp_path / "mine.py").write_text("def experiment(width: int = 3): ...\n")
    check_refusal(
        call("submit", "mine.py", "--widht", 5, "--dry-run"), r"^No such option: --widht; did you mean --width\? "
    )


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (
            "raise SystemExit('giving up')",
            "experiment() of mine.py ends the program in line 2, with sys.exit('giving up')",
        ),
        ("return {}['width']", "experiment() of mine.py failed in line 2: KeyError: 'width'"),
    ],
)
def test_an_error_in_the_users_own_file_is_a_sentence_with_its_line(tmp_path: Path, line: str, sentence: str):
    (tmp_path / "mine.py").write_text(f"def experiment():\n    {line}\n")
    with pytest.raises(RunFailed, match=f"^{re.escape(sentence)}$"):
        submit._experiment(find(str(tmp_path / "mine.py")), RunConfig(target="mine.py"))


def test_a_file_that_is_no_python_is_named_with_its_line(call: Call, tmp_path: Path):
    (tmp_path / "broken.py").write_text("x = 1\ndef experiment(:\n")
    check_refusal(call("submit", "broken.py", *DRY), r"^broken\.py is not valid Python: line 2: invalid syntax$")


def test_gpus_that_nobody_knows_of_are_asked_for(call: Call):
    check_refusal(
        call("submit", "digits", "--dry-run"), r"^how many GPUs a node has is not known here; .*\(--gpus-per-node\)$"
    )


def test_a_plain_script_is_refused(call: Call, tmp_path: Path):
    (tmp_path / "script.py").write_text("print(1)\n")
    check_refusal(call("submit", "script.py", *DRY), r"^script.py is a plain script; submit needs a function")


def test_words_of_a_hostile_user_are_words(call: Call, tmp_path: Path):
    """What is typed gets to the job as it is, and runs nowhere."""
    hostile = 'it\'s "50%" $(touch gone) `id`;&'
    shown = call("submit", "digits", *DRY, "--name", hostile).out
    assert subprocess.run(["/bin/bash", "-n"], input=shown, text=True, check=False).returncode == 0
    assignment = next(line for line in shown.splitlines() if line.startswith("RUN="))
    program = f'{assignment}\nprintf %s "$RUN"'
    said = subprocess.run(["/bin/bash", "-c", program], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert said.stdout == f"{tmp_path}/runs/{hostile}-1"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", sorted(recipes()))
def test_options_read_from_the_text_are_those_of_the_function(text: str):
    check_same_options(find(text))


def test_options_of_every_type_are_read_from_the_text():
    check_same_options(find(EVERY_TYPE))


def check_same_options(target: Target) -> None:
    """The same names in the same order, and of each whose type the text can tell, the same conversion."""
    told, found = static_options(target), options_of(target.function())
    assert told is not None
    assert {option.name for option in found} <= {option.name for option in told}
    for option in found:
        static = next(each for each in told if each.name == option.name)
        assert static.many == option.many and static.container == option.container
        if static.kind is not str:
            assert static.kind == option.kind
        if option.default is not None and isinstance(option.default, int | float | str):
            assert static.default == option.default


def test_a_function_that_is_imported_is_asked_for_its_options(call: Call, tmp_path: Path):
    (tmp_path / "mine.py").write_text("from meshrun.recipes.digits import experiment\n")
    assert static_options(find(str(tmp_path / "mine.py"))) is None
    assert call("submit", "mine.py", *DRY, "--width", 32).status == 0
    check_refusal(call("submit", "mine.py", *DRY, "--width", "wide"), r"^width is 'wide'; ")


def test_help_lists_the_options_of_jobs(call: Call):
    shown = re.sub(r"\s+", " ", call("submit", "--help").out)
    for flag in ("--gpus-per-node", "--until-done", "--sweep", "--dry-run", "--account", "--layout"):
        assert flag in shown


def test_the_runs_of_a_sweep_have_all_combinations_of_its_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    plan = planned(["digits", *DRY, "--sweep", "lr=1e-3,3e-4", "--sweep", "compile=true,false", "--until-done"])
    assert plan is not None and plan.submission.links == 20
    chosen = [(each.config.options.get("lr"), each.config.compile, each.values) for each in plan.choices]
    assert chosen == [
        (1e-3, True, "lr=1e-3, compile=true"),
        (1e-3, False, "lr=1e-3, compile=false"),
        (3e-4, True, "lr=3e-4, compile=true"),
        (3e-4, False, "lr=3e-4, compile=false"),
    ]
    assert {each.config.nodes for each in plan.choices} == {"1:2"}
    assert [element.run.name for element in plan.submission.sweep] == ["digits-1", "digits-2", "digits-3", "digits-4"]


class Queue(Slurm):
    """A Slurm whose jobs begin, and go on as another one, before sbatch has said their number."""

    def __init__(self, plan: Plan, rejects: bool = False) -> None:
        super().__init__()
        object.__setattr__(self, "rejects", rejects)
        object.__setattr__(self, "folders", [plan.submission.run, *(each.run for each in plan.submission.sweep)])

    def submit(self, script: Path, *_flags: str) -> str:
        assert script.stat().st_mode & 0o777 == 0o755
        if self.rejects:  # type: ignore[attr-defined]
            raise UserError("Slurm rejects the job")
        for folder in self.folders:  # type: ignore[attr-defined]
            replace(Record.load(folder), jobs=("99",)).save(folder)
        return "7"


def test_each_run_of_a_sweep_has_its_own_number_and_keeps_what_its_job_has_noted_already(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    plan = planned(["digits", *DRY, "--sweep", "lr=1e-3,3e-4"])
    assert plan is not None
    umask = os.umask(0)
    try:
        submission, job = submit._submitted(plan, Queue(plan))
    finally:
        os.umask(umask)
    assert job == "7" and submission.run.stat().st_mode & 0o777 == 0o770
    folders = [submission.run, *(each.run for each in submission.sweep)]
    records = [Record.load(folder) for folder in folders]
    assert [(each.jobs, each.index) for each in records] == [
        (("7", "99"), None),
        (("7_0", "99"), 0),
        (("7_1", "99"), 1),
    ]


def test_a_job_that_slurm_rejects_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for sweep in ([], ["--sweep", "lr=1e-3,3e-4"]):
        plan = planned(["digits", *DRY, *sweep])
        assert plan is not None
        with pytest.raises(UserError, match="rejects"):
            submit._submitted(plan, Queue(plan, rejects=True))
        assert not list((tmp_path / "runs").iterdir())


@pytest.mark.parametrize(("layout", "looks"), [("dp=*", 0), ("fsdp=*", 1)])
def test_whether_the_model_can_be_trained_so_is_found_out_before_it_waits_in_a_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str, looks: int
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/nowhere")
    looked: list[str] = []
    monkeypatch.setattr(refusals, "refuse", lambda _, layout, __: looked.append(str(layout)))
    submit._checked(["digits", *DRY[:-1], "--layout", layout])
    assert len(looked) == looks


@pytest.mark.parametrize(
    ("words", "followed"),
    [
        ([], [(False, False)]),
        (["--no-follow"], []),
        (["--wait", "--no-follow"], [(False, True)]),
        (["--json"], []),
        (["--wait", "--json"], [(True, False)]),
    ],
)
def test_a_job_is_followed_or_waited_for_as_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], followed: list[tuple[bool, bool]]
):
    """As a document for scripts or in words, and with its whole story or its end alone."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(submit, "cluster_here", lambda _: None)
    monkeypatch.setattr(Slurm, "here", lambda *_: Slurm())
    monkeypatch.setattr(submit, "_submitted", lambda plan, _: (plan.submission, "7"))
    seen: list[tuple[bool, bool]] = []
    monkeypatch.setattr(following, "follow", lambda _, __, told, quiet: seen.append((told is not None, quiet)) or 0)
    assert submit.submit_command(["digits", *DRY[:-1], *words]) == 0 and seen == followed


def test_a_job_goes_on_with_fewer_nodes_only_where_the_layout_fits_in_them():
    config = RunConfig("digits", procs=2)
    assert job_plan._fits(parse("dp=*"), 2, config) and not job_plan._fits(parse("tp=4"), 4, config)
    assert job_plan._fits(parse("tp=4"), 4, replace(config, allow_tp_across_nodes=True))


@pytest.mark.parametrize(
    ("given", "gpus", "site", "cpus"),
    [
        (3, 4, {}, 12),
        (None, 0, {"cores_per_gpu": 18}, 4),
        (None, 4, {}, None),
        (None, 4, {"cores_per_gpu": 18, "threads_per_core": 2}, 144),
        (None, 4, {"cores_per_gpu": 18, "threads_per_core": 2, "hint": "nomultithread"}, 72),
    ],
)
def test_a_node_asks_for_the_hardware_threads_that_belong_to_its_gpus(
    given: int | None, gpus: int, site: Any, cpus: int | None
):
    assert _cpus(given, gpus, 4, site) == cpus


def test_a_job_is_one_of_several_only_where_it_is_to_go_on_until_the_training_is_done():
    for words, links in (([], 1), (["--until-done"], LINKS), (["--until-done", "--links", "3"], 3)):
        plan = planned(["digits", *DRY, *words])
        assert plan is not None and plan.submission.links == links


def test_the_number_of_gpus_may_be_said_as_that_of_ranks_too():
    for procs in ([], ["--procs", "4"]):
        plan = planned(["digits", "--gpus-per-node", "4", "--time", "1h", "--dry-run", *procs])
        assert plan is not None and plan.submission.resources.procs == 4
    with pytest.raises(UserError, match="procs is 2, but each of the 4 GPUs of a node gets one rank"):
        planned(["digits", "--gpus-per-node", "4", "--time", "1h", "--dry-run", "--procs", "2"])

"""What a run's record holds: all that decided it, where it came from, and every start that it had."""

from __future__ import annotations

import functools
import json
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from meshrun.cli.provenance import MOST_TEXT, name_of, options_used, program_of
from meshrun.cli.target import find, place_of
from meshrun.config import RunConfig, RunDirectory, is_secret, without_secrets
from tests.launch.command import meshrun

PROGRAM = """
import torch
from torch import nn
from meshrun import Experiment, cross_entropy

def experiment(width: int = 4, lr: float = 0.25, names: list[str] = ["a", "b"]) -> Experiment:
    inputs = torch.randn(16, 3, generator=torch.Generator().manual_seed(0))
    data = torch.utils.data.TensorDataset(inputs, torch.arange(16) % 2)
    return Experiment(
        model=lambda: nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 2)),
        train=data, evals={"val": data}, loss=cross_entropy, batch=4, steps=4,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=lr, momentum=0.9),
        schedule=lambda step, steps: 1.0 - step / steps,
    )
"""


def git(folder: Path, *words: str) -> None:
    names = ("-c", "user.name=x", "-c", "user.email=x@x")
    subprocess.run(["git", *names, *words], cwd=folder, check=True, capture_output=True)


def test_the_record_of_a_run_says_all_that_decided_it_and_all_starts_that_it_had(tmp_path: Path):
    program = tmp_path / "small.py"
    program.write_text(PROGRAM)
    git(tmp_path, "init")
    git(tmp_path, "add", "small.py")
    git(tmp_path, "commit", "-m", "x")
    ended = meshrun(tmp_path, "run", "small.py", "--procs", 2, "--width", 6, "--checkpoint", 2)
    assert ended.status == 0, ended.err
    run = tmp_path / "runs" / "small-1"
    document = json.loads((run / "config.json").read_text())
    words = ["meshrun", "run", "small.py", "--procs", "2", "--width", "6", "--checkpoint", "2"]
    assert document["config"]["command"] == words
    resolved = document["resolved"]
    assert resolved["options"] == {"width": 6, "lr": 0.25, "names": ["a", "b"]}
    assert resolved["optimizer"]["class"] == "SGD"
    assert (resolved["optimizer"]["groups"][0]["lr"], resolved["optimizer"]["groups"][0]["momentum"]) == (0.25, 0.9)
    assert resolved["schedule"] == "<lambda> in small.py, line 13"
    assert resolved["launcher"] == "meshrun"
    assert resolved["program"]["text"] == PROGRAM and resolved["program"]["path"] == str(program)
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=tmp_path, capture_output=True, text=True, check=True
    ).stdout
    assert resolved["program"]["git"] == {"commit": commit.strip(), "modified": False, "tracked": True}
    assert " at 0x" not in (run / "config.json").read_text()
    first = json.loads((run / "result.json").read_text())
    assert "legs" not in first

    ended = meshrun(tmp_path, "resume", run, "--steps", 8, "--procs", 1)
    assert ended.status == 0, ended.err
    result = json.loads((run / "result.json").read_text())
    assert [(leg["layout"], leg["first_step"], leg["last_step"]) for leg in result["legs"]] == [
        ("dp=2", 0, 4),
        ("dp=1", 4, 8),
    ]
    assert [leg["launcher"] for leg in result["legs"]] == ["meshrun", "none"]
    assert result["seconds"] == pytest.approx(sum(leg["seconds"] for leg in result["legs"]))
    assert result["seconds"] > first["seconds"] > 0
    assert f"8 steps in {result['seconds']:.1f} s in 2 starts, the last on dp=1" in ended.out
    document = json.loads((run / "config.json").read_text())
    assert document["config"]["command"][:2] == ["meshrun", "resume"]
    assert document["history"][0]["config"]["command"] == words
    report = (run / "report.html").read_text()
    for text in ("nn.Tanh(), nn.Linear(width, 2)", commit.strip(), "options.lr", "optimizer.groups", "meshrun resume "):
        assert text in report, text


def step_decay(step: int, steps: int) -> float:
    return 1.0 - step / steps


class Decay:
    def __call__(self, step: int, steps: int) -> float:
        return step_decay(step, steps)


def test_functions_are_named_by_where_they_are_written_and_never_by_an_address():
    line = step_decay.__code__.co_firstlineno
    assert name_of(step_decay) == f"step_decay in test_record.py, line {line}"
    assert name_of(functools.partial(step_decay, 3)) == f"partial of step_decay in test_record.py, line {line}"
    assert name_of(torch.optim.AdamW) == "torch.optim.adamw.AdamW"
    assert " at 0x" not in name_of(Decay()) and "Decay object" in name_of(Decay())
    assert name_of(len) == "builtins.len"


def test_every_parameter_has_its_value_in_the_record():
    def experiment(a: int, b: float = 0.5, c: Any = step_decay, d: Path = Path("x"), *, e: tuple[int, ...] = (1, 2)):
        return a, b, c, d, e

    line = step_decay.__code__.co_firstlineno
    assert options_used(experiment, {"a": 3, "d": "y"}) == {
        "a": 3,
        "b": 0.5,
        "c": f"step_decay in test_record.py, line {line}",
        "d": "y",
        "e": [1, 2],
    }


def test_a_program_outside_of_git_or_gone_has_what_can_be_known(tmp_path: Path):
    (tmp_path / "a.py").write_text("x = 1\n")
    found = program_of(tmp_path / "a.py")
    assert found["text"] == "x = 1\n" and len(found["sha256"]) == 64 and found["git"] is None
    assert program_of(tmp_path / "gone.py") == {"path": str(tmp_path / "gone.py")}
    git(tmp_path, "init")
    assert program_of(tmp_path / "a.py")["git"] is None, "there is no commit yet"
    git(tmp_path, "commit", "--allow-empty", "-m", "x")
    assert program_of(tmp_path / "a.py")["git"]["tracked"] is False
    git(tmp_path, "add", "a.py")
    git(tmp_path, "commit", "-m", "x")
    (tmp_path / "a.py").write_text("x = 2\n")
    assert program_of(tmp_path / "a.py")["git"]["modified"] is True


SECRETIVE = """
import torch
from meshrun import Experiment, mean_squared_error

def experiment(hub_token: str = "", max_tokens: int = 1):
    data = torch.utils.data.TensorDataset(torch.ones(8, 4), torch.ones(8, 4))
    sgd = lambda parameters: torch.optim.SGD(parameters, lr=1e-3)
    return Experiment(lambda: torch.nn.Linear(4, 4), data, loss=mean_squared_error, optimizer=sgd, batch=4, steps=2)
"""


def test_the_value_of_an_option_that_is_a_secret_is_in_no_file_that_others_can_read(tmp_path: Path):
    (tmp_path / "secretive.py").write_text(SECRETIVE)
    ended = meshrun(tmp_path, "run", "secretive.py", "--procs", 2, "--hub-token", "s3cr3t", "--max-tokens", 77)
    assert ended.status == 0, ended.err
    run = tmp_path / "runs" / "secretive-1"
    holding = [path.name for path in run.rglob("*") if path.is_file() and b"s3cr3t" in path.read_bytes()]
    assert holding == ["config.json"]
    assert stat.S_IMODE((run / "config.json").stat().st_mode) == 0o600
    report = (run / "report.html").read_text()
    assert "(hidden)" in report and "77" in report


def test_words_that_are_written_down_hide_the_values_of_secrets():
    words = [
        "run",
        "--api-key=x",
        "--password",
        "y.-1",
        "--token",
        "--lr",
        "1",
        "--from",
        "s3://me:z@host:9/a@b",
        "http://h:1/c@d",
    ]
    shown = ["run", "--api-key=(hidden)", "--password", "(hidden)", "--token", "--lr", "1"]
    assert without_secrets(words) == (*shown, "--from", "s3://(hidden)@host:9/a@b", "http://h:1/c@d")


@pytest.mark.parametrize(
    "name",
    [
        "hftoken",
        "authToken",
        "--dbpassword",
        "wandb_key",
        "smtp-pwd",
        "basic_auth",
        "pw",
        "db_pass",
        "credentials_json",
    ],
)
def test_secrets_are_known_by_their_names_however_these_are_put_together(name: str):
    assert is_secret(name)


@pytest.mark.parametrize("name", ["max_tokens", "tokenizer", "key", "author", "path", "passes", "bypass", "seed"])
def test_names_of_other_things_are_no_secrets(name: str):
    assert not is_secret(name)


def test_a_secret_that_is_a_default_or_of_an_earlier_start_is_for_the_owner_alone(tmp_path: Path):
    run = RunDirectory.create(RunConfig("digits", runs=tmp_path))
    assert mode_of(run) != 0o600
    run.save_config(RunConfig("digits", runs=tmp_path), {"options": {"hub_token": "s3cr3t"}})
    assert mode_of(run) == 0o600
    with run.renewed(RunConfig("digits", runs=tmp_path), run.document()):
        assert mode_of(run) == 0o600, "the history holds it"


def mode_of(run: RunDirectory) -> int:
    return stat.S_IMODE((run.path / "config.json").stat().st_mode)


def test_the_command_for_missing_files_hides_secrets(tmp_path: Path):
    """It stands in sentences that logs, events and reports keep."""
    (tmp_path / "secretive.py").write_text(SECRETIVE)
    place = place_of(find(str(tmp_path / "secretive.py")), {"hub_token": "s3cr3t", "max_tokens": 3}, Path("data"))
    assert "s3cr3t" not in place.command and "--max-tokens=3" in place.command


def test_the_record_says_whether_git_knows_a_program_and_whether_it_was_changed(tmp_path: Path):
    def git(*words: str) -> None:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", *identity, *words], cwd=tmp_path, check=True, capture_output=True)

    known, unknown = tmp_path / "known.py", tmp_path / "unknown.py"
    for path in (known, unknown):
        path.write_text("x = 1")
    git("init", "-q")
    git("add", "known.py")
    git("commit", "-qm", "first")
    assert [program_of(path)["git"]["tracked"] for path in (known, unknown)] == [True, False]
    assert program_of(known)["git"]["modified"] is False
    known.write_text("x = 2")
    assert program_of(known)["git"]["modified"] is True


def test_the_text_of_a_long_program_is_not_kept(tmp_path: Path):
    path = tmp_path / "long.py"
    path.write_text("#" * (MOST_TEXT + 1))
    found = program_of(path)
    assert found["text"] is None and len(found["sha256"]) == 64

"""`meshrun chaos` without a run: which faults are planned, what is kept, and the exit status."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from meshrun.check.chaos import Outcome
from meshrun.cli import chaos
from meshrun.cli.chaos import _folder, armed_text, chaos_command
from meshrun.cli.command import parse_chaos
from meshrun.cli.target import find
from meshrun.errors import UserError
from tests.launch.command import TINY


class Struck:
    """Runs of which none is made."""

    evaluates = False
    failures: tuple[str, ...] = ()
    made: Struck

    def __init__(self, _target: str, _armed: str, document: dict[str, Any], folder: Path, *_: object) -> None:
        self.document, self.folder, Struck.made = document, folder, self

    def reference(self) -> None:
        pass

    def strike(self, faults: list[Any], _tell: object) -> Outcome:
        self.faults = faults
        return Outcome(failures=list(self.failures))


@pytest.fixture
def struck(monkeypatch: pytest.MonkeyPatch) -> type[Struck]:
    monkeypatch.setattr(chaos, "Chaos", Struck)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    return Struck


def ended(*words: str) -> int:
    asked = parse_chaos([TINY, "--faults", "40", "--json", *words])
    assert asked is not None
    return chaos_command(asked)


@pytest.mark.parametrize(
    ("failures", "keeps"), [((), False), ((), True), (("a sample was lost",), False), (("two were lost",), True)]
)
def test_runs_are_kept_where_one_failed_or_that_is_asked_for(
    struck: type[Struck],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    failures: tuple[str, ...],
    keeps: bool,
):
    monkeypatch.setattr(struck, "failures", failures)
    monkeypatch.setattr(chaos.tempfile, "mkdtemp", lambda **_: str(tmp_path / "own"))
    (tmp_path / "own").mkdir()
    kept = tmp_path / "kept" if keeps else tmp_path / "own"
    assert ended(*(("--keep", str(kept)) if keeps else ())) == len(failures)
    assert struck.made.folder == kept and kept.exists() is bool(failures or keeps)
    assert json.loads(capsys.readouterr().out)["seed"] == 1


def test_another_seed_strikes_elsewhere_and_only_what_there_is(struck: type[Struck], monkeypatch: pytest.MonkeyPatch):
    planned = []
    for seed in ("1", "1", "2"):
        assert ended("--seed", seed) == 0
        planned.append([str(fault) for fault in struck.made.faults])
    assert planned[0] == planned[1] != planned[2]
    assert "kill-evaluating" not in str(planned), "the run without faults had no evaluation"
    monkeypatch.setattr(struck, "evaluates", True)
    assert ended("--kinds", "kill-evaluating") == 0
    assert {fault.kind for fault in struck.made.faults} == {"kill-evaluating"}


def test_the_user_decides_on_runs_but_for_what_chaos_needs(struck: type[Struck]):
    assert ended("--steps", "80", "--procs", "3") == 0
    document = struck.made.document
    assert (document["steps"], document["procs"], document["eval_every"], document["checkpoint"]) == (80, 3, 10, "5")
    assert (document["record_ids"], document["tensorboard"], document["keep"]) == (True, False, 3)


def test_a_folder_in_which_something_is_takes_no_runs(tmp_path: Path):
    assert _folder(tmp_path / "new" / "one").is_dir()
    (tmp_path / "mine").touch()
    with pytest.raises(UserError, match=r"is not empty; give a folder that is empty or does not exist \(--keep\)"):
        _folder(tmp_path)
    with pytest.raises(UserError, match="cannot make the folder"):
        _folder(tmp_path / "mine")


def test_armed_ranks_find_the_target_from_wherever_they_start(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(Path(TINY).parent)
    assert f"find('{TINY}:experiment')" in armed_text(find("tiny.py"))
    assert "find('digits')" in armed_text(find("digits"))

"""What a command line ends with: the sentence, who says it, and the exit status."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from meshrun.cli import main as module
from meshrun.cli import next as next_module
from meshrun.cli import verify as verify_module
from meshrun.cli.main import PATIENCE, _dispatch, _parsed, _place_in_program, _tell_other_nodes, main
from meshrun.errors import CutOff, RunFailed, SharedError, StoppedByHand, UserError
from meshrun.launch import agents
from meshrun.world import World


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long a process waits before its end."""
    found: list[float] = []
    monkeypatch.setattr(module, "time", SimpleNamespace(sleep=found.append))
    return found


def ended(monkeypatch: pytest.MonkeyPatch, error: BaseException | None, *words: str) -> int:
    """The exit status of a command that comes to such an end."""

    def dispatch(_words: list[str]) -> int:
        if error is not None:
            raise error
        return 0

    monkeypatch.setattr(module, "_dispatch", dispatch)
    with pytest.raises(SystemExit) as found:
        main(list(words))
    return int(found.value.code or 0)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (UserError("no"), 2),
        (RunFailed("no"), 1),
        (CutOff("no"), 75),
        (StoppedByHand("no"), 130),
        (PermissionError(13, "no"), 2),
        (OSError(28, "no"), 1),
    ],
)
def test_the_status_says_whose_mistake_it_was_also_in_the_document(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception, status: int
):
    assert ended(monkeypatch, error, "run", "digits", "--json") == status
    shown = capsys.readouterr()
    assert json.loads(shown.out)["status"] == status and shown.err.startswith("meshrun: no")


def test_ctrl_c_has_the_status_of_shells(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    assert ended(monkeypatch, KeyboardInterrupt(), "run", "digits") == 130
    assert capsys.readouterr().err == "meshrun: stopped by CTRL-C\n"


def test_what_stands_behind_two_dashes_is_not_for_meshrun(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    assert ended(monkeypatch, UserError("no"), "run", "script.py", "--", "--json", "--debug") == 2
    assert capsys.readouterr() == ("", "meshrun: no\n")


@pytest.mark.parametrize(
    ("rank", "error", "says"), [(0, SharedError, True), (1, SharedError, False), (1, UserError, True)]
)
def test_of_many_ranks_the_first_one_says_what_all_of_them_meet_and_the_others_wait_for_it(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    waits: list[float],
    rank: int,
    error: type[UserError],
    says: bool,
):
    left: list[int] = []

    def leave(status: int) -> None:
        left.append(status)
        raise SystemExit(status)

    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(module, "_world", lambda: World(rank, 2, rank, 2, 0, 1, "n1", "torchrun"))
    assert ended(monkeypatch, error("no"), "run", "digits") == 2
    assert left == [2], "without the clean-up at the end of a process, which waits for the other ranks"
    assert capsys.readouterr().err == ("meshrun: no\n" if says else "")
    assert waits == ([] if says else [PATIENCE])


def test_a_result_that_could_not_be_printed_is_a_failure(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "flush", lambda: "cannot write standard output: No space left on device")
    assert ended(monkeypatch, None, "version") == 1


def test_an_error_is_placed_at_the_innermost_line_of_the_users_own_program():
    scope: dict[str, Any] = {}
    text = "import json\ndef outer():\n    inner()\ndef inner():\n    json.loads('{')\n"
    exec(compile(text, "/home/me/program.py", "exec"), scope)
    with pytest.raises(ValueError) as found:
        scope["outer"]()
    assert _place_in_program(found.value) == "/home/me/program.py:5 in inner"
    assert _place_in_program(UserError("no")) is None


@pytest.mark.parametrize(("words", "printed"), [(["--json"], "err"), ([], "out"), (["--json", "--help"], "out")])
def test_standard_output_is_kept_for_the_document_but_help_is_printed_there(
    capsys: pytest.CaptureFixture[str], words: list[str], printed: str
):
    _parsed(lambda _: print("words of the program"), words)  # type: ignore[arg-type,func-returns-value]
    assert getattr(capsys.readouterr(), printed) == "words of the program\n"


@pytest.mark.parametrize(
    ("world", "words", "resumes", "told"),
    [
        ({"node": 0}, ["digits", "--runs", "there"], False, ["give up", Path("there")]),
        ({"node": 1}, ["digits", "--runs=there"], False, ["excuse", Path("there"), "no"]),
        ({"node": 1}, ["digits"], False, ["excuse", Path("runs"), "no"]),
        ({"node": 0}, ["there/digits-1"], True, ["give up", Path("there")]),
        ({"node": 0, "size": 4}, ["digits"], False, []),
        ({"node": 0, "source": "torchrun"}, ["digits"], False, []),
        ({"node": 0, "nodes": 1, "size": 1}, ["digits"], False, []),
    ],
)
def test_where_one_task_a_node_was_started_nobody_waits_for_one_that_fails(
    monkeypatch: pytest.MonkeyPatch, world: dict[str, Any], words: list[str], resumes: bool, told: list[object]
):
    said: list[object] = []
    of_two = replace(World(0, 2, 0, 1, 0, 2, "n1", "slurm"), **world)
    monkeypatch.setattr(module, "_world", lambda: of_two)
    monkeypatch.setattr(agents, "give_up", lambda _, *given: said.extend(["give up", *given]))
    monkeypatch.setattr(agents, "excuse", lambda _, *given: said.extend(["excuse", *given]))
    _tell_other_nodes(words, resumes, "no")
    assert said == told


def test_commands_get_the_words_behind_them_and_their_status_is_passed_on(monkeypatch: pytest.MonkeyPatch):
    got: list[object] = []
    monkeypatch.setattr(next_module, "next_command", lambda *given: got.extend(given) or 7)
    assert _dispatch(["next", "runs/a-1", "--status", "75", "--json"]) == 7
    assert got == [Path("runs/a-1"), 75, True]
    asked = SimpleNamespace()
    monkeypatch.setattr(module, "_parsed", lambda *_: asked)
    monkeypatch.setattr(verify_module, "verify_command", lambda found: 1 if found is asked else 0)
    assert _dispatch(["verify", "digits"]) == 1


def test_of_a_plain_script_only_a_document_tells_what_it_has_reached(capsys: pytest.CaptureFixture[str]):
    for as_json, shown in ((False, ""), (True, '{"run": null, "world": 2}\n')):
        asked: Any = SimpleNamespace(as_json=as_json, target=SimpleNamespace(entry=None))
        assert module._trained(asked, {"run": None, "world": 2}) == 0
        assert capsys.readouterr().out == shown

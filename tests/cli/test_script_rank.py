"""A rank that runs a plain script: what the script sees, and how its process ends."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from meshrun.cli import script_rank
from meshrun.cli.script_rank import leave, run_script, run_watched
from meshrun.cli.target import find
from meshrun.config import RunConfig
from meshrun.world import World


def test_a_script_has_its_own_name_and_words_and_the_modules_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "beside_the_script.py").write_text("HERE = 7\n")
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\nfrom beside_the_script import HERE\nfrom pathlib import Path\n"
        "Path(__file__).with_name('seen').write_text(f'{__name__} {sys.argv} {HERE}')\n"
    )
    monkeypatch.setattr(sys, "argv", ["meshrun", "run", "script.py"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(script_rank, "use", lambda _: None)
    monkeypatch.setattr(script_rank.mesh, "use", lambda _: None)
    run_script(RunConfig(str(script), arguments=("--lr", "3")), find(str(script)))
    assert (tmp_path / "seen").read_text() == f"__main__ {[str(script), '--lr', '3']} 7"


@pytest.mark.parametrize(("rank", "tells"), [(0, True), (1, False), (2, False)])
def test_the_first_rank_of_all_nodes_tells_that_they_work_alone(
    monkeypatch: pytest.MonkeyPatch, rank: int, tells: bool
):
    told: list[str] = []
    world = World(rank, 4, rank % 2, 2, rank // 2, 2, "n1", "torchrun")
    monkeypatch.setattr(script_rank, "detect", lambda _: world)
    monkeypatch.setattr(script_rank, "run_script", lambda *_: None)
    monkeypatch.setattr(script_rank.mesh, "notice_groups", lambda _: None)
    recorder: Any = lambda _, text: told.append(text)  # noqa: E731
    nothing: Any = None
    assert run_watched(nothing, find("digits"), recorder, None) is False
    assert len(told) == tells and all("each of its 4 ranks does all of the work by itself" in text for text in told)


def test_a_script_ends_as_an_interpreter_does(monkeypatch: pytest.MonkeyPatch):
    done: list[object] = []

    def end(status: int) -> None:
        raise SystemExit(status)

    monkeypatch.setattr(threading, "_shutdown", lambda: done.append("threads"))
    monkeypatch.setattr(atexit, "_run_exitfuncs", lambda: done.append("what was left for the end"))
    monkeypatch.setattr(os, "_exit", end)
    with pytest.raises(SystemExit) as ended:
        leave()
    assert done == ["threads", "what was left for the end"] and ended.value.code == 0

"""A rank of our launcher: what it does in which order, and the status that says whether others may start it anew."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from meshrun.cli import rank
from meshrun.cli.rank import _may_go_away, _owned, rank_command
from meshrun.config import RunConfig, RunDirectory
from meshrun.data.readers import ReaderLost
from meshrun.errors import RunFailed, SharedError, UserError
from meshrun.launch.lock import lock
from meshrun.mesh import PeerLost
from meshrun.train.loop import Stopped
from meshrun.world import detect


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(RunConfig("digits", runs=tmp_path))


@pytest.mark.parametrize(
    ("error", "goes_away"),
    [
        (PeerLost("rank 1 lost rank 0"), True),
        (Stopped("a rank was told to stop"), True),
        (torch.AcceleratorError("an uncorrectable error"), True),
        (ReaderLost("reader 1 was killed"), True),
        (RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer"), True),
        (RuntimeError("shapes do not match"), False),
        (UserError("no such folder"), False),
        (ValueError("bad luck"), False),
    ],
)
def test_ranks_are_worth_another_start_where_what_was_lost_may_be_there_then(error: Exception, goes_away: bool):
    assert _may_go_away(error) is goes_away


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a rank without a launcher does, of which nothing happens."""
    found: list[str] = []

    def leave(status: int) -> None:
        raise SystemExit(status)

    for name in ("die_with_launcher", "print_to", "hear_of_no_reader"):
        monkeypatch.setattr(rank, name, lambda *_: None)
    monkeypatch.setattr(rank.signal, "signal", lambda *_: None)
    for name in ("train", "afterwards", "refuse_unsaved"):
        monkeypatch.setattr(rank, name, lambda *_, name=name: found.append(name))
    monkeypatch.setattr(rank.mesh, "finish", lambda: found.append("finish"))
    monkeypatch.setattr(rank, "Signals", contextlib.nullcontext)
    monkeypatch.setattr(os, "_exit", leave)
    return found


def test_ranks_part_before_the_first_one_works_on_and_a_checkpoint_that_is_missing_is_told_last(
    run: RunDirectory, calls: list[str]
):
    rank_command(run.path, os.getpid())
    assert calls == ["train", "finish", "afterwards", "refuse_unsaved"]


@pytest.mark.parametrize(
    ("where", "error", "status"),
    [
        ("train", UserError("no such folder"), 2),
        ("train", PeerLost("rank 1 lost rank 0"), 75),
        ("train", ValueError("bad luck"), 1),
        ("refuse_unsaved", RunFailed("its last checkpoint could not be kept"), 1),
    ],
)
@pytest.mark.usefixtures("calls")
def test_the_status_of_a_rank_says_whether_it_is_worth_another_start(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, where: str, error: Exception, status: int
):
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(rank, where, fail)
    with pytest.raises(SystemExit) as ended:
        rank_command(run.path, os.getpid())
    assert ended.value.code == status
    assert str(error) in run.events_of(0).read_text()


def test_a_run_is_renewed_only_where_it_is_one_to_go_on_with(run: RunDirectory, monkeypatch: pytest.MonkeyPatch):
    renewed: list[Any] = []
    monkeypatch.setattr(rank, "run_of", lambda *_: run)
    monkeypatch.setattr(RunDirectory, "renewed", lambda _, *given: contextlib.nullcontext(renewed.append(given)))
    here: Any = SimpleNamespace(world=detect({}))
    for again in (None, run):
        with contextlib.ExitStack() as held:
            assert _owned(run.config(), here, again, {"format": 1}, held) == (str(run.path), "")
            with pytest.raises(SharedError, match="is in use"), lock(run):
                pass
    assert renewed == [(run.config(), {"format": 1})]

"""`meshrun cancel`: which of a run's jobs Slurm is asked to end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshrun.cli import listing
from meshrun.cli.jobs import cancel_command
from meshrun.errors import UserError
from meshrun.launch.slurm import Slurm


@pytest.fixture
def cancelled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """What a Slurm is asked to cancel."""
    asked: list[str] = []
    monkeypatch.setattr(Slurm, "here", lambda *_: Slurm())
    monkeypatch.setattr(Slurm, "cancel", lambda _, id: asked.append(id))
    monkeypatch.setattr(listing, "found_run", lambda *_: tmp_path)
    return asked


@pytest.mark.parametrize(
    ("alive", "ended"),
    [
        (["7"], ["7"]),
        (["7", "7_0", "7_1"], ["7"]),
        (["7_1", "9_0"], ["7_1", "9_0"]),
        (["7", "7_0", "9_1"], ["7", "9_1"]),
    ],
)
def test_an_array_is_ended_as_one_and_elements_of_later_links_by_their_own_numbers(
    cancelled: list[str],
    alive: list[str],
    ended: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.setattr(listing, "called_off", lambda *_: alive)
    assert cancel_command("digits-1", as_json=True) == 0
    assert cancelled == ended == json.loads(capsys.readouterr().out)["cancelled"]


def test_a_run_whose_jobs_are_over_is_not_cancelled(cancelled: list[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(listing, "called_off", lambda *_: [])
    with pytest.raises(UserError, match="has no job that is pending or running"):
        cancel_command("digits-1")
    assert not cancelled

"""`meshrun verify` but for its trainings: which there are, what is resumed, and what it ends with."""

from __future__ import annotations

import math
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from meshrun.check import probe, resumed
from meshrun.check import verify as check
from meshrun.cli import configured, rank, verify
from meshrun.cli.command import Asked
from meshrun.cli.target import find
from meshrun.cli.verify import BACKWARDS, SAVES, Alone, verify_command
from meshrun.config import RunConfig, RunDirectory
from meshrun.errors import UserError
from meshrun.layout import Layout, parse
from meshrun.observe.failures import FirstFailure
from meshrun.world import cores

CONFIG = RunConfig("digits", device="cpu", offload=True)
FAILED = FirstFailure("rank 0 failed", ["  model.py:3 in forward: x + y "], Path("log"), by_user=False)
NOBODY: Any = SimpleNamespace(begin=lambda _: None, end=lambda: None)


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[tuple[RunConfig, tuple[str, ...]]]:
    """The trainings that were wanted: their configuration, and the words for their ranks."""
    wanted: list[tuple[RunConfig, tuple[str, ...]]] = []

    def train(config: RunConfig, _layout: Layout, what: str, _shown: Any, _nursery: Any, words: Any = ()) -> Any:
        wanted.append((config, words))
        return Path("one") if what == "one process" else FAILED

    monkeypatch.setattr(verify, "_trained", train)
    monkeypatch.setattr(probe, "Found", SimpleNamespace(read=lambda _: SimpleNamespace(losses=[1.0])))
    return wanted


@pytest.mark.parametrize(("micro", "batch", "thirds"), [(None, 8, 3), (2, 8, 1), (None, 9, 3), (12, 8, 3)])
def test_the_twin_of_one_process_adds_up_in_thirds(trained: Any, micro: int | None, batch: int, thirds: int):
    experiment: Any = SimpleNamespace(micro=micro, batch=batch)
    verify._alone(CONFIG, experiment, 1e-5, NOBODY, NOBODY)
    (first, saving), (twin, words) = trained
    assert (saving, words) == ((SAVES,), ()) and twin.micro == thirds
    assert not first.offload and not twin.offload, "one process has no shards that could be elsewhere"


def test_with_statistics_over_all_ranks_the_twin_takes_batches_backwards(trained: Any):
    config = RunConfig("digits", device="cpu", sync_batchnorm=True, checkpoint="none")
    experiment: Any = SimpleNamespace(micro=None, batch=8)
    verify._alone(config, experiment, 1e-5, NOBODY, NOBODY)
    assert [words for _, words in trained] == [(), (BACKWARDS,)]


def test_a_layout_resumes_from_one_process_too_and_its_failure_is_told_with_its_line(trained: Any):
    found: Any = SimpleNamespace(losses=[1.0])
    alone = Alone(Path("alone"), found, None, check.allow(1e-5, None, 1))
    row = verify._row(CONFIG, parse("dp=2"), alone, NOBODY, NOBODY)
    assert [words for _, words in trained] == [(SAVES, "alone")]
    assert not row.ok and row.cause == "rank 0 failed (model.py:3 in forward: x + y)"


def test_ranks_are_told_what_else_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    started: list[Any] = []
    monkeypatch.setattr(verify, "launch", lambda job, **_: started.append(job) or [])
    config = RunConfig("digits", runs=tmp_path)
    run = verify._trained(config, parse("dp=2"), "dp=2", NOBODY, NOBODY, (SAVES, "alone"))
    (job,) = started
    assert job.ranks == 2 and list(job.argv[-2:]) == [SAVES, "alone"] and str(run) in job.argv


def test_of_what_was_resumed_that_which_differs_is_told_first(monkeypatch: pytest.MonkeyPatch):
    def resumption(ok: bool) -> Any:
        measured = SimpleNamespace(loss=0.0, grad_norm=0.0, weight=0.0)
        compared = SimpleNamespace(measured=measured, verdict=SimpleNamespace(ok=ok), cause=None)
        return SimpleNamespace(saved_on="a", resumed_on="b", step=3, failure=None, compared=lambda *_: compared)

    pairs = {Path("a"): resumption(True), Path("b"): resumption(False)}
    monkeypatch.setattr(resumed, "Resumption", SimpleNamespace(all_in=lambda _: pairs))
    found: Any = SimpleNamespace(loss_of_checkpoint=None)
    rows = verify._resumed(Alone(Path("alone"), found, None, check.allow(1e-5, None, 1)), found, Path("x"))
    assert [row.ok for row in rows] == [False, True]


@pytest.mark.parametrize(("granted", "most"), [(1, 2), (2, 4), (3, 6), (64, 8)])
def test_ranks_on_cpus_take_turns_two_a_core(monkeypatch: pytest.MonkeyPatch, granted: int, most: int):
    monkeypatch.setattr(cores, "granted", lambda: frozenset(range(granted)))
    assert verify._most_ranks(CONFIG) == most


@pytest.mark.parametrize("styles", [{}, {"layer": "column"}])
def test_tensor_parallelism_is_verified_where_it_splits_something(monkeypatch: pytest.MonkeyPatch, styles: Any):
    monkeypatch.setattr(verify, "_most_ranks", lambda _: 8)
    monkeypatch.setattr(verify, "_objection", lambda *_: None)
    demands: Any = SimpleNamespace(plan=SimpleNamespace(styles=styles))
    left_out: dict[str, str] = {}
    layouts = list(map(str, verify._covering(demands, CONFIG, left_out)))
    assert ("tp=2" in layouts, "tp=2" in left_out) == (bool(styles), not styles) and "dp=3" in layouts


@pytest.mark.parametrize(
    ("text", "said"), [("dp=*", "is open"), (" ; ", "must name at least one"), ("dp=5000", "at most 4,096")]
)
def test_layouts_that_cannot_be_verified_are_refused(text: str, said: str):
    assert list(map(str, verify._layouts_of("dp=2; fsdp=2,tp=2;"))) == ["dp=2", "fsdp=2,tp=2"]
    with pytest.raises(UserError, match=rf"{said}.*\(--layouts\)"):
        verify._layouts_of(text)


@pytest.mark.parametrize("ok", [True, False])
def test_the_exit_status_says_whether_all_layouts_agree(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], ok: bool
):
    outcome = SimpleNamespace(ok=ok, noise=None, document=lambda: {"ok": ok})
    monkeypatch.setattr(verify, "_verify", lambda *_: outcome)
    assert verify_command(Asked(find("digits"), CONFIG, as_json=True)) == (not ok)
    with pytest.raises(UserError, match="tolerance is nan; it must be above 0"):
        verify_command(Asked(find("digits"), CONFIG, True, {"tolerance": math.nan}))
    capsys.readouterr()


@pytest.mark.parametrize(("error", "status"), [(UserError("no such folder"), 2), (ValueError("bad luck"), 1)])
def test_a_rank_of_verify_says_by_its_status_whose_mistake_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, status: int
):
    def fail(_: object) -> None:
        raise error

    def leave(status: int) -> None:
        raise SystemExit(status)

    run = RunDirectory.create(RunConfig("digits", runs=tmp_path))
    monkeypatch.setattr(verify, "die_with_launcher", lambda _: None)
    monkeypatch.setattr(rank, "print_to", lambda _: None)
    monkeypatch.setattr(configured, "start_rank", fail)
    monkeypatch.setattr(os, "_exit", leave)
    with pytest.raises(SystemExit) as ended:
        verify.probe_command(run.path, os.getpid())
    assert ended.value.code == status and str(error) in run.events_of(0).read_text()

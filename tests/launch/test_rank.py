"""A rank of our own launcher, started by hand: what it hears, and from when its time is counted."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from meshrun.cli import rank, script_rank
from meshrun.config import RunConfig, RunDirectory
from meshrun.train.deadline import start_of_run
from meshrun.world import detect
from tests.launch.command import MODULE, wait_until

WAITING = """
import signal
print("here", flush=True)
signal.pause()
"""


def test_a_rank_that_is_started_anew_writes_its_log_behind_that_of_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    log, files = tmp_path / "rank-00000.log", list[int]()
    log.write_text("why it was lost\n")
    monkeypatch.setattr(os, "dup2", lambda file, _: files.append(file))
    monkeypatch.setattr(rank, "lose_what_is_refused", lambda: None)
    rank.print_to(log)
    os.write(files[0], b"on again\n")
    os.close(files[0])
    assert log.read_text() == "why it was lost\non again\n"


def test_what_another_rank_said_in_an_earlier_start_is_not_said_now(tmp_path: Path):
    run = RunDirectory.create(RunConfig("digits", runs=tmp_path))
    here: Any = SimpleNamespace(rank=1, size=2)
    since = time.time()
    with run.events_of(0).open("w") as events:
        for moment, found in ((since - 60, False), (since + 1, True)):
            failure = {"kind": "failure", "time": moment, "sentence": "the disk is full", "secondary": False}
            print(json.dumps(failure), file=events, flush=True)
            assert rank._said_elsewhere(run, here, "the disk is full", False, since, patience=0.01) is found


@pytest.mark.parametrize(("ranks", "notes"), [(1, 0), (2, 1)])
def test_that_ranks_have_nothing_to_do_with_each_other_is_told_once_and_where_there_are_several(ranks: int, notes: int):
    told: Any = []
    lone = script_rank._LoneRanks(SimpleNamespace(label="mine"), ranks, lambda *_, text: told.append(text))  # type: ignore[arg-type]
    for _ in range(2):
        lone._tell()
    assert len(told) == notes


@pytest.mark.parametrize(("status", "fails"), [(3, True), ("no data", True), (0, False), (None, False)])
def test_a_script_that_exits_fails_unless_it_says_that_all_is_well(
    monkeypatch: pytest.MonkeyPatch, status: object, fails: bool
):
    def run_script(*_: object) -> None:
        raise SystemExit(status)

    monkeypatch.setattr(script_rank, "run_script", run_script)
    monkeypatch.setattr(script_rank.mesh, "notice_groups", lambda _: None)
    nobody: Any = None
    with pytest.raises(SystemExit) if fails else contextlib.nullcontext():
        assert script_rank.run_watched(nobody, nobody, nobody, None) is False


def ignoring_sigterm() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def test_a_rank_that_is_no_fork_of_the_warm_process_does_not_ignore_sigterm_as_that_one_does(tmp_path: Path):
    (tmp_path / "waiting.py").write_text(WAITING)
    run = RunDirectory.create(RunConfig(str(tmp_path / "waiting.py"), runs=tmp_path / "runs"))
    words = [*MODULE, "rank", str(run.path), str(os.getpid())]
    with subprocess.Popen(words, preexec_fn=ignoring_sigterm) as rank:
        try:
            wait_until(lambda: run.log_of(0).is_file() and "here" in run.log_of(0).read_text(), 60)
            rank.terminate()
            assert rank.wait(60) == -signal.SIGTERM
        finally:
            rank.kill()


STARTED = """
import os, sys, time
from dataclasses import replace
from meshrun.train.deadline import start_of_run
from meshrun.world import detect
world = replace(detect({}), source="torchrun", agent_store=True)
if os.fork() == 0:
    print(start_of_run(world, ours=True), start_of_run(world, ours=False), flush=True)
    os._exit(0)
os.wait()
"""


def test_the_time_of_a_run_counts_from_the_start_of_its_launcher_not_of_the_process_that_ranks_are_forks_of():
    asked = subprocess.run([sys.executable, "-c", STARTED], capture_output=True, text=True, check=True, timeout=60)
    ours, others = map(float, asked.stdout.split())
    assert ours == pytest.approx(start_of_run(detect({}), ours=False), abs=0.1)
    assert others > ours + 0.1, "another launcher starts its ranks itself"

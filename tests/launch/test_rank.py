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
from meshrun.cli.run import _as_rank
from meshrun.config import RunConfig, RunDirectory
from meshrun.errors import RunFailed, SharedError, UserError
from meshrun.launch.lock import lock
from meshrun.mesh import PeerLost
from meshrun.observe.beside import LATE
from meshrun.train.deadline import start_of_run
from meshrun.world import World, detect
from tests.launch.command import MODULE, wait_until

WAITING = """
import signal
print("here", flush=True)
signal.pause()
"""


def test_a_rank_that_is_started_anew_writes_its_log_behind_that_of_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    log, files = tmp_path / "rank-00000.log", list[tuple[int, int]]()
    log.write_text("why it was lost\n")
    monkeypatch.setattr(os, "dup2", lambda file, to: files.append((file, to)))
    monkeypatch.setattr(rank, "lose_what_is_refused", lambda: None)
    rank.print_to(log)
    ((file, output), (again, errors)) = files
    assert (again, output, errors) == (file, 1, 2)
    os.write(file, b"on again\n")
    os.close(file)
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


@pytest.mark.parametrize(
    ("by", "is_cause", "said"), [(0, True, True), (0, False, False), (1, True, True), (1, False, True)]
)
def test_rank_0_tells_that_it_lost_the_others_unless_one_of_them_says_why(
    tmp_path: Path, by: int, is_cause: bool, said: bool
):
    """Else nobody would: all others leave it to rank 0."""
    run = RunDirectory.create(RunConfig("digits", runs=tmp_path))
    here: Any = SimpleNamespace(rank=by, size=2)
    failure = {"kind": "failure", "time": 5.0, "sentence": "rank 1 lost rank 0", "secondary": not is_cause}
    run.events_of(1 - by).write_text(json.dumps(failure) + "\n")
    assert rank._said_elsewhere(run, here, "rank 0 lost rank 1", True, 0.0, patience=0.01) is said


def test_a_run_that_somebody_trains_is_not_owned_by_a_second_launch_of_torchrun(tmp_path: Path):
    run = RunDirectory.create(RunConfig("digits", runs=tmp_path))
    here: Any = None
    with lock(run), contextlib.ExitStack() as held:
        made, refusal = rank._owned(run.config(), here, run, run.document(), held)
        assert made is None and "is in use by process" in refusal
    with contextlib.ExitStack() as held:
        assert rank._owned(run.config(), here, run, run.document(), held) == (str(run.path), "")


@pytest.mark.parametrize("procs", [1, 3])
def test_another_number_of_ranks_than_a_launcher_has_started_is_refused(procs: int):
    asked: Any = SimpleNamespace(config=RunConfig("digits", procs=procs), run=None)
    with pytest.raises(SharedError, match=f"procs is {procs} but slurm has started 2 ranks on n1; leave --procs away"):
        _as_rank(asked, World(0, 4, 0, 2, 0, 2, "n1", "slurm"))


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


def test_a_rank_that_does_not_see_the_run_says_where_that_must_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    here: Any = SimpleNamespace(rank=1, world=SimpleNamespace(host="n2"), from_rank_0=lambda _: (str(tmp_path), ""))
    monkeypatch.setattr(rank, "start_rank", lambda _: here)
    nobody: Any = None
    with pytest.raises(UserError, match=r"rank 1 on n2 cannot see .*; it must be on a shared disk \(--runs\)"):
        rank.work(RunConfig("digits"), nobody, nobody)


@pytest.mark.parametrize(
    ("error", "hang", "text", "ended"),
    [
        (PeerLost("rank 1 lost rank 0"), "", "rank 1 lost rank 0", True),
        (PeerLost("rank 1 lost rank 0"), "rank 0 hangs", "rank 0 hangs", False),
        (RuntimeError("bad luck"), "rank 0 hangs", "bad luck", False),
    ],
)
def test_a_rank_says_why_it_failed_unless_its_launcher_ends_it_for_the_loss_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, hang: str, text: str, ended: bool
):
    def train(*_: object) -> None:
        raise error

    killed: list[int] = []
    world = World(1, 2, 0, 1, 1, 2, "n2", "torchrun")
    here: Any = SimpleNamespace(rank=1, size=2, world=world, site=None)
    kept: list[int] = []
    monkeypatch.setattr(rank, "train", train)
    monkeypatch.setattr(rank, "told", lambda _: hang)
    monkeypatch.setattr(rank.Signals, "by", signal.SIGTERM, raising=False)
    monkeypatch.setattr(rank.Signals, "__init__", lambda _: None)
    monkeypatch.setattr(rank.Signals, "__enter__", lambda own: own)
    monkeypatch.setattr(rank.Signals, "__exit__", lambda *_: None)
    monkeypatch.setattr(rank, "_watched", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(rank, "_said_elsewhere", lambda *_: False)
    monkeypatch.setattr(rank, "kept_on_node", lambda *_: contextlib.nullcontext(kept.append(1)))
    monkeypatch.setattr(os, "kill", lambda _, number: killed.append(number))
    run = RunDirectory.create(RunConfig("digits", runs=tmp_path))
    nobody: Any = None
    with pytest.raises(RunFailed, match=text):
        rank._work_in(run, here, nobody, nobody)
    assert killed == [signal.SIGTERM] * ended
    assert kept == [1], "by the first rank of its node"


@pytest.mark.parametrize(("number", "local", "late"), [(2, 0, [0.0]), (3, 1, [LATE]), (4, 2, [])])
def test_two_ranks_of_each_node_watch_the_second_one_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, local: int, late: list[float]
):
    watching: list[float] = []
    ends: list[bool] = []
    monkeypatch.setattr(rank.Pulse, "open", lambda *_: SimpleNamespace(waiting=None, close=lambda: None))
    monkeypatch.setattr(rank.mesh, "listen", lambda _: None)
    monkeypatch.setattr(rank, "Watcher", lambda *_, late, **__: watching.append(late))
    monkeypatch.setattr(rank, "Beside", lambda *_, end: contextlib.nullcontext(ends.append(end)))
    run = RunDirectory.create(RunConfig("digits", runs=tmp_path, on_hang="report" if local else "restart"))
    here: Any = SimpleNamespace(rank=number, size=6, world=World(number, 6, local, 3, 1, 2, "n1", "torchrun"))
    with rank._watched(run.config(), run, here, rank.Recorder(run, number, None)):
        assert (watching, ends) == (late, [not local] * len(late)), "a rank that only reports ends no run"


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

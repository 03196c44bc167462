"""How ranks of a node are told to end: which word holds, which signal counts, and for how long they are waited for."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from meshrun import strict_json
from meshrun.launch.job import Seat
from meshrun.launch.node import Node, Stopped
from meshrun.launch.parting import dead_file
from meshrun.launch.ranks import GRACE, STEP, Ended, Ranks, Stop, _allow_many_files, _kill_group, _Process
from meshrun.launch.wire import readable


def ranks_of(memory: Path | None = None, saving: float = 0.0) -> Ranks:
    """Ranks of a node without a nursery."""
    made = Ranks(SimpleNamespace(memory=memory, ranks=1, saving=saving), None)  # type: ignore[arg-type]
    made._seat = SimpleNamespace(generation=0)  # type: ignore[assignment]
    return made


def test_a_later_word_makes_a_stop_more_urgent_and_takes_nothing_back():
    both = Stop(dead=(2,)).after(Stop(patient=True, final=True, dead=(1,)))
    assert both == Stop(dead=(1, 2), patient=False, final=True, hurried=False)
    assert Stop(patient=True).after(Stop(hurried=True)) == Stop(hurried=True)


@pytest.mark.parametrize(
    ("stop", "step", "grace"),
    [
        (Stop(dead=(1,)), 10.0, 30.0),
        (Stop(dead=(1,)), 0.01, GRACE),
        (Stop(dead=(1,)), 1000.0, STEP),
        (Stop(patient=True), 0.01, STEP),
        (Stop(hurried=True), 10.0, GRACE),
    ],
)
def test_ranks_get_the_time_of_their_steps(stop: Stop, step: float, grace: float):
    ranks = ranks_of()
    ranks.stop(stop, step)
    assert ranks.grace == grace


def test_ranks_that_are_still_to_be_started_go_with_their_nursery_and_all_with_what_they_have_started(
    monkeypatch: pytest.MonkeyPatch,
):
    ranks, closed, killed = ranks_of(), list[bool](), list[int]()
    monkeypatch.setattr("meshrun.launch.ranks._kill_group", killed.append)
    ranks._nursery = SimpleNamespace(close=lambda: closed.append(True))  # type: ignore[assignment]
    ranks.stop(Stop(dead=(1,)))
    ranks._expected, ranks._stopped_at, ranks._well_at = {0}, 0.0, 0.0
    ranks._kill_the_late()
    assert closed == [True]
    ranks.close()
    assert closed == [True, True]
    ranks._expected.clear()
    ranks._alive[1] = _Process(4711, -1)
    ranks.close()
    assert killed == [4711] and closed == [True] * 3


def test_each_start_of_ranks_has_one_way_to_the_store(monkeypatch: pytest.MonkeyPatch):
    log: list[str] = []

    class Noted:
        def __init__(self, address: str, port: int, secret: bytes) -> None:
            assert (address, port, secret) == ("10.0.0.1", 29500, b"secret")
            log.append("opened")
            self.port = 4711

        def close(self) -> None:
            log.append("closed")

    monkeypatch.setattr("meshrun.launch.node.Relay", Noted)
    node: Any = Node(None, None, SimpleNamespace(takes_long=None), lambda: b"secret")  # type: ignore[arg-type]
    seats: list[Seat] = []
    node._ranks = SimpleNamespace(begin=seats.append, close=lambda: None)
    for _ in range(2):
        node.begin(Seat("job", 0, 1, 2, 1, 2, "10.0.0.1", 29500))
    node.close()
    assert log == ["opened", "closed", "opened", "closed"]
    assert {(seat.address, seat.port) for seat in seats} == {("127.0.0.1", 4711)}


def test_what_ranks_have_started_goes_with_a_nursery_that_has_died(monkeypatch: pytest.MonkeyPatch):
    ranks, killed = ranks_of(), list[int]()
    monkeypatch.setattr("meshrun.launch.ranks._kill_group", killed.append)
    ranks._alive = {0: _Process(4711, -1), 1: _Process(4712, -1)}
    assert ranks._orphaned() == [Ended(rank, -signal.SIGKILL, own=True) for rank in (0, 1)]
    assert killed == [4711, 4712]


@pytest.mark.parametrize(("code", "found"), [(3, 3), (None, -signal.SIGKILL)])
def test_a_rank_that_could_not_start_has_ended_by_itself_as_its_nursery_did(code: int | None, found: int):
    ranks = ranks_of()
    ranks._nursery = SimpleNamespace(ended=lambda: code)  # type: ignore[assignment]
    ranks._expected = {2}
    assert ranks._orphaned() == [Ended(2, found, own=True)] and ranks._expected == set()


@pytest.mark.parametrize(("code", "own"), [(-15, False), (-9, True), (1, True), (0, True)])
def test_an_end_by_the_signal_of_the_launcher_is_not_the_ranks_own(code: int, own: bool):
    ranks = ranks_of()
    file = os.open(os.devnull, os.O_RDONLY)
    ranks._alive[0] = _Process(1, file, signal.SIGTERM)
    assert ranks._lost(0, code).own == own
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.close(file)


@pytest.mark.parametrize(
    ("since", "writing", "killed"), [(1.0, False, False), (5.0, False, True), (5.0, True, False), (1000.0, True, True)]
)
def test_a_rank_that_writes_its_state_is_waited_for_but_not_forever(
    tmp_path: Path, since: float, writing: bool, killed: bool
):
    ranks = ranks_of(tmp_path)
    ranks.stop(Stop(dead=(1,)))
    ranks._alive[0] = process = _Process(1, -1, signal.SIGTERM)
    ranks._stopped_at = ranks._well_at = time.monotonic() - since
    if writing:
        (tmp_path / "words-0.busy").touch()
    ranks._kill_the_late()
    assert (process.signalled == signal.SIGKILL) == killed


def test_a_rank_that_starts_after_the_word_to_stop_is_told_too():
    ranks = ranks_of()
    ranks.stop(Stop())
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as late:
        ranks._started({0: late.pid})
        assert late.wait(30) == -signal.SIGTERM
    os.close(ranks._alive[0].pidfd)


def test_the_first_signal_is_the_reason_and_a_second_ctrl_c_alone_is_urgent():
    stopped = Stopped()
    for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGTERM):
        stopped.note(number)
    assert (stopped.by, stopped.at_once) == (signal.SIGTERM, False)
    stopped.note(signal.SIGINT)
    assert (stopped.by, stopped.at_once) == (signal.SIGTERM, True)


def test_a_signal_that_was_ignored_before_is_ignored_still():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Stopped():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)


def test_ranks_elsewhere_are_all_but_those_of_the_node():
    node: Any = Node.__new__(Node)
    node._seat, node._ranks = SimpleNamespace(first=2, size=6), SimpleNamespace(count=2)
    assert node.elsewhere == [0, 1, 4, 5]


def test_processes_that_a_rank_has_started_are_killed_with_it():
    words = "import subprocess, sys; subprocess.run([sys.executable, '-S', '-c', 'print(1, flush=True); input()'])"
    with subprocess.Popen(
        [sys.executable, "-S", "-c", words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    ) as rank:
        assert rank.stdout is not None and rank.stdout.readline() == b"1\n"
        _kill_group(rank.pid)
        assert rank.wait(30) == -signal.SIGKILL
        assert readable([rank.stdout.fileno()], 30) and rank.stdout.read() == b"", "who held its output is gone, too"


def test_a_launcher_may_open_as_many_files_as_the_system_allows():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
        _allow_many_files()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(
    ("stop", "saving", "since", "killed"),
    [
        (Stop(final=True), 300.0, 200.0, False),
        (Stop(final=True), 300.0, 400.0, True),
        (Stop(final=True), 0.0, 31.0, False),
        (Stop(final=True, dead=(1,)), 300.0, 200.0, True),
        (Stop(final=True, hurried=True), 300.0, 200.0, True),
        (Stop(), 300.0, 200.0, True),
    ],
)
def test_ranks_that_write_get_the_time_of_the_job_where_nobody_is_lost(
    tmp_path: Path, stop: Stop, saving: float, since: float, killed: bool
):
    ranks = ranks_of(tmp_path, saving)
    ranks.stop(stop)
    ranks._alive[0] = process = _Process(1, -1, signal.SIGTERM)
    (tmp_path / "words-0.busy").touch()
    ranks._stopped_at = ranks._well_at = time.monotonic() - since
    ranks._kill_the_late()
    assert (process.signalled == signal.SIGKILL) == killed


@pytest.mark.parametrize(("stop", "killed"), [(Stop(final=True), False), (Stop(), True), (Stop(dead=(3,)), True)])
def test_an_evaluation_is_waited_for_only_where_all_are_well(stop: Stop, killed: bool):
    ranks = ranks_of(saving=1000.0)
    ranks._takes_long = lambda: True
    ranks.stop(stop)
    ranks._alive[0] = process = _Process(1, -1, signal.SIGTERM)
    ranks._stopped_at = ranks._well_at = time.monotonic() - 20.0
    ranks._kill_the_late()
    assert (process.signalled == signal.SIGKILL) == killed


def test_ranks_that_are_killed_or_hang_are_named_to_those_that_are_left(tmp_path: Path):
    ranks = ranks_of(tmp_path)
    ranks._alive = {rank: _Process(1, -1) for rank in (0, 1, 2)}
    assert ranks._lost(1, -signal.SIGSEGV).own
    ranks.stop(Stop(dead=(2,), final=True))
    assert strict_json.read(dead_file(tmp_path, 0)) == {"ranks": [1, 2], "final": True}
    assert [process.signalled for process in ranks._alive.values()] == [signal.SIGTERM, signal.SIGKILL]


def test_a_rank_that_dies_while_all_are_asked_to_stop_ends_the_time_that_the_others_have_for_saving(tmp_path: Path):
    ranks = ranks_of(tmp_path, saving=300.0)
    ranks._alive = {rank: _Process(1, -1) for rank in (0, 1)}
    ranks.stop(Stop(final=True))
    (tmp_path / "words-0.busy").touch()
    ranks._stopped_at = ranks._well_at = time.monotonic() - 200.0
    ranks._kill_the_late()
    assert ranks._alive[0].signalled == signal.SIGTERM
    ranks._lost(1, -signal.SIGSEGV)
    ranks._kill_the_late()
    assert ranks._alive[0].signalled == signal.SIGKILL


def test_all_ranks_are_waited_for_while_one_of_them_writes(tmp_path: Path):
    ranks = ranks_of(tmp_path)
    ranks.stop(Stop())
    ranks._alive = {rank: _Process(1, -1, signal.SIGTERM) for rank in (0, 1)}
    (tmp_path / "words-1.busy").touch()
    ranks._stopped_at = ranks._well_at = time.monotonic() - 5.0
    ranks._kill_the_late()
    assert [process.signalled for process in ranks._alive.values()] == [signal.SIGTERM] * 2


def test_a_rank_that_ends_by_an_error_of_its_own_is_not_named_as_lost(tmp_path: Path):
    """It has left what it holds, or nobody needs it; a rank that is named is not waited for."""
    ranks = ranks_of(tmp_path)
    ranks._alive = {rank: _Process(1, -1) for rank in (0, 1, 2)}
    assert ranks._lost(0, 1).own and ranks._lost(1, -signal.SIGSEGV).own
    ranks.stop(Stop())
    assert strict_json.read(dead_file(tmp_path, 0)) == {"ranks": [1], "final": False}


def test_who_was_lost_in_an_earlier_start_is_not_in_the_next_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    ranks = ranks_of(tmp_path)
    ranks.stop(Stop(dead=(1,)))
    ranks._job.argv = []  # type: ignore[misc]
    monkeypatch.setattr(ranks, "_nursery", SimpleNamespace(start=lambda _: None))
    ranks.begin(Seat("job", 1, 0, 1, 0, 1, "127.0.0.1", 1))
    ranks.stop(Stop(final=True))
    assert strict_json.read(dead_file(tmp_path, 1)) == {"ranks": [], "final": True}


def test_who_watches_learns_once_of_each_start_of_ranks():
    told: list[tuple[object, int]] = []
    watch = SimpleNamespace(takes_long=None, look=lambda: None, started=lambda *given: told.append(given))
    node: Any = Node(None, None, watch)  # type: ignore[arg-type]
    node._ranks = SimpleNamespace(begin=lambda _: None, poll=lambda: (), running=True, pids={0: 4711})
    for generation in (0, 1):
        node.begin(Seat("job", generation, 1, 2, 1, 2, "10.0.0.1", 29500))
        for _ in range(2):
            assert list(node.news()) == []
    assert told == [({0: 4711}, 0), ({0: 4711}, 1)]

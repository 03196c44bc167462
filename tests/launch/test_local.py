"""Ranks on this machine: what they leave, how they are named when they fail, and that nothing outlives a run."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from meshrun.launch import local
from meshrun.launch.head import Head, Outcome, Wanted
from meshrun.launch.job import silent
from meshrun.launch.ranks import Gone
from tests.launch.command import TINY, Ended, events, is_alive, log, meshrun, started, wait_until

HOST = socket.gethostname()
STOPPED = re.compile(
    r"meshrun: stopped by SIG(INT|TERM); (no state was saved; runs/tiny-1 has its logs"
    r"|state saved at step \d+; continue with: meshrun resume runs/tiny-1)"
)
"""The last line of a run that was stopped, as far as its state was written."""
ENOUGH_CORES = len(os.sched_getaffinity(0)) >= 2


class Still:
    """A node on which nothing happens but what it is told to say."""

    def __init__(self, *facts: object) -> None:
        self.facts, self.fds, self.waits = list(facts), list[int](), ""

    def news(self) -> list[object]:
        facts, self.facts = self.facts, []
        return facts

    def progress(self) -> int:
        return 7


def carried(node: Still, head: Any, by: int = 0, hub: Any = None) -> Outcome:
    stopped: Any = SimpleNamespace(by=by, at_once=False)
    return local._run(head, node, hub, None, stopped, silent, lambda: "")  # type: ignore[arg-type]


def test_other_nodes_are_told_why_a_run_ends_that_was_stopped():
    head = Head(3, Wanted(2, 2), silent)
    assert carried(Still(), head, signal.SIGTERM).sentence == "the run was stopped by SIGTERM"


@pytest.mark.parametrize(("elsewhere", "reached"), [(None, 7), (5, 7), (9, 9)])
def test_steps_that_ranks_of_any_node_have_finished_are_progress(elsewhere: int | None, reached: int):
    hub: Any = SimpleNamespace(fds=[], progress=elsewhere, news=lambda _: [], finish=lambda _: None)
    heard: list[int] = []
    head: Any = SimpleNamespace(outcome=None, progress=0, is_waiting=False, orders=[])
    head.tick = lambda _: setattr(head, "outcome", Outcome())
    head.hear = lambda *_: heard.append(head.progress)
    carried(Still(Gone(0)), head, hub=None if elsewhere is None else hub)
    assert heard == [reached]


def test_a_second_ctrl_c_is_not_kept_waiting_for_ranks():
    head: Any = SimpleNamespace(outcome=None, is_waiting=False, orders=[], end=lambda _: None)
    head.tick = lambda _: setattr(head, "outcome", Outcome(sentence="it has been waited for"))
    stopped: Any = SimpleNamespace(by=signal.SIGINT, at_once=True)
    nobody: Any = None
    assert local._run(head, Still(), nobody, nobody, stopped, silent, lambda: "") == Outcome()  # type: ignore[arg-type]


@pytest.mark.parametrize("waits", [False, True])
def test_only_a_run_that_waits_for_nodes_is_stopped_by_its_launcher_s_clock(
    monkeypatch: pytest.MonkeyPatch, waits: bool
):
    monkeypatch.setattr(local, "ASK_EVERY", -1.0)
    head: Any = SimpleNamespace(outcome=None, is_waiting=waits, orders=[])
    head.end = lambda outcome: setattr(head, "outcome", outcome)
    head.tick = lambda _: setattr(head, "outcome", head.outcome or Outcome())
    hub: Any = SimpleNamespace(fds=[], progress=0, news=lambda _: [], finish=lambda _: None)
    stopped: Any = SimpleNamespace(by=0, at_once=False)
    store: Any = None
    outcome = local._run(head, Still(), hub, store, stopped, silent, lambda: "its time is up")  # type: ignore[arg-type]
    assert (outcome.cut_off, "its time is up" in outcome.sentence) == (waits, waits)


def test_a_port_that_was_asked_for_is_the_hub_s_where_there_is_one_and_ranks_end_with_their_launcher(
    monkeypatch: pytest.MonkeyPatch,
):
    closed: list[str] = []
    node = SimpleNamespace(close=lambda: closed.append("ranks"))

    def failing(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(local, "Node", lambda *_: node)
    monkeypatch.setattr(local, "_run", failing)
    monkeypatch.setattr(local, "Beat", lambda _: contextlib.nullcontext())
    job: Any = SimpleNamespace(port=4711, restarts=0, ranks=2)
    nursery: Any = object()
    for hub, port in ((None, "4711"), (SimpleNamespace(beat=None), "0")):
        monkeypatch.setattr(local, "_store", lambda port: contextlib.nullcontext(closed.append(str(port))))
        with pytest.raises(ZeroDivisionError):
            local.launch(job, nursery=nursery, hub=hub)  # type: ignore[arg-type]
        assert closed == [port, "ranks"]
        closed.clear()


def test_a_rank_ends_at_once_at_ctrl_c_whoever_ignored_it_before(monkeypatch: pytest.MonkeyPatch):
    """In a collective Python would handle no signal."""
    monkeypatch.setattr(local.ctypes, "CDLL", lambda _: SimpleNamespace(prctl=lambda *_: 0))
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        local.die_with_launcher(os.getppid())
        assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGINT, before)


def port_in(text: str) -> int:
    found = re.search(r"met on port (\d+)", text)
    assert found, text
    return int(found[1])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def two_at_once(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Ended], list[Path]]:
    """Two good runs started together in one folder, one for people and one for scripts; and their run directories."""
    folder = tmp_path_factory.mktemp("two")
    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(lambda words: meshrun(folder, "run", TINY, "--procs", 2, *words), ([], ["--json"])))
    assert [ended.status for ended in both] == [0, 0], both
    return both, sorted((folder / "runs").iterdir())


def test_two_runs_at_once_get_different_run_directories(two_at_once: tuple[list[Ended], list[Path]]):
    (plain, as_json), runs = two_at_once
    assert [run.name for run in runs] == ["tiny-1", "tiny-2"]
    own = as_json.document["run"]
    assert own in ("runs/tiny-1", "runs/tiny-2")
    assert own in as_json.err and own not in plain.err


def test_two_runs_at_once_meet_on_different_ports(two_at_once: tuple[list[Ended], list[Path]]):
    _, runs = two_at_once
    assert len({port_in(log(run, 0)) for run in runs}) == 2


def test_one_log_a_rank_holds_what_that_rank_printed(two_at_once: tuple[list[Ended], list[Path]]):
    for run in two_at_once[1]:
        assert sorted(path.name for path in (run / "logs").iterdir()) == ["rank-00000.log", "rank-00001.log"]
        for rank in (0, 1):
            assert re.fullmatch(rf"words of rank {rank}, met on port \d+\n", log(run, rank))


def test_rank_0_speaks_to_the_terminal_and_no_other_rank_does(two_at_once: tuple[list[Ended], list[Path]]):
    (plain, as_json), _ = two_at_once
    assert "words of rank 0" in plain.out
    assert "words of rank 0" in as_json.err
    for ended in (plain, as_json):
        assert "words of rank 1" not in ended.out + ended.err


def test_all_ranks_of_a_run_have_one_world(two_at_once: tuple[list[Ended], list[Path]]):
    for run in two_at_once[1]:
        starts = [events(run, rank, "start")[0] for rank in (0, 1)]
        assert [(each["rank"], each["world"], each["host"]) for each in starts] == [(0, 2, HOST), (1, 2, HOST)]
        assert len({each["pid"] for each in starts}) == 2


@pytest.mark.skipif(not ENOUGH_CORES, reason="two ranks share the only core that this machine grants")
def test_ranks_are_bound_to_cores_of_their_own(two_at_once: tuple[list[Ended], list[Path]]):
    for run in two_at_once[1]:
        first, second = (set(events(run, rank, "start")[0]["cores"]) for rank in (0, 1))
        assert first and second and not first & second


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Ended, Path]:
    """A run whose rank 1 is killed in its third step, and not replaced."""
    folder = tmp_path_factory.mktemp("killed")
    ended = meshrun(folder, "run", TINY, "--procs", 2, "--restarts", 0, "--fault", "kill", "--rank", 1, "--step", 3)
    return ended, folder / "runs/tiny-1"


def test_when_a_rank_is_killed_the_others_end_soon(killed: tuple[Ended, Path]):
    ended, run = killed
    assert ended.status == 75, "it may go well another time"
    last_step = max(event["time"] for event in events(run, 1, "step"))
    assert ended.at - last_step < 40
    assert not any(is_alive(events(run, rank, "start")[0]["pid"]) for rank in (0, 1))


def test_a_killed_rank_is_named_with_its_signal_step_last_lines_and_log(killed: tuple[Ended, Path]):
    ended, _ = killed
    assert ended.sentences == [f"rank 1 on {HOST} was killed by SIGKILL after step 2"]
    sentence, last_line, where = ended.err.splitlines()[-3:]
    assert sentence.startswith("meshrun: rank 1")
    assert last_line.startswith("    words of rank 1")
    assert where == "    log: runs/tiny-1/logs/rank-00001.log"


@pytest.fixture(scope="module")
def raised(tmp_path_factory: pytest.TempPathFactory) -> tuple[Ended, Path]:
    """A run of three whose rank 1 raises in its third step."""
    folder = tmp_path_factory.mktemp("raised")
    ended = meshrun(folder, "run", TINY, "--procs", 3, "--fault", "raise", "--rank", 1, "--step", 3, "--json")
    return ended, folder / "runs/tiny-1"


def test_a_rank_that_raises_is_named_with_its_host_step_and_error(raised: tuple[Ended, Path]):
    ended, _ = raised
    assert ended.status == 1
    assert ended.sentences == [f"rank 1 on {HOST} failed at step 3: ValueError: bad luck"]


def test_a_rank_that_raises_shows_where_in_the_users_file_and_its_log(raised: tuple[Ended, Path]):
    ended, run = raised
    *_, where, log_line = ended.err.splitlines()
    assert re.fullmatch(rf'    {re.escape(TINY)}:\d+ in forward: raise ValueError\("bad luck"\)', where)
    assert log_line == "    log: runs/tiny-1/logs/rank-00001.log"
    assert "Traceback" not in ended.err
    assert "Traceback" in log(run, 1)


def test_ranks_that_lost_their_peer_are_not_blamed(raised: tuple[Ended, Path]):
    ended, run = raised
    assert "rank 0 on" not in ended.err and "rank 2 on" not in ended.err
    consequences = [event for rank in (0, 2) for event in events(run, rank, "failure")]
    assert all(event["secondary"] for event in consequences)
    assert all("lost another rank while it waited for the gradients of step 3" in e["sentence"] for e in consequences)


def test_scripts_read_of_a_failed_rank_in_one_document(raised: tuple[Ended, Path]):
    ended, _ = raised
    assert ended.document["status"] == 1
    assert ended.document["error"].startswith(ended.sentences[0])


class Running:
    """A run of two ranks with two readers each that would go on for an hour."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        words = ["--procs", 2, "--workers", 2, "--steps", 100_000, "--pause", 0.04, "--port", self.port]
        self.launcher = started(folder, "run", TINY, *words)
        self.run = folder / "runs/tiny-1"
        self.family: list[int] = []

    def ready(self) -> Running:
        """Wait until all ranks train, and note every process of the run."""
        wait_until(lambda: self.launcher.poll() is not None or all(self.steps(rank) for rank in (0, 1)), 60)
        assert self.launcher.poll() is None, self.launcher.communicate()
        self.ranks = [events(self.run, rank, "start")[0]["pid"] for rank in (0, 1)]
        self.readers = [child.pid for pid in self.ranks for child in psutil.Process(pid).children(recursive=True)]
        self.family = [*self.ranks, *self.readers]
        return self

    def steps(self, rank: int) -> int:
        return len(events(self.run, rank, "step"))

    def alive(self) -> list[int]:
        return [pid for pid in self.family if is_alive(pid)]

    def ended(self) -> tuple[str, float]:
        """The last line on standard error, and how long it took the launcher to end from now on."""
        began = time.monotonic()
        _, err = self.launcher.communicate(timeout=60)
        assert "Traceback" not in err
        return err.splitlines()[-1], time.monotonic() - began

    def clean_up(self) -> None:
        for pid in {*self.family, self.launcher.pid}:
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)
        self.launcher.communicate()


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    run = Running(tmp_path)
    try:
        yield run.ready()
    finally:
        run.clean_up()


def test_ctrl_c_ends_all_ranks_and_readers_even_a_stopped_one(running: Running):
    assert len(running.readers) >= 4
    os.kill(running.ranks[1], signal.SIGSTOP)
    os.killpg(running.launcher.pid, signal.SIGINT)
    last_line, took = running.ended()
    assert took < 30
    assert not running.alive()
    assert running.launcher.returncode == 1
    assert STOPPED.fullmatch(last_line), last_line


def test_sigterm_to_the_launcher_ends_all_ranks_and_readers_and_frees_the_port(running: Running):
    listening = [each.laddr.port for each in psutil.Process(running.launcher.pid).net_connections() if not each.raddr]
    assert running.port in listening
    running.launcher.terminate()
    last_line, took = running.ended()
    assert took < 30
    assert not running.alive()
    assert running.launcher.returncode == 1
    assert STOPPED.fullmatch(last_line), last_line
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", running.port))


def test_a_rank_whose_launcher_is_gone_before_it_could_ask_for_its_death_ends_itself(tmp_path: Path):
    """The launcher's number that it is given is not its parent's any more."""
    gone = subprocess.Popen(["true"])
    gone.wait()
    ended = meshrun(tmp_path, "rank", "runs/none", gone.pid)
    assert (ended.status, ended.out, ended.err) == (1, "", "")

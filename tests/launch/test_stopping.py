"""How ranks of a node are told to end: which word holds, which signal counts, and for how long they are waited for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from meshrun.launch.node import Node, Stopped
from meshrun.launch.ranks import GRACE, STEP, Ranks, Stop, _Process


def ranks_of(memory: Path | None = None) -> Ranks:
    """Ranks of a node without a nursery."""
    made = Ranks(SimpleNamespace(memory=memory, ranks=1, saving=0.0), None)  # type: ignore[arg-type]
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


@pytest.mark.parametrize(("code", "own"), [(-15, False), (-9, True), (1, True), (0, True)])
def test_an_end_by_the_signal_of_the_launcher_is_not_the_ranks_own(code: int, own: bool):
    ranks = ranks_of()
    ranks._alive[0] = _Process(1, -1, signal.SIGTERM)
    assert ranks._lost(0, code).own == own


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

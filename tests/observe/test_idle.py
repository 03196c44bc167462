"""When a process counts as idle: what little its threads do while they only look is no progress."""

from __future__ import annotations

import os

import pytest

from meshrun.observe import idle
from meshrun.observe.idle import SHARE, Activity, Effort


@pytest.mark.parametrize(
    ("cpu", "moved", "busy"),
    [(0.0, 0, False), (10 * SHARE, 0, False), (10 * SHARE + 0.1, 0, True), (0.0, 1, True), (0.01, 0, False)],
)
def test_more_than_a_share_of_a_processor_or_any_byte_is_progress(cpu: float, moved: int, busy: bool):
    before = Effort(100.0, 7)
    assert (before + Effort(cpu, moved)).differs(before, seconds=10.0) == busy


def test_a_process_that_is_ready_to_run_on_a_busy_machine_is_not_idle(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Effort, "of", staticmethod(lambda _pid: Effort(1.0, 7)))
    monkeypatch.setattr(idle.stacks, "children_of", lambda _pid: [])
    activity, ready = Activity(), [False]
    monkeypatch.setattr(idle, "_is_ready", lambda _pid: ready[0])
    assert activity.seen(4711), "a process that is new has done something"
    assert not activity.seen(4711)
    ready[0] = True
    assert not activity.seen(4711), "threads that only look at something are ready now and then"
    assert activity.seen(4711) and activity.seen(4711)
    ready[0] = False
    assert not activity.seen(4711)
    ready[0] = True
    assert not activity.seen(4711)


def test_what_children_do_is_progress_and_what_an_answer_costs_is_none(monkeypatch: pytest.MonkeyPatch):
    done = {4711: 0, 4712: 0}
    monkeypatch.setattr(Effort, "of", staticmethod(lambda pid: Effort(0.0, done[pid])))
    monkeypatch.setattr(idle.stacks, "children_of", lambda _pid: [4712])
    monkeypatch.setattr(idle, "_is_ready", lambda _pid: False)
    activity = Activity()
    activity.seen(4711)
    activity.forget(4711)
    assert not activity.seen(4711)
    done[4712] += 100
    assert activity.seen(4711) and not activity.seen(4711)
    done[4711] += 100
    activity.forget(4711)
    assert not activity.seen(4711)


def test_a_process_that_computes_is_ready():
    assert idle._is_ready(os.getpid())

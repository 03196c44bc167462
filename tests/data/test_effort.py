"""What reading took: who was ready to compute and had no core has not waited for a disk."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import Any

import pytest

from meshrun.data import effort, loader
from meshrun.data.loader import Loader, Reading
from meshrun.data.order import Cut, Order
from meshrun.data.samples import NO_EFFORT, Effort, Read, Samples, Wanted


class Data:
    light = False

    def __len__(self) -> int:
        return 4

    def __getitem__(self, number: int) -> int:
        return number


def measured(monkeypatch: pytest.MonkeyPatch, computed: float, kept: float) -> Any:
    """The effort of a read during which so many seconds were computed, and so many without a core."""
    clocks = iter([1.0, 1.0 + computed])
    waits = iter([2.0, 2.0 + kept])

    @contextmanager
    def kernel() -> Any:
        yield lambda: next(waits)

    monkeypatch.setattr(effort, "_computed", lambda: next(clocks))
    monkeypatch.setattr(effort, "_kept_from_a_core", kernel)
    return effort.measured(Samples(Data(), None, False, 0), Wanted([1], 1)).effort


def test_time_without_a_core_is_no_wait_for_a_disk(monkeypatch: pytest.MonkeyPatch):
    assert measured(monkeypatch, computed=0.25, kept=0.5).busy == pytest.approx(0.75)
    assert measured(monkeypatch, computed=0.25, kept=0.0).busy == pytest.approx(0.25)


def test_data_in_memory_are_not_measured():
    data = Data()
    data.light = True
    assert effort.measured(Samples(data, None, False, 0), Wanted([1], 1)).effort == NO_EFFORT


def test_a_thread_beside_the_training_counts_its_own_computing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(effort.time, "process_time", lambda: 7.0)
    monkeypatch.setattr(effort.time, "thread_time", lambda: 3.0)
    found = [effort._computed()]
    thread = threading.Thread(target=lambda: found.append(effort._computed()))
    thread.start()
    thread.join()
    assert found == [7.0, 3.0]


def test_the_effort_of_a_step_is_that_of_all_its_micro_batches(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(loader, "measured", lambda *_: Read(None, effort=Effort(2.0, 0.5)))
    steps = Loader(Data(), Order(4, 4), 0, 1, Reading(Cut(micro=2))).steps(0, 1)  # type: ignore[arg-type]
    assert next(steps).effort == Effort(4.0, 1.0)


def test_efforts_add_up_in_both_of_their_parts():
    assert Effort(1.0, 0.5) + Effort(2.0, 0.25) == Effort(3.0, 0.75)

"""A rank's sign of life: cheap to give, whole when read, and of this rank's own process."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest

from meshrun.observe import flight, stacks
from meshrun.observe import pulse as pulse_module
from meshrun.observe.pulse import BEAT_EVERY, Pulse, PulseView, path_of
from tests.launch.command import wait_until


@pytest.fixture
def pulse(tmp_path: Path) -> Iterator[Pulse]:
    opened = Pulse.open(tmp_path, 3, generation=2)
    yield opened
    opened.close()


def view_of(folder: Path) -> PulseView:
    view = PulseView.open(folder, 3)
    assert view is not None
    return view


def test_no_pulse_is_seen_before_a_rank_has_one(tmp_path: Path):
    assert PulseView.open(tmp_path, 3) is None


def test_mark_shows_where_a_rank_is_and_since_when(pulse: Pulse, tmp_path: Path):
    view = view_of(tmp_path)
    first = view.read()
    assert (first.rank, first.pid, first.generation, first.phase) == (3, os.getpid(), 2, "starting")
    pulse.mark("computing", 12)
    pulse.waiting("the gradients of step 12")
    time.sleep(0.05)
    now = view.read()
    assert (now.phase, now.step, now.what) == ("computing", 12, "the gradients of step 12")
    assert now.marks == first.marks + 2
    assert 0.05 <= now.silent < 0.5
    pulse.waiting(None)
    assert view.read().what == ""


def test_same_words_again_are_progress(pulse: Pulse, tmp_path: Path):
    view = view_of(tmp_path)
    pulse.mark("evaluating", 12)
    before = view.marks
    pulse.mark("evaluating", 12)
    assert view.marks == before + 1


def test_words_that_are_too_long_are_cut(pulse: Pulse, tmp_path: Path):
    pulse.waiting("ü" * 500)
    what = view_of(tmp_path).read().what
    assert 99 <= what.count("ü") < 200 and not what.strip("ü"), "whole letters, and fewer than there were"


def test_longest_step_leaves_out_the_first_which_pays_for_starting(pulse: Pulse, tmp_path: Path):
    view = view_of(tmp_path)
    seen = []
    for number, seconds in enumerate((8.0, 0.2, 0.3, 0.1), 1):
        pulse.finished(number, seconds, 0.01)
        seen.append(view.read().longest)
    assert seen == [8.0, 0.2, 0.3, 0.3]
    now = view.read()
    assert (now.finished, now.last, now.phase, now.step) == (4, 4, "reading", 5)
    assert now.seconds == pytest.approx(8.6) and now.data_wait == pytest.approx(0.04)


def test_time_of_evaluations_is_known_after_the_first(pulse: Pulse, tmp_path: Path):
    view, began = view_of(tmp_path), time.monotonic()
    pulse.mark("evaluating", 4)
    time.sleep(0.05)
    pulse.mark("evaluating", 4)
    assert view.read().evaluations == 0
    pulse.mark("reading", 5)
    now = view.read()
    assert now.evaluations == 1 and 0.05 <= now.longest_evaluating <= time.monotonic() - began


def test_mark_costs_microseconds(pulse: Pulse):
    """The least of many, as others run on this machine."""
    least = float("inf")
    for _ in range(20):
        began = time.perf_counter()
        for _ in range(500):
            pulse.mark("computing", 12)
        least = min(least, (time.perf_counter() - began) / 500)
    assert least < 5e-6


@pytest.mark.usefixtures("pulse")
def test_beat_goes_on_while_the_main_thread_does_not(tmp_path: Path):
    view = view_of(tmp_path)
    before = view.read().beats
    for _ in range(10):  # on a busy machine a beat may be late
        time.sleep(2.5 * BEAT_EVERY)
        now = view.read()
        if now.beats >= before + 2:
            break
    assert now.beats >= before + 2
    assert now.beat_age < 5 * BEAT_EVERY


def write_marks(folder: Path, enough: Event) -> None:
    pulse = Pulse.open(folder, 3, 0)
    index = 0
    while not enough.is_set():
        index += 1
        pulse.waiting(("a" if index % 2 else "b") * 200)
        sum(range(1000))  # the reader needs a moment in which nobody writes


def test_marks_are_never_read_torn(tmp_path: Path):
    context = multiprocessing.get_context("fork")
    enough = context.Event()
    writer = context.Process(target=write_marks, args=(tmp_path, enough), daemon=True)
    writer.start()
    while (view := PulseView.open(tmp_path, 3)) is None:
        time.sleep(0.01)
    seen: set[int] = set()
    while len(seen) < 2000:  # marks: however the two take turns, it is written to meanwhile
        now = view.read()
        assert now.what in ("", "a" * 200, "b" * 200)
        seen.add(now.marks)
    enough.set()
    writer.join()


@pytest.mark.usefixtures("pulse")
def test_rank_answers_a_question_for_its_collectives_at_its_next_beat(tmp_path: Path):
    view = view_of(tmp_path)
    question = view.ask()
    assert flight.read(tmp_path, 3, question) is None
    end = time.monotonic() + 30
    while flight.read(tmp_path, 3, question) is None and time.monotonic() < end:
        time.sleep(0.02)
    assert flight.read(tmp_path, 3, question) == []
    assert flight.read(tmp_path, 3, question + 1) is None


def test_rank_answers_a_question_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pulse_module, "BEAT_EVERY", 0.01)
    rank = Pulse.open(tmp_path, 3, generation=0)
    view, file = view_of(tmp_path), flight.path_of(tmp_path, 3)
    question = view.ask()
    wait_until(lambda: flight.read(tmp_path, 3, question) is not None, 30)
    answer, beats = file.stat().st_ino, view.read().beats
    wait_until(lambda: view.read().beats > beats + 3, 30)
    rank.close()
    assert file.stat().st_ino == answer


def sleep_here() -> None:
    time.sleep(100)


@pytest.mark.usefixtures("pulse")
def test_process_and_those_that_it_forks_show_their_stacks_when_asked(tmp_path: Path):
    file = stacks.path_of(tmp_path, 3)
    thread = view_of(tmp_path).read().thread
    own = stacks.thread_stacks(stacks.ask(os.getpid(), file))[thread]
    assert any(frame.function == "test_process_and_those_that_it_forks_show_their_stacks_when_asked" for frame in own)
    child = multiprocessing.get_context("fork").Process(target=sleep_here)
    child.start()
    try:
        for _ in range(50):
            time.sleep(0.1)
            frames = stacks.thread_stacks(stacks.ask(child.pid or 0, file))[thread]
            if frames[0].function == "sleep_here":
                break
        assert frames[0].function == "sleep_here"
        assert str(frames[0]) == f"test_pulse.py:{frames[0].line} sleep_here (time.sleep(100))"
        assert child.pid in stacks.children_of(os.getpid())
    finally:
        child.kill()
        child.join()


@pytest.mark.usefixtures("pulse")
def test_process_that_expects_no_question_is_not_asked(tmp_path: Path):
    """The signal would end it."""
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    try:
        time.sleep(0.1)
        assert stacks.ask(stranger.pid, stacks.path_of(tmp_path, 3)) == ""
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


@pytest.mark.ranks(2)
def test_what_a_rank_waits_for_is_told_also_where_waits_lie_in_each_other():
    from meshrun import mesh

    mesh.use(mesh.Meeting(device="cpu"))
    here = mesh.start()
    told: list[str | None] = []
    mesh.listen(told.append)
    with here.waiting("the gradients"):
        here.gathered(1)
    with pytest.raises(ValueError, match="own"), here.waiting("the end"):
        raise ValueError("the user's own")
    assert told == ["the gradients", "a word from every rank", "the gradients", None, "the end", None]


def test_a_file_that_is_no_pulse_is_none(tmp_path: Path):
    Pulse.open(tmp_path, 0, generation=0).close()
    path = path_of(tmp_path, 0)
    assert PulseView.open(tmp_path, 0) is not None
    path.write_bytes(b"other-01" + path.read_bytes()[8:])
    assert PulseView.open(tmp_path, 0) is None


def test_processor_time_is_counted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    clock = iter([1.0, 3.0, 6.0, 10.0])
    monkeypatch.setattr(time, "thread_time", lambda: next(clock))
    rank = Pulse.open(tmp_path, 0, generation=0)
    view = PulseView.open(tmp_path, 0)
    assert view is not None
    for step, cpu in ((1, 2.0), (2, 5.0), (3, 9.0)):
        rank.finished(step, 0.1, 0.0)
        assert view.read().cpu == cpu
    rank.close()

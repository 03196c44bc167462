"""How long a rank may be silent, and whose pulses count; and a hang as the user of `meshrun run` reads of it."""

from __future__ import annotations

import math
import os
import re
import socket
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from meshrun.config import RunConfig
from meshrun.observe import watch as watch_module
from meshrun.observe.hang import Witness
from meshrun.observe.pulse import Pulse
from meshrun.observe.testimony import all_witnesses
from meshrun.observe.watch import ScriptWatcher, Watcher, limit_of
from tests.launch.command import meshrun
from tests.observe.test_diagnose import pulse, waiting

HANGING = str(Path(__file__).parent / "programs/hanging.py")
DEFAULT = RunConfig("x", timeout=600)
IN_THREE = RunConfig("x", timeout=600, hang_after=3)


@pytest.mark.parametrize(
    ("changes", "default", "in_three"),
    [
        ({"longest": 0.3}, 10, 3),
        ({"longest": 4.0}, 40, 3),
        ({"finished": 0}, 600, 600),
        ({"phase": "saving"}, 600, 600),
        ({"phase": "after"}, math.inf, math.inf),
        ({"phase": "compiling"}, 600, 600),
        ({"phase": "evaluating"}, 600, 600),
        ({"phase": "evaluating", "evaluations": 1, "longest_evaluating": 0.1}, 10, 3),
        ({"phase": "evaluating", "evaluations": 1, "longest_evaluating": 7.0}, 70, 70),
    ],
)
def test_limit_follows_the_pace_of_the_run(changes: dict[str, object], default: float, in_three: float):
    rank = replace(pulse(0), **changes)  # type: ignore[arg-type]
    assert limit_of(rank, [rank], DEFAULT) == default
    assert limit_of(rank, [rank], IN_THREE) == in_three


def test_slowest_rank_sets_the_limit_of_all():
    quick, slow = replace(pulse(0), longest=0.1), replace(pulse(1), longest=3.0)
    assert limit_of(quick, [quick, slow], DEFAULT) == 30


def test_pulses_of_an_earlier_generation_or_of_another_process_count_for_nothing(tmp_path: Path):
    rank = Pulse.open(tmp_path, 0, generation=0)
    rank.finished(7, 0.1, 0.0)
    watch = Watcher(tmp_path, tmp_path, DEFAULT, "node7")
    for pid, generation, reached in ((os.getpid(), 1, 0), (os.getpid() + 1, 0, 0), (os.getpid(), 0, 7)):
        watch.started({0: pid}, generation)
        assert watch.progress() == reached
    watch.started({0: os.getpid()}, 1)
    assert watch.progress() == 7, "what was reached once stays reached"
    rank.close()


@pytest.mark.parametrize(("silent", "hangs"), [(599.0, False), (601.0, True)])
def test_ranks_that_are_done_and_do_not_end_hang_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, silent: float, hangs: bool
):
    monkeypatch.setattr(watch_module.stacks, "state_of", lambda _: "S")
    watch = Watcher(tmp_path, tmp_path, DEFAULT, "node7")
    watch.started({0: 100}, 0)
    assert watch._hangs([pulse(0, silent=silent, phase="done")], 0.0) is hangs


def test_what_was_told_of_slow_ranks_is_not_held_against_those_that_come_after_them(tmp_path: Path):
    watch = Watcher(tmp_path, tmp_path, DEFAULT, "node7")
    watch._straggling._in_a_row[0, "data"], watch._straggling._told[0, "data"] = 2, 3.0
    watch._stopped[0] = 1.0
    watch.started({0: os.getpid()}, 1)
    assert (watch._straggling._in_a_row, watch._straggling._told, watch._stopped) == ({}, {}, {})


@pytest.mark.parametrize(("state", "at_length"), [("S", True), ("T", False), ("", False)])
def test_a_rank_that_is_stopped_or_gone_is_not_waited_for_as_one_that_evaluates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, at_length: bool
):
    monkeypatch.setattr(watch_module.stacks, "state_of", lambda _: state)
    watch = Watcher(tmp_path, tmp_path, DEFAULT, "node7")
    assert watch._is_at_length(replace(pulse(0), phase="evaluating")) is at_length


def test_what_is_told_of_slow_ranks_is_told_once(tmp_path: Path):
    watch = Watcher(tmp_path, tmp_path, DEFAULT, "node7")
    watch._notes.append("rank 1 is slow")
    assert watch.notes() == ["rank 1 is slow"] and watch.notes() == []


def test_a_hang_is_told_once(tmp_path: Path):
    watch, stuck = Watcher(tmp_path, tmp_path, DEFAULT, "node7"), waiting(0)
    over = SimpleNamespace(is_alive=lambda: False)
    inquiry: Any = SimpleNamespace(
        thread=over, witnesses=[stuck], everywhere=[stuck], marks={0: stuck.pulse.marks}, report=str
    )
    assert watch._result(inquiry) is not None and watch._reported == {0: stuck.pulse.marks}


def test_of_a_script_whoever_has_ended_is_looked_at_no_more_and_to_answer_is_no_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(watch_module.stacks, "state_of", lambda pid: "" if pid == 101 else "S")
    monkeypatch.setattr(Watcher, "_result", lambda *_: None)
    watch, forgotten = ScriptWatcher(tmp_path, tmp_path, DEFAULT, "node7"), list[int]()
    watch.started({0: 100, 1: 101}, 0)
    assert watch._read() == [] and watch._pids == {0: 100}
    watch._activity = SimpleNamespace(forget=forgotten.append)  # type: ignore[assignment]
    inquiry: Any = None
    assert watch._result(inquiry) is None and forgotten == [100]


def test_ranks_that_have_not_finished_a_step_get_the_time_of_those_before_them(tmp_path: Path):
    watch = Watcher(tmp_path, tmp_path, DEFAULT, "node7")
    assert watch.patience() == 0
    rank = Pulse.open(tmp_path, 0, generation=0)
    watch.started({0: os.getpid()}, 0)
    for seconds, longest in ((9.0, 9.0), (3.0, 3.0), (4.0, 4.0), (1.0, 4.0)):
        rank.finished(1, seconds, 0.0)
        assert watch.patience() == longest
    rank.close()
    again = Pulse.open(tmp_path, 0, generation=1)
    watch.started({0: os.getpid()}, 1)
    assert watch.patience() == 4
    again.finished(1, 2.0, 0.0)
    assert watch.patience() == 2
    again.close()


@pytest.mark.parametrize(
    ("phase", "finished", "several", "expected"),
    [
        ("starting", False, False, False),
        ("computing", False, False, True),
        ("computing", True, False, False),
        ("evaluating", True, False, True),
        ("saving", True, False, True),
        ("waiting", True, False, False),
        ("waiting", True, True, True),
    ],
)
def test_an_evaluation_a_checkpoint_and_the_first_step_take_long(
    tmp_path: Path, phase: str, finished: bool, several: bool, expected: bool
):
    rank = Pulse.open(tmp_path, 0, generation=0)
    watch = Watcher(tmp_path, tmp_path, DEFAULT, "node7", others=several)
    watch.started({0: os.getpid()}, 0)
    if finished:
        rank.finished(1, 0.1, 0.0)
    rank.mark(phase if phase != "waiting" else "computing", 2)
    rank.waiting("the gradients of step 2" if phase == "waiting" else None)
    assert watch.takes_long() is expected
    rank.close()


def test_who_is_overdue_is_not_waited_for(tmp_path: Path):
    rank = Pulse.open(tmp_path, 0, generation=0)
    watch = Watcher(tmp_path, tmp_path, replace(DEFAULT, timeout=0.5), "node7")
    watch.started({0: os.getpid()}, 0)
    rank.mark("saving", 1)
    assert watch.takes_long()
    time.sleep(0.6)
    assert not watch.takes_long()
    rank.close()


def test_user_reads_of_a_hang_in_one_sentence(tmp_path: Path):
    words = ("--fault", "forward", "--hang-after", 2, "--on-hang", "end", "--steps", 50)
    ended = meshrun(tmp_path, "run", HANGING, "--procs", 2, *words)
    assert ended.status == 1
    assert re.fullmatch(
        rf"rank 1 on {socket.gethostname()} has been in hanging\.py:\d+ forward \(time\.sleep\(FOREVER\)\) for \d s at "
        r"step 6, while rank 0 waits for it in the gradients of step 6; all stacks are in runs/hanging-1/hangs/.*\.txt",
        ended.sentences[-1],
    ), ended.err
    assert (tmp_path / ended.sentences[-1].rpartition(" ")[2]).is_file()


def test_ranks_hang_when_all_that_are_not_done_are_silent_for_longer_than_they_may(tmp_path: Path):
    watch = Watcher(tmp_path, tmp_path, IN_THREE, "node7")
    watch.started({0: os.getpid(), 1: os.getpid()}, 0)
    quick, slow = replace(pulse(0), pid=os.getpid(), silent=1.0), replace(pulse(1), pid=os.getpid(), silent=5.0)
    silent, done = replace(quick, silent=4.0), replace(quick, phase="done", silent=4.0)
    now = time.monotonic()
    assert not watch._hangs([quick, slow], now), "one gets on, and the other may wait for it"
    assert watch._hangs([silent, slow], now)
    assert watch._hangs([done, slow], now), "one that has finished is waited for by nobody who gets on"
    assert not watch._hangs([slow], now), "not all ranks are there yet"


def test_on_a_full_disk_a_node_judges_by_what_it_has_seen_itself(tmp_path: Path):
    own: list[Any] = [object()]
    assert all_witnesses(tmp_path / "gone" / "folder", 0, own, give_up=0.0) == own


def inquiry(*witnesses: Witness, **changes: Any) -> Any:
    """What an inquiry has come to, in which no rank moved."""
    marks = {witness.rank: witness.pulse.marks for witness in witnesses}
    over = SimpleNamespace(is_alive=lambda: False)
    found = {"thread": over, "witnesses": list(witnesses), "everywhere": list(witnesses), "marks": marks}
    return SimpleNamespace(**{**found, "report": lambda sentence: f"{sentence}\n", **changes})


GUILTY = Witness(pulse(0), "node7", state="T")


def test_a_hang_is_told_with_the_guilty_rank_and_where_all_stacks_are(tmp_path: Path):
    watch = Watcher(tmp_path, tmp_path, DEFAULT, "node7")
    watch.started({0: 100}, 0)
    finding = watch._result(inquiry(GUILTY))
    assert finding is not None and finding.stacks is not None and finding.rank == 0
    assert finding.stacks.read_text().startswith("rank 0 on node7 has been stopped")


@pytest.mark.parametrize(
    "seen",
    [
        inquiry(GUILTY, marks={0: 49}),
        inquiry(GUILTY, replace(GUILTY, pulse=pulse(1), state="Z")),
        inquiry(GUILTY, replace(GUILTY, pulse=pulse(1), state="")),
        inquiry(),
        inquiry(replace(GUILTY, state="S"), everywhere=[replace(GUILTY, pulse=pulse(5))]),
    ],
    ids=["it went on", "a rank died", "a rank is gone", "nobody was seen", "another node's rank is guilty"],
)
def test_no_hang_is_told_where_the_run_went_on_a_rank_died_or_another_node_tells_of_it(tmp_path: Path, seen: Any):
    watch = Watcher(tmp_path, tmp_path, DEFAULT, "node7")
    watch.started({0: 100, 1: 101}, 0)
    assert watch._result(seen) is None


def test_a_hang_is_looked_into_once_until_a_rank_moves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    begun: list[dict[int, int]] = []

    class Begun:
        def __init__(self, *words: Any) -> None:
            begun.append(words[-1])

        def begin(self, *_: object) -> None:
            pass

    monkeypatch.setattr(watch_module, "_Inquiry", Begun)
    watch, stuck = Watcher(tmp_path, tmp_path, IN_THREE, "node7"), replace(pulse(0), pid=os.getpid(), silent=9.0)
    watch.started({0: os.getpid()}, 0)
    for marks in (50, 50, 51):
        monkeypatch.setattr(watch, "_read", lambda marks=marks: [replace(stuck, marks=marks)])
        watch._due = 0.0
        assert watch.look() is None
        if watch._inquiry is not None:
            watch._inquiry, watch._reported = None, begun[-1]
    assert begun == [{0: 50}, {0: 51}]


@pytest.mark.parametrize(("late", "hangs"), [(0.0, True), (2.0, False)])
def test_the_second_watcher_of_a_node_is_late(tmp_path: Path, late: float, hangs: bool):
    watch = Watcher(tmp_path, tmp_path, IN_THREE, "node7", late=late)
    watch.started({0: os.getpid()}, 0)
    assert watch._hangs([replace(pulse(0), pid=os.getpid(), silent=4.0)], time.monotonic()) == hangs


@pytest.mark.parametrize("late", [0.0, 2.0])
def test_a_rank_that_is_stopped_hangs_whatever_it_is_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: float):
    monkeypatch.setattr(watch_module.stacks, "state_of", lambda _pid: "T")
    watch = Watcher(tmp_path, tmp_path, IN_THREE, "node7", late=late)
    stopped = replace(pulse(0), phase="saving", silent=1.0)
    watch.started({0: 100}, 0)
    assert [watch._hangs([stopped], now) for now in (10.0, 12.9 + late, 13.1 + late)] == [False, False, True]

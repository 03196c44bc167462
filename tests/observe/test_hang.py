"""A run that hangs: noticed in seconds, and the right rank named with what it does instead."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from meshrun.config import RunConfig
from meshrun.observe import watch
from meshrun.observe.beside import told
from meshrun.observe.hang import Finding
from meshrun.observe.stacks import children_of, state_of
from meshrun.observe.watch import Watcher
from tests.observe.warm import Warm

HOST = socket.gethostname()
HANGING = Path(__file__).parent / "programs/hanging.py"
AFTER = 1.0


@pytest.fixture(scope="module")
def warm() -> Iterator[Warm]:
    with Warm() as process:
        yield process


class Run:
    """Ranks at work, and the watcher that their launcher would have."""

    def __init__(self, warm: Warm, folder: Path, world: int, hang_after: float | None = AFTER, **asked: Any) -> None:
        self.folder = folder
        self.memory = folder / "memory"
        self.memory.mkdir()
        self.pids = warm.ranks(self.memory, world, **asked)
        self.watch = Watcher(self.memory, folder, RunConfig("x", hang_after=hang_after, timeout=60), HOST)
        self.watch.started(self.pids, 0)

    def until_step(self, step: int, seconds: float = 60) -> None:
        end = time.monotonic() + seconds
        while self.watch.progress() < step:
            assert time.monotonic() < end, self.logs()
            time.sleep(0.02)

    def until_pulses(self) -> None:
        end = time.monotonic() + 30
        while len(list(self.memory.glob("pulse-*"))) < len(self.pids):
            assert time.monotonic() < end, self.logs()
            time.sleep(0.02)

    def look(self, seconds: float) -> Finding | None:
        """Look as the launcher does, for so long at most; what it costs is held too."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            began = time.monotonic()
            finding = self.watch.look()
            assert time.monotonic() - began < 2
            if finding is not None:
                return finding
            time.sleep(0.1)
        return None

    def found(self, seconds: float = AFTER + 4) -> Finding:
        """The finding, its sentence without the file that it names at its end."""
        self.until_step(3)
        finding = self.look(seconds)
        assert finding is not None, self.logs()
        return without_file(finding)

    def logs(self) -> str:
        return "\n".join(path.read_text() for path in self.memory.glob("log-*"))


def without_file(finding: Finding) -> Finding:
    sentence, _, named = finding.sentence.partition("; all stacks are in ")
    assert named == str(finding.stacks)
    return replace(finding, sentence=sentence)


@pytest.fixture
def run(warm: Warm, tmp_path: Path) -> Iterator[Any]:
    runs: list[Run] = []

    def start(world: int = 2, **asked: Any) -> Run:
        runs.append(Run(warm, tmp_path, world, **asked))
        return runs[-1]

    yield start
    for each in runs:
        warm.end(each.pids)


def line_of(comment: str) -> int:
    lines = HANGING.read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if f"# {comment}" in line)


def at(comment: str, function: str) -> str:
    return re.escape(f"hanging.py:{line_of(comment)} {function} (")


def test_rank_that_sleeps_in_its_forward_pass_is_named_once_with_the_line_and_all_stacks_are_kept(run: Any):
    hung = run(fault="forward")
    finding = hung.found()
    assert finding.rank == 1
    assert re.fullmatch(
        rf"rank 1 on {HOST} has been in {at('the forward pass', 'forward')}time\.sleep\(FOREVER\)\) "
        r"for [1-5] s at step 6, while rank 0 waits for it in the gradients of step 6",
        finding.sentence,
    ), finding.sentence
    assert finding.stacks is not None and finding.stacks.parent == hung.folder / "hangs"
    text = finding.stacks.read_text()
    assert text.startswith(finding.sentence)
    for rank in (0, 1):
        assert f"=== rank {rank} on {HOST}" in text
    assert f'hanging.py", line {line_of("the forward pass")} in forward' in text
    assert "_engine_run_backward" in text and "PENDING" in text
    assert hung.look(2.5) is None


def test_rank_that_spins_in_its_own_code_is_named(run: Any):
    finding = run(world=3, fault="loop").found()
    assert finding.rank == 1
    loop = line_of("the loop")
    assert re.search(rf"hanging\.py:({loop - 1}|{loop}) spin \(", finding.sentence), finding.sentence
    assert "while ranks 0 and 2 wait for it in the gradients of step 6" in finding.sentence


def test_rank_that_is_stuck_in_an_update_is_named(run: Any):
    finding = run(fault="optimizer").found()
    assert finding.rank == 1
    assert re.search(at("the update", "step"), finding.sentence), finding.sentence


def test_rank_that_left_out_a_sum_of_a_group_is_named_with_the_line_of_those_who_wait_in_it(run: Any):
    finding = run(world=3, fault="skipped sum").found()
    assert finding.rank == 1
    assert re.fullmatch(
        rf"rank 1 on {HOST} never came to all_reduce number 6, in which ranks 0 and 2 have waited for [1-5] s at step "
        rf"6 \({at('the skipped sum', '__call__')}dist\.all_reduce\(torch\.ones\(3\), group=self\.group\)\)\): "
        r"it is already in the gradients of step 6",
        finding.sentence,
    ), finding.sentence


@pytest.mark.parametrize("world", [2, 3])
def test_rank_that_left_a_barrier_out_is_named_with_what_it_did_instead(run: Any, world: int):
    finding = run(world=world, fault="skipped barrier").found()
    assert finding.rank == 1
    assert re.fullmatch(
        rf"rank 1 on {HOST} left a collective out or made one too many at step 6: its number \d+ is all_reduce of "
        rf"\[\d+\] Float, where ranks? 0( and 2)? ha\w+ waited for [1-5] s in barrier "
        rf"\({at('the skipped barrier', '__call__')}dist\.barrier\(\)\)\)",
        finding.sentence,
    ), finding.sentence


@pytest.mark.parametrize("layout", ["fsdp=2", "pp=2"])
def test_rank_is_named_on_other_meshes_too(run: Any, layout: str):
    finding = run(layout=layout, fault="forward", step=30).found()
    assert finding.rank == 1
    assert re.search(at("the forward pass", "forward"), finding.sentence), finding.sentence
    assert "while rank 0 waits for it in the gradients of step" in finding.sentence


def test_sleeping_data_reader_is_named_with_its_rank_and_the_dataset_s_line(run: Any):
    finding = run(workers=1, lost=150).found()
    assert finding.rank == 1
    assert re.search(
        rf"rank 1 on {HOST} has waited for \d+ s at step \d+ for its data reader \(process \d+\), which is in "
        rf"{at('the dataset', '__getitem__')}",
        finding.sentence,
    ), finding.sentence


def test_dataset_that_sleeps_in_the_rank_itself_is_named(run: Any):
    finding = run(lost=150).found()
    assert finding.rank == 1
    assert re.search(at("the dataset", "__getitem__"), finding.sentence), finding.sentence


def test_stopped_rank_is_named_as_stopped(run: Any):
    hung = run()
    hung.until_step(3)
    os.kill(hung.pids[1], signal.SIGSTOP)
    finding = hung.found()
    assert finding.rank == 1
    assert re.fullmatch(
        rf"rank 1 on {HOST} has been stopped \(SIGSTOP\) for \d s at step \d+, while rank 0 waits for it in the "
        r"gradients of step \d+",
        finding.sentence,
    ), finding.sentence


def test_stopped_data_reader_is_named_as_stopped(run: Any):
    hung = run(workers=1, pause=0.01)
    hung.until_step(3)
    (reader,) = children_of(hung.pids[1])
    os.kill(reader, signal.SIGSTOP)
    finding = hung.found()
    assert finding.rank == 1
    assert f"for its data reader (process {reader}), which is stopped (SIGSTOP)" in finding.sentence, finding.sentence


def test_rank_that_is_stopped_before_its_first_step_is_named_too(run: Any):
    hung = run(fault="forward", step=1)
    hung.until_pulses()
    os.kill(hung.pids[1], signal.SIGSTOP)
    finding = hung.look(AFTER + 4)
    assert finding is not None and finding.rank == 1
    assert "has been stopped (SIGSTOP)" in finding.sentence


def test_of_two_nodes_the_one_with_the_guilty_rank_tells_and_sees_who_waits_elsewhere(run: Any):
    hung = run(world=3, fault="forward")
    watches = [
        Watcher(hung.memory, hung.folder, RunConfig("x", hang_after=AFTER, timeout=60, nodes="2"), host)
        for host in ("node1", "node2")
    ]
    watches[0].started({0: hung.pids[0]}, 0)
    watches[1].started({rank: hung.pids[rank] for rank in (1, 2)}, 0)
    hung.until_step(5)
    found: list[Finding | None] = [None, None]
    end = time.monotonic() + AFTER + 20
    while time.monotonic() < end:
        found = [watch.look() or before for watch, before in zip(watches, found, strict=True)]
        if any(found):  # the other node has a second to be wrong
            end = min(end, time.monotonic() + 1)
        time.sleep(0.1)
    assert found[0] is None
    assert found[1] is not None and found[1].rank == 1
    assert found[1].sentence.startswith("rank 1 on node2 has been in hanging.py:")
    assert without_file(found[1]).sentence.endswith("while ranks 0 and 2 wait for it in the gradients of step 6")


@pytest.mark.parametrize("stopped", [0, 1])
def test_without_our_launcher_ranks_watch_each_other_and_end_the_guilty_one(run: Any, stopped: int):
    hung = run(beside=True)
    hung.until_step(3)
    os.kill(hung.pids[stopped], signal.SIGSTOP)
    end = time.monotonic() + 40
    while not (finders := list(hung.memory.glob("found-by-*"))) or state_of(hung.pids[stopped]) == "T":
        assert time.monotonic() < end, hung.logs()
        time.sleep(0.1)
    (finder,) = finders
    assert finder.name == f"found-by-{1 - stopped}"
    assert finder.read_text().startswith(f"rank {stopped} on here has been stopped (SIGSTOP)")
    assert told(hung.folder) == finder.read_text().partition("; all stacks")[0]


def test_hang_is_told_by_one_watcher_only_where_several_ranks_watch(run: Any):
    hung = run(world=3, beside=True)
    hung.until_step(3)
    os.kill(hung.pids[2], signal.SIGSTOP)
    end = time.monotonic() + 40
    while not list(hung.memory.glob("found-by-*")):
        assert time.monotonic() < end, hung.logs()
        time.sleep(0.1)
    time.sleep(1)
    assert [path.name for path in hung.memory.glob("found-by-*")] == ["found-by-0"]


@dataclass
class Seen:
    """What was found in a run, after how many seconds of looking, and how many steps it made meanwhile."""

    finding: Finding | None
    after: float
    steps: int


@pytest.fixture(scope="module")
def side_by_side(warm: Warm, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Seen]:
    """Runs that are busy, and one that hangs without any setting; looked at together, since most of it is waiting."""
    busy: dict[str, tuple[int, dict[str, Any]]] = {
        "slow": (2, {"pause": 0.3}),
        "evaluating": (4, {"fault": "long evaluation", "eval_every": 4}),
        "saving": (6, {"save": 7.0, "pause": 0.01}),
    }
    runs: dict[str, Run] = {}
    seen: dict[str, Seen] = {}

    def start(name: str, **words: Any) -> None:
        runs[name] = Run(warm, tmp_path_factory.mktemp(name), 2, **words)

    try:
        for name, (_, words) in busy.items():
            start(name, hang_after=1.5, **words)
        for name, (step, _) in busy.items():
            runs[name].until_step(step)
        start("hung", fault="forward", hang_after=None)
        runs["hung"].until_step(5)
        before = {name: run.watch.progress() for name, run in runs.items()}
        began = time.monotonic()
        while time.monotonic() < began + 40 and ("hung" not in seen or seen["hung"].finding is None):
            for name, run in runs.items():
                if name not in seen or seen[name].finding is None:
                    finding = run.look(0.02)
                    seen[name] = Seen(finding, time.monotonic() - began, run.watch.progress() - before[name])
        return seen
    finally:
        for run in runs.values():
            warm.end(run.pids)


def test_hang_is_named_without_any_setting(side_by_side: dict[str, Seen]):
    hung = side_by_side["hung"]
    assert hung.finding is not None and hung.finding.rank == 1
    assert 9 < hung.after < 30


def test_slow_steps_are_no_hang(side_by_side: dict[str, Seen]):
    slow = side_by_side["slow"]
    assert slow.finding is None and slow.steps > 2


def test_long_evaluation_is_no_hang(side_by_side: dict[str, Seen]):
    busy = side_by_side["evaluating"]
    assert busy.finding is None and busy.steps == 0, "it is looked at while it evaluates"


def test_rank_that_is_busy_with_saving_is_no_hang(side_by_side: dict[str, Seen]):
    busy = side_by_side["saving"]
    assert busy.finding is None and busy.steps > 5


def test_rank_whose_data_come_late_is_named_while_the_run_goes_on(run: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(watch, "LOOK_EVERY", 0.6)
    slow = run(slow=0.01)
    end = time.monotonic() + 40
    notes: list[str] = []
    while not notes:
        assert time.monotonic() < end, slow.logs()
        assert slow.look(0.3) is None
        notes = slow.watch.notes()
    (note,) = notes
    assert re.fullmatch(
        rf"rank 1 on {HOST} is slow: it waits \d+\.\d ms a step for its data, the others \d+\.\d ms", note
    ), note

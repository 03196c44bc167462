"""Lost ranks are replaced: which ends are worth another start, who is told, and how soon all of them run again."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from meshrun.launch.job import PARENT, Failure, Interrupted, Job, Seat, Unwatched, Verdict
from meshrun.launch.local import launch
from meshrun.launch.ranks import Nursery, Ranks, Stop
from tests.launch.command import PROGRAMS, TINY, Ended, events, is_alive, meshrun, started, wait_until

LOSING = str(PROGRAMS / "losing.py")
HOST = socket.gethostname()


@dataclass(frozen=True)
class Life:
    """A rank's line in the diary."""

    generation: int
    rank: int
    world: int
    began: float
    pid: int


def lives(diary: Path) -> list[Life]:
    if not diary.exists():
        return []
    lines = [line.split() for line in diary.read_text().splitlines()]
    return [Life(int(a), int(b), int(c), float(d), int(e)) for a, b, c, d, e in lines]


def launcher_events(run: Path) -> list[dict[str, object]]:
    return [json.loads(line) for path in run.glob("events/launcher-*.jsonl") for line in path.read_text().splitlines()]


def losing(folder: Path, *words: object) -> Ended:
    return meshrun(folder, "run", LOSING, "--diary", folder / "diary", "--procs", 2, *words)


@pytest.fixture(scope="module")
def lost_twice(tmp_path_factory: pytest.TempPathFactory) -> tuple[Ended, Path]:
    """A run whose rank 1 is killed in its third step, and in its second life says that it is worth a restart."""
    folder = tmp_path_factory.mktemp("lost")
    return losing(folder, "--lives", 2, "--end", "SIGKILL,exit", "--pause", 0.05, "--json"), folder


def test_a_killed_rank_is_replaced_and_the_run_reaches_its_end(lost_twice: tuple[Ended, Path]):
    ended, folder = lost_twice
    assert ended.status == 0, ended.err
    assert ended.document["steps"] == 5
    found = sorted((each.generation, each.rank) for each in lives(folder / "diary"))
    assert found == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    told, _ = launcher_events(folder / "runs/losing-1")
    assert (told["kind"], told["generation"]) == ("restart", 1)
    assert str(told["sentence"]).startswith(f"rank 1 on {HOST} was killed by SIGKILL")
    assert str(told["sentence"]) in ended.err


def test_all_ranks_compute_again_soon_after_a_death(lost_twice: tuple[Ended, Path]):
    _, folder = lost_twice
    last = min(event["time"] for event in events(folder / "runs/losing-1", 0, "step") if event["step"] == 2)
    again = max(each.began for each in lives(folder / "diary") if each.generation == 1)
    assert 0 < again - last < 10, "how soon is measured by benchmarks/restart.py"


def test_a_rank_that_says_that_it_is_worth_a_restart_gets_one(lost_twice: tuple[Ended, Path]):
    _, told = launcher_events(lost_twice[1] / "runs/losing-1")
    assert (told["kind"], told["generation"]) == ("restart", 2)
    assert str(told["sentence"]).startswith(f"rank 1 on {HOST} ended with exit status 75")


def test_a_killed_rank_0_is_replaced_too(tmp_path: Path):
    ended = losing(tmp_path, "--rank", 0, "--json")
    assert ended.status == 0, ended.err
    assert ended.document["steps"] == 5
    (told,) = launcher_events(tmp_path / "runs/losing-1")
    assert str(told["sentence"]).startswith(f"rank 0 on {HOST} was killed by SIGKILL")


def test_an_error_of_the_program_is_not_tried_again(tmp_path: Path):
    ended = losing(tmp_path, "--end", "raise")
    assert ended.status == 1
    assert ended.sentences == [f"rank 1 on {HOST} failed at step 3: ValueError: bad luck"]
    assert {each.generation for each in lives(tmp_path / "diary")} == {0}
    assert not launcher_events(tmp_path / "runs/losing-1")


def test_ranks_that_are_lost_again_and_again_without_progress_are_given_up(tmp_path: Path):
    ended = losing(tmp_path, "--lives", 9, "--step", 1, "--restarts", 2)
    assert ended.status == 75, "it may go well another time"
    assert max(each.generation for each in lives(tmp_path / "diary")) == 2
    assert ended.sentences[-1].startswith(f"rank 1 on {HOST} was killed by SIGKILL")
    assert "gave up after 2 restarts without a finished step between (--restarts)" in ended.err


class Training:
    """A run of two that would go on for an hour, with the processes that it consists of."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        words = ["--diary", folder / "diary", "--procs", 2, "--workers", 1, "--steps", 100_000, "--pause", 0.04]
        words += ["--lives", 0]
        self.launcher = started(folder, "run", LOSING, *words)
        self.seen: set[int] = set()
        self.reach(0)

    def reach(self, generation: int) -> list[Life]:
        """Wait until both ranks of a generation compute."""
        wait_until(lambda: self.launcher.poll() is not None or len(self.of(generation)) == 2, 60)
        assert self.launcher.poll() is None, self.launcher.communicate()
        self.seen |= {self.nursery, *self.pids_of(generation)}
        return self.of(generation)

    def pids_of(self, generation: int) -> list[int]:
        """Of its ranks and their readers."""
        ranks = [each.pid for each in self.of(generation)]
        return [*ranks, *(child.pid for pid in ranks for child in psutil.Process(pid).children(recursive=True))]

    def of(self, generation: int) -> list[Life]:
        return [each for each in lives(self.folder / "diary") if each.generation == generation]

    @property
    def nursery(self) -> int:
        return psutil.Process(self.launcher.pid).children()[0].pid

    def clean_up(self) -> None:
        for pid in {self.launcher.pid, *self.seen}:
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)
        self.launcher.communicate()


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Training]:
    """One for all tests: the last of them ends it."""
    made = Training(tmp_path_factory.mktemp("training"))
    try:
        yield made
    finally:
        made.clean_up()


def test_a_run_that_is_being_trained_is_refused_to_a_second_launcher(training: Training):
    ended = meshrun(training.folder, "resume", "runs/losing-1")
    assert ended.status == 2
    assert ended.sentences[0].startswith(f"runs/losing-1 is in use by process {training.launcher.pid} on {HOST} since")
    assert training.launcher.poll() is None


def test_when_the_process_that_ranks_are_forked_from_is_killed_another_one_is_started(training: Training):
    first, ranks = training.nursery, [each.pid for each in training.of(0)]
    os.kill(first, signal.SIGKILL)
    training.reach(1)
    assert training.nursery != first
    assert not any(is_alive(pid) for pid in (first, *ranks))


def test_nothing_outlives_a_killed_launcher_and_its_memory_is_removed_by_the_next(training: Training):
    wait_until(lambda: folders_in_memory(training.folder / "runs/losing-1"), 30)
    ranks = [life.pid for life in lives(training.folder / "diary")]
    training.launcher.kill()
    wait_until(lambda: not any(is_alive(pid) for pid in ranks), 30)
    killed = time.monotonic()
    assert folders_in_memory(training.folder / "runs/losing-1")
    assert meshrun(training.folder, "run", TINY, "--procs", 2).status == 0
    assert not folders_in_memory(training.folder / "runs/losing-1")
    assert not folders_in_memory(training.folder / "runs/tiny-1")
    # Readers look for their rank every five seconds.
    wait_until(lambda: not any(is_alive(pid) for pid in training.seen), max(0.1, killed + 30 - time.monotonic()))


def folders_in_memory(run: Path) -> list[Path]:
    from meshrun.config import RunDirectory

    return list(RunDirectory(run).memories.glob("*"))


SLEEPING = ["-c", "import sys, time; time.sleep(60)", PARENT]


@pytest.fixture
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a second from the signal that should end a rank to the one that does."""
    monkeypatch.setattr("meshrun.launch.ranks.GRACE", 0.5)


class Pointing(Unwatched):
    """A watch that finds fault with one rank a tenth of a second after all have started, once."""

    def __init__(self, action: str, stop: bool = False, rank: int = 1) -> None:
        self.action, self.stop, self.rank = action, stop, rank
        self.generations: list[dict[int, int]] = []
        self.found = False

    def started(self, pids: dict[int, int], generation: int) -> None:
        assert generation == len(self.generations)
        self.generations.append(pids)
        self.at = time.monotonic()
        if self.stop:
            os.kill(pids[1], signal.SIGSTOP)

    def look(self) -> Verdict | None:
        if time.monotonic() - self.at < 0.1:
            return None
        if len(self.generations) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        if self.found:
            return None
        self.found = True
        return Verdict(self.rank, "rank 1 hangs", self.action)  # type: ignore[arg-type]


@pytest.mark.usefixtures("short_grace")
@pytest.mark.parametrize("rank", [1, -1])
def test_a_stopped_rank_is_killed_and_all_start_anew_whether_the_watch_can_name_it_or_not(rank: int):
    watch, told = Pointing("restart", stop=True, rank=rank), []
    began = time.monotonic()
    with pytest.raises(Interrupted, match="SIGTERM"):
        launch(Job(SLEEPING, 2, restarts=1), watch, lambda kind, **fields: told.append((kind, fields)))
    assert [set(pids) for pids in watch.generations] == [{0, 1}, {0, 1}]
    assert not any(is_alive(pid) for pids in watch.generations for pid in pids.values())
    assert told == [("restart", {"generation": 1, "sentence": "rank 1 hangs; all ranks are started again"})]
    assert time.monotonic() - began < 40


def test_a_watch_can_end_the_run_with_its_sentence():
    from meshrun.errors import RunFailed

    watch = Pointing("end")
    with pytest.raises(RunFailed, match=r"^rank 1 hangs$"):
        launch(Job(SLEEPING, 2, restarts=1), watch)
    assert not any(is_alive(pid) for pid in watch.generations[0].values())


def test_what_a_watch_only_reports_changes_nothing():
    watch, told = Pointing("report"), []
    words = ["-c", "import time; time.sleep(0.5)"]
    assert launch(Job(words, 2), watch, lambda kind, **fields: told.append((kind, fields))) == []
    assert told == [("hang", {"sentence": "rank 1 hangs"})]


@pytest.mark.usefixtures("short_grace")
def test_survivors_read_who_is_gone_and_get_time_to_write_down_their_state(tmp_path: Path):
    """The survivor keeps its busy file for a second, which is longer than the grace time."""
    program = f"""
import json, os, pathlib, signal, sys, time
memory, rank = pathlib.Path({str(tmp_path)!r}), os.environ["RANK"]
busy = memory / f"words-{{rank}}.busy"
def write(*_):
    busy.touch()
    time.sleep(1)
    (memory / "words").write_text((memory / "dead-0.json").read_text())
    busy.unlink()
    os._exit(75)
signal.signal(signal.SIGTERM, write)
(memory / f"ready-{{rank}}").touch()
while not (memory / "ready-0").exists(): time.sleep(0.01)
if rank == "1": os.kill(os.getpid(), signal.SIGKILL)
time.sleep(60)
"""
    failures = launch(Job(["-c", program], 2, memory=tmp_path))
    assert [(each.rank, each.code) for each in failures] == [(1, -9), (0, 75)]
    assert json.loads((tmp_path / "words").read_text()) == {"ranks": [1], "final": False}


class Slow(Unwatched):
    """Watches ranks whose steps take most of a second."""

    def patience(self) -> float:
        return 0.7


LATE = """
import os, pathlib, signal, sys, time
memory, rank = pathlib.Path(sys.argv[1]), os.environ["RANK"]
def end(*_):
    time.sleep(1)
    (memory / f"said-{rank}").write_text((memory / "dead-0.json").read_text())
    os._exit(75)
signal.signal(signal.SIGTERM, end)
(memory / f"ready-{rank}").touch()
while not all((memory / f"ready-{other}").exists() for other in "01"): time.sleep(0.01)
"""


@pytest.mark.usefixtures("short_grace")
def test_survivors_of_a_lost_rank_may_finish_a_step_that_is_longer_than_the_grace_time(tmp_path: Path):
    program = f"{LATE}\nif rank == '1': os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(60)"
    failures = launch(Job(["-c", program, str(tmp_path)], 2, memory=tmp_path), Slow())
    assert [(each.rank, each.code) for each in failures] == [(1, -9), (0, 75)]


def test_ranks_read_that_nobody_comes_after_them_also_when_one_is_lost_later(tmp_path: Path):
    with Nursery(None, warm=False) as nursery:
        ranks = Ranks(Job(SLEEPING, 1, memory=tmp_path), nursery)
        ranks.begin(Seat("job", 0, 0, 1, 0, 1, "127.0.0.1", 1))
        ranks.stop(Stop(final=True))
        ranks.stop(Stop(dead=(7,)))
        assert json.loads((tmp_path / "dead-0.json").read_text()) == {"ranks": [7], "final": True}
        ranks.close()


@pytest.mark.usefixtures("short_grace")
def test_who_is_asked_to_stop_lets_ranks_finish_a_long_step_and_says_so(tmp_path: Path):
    """Rank 1 asks the launcher to stop and dies itself while the other is still at its step."""
    program = f"{LATE}\nif rank == '1': signal.signal(signal.SIGTERM, signal.SIG_DFL); os.kill({os.getpid()}, 15)\n"
    told: list[tuple[str, dict[str, object]]] = []
    with pytest.raises(Interrupted, match="SIGTERM"):
        job = Job(["-c", f"{program}time.sleep(60)", str(tmp_path)], 2, memory=tmp_path)
        launch(job, Slow(), lambda kind, **fields: told.append((kind, fields)))
    assert json.loads((tmp_path / "said-0").read_text())["final"] is True
    assert told == [("note", {"text": "ranks get 2 s to finish their step; CTRL-C now ends them at once"})]


class Evaluating(Unwatched):
    """Watches ranks that evaluate until one of them has left a file."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def takes_long(self) -> bool:
        return not self._file.exists()


EVALUATING = """
import os, pathlib, signal, sys, time
memory, rank = pathlib.Path(sys.argv[1]), os.environ["RANK"]
def end(*_):
    time.sleep(1.5)
    (memory / "evaluated").touch()
    time.sleep(0.3)
    (memory / f"said-{rank}").touch()
    os._exit(0)
signal.signal(signal.SIGTERM, end)
os.kill(int(sys.argv[2]), 15)
time.sleep(60)
"""


def test_ranks_that_evaluate_when_the_run_is_to_stop_get_the_time_for_it_and_for_a_step_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("meshrun.launch.ranks.GRACE", 1.2)
    told: list[object] = []
    with pytest.raises(Interrupted, match="SIGTERM"):
        job = Job(["-c", EVALUATING, str(tmp_path), str(os.getpid())], 1, memory=tmp_path)
        launch(job, Evaluating(tmp_path / "evaluated"), lambda _, **fields: told.append(fields["text"]))
    assert (tmp_path / "said-0").exists()
    assert told == ["ranks get the time to finish what they are at; CTRL-C now ends them at once"]


def test_steps_longer_than_the_grace_time_are_not_lost_with_a_rank(tmp_path: Path):
    ended = losing(tmp_path, "--pause", 2.3, "--step", 2, "--steps", 2)
    assert ended.status == 0, ended.err
    assert [event["step"] for event in events(tmp_path / "runs/losing-1", 0, "resumed")] == [1]


def test_what_long_steps_have_reached_is_saved_when_the_run_is_asked_to_stop(tmp_path: Path):
    words = ["--diary", tmp_path / "diary", "--procs", 2, "--steps", 100, "--pause", 2.3, "--lives", 0]
    launcher = started(tmp_path, "run", LOSING, *words)
    run = tmp_path / "runs/losing-1"
    try:
        wait_until(lambda: launcher.poll() is not None or events(run, 0, "step"), 60)
        launcher.terminate()
        _, err = launcher.communicate(timeout=60)
    finally:
        launcher.kill()
        launcher.communicate()
    # The first checkpoint may still be on its way.
    assert re.search(r"ranks get (\d+ s to finish their step|the time to finish .*); CTRL-C now ends them at once", err)
    last = events(run, 0, "step")[-1]["step"]
    assert [path.name for path in (run / "checkpoints").glob("step-*")] == [f"step-{last:08d}"]


@pytest.mark.usefixtures("short_grace")
def test_a_rank_that_ignores_the_signal_is_killed_after_the_grace_time():
    program = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
time.sleep(60 if os.environ["RANK"] == "0" else 0.5)
os._exit(3)
"""
    began = time.monotonic()
    failures = launch(Job(["-c", program], 2))
    assert [(each.rank, each.how) for each in failures] == [
        (1, "ended with exit status 3"),
        (0, "was killed by SIGKILL"),
    ]
    assert time.monotonic() - began < 40
    assert isinstance(failures[0], Failure)

"""A training stops in time, after the same step on all ranks, under every launcher; and goes on as if it had not."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from meshrun import Here, mesh
from meshrun.config import RunConfig, RunDirectory
from meshrun.errors import RunFailed
from meshrun.layout import parse
from meshrun.train.deadline import Deadline, _stat, deadline_of
from meshrun.train.ending import Ending, Signals, begin_anew
from meshrun.train.interval import Every
from meshrun.train.loop import Stopped, Trainer
from meshrun.train.recovery import Keeping
from tests import warm
from tests.launch.command import MODULE, Ended, events, meshrun, wait_until
from tests.launch.test_other_launchers import OPENMPI, TORCHRUN
from tests.train.small import points, small

SLOW = str(Path(__file__).parent / "programs/slow.py")
REFERENCE = 600
MORE = 5
"""Steps that are made after a run has gone on, each of which would show that it did not go on as it was."""
LAUNCHERS: dict[str, tuple[str, ...]] = {
    "own": (*MODULE, "run", SLOW, "--procs", "2"),
    "torchrun": (*TORCHRUN, "-m", "meshrun", "run", SLOW),
    "mpirun": (*OPENMPI, *MODULE, "run", SLOW),
    "a file": (*MODULE, "run", SLOW, "--procs", "2"),
    "in a job": (*MODULE, "run", SLOW, "--procs", "2"),
}
BY_THE_CLOCK = ("own", "torchrun")
PATIENCE = 240.0
"""Seconds, on a machine that has much else to do."""
pytestmark = pytest.mark.timeout(3 * PATIENCE)


class Course:
    """A run of two ranks that would go on for long: started, asked to stop, and resumed."""

    def __init__(self, folder: Path, launcher: str) -> None:
        self.folder, self.launcher = folder, launcher
        self.run = RunDirectory(folder / "runs/slow-1")
        self.processes: list[subprocess.Popen[str]] = []
        self.ended: list[Ended] = []
        self.began: list[float] = []
        self.stopped: dict[str, Any] = {}

    def begin(self, *words: object) -> None:
        job = {"SLURM_JOB_ID": "1"} if self.launcher == "in a job" else {}
        self._start(*LAUNCHERS[self.launcher], "--pause", "0.2", "--record-ids", "--json", *words, **job)

    def resume(self) -> None:
        self.stopped = self.run.stopped() or {}
        words = ["--procs", 2, "--pause", 0, "--steps", self.stopped["step"] + MORE, "--deadline", "none", "--json"]
        self._start(*MODULE, "resume", "runs/slow-1", *words)

    def _start(self, *words: object, **environment: str) -> None:
        self.began.append(time.time())
        self.processes.append(
            warm.Popen(
                list(map(str, words)),
                cwd=self.folder,
                env={**os.environ, **environment},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                process_group=0,
            )
        )

    def works(self, rank: int) -> bool:
        """Whether a rank does some steps before its run ends."""
        process = self.processes[0]
        wait_until(lambda: process.poll() is not None or len(events(self.run.path, rank, "step")) > 3, PATIENCE)
        return process.poll() is None

    def pid(self, rank: int) -> int:
        """Of a rank, once it has done some steps."""
        assert self.works(rank), self.processes[0].communicate()
        pid: int = events(self.run.path, rank, "start")[-1]["pid"]
        return pid

    def end(self) -> None:
        process = self.processes[-1]
        out, err = process.communicate(timeout=PATIENCE)
        self.ended.append(Ended(process.returncode, out, err, time.time()))
        assert process.returncode == 0, err

    def clean_up(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()


@dataclass(frozen=True)
class Courses:
    """All of them, and what the same training is where nobody stops it."""

    losses: list[float]
    deadline: float
    by_launcher: dict[str, Course]


@pytest.fixture(scope="module")
def courses(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Courses]:
    """All at once, since they mostly wait. A deadline must suit the machine: it goes by how long a start takes, and is
    doubled where that is not enough for a run to come to its first steps."""
    began = time.time()
    words = ["--procs", 2, "--steps", REFERENCE, "--eval-every", REFERENCE, "--json"]
    reference = meshrun(tmp_path_factory.mktemp("reference"), "run", SLOW, *words)
    assert reference.status == 0, reference.err
    deadline = 10 + 1.5 * (time.time() - began)
    made: dict[str, Course] = {}
    try:
        while not made or not all(course.works(rank=1) for course in made.values()):
            assert deadline < 2 * PATIENCE, [course.processes[0].communicate() for course in made.values()]
            deadline *= 2
            for course in made.values():
                course.clean_up()
            made = {each: Course(tmp_path_factory.mktemp("course"), each) for each in BY_THE_CLOCK}
            for course in made.values():
                course.begin("--deadline", f"{deadline:.1f}s")
        found = [each for each in LAUNCHERS if each not in BY_THE_CLOCK and shutil.which(LAUNCHERS[each][0])]
        rest = {each: Course(tmp_path_factory.mktemp("course"), each) for each in found}
        made |= rest
        for course in rest.values():
            course.begin("--deadline", "none")
        for course in rest.values():
            _ask(course)
        for course in made.values():
            course.end()
        for course in made.values():
            course.resume()
        for course in made.values():
            course.end()
        yield Courses(reference.document["losses"], deadline, made)
    finally:
        for course in made.values():
            course.clean_up()


def _ask(course: Course) -> None:
    match course.launcher:
        case "mpirun":
            os.kill(course.pid(rank=1), signal.SIGUSR2)
        case "a file":
            course.pid(rank=0)
            course.run.stop_file.touch()
        case "in a job":
            os.kill(course.pid(rank=1), signal.SIGTERM)


@pytest.fixture
def course(courses: Courses, launcher: str) -> Course:
    if launcher not in courses.by_launcher:
        pytest.skip(f"{LAUNCHERS[launcher][0]} is not installed")
    return courses.by_launcher[launcher]


every_launcher = pytest.mark.parametrize("launcher", LAUNCHERS)


@every_launcher
def test_all_ranks_stop_after_the_same_step_keep_it_and_end_well(course: Course):
    step, first = course.stopped["step"], course.began[1]
    last = [
        [each["step"] for each in events(course.run.path, rank, "ids") if each["time"] < first][-1] for rank in (0, 1)
    ]
    assert last == [step, step]
    assert events(course.run.path, 0, "resumed")[0]["step"] == step
    assert (course.stopped["of"], course.stopped["saved"]) == (5000, True)


@every_launcher
def test_scripts_read_why_it_stopped_and_what_it_had_reached(course: Course, courses: Courses):
    result = course.ended[0].document
    stopped = result["stopped"]
    assert {name: course.stopped[name] for name in stopped} == stopped
    assert result["losses"][:REFERENCE] == courses.losses[: stopped["step"]]
    reasons = {
        "own": r"the deadline is in \d+ s",
        "torchrun": r"the deadline is in \d+ s",
        "mpirun": "it got SIGUSR2",
        "a file": "runs/slow-1/stop was made",
        "in a job": "it got SIGTERM",
    }
    assert re.fullmatch(reasons[course.launcher], stopped["why"])
    givers = {"own": "clock", "torchrun": "clock", "mpirun": "signal", "a file": "user", "in a job": "signal"}
    assert stopped["by"] == givers[course.launcher]


@every_launcher
def test_it_goes_on_where_it_stopped_with_no_step_lost_or_repeated(course: Course, courses: Courses):
    steps = course.stopped["step"] + MORE
    assert course.ended[1].document["losses"][:REFERENCE] == courses.losses[:steps]
    for rank in (0, 1):
        used = [each["step"] for each in events(course.run.path, rank, "ids")]
        assert used == list(range(1, steps + 1))
    assert course.run.stopped() is None
    assert not course.run.stop_file.exists()


@pytest.mark.parametrize("launcher", BY_THE_CLOCK)
def test_it_stops_before_the_deadline_and_not_long_before(course: Course, courses: Courses):
    took = course.ended[0].document["stopped"]["time"] - course.began[0]
    # A busy machine may make a step long, and the next one is taken for as long.
    assert courses.deadline / 4 < took < courses.deadline


def test_a_run_without_time_for_a_step_says_so_and_is_not_tried_again(tmp_path: Path):
    ended = meshrun(tmp_path, "run", SLOW, "--deadline", "0.1s")
    assert ended.status == 2
    (sentence,) = ended.sentences
    assert sentence.startswith("the deadline is in 0 s, which is too short for a step and a checkpoint (")
    assert sentence.endswith("; give it more time (--deadline, or the job's time limit)")


class Asking:
    """An ending that asks one rank to stop at one step."""

    def __init__(self, rank: int, here: Here, step: int) -> None:
        self._asks, self._step, self._looked = rank == here.rank, step, 0

    def asked(self, evaluates: bool) -> float:
        del evaluates
        self._looked += 1
        return float(self._asks and self._looked >= self._step)

    def stepped(self, seconds: float) -> None: ...

    def evaluated(self, seconds: float) -> None: ...


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    "layout",
    [pytest.param(each, marks=pytest.mark.ranks(parse(each).size), id=each) for each in ("dp=2", "fsdp=2", "pp=2")],
)
def test_a_word_to_one_rank_stops_all_of_them_after_the_step_in_which_it_came(layout: str, rank: int):
    mesh.use(mesh.Meeting(layout=layout, device="cpu"))
    trainer = Trainer(small(64, 8, steps=20), mesh.start())
    trainer.ending = Asking(rank, trainer.here, step=4)
    with pytest.raises(Stopped, match=r"stopped after step 4$"):
        trainer.train()


@pytest.mark.gpu
@pytest.mark.parametrize(("asked", "stopped"), [(4, 5), (8, 8)])
def test_on_a_gpu_the_word_is_heard_a_step_later_but_before_an_evaluation(asked: int, stopped: int):
    mesh.use(mesh.Meeting(device="cuda"))
    try:
        trainer = Trainer(small(64, 8, steps=20, evals={"val": points(16)}), mesh.start())
        trainer.ending = Asking(0, trainer.here, asked)
        with pytest.raises(Stopped, match=rf"stopped after step {stopped}$"):
            trainer.train()
        assert trainer.evaluated == 0
    finally:
        mesh.finish()
        mesh.use(mesh.Meeting())


def keeping_trainer(here: Here, folder: Path, **changes: Any) -> Trainer:
    return Trainer(small(64, 8, steps=20, **changes), here, keeping=Keeping(folder, None, Every(steps=100)))


def test_an_evaluation_that_would_not_end_in_time_is_not_begun_and_made_up_for_later(alone: Here, tmp_path: Path):
    trainer = keeping_trainer(alone, tmp_path, evals={"val": points(16)})
    ending = Ending(trainer, RunDirectory(tmp_path), Signals(), Deadline(time.time(), time.time() + 100))
    ending.evaluated(1000.0)
    trainer.ending = ending
    with pytest.raises(Stopped) as stopped:
        trainer.train()
    assert ending.conclude(stopped.value)["step"] == 8 and trainer.evaluated == 0
    again = keeping_trainer(alone, tmp_path, evals={"val": points(16)})
    made: list[int] = []
    again.record = lambda kind, **fields: made.append(fields["step"]) if kind == "eval" else None
    assert again.resume() is not None
    again.train()
    assert made == [8, 16, 20]
    assert again.evaluated == 20 and again.totals.best["step"] >= 8


def needed(trainer: Trainer, folder: Path, seconds: float = 1000.0, evaluates: bool = False) -> float:
    """Seconds that a training with steps of 0.5 s keeps free before its end, but for the slack."""
    deadline = Deadline(time.time(), time.time() + seconds)
    ending = Ending(trainer, RunDirectory(folder), Signals(), deadline)
    for length in (0.25, 0.5, 0.25):
        ending.stepped(length)
    return ending._needed(evaluates) - deadline.slack


def test_time_is_kept_for_two_steps_of_the_longest_kind_and_twice_the_last_checkpoint(alone: Here, tmp_path: Path):
    trainer = keeping_trainer(alone, tmp_path, evals={"val": points(17)})
    assert trainer.keeper is not None
    trainer.keeper.took = 30.0
    assert needed(trainer, tmp_path) == pytest.approx(2 * 0.5 + 2 * 30.0)
    # Until an evaluation was measured, each of its batches counts as a step: 17 samples are 3 batches of 8.
    assert needed(trainer, tmp_path, evaluates=True) == pytest.approx(2 * 0.5 + 3 * 0.5 + 2 * 30.0)
    trainer.here = replace(alone, device=torch.device("cuda"))  # where the numbers of a step are seen one step later
    assert needed(trainer, tmp_path) == pytest.approx(3 * 0.5 + 2 * 30.0)


def test_before_the_first_checkpoint_time_is_kept_for_one_of_unknown_length(
    alone: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    trainer = keeping_trainer(alone, tmp_path)
    unknown = Deadline(0.0, 1000.0).unknown_checkpoint
    assert unknown >= 1 and needed(trainer, tmp_path) == pytest.approx(2 * 0.5 + unknown, rel=0.05)
    # A disk that takes a thousandth of the weights in a second: these and two moments come, and that twice.
    size = sum(each.parameter.numel() * 4 for each in trainer.placed.shards)
    monkeypatch.setattr("meshrun.train.ending._bytes_a_second", lambda _: size / 1000)
    assert needed(trainer, tmp_path) == pytest.approx(2 * 0.5 + 6000)
    trainer.placed.shards = [replace(each, holders=(0, 1)) for each in trainer.placed.shards]
    assert needed(trainer, tmp_path) == pytest.approx(2 * 0.5 + 3000), "each of two ranks writes half of what both have"


def test_slurm_is_asked_again_before_the_time_has_come_and_a_limit_that_was_extended_holds(alone: Here, tmp_path: Path):
    trainer, asked = keeping_trainer(alone, tmp_path), list[float]()

    def ask() -> float:
        asked.append(time.time())
        return time.time() + 1000

    ending = Ending(trainer, RunDirectory(tmp_path), Signals(), Deadline(time.time(), time.time() + 3, ask=ask))
    trainer.ending = ending
    trainer.train()
    assert len(asked) == 1


def test_a_limit_that_slurm_says_late_to_be_extended_is_waited_for_and_holds(alone: Here, tmp_path: Path):
    trainer = keeping_trainer(alone, tmp_path)

    def ask() -> float:
        time.sleep(0.05)
        return time.time() + 1000

    ending = Ending(trainer, RunDirectory(tmp_path), Signals(), Deadline(time.time(), time.time() + 0.1, ask=ask))
    ending.stepped(10.0)  # so long that the time to stop has come before anybody has asked
    assert ending.asked(evaluates=False) == 0.0


@pytest.mark.parametrize("restarted", [False, True])
def test_slurm_is_asked_whether_a_job_that_seems_to_be_over_was_extended(alone: Here, tmp_path: Path, restarted: bool):
    trainer = keeping_trainer(alone, tmp_path)
    deadline = Deadline(time.time() - 100, time.time() + 1, ask=lambda: time.time() + 1000)
    with Signals() as signals:
        trainer.ending = ending = Ending(trainer, RunDirectory(tmp_path), signals, deadline)
        ending.begin(restarted)
        assert trainer.train()["steps"] == 20


def test_ranks_started_anew_without_time_for_a_step_keep_the_steps_of_those_before_them(alone: Here, tmp_path: Path):
    memory = tmp_path / "memory"
    memory.mkdir()
    before = Trainer(small(64, 8, steps=20), alone, keeping=Keeping(tmp_path, memory, Every(steps=100)))
    steps = before.steps()
    for _ in range(5):
        next(steps)
    assert before.keeper is not None
    before.keeper.leave(graceful=True)
    again = Trainer(small(64, 8, steps=20), alone, keeping=Keeping(tmp_path, memory, Every(steps=100), generation=1))
    assert not list(tmp_path.glob("step-*"))
    for attempt in (again, keeping_trainer(alone, tmp_path)):
        # The second one was lost after its own checkpoint: it has nothing more to keep, and stops as well.
        assert attempt.resume() is not None
        with Signals() as signals, pytest.raises(Stopped) as stopped:
            ending = Ending(attempt, RunDirectory(tmp_path), signals, Deadline(time.time() - 100, time.time() + 1))
            ending.begin(restarted=True)
        concluded = ending.conclude(stopped.value)
        assert (concluded["step"], concluded["saved"]) == (5, True)
        assert re.fullmatch(r"the deadline is in \d s", concluded["why"])
        assert [path.name for path in tmp_path.glob("step-*")] == ["step-00000005"]


@pytest.mark.parametrize(("finals", "ends"), [((False, False), False), ((False, True), True), ((None, True), True)])
def test_ranks_keep_their_state_for_good_if_a_launcher_of_any_node_says_that_nothing_comes_after_them(
    alone: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, finals: tuple[bool | None, ...], ends: bool
):
    trainer = keeping_trainer(alone, tmp_path)
    ending = Ending(trainer, RunDirectory(tmp_path), Signals(), None, memory=tmp_path)
    monkeypatch.setattr(
        Here, "gathered", lambda *_: [("it got SIGTERM", "signal", signal.SIGTERM, each) for each in finals]
    )
    if ends:
        assert ending.conclude(Stopped("to be started anew"))["why"] == "it got SIGTERM"
    else:
        with pytest.raises(Stopped, match="to be started anew"):
            ending.conclude(Stopped("to be started anew"))


def test_a_run_that_keeps_no_state_does_not_stop_by_the_clock(alone: Here, tmp_path: Path):
    never = Keeping(tmp_path, None, Every(never=True))
    trainer = Trainer(small(64, 8, steps=20), alone, keeping=never)
    trainer.ending = ending = Ending(trainer, RunDirectory(tmp_path), Signals(), Deadline(0.0, 100.0))
    ending.begin(restarted=False)
    assert trainer.train()["steps"] == 20


def test_signals_are_as_before_afterwards(alone: Here, tmp_path: Path):
    before = [signal.getsignal(number) for number in (signal.SIGUSR2, signal.SIGTERM)]
    trainer = keeping_trainer(alone, tmp_path)
    with Signals() as signals:
        ending = Ending(trainer, RunDirectory(tmp_path), signals, None)
        ending.begin(restarted=False)
        assert ending.asked(evaluates=False) == 0
        os.kill(os.getpid(), signal.SIGTERM)
        assert ending.asked(evaluates=False) == 1
    assert [signal.getsignal(number) for number in (signal.SIGUSR2, signal.SIGTERM)] == before


def test_an_end_that_slurm_does_not_say_at_once_is_learned_beside_the_training(alone: Here, tmp_path: Path):
    answer = threading.Event()

    def ask() -> float:
        answer.wait()
        return time.time() + 1

    trainer = keeping_trainer(alone, tmp_path)
    deadline = Deadline(time.time() - 1000, ask=ask)
    deadline.ask_while_unknown()
    trainer.ending = ending = Ending(trainer, RunDirectory(tmp_path), Signals(), deadline)
    ending.begin(restarted=True)
    steps = trainer.steps()
    for _ in range(3):
        next(steps)
    answer.set()
    deadline.wait(10)
    with pytest.raises(Stopped, match=r"stopped after step 4$"):
        list(steps)
    assert re.fullmatch(r"the deadline is in \d s", ending.conclude(Stopped(""))["why"])


def test_slurm_is_asked_again_once_it_has_answered_and_an_end_stays_without_an_answer():
    answers, asked = iter([50.0, None, None]), list[int]()
    go = threading.Event()

    def ask() -> float | None:
        asked.append(1)
        go.wait(10)
        return next(answers)

    deadline = Deadline(0.0, 30.0, ask=ask)
    deadline.ask()
    deadline.ask()
    go.set()
    for count in (1, 2):
        deadline.wait(10)
        assert (len(asked), deadline.end) == (count, 50.0)
        deadline.ask()
        deadline.wait(10)


def test_what_linux_says_of_a_process_is_read_whatever_its_name():
    name = Path("/proc/self/comm")
    before = name.read_text()
    try:
        name.write_text("a) b (c")
        assert _stat(os.getpid())[1] == str(os.getppid())
    finally:
        name.write_text(before)


def test_an_end_that_nobody_knows_is_asked_for_ever_more_seldom(monkeypatch: pytest.MonkeyPatch):
    deadline, asked = Deadline(0.0), list[int]()
    deadline.ask = lambda: asked.append(now)  # type: ignore[method-assign]
    for now in range(0, 100, 5):
        monkeypatch.setattr("meshrun.train.deadline.time.monotonic", lambda now=now: 1000.0 + now)
        deadline.ask_while_unknown()
    assert asked == [0, 10, 30, 70]


def test_a_deadline_is_counted_from_the_start_of_the_run_or_is_that_of_the_job():
    found = deadline_of(RunConfig(target="digits", deadline="10min"), {}, began=1000.0)
    assert found is not None and (found.end, found.limit, found.slack) == (1600.0, 600.0, 11.0)
    found = deadline_of(RunConfig(target="digits", deadline="20s"), {}, began=1000.0)
    assert found is not None and (found.slack, found.unknown_checkpoint) == (2.0, 5.0), (
        "a short time has shares for both"
    )
    job = {"SLURM_JOB_ID": "17", "SLURM_JOB_END_TIME": "8200"}
    found = deadline_of(RunConfig(target="digits"), job, began=1000.0)
    assert found is not None and (found.end, found.limit, found.slack) == (8200.0, 7200.0, 60.0)
    assert deadline_of(RunConfig(target="digits", deadline="none"), job, began=1000.0) is None
    assert deadline_of(RunConfig(target="digits"), {}, began=1000.0) is None


def test_the_first_signal_is_the_reason():
    signals = Signals()
    signals._note(signal.SIGUSR2, None)
    signals._note(signal.SIGTERM, None)
    assert signals.by == signal.SIGUSR2


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_0_alone_looks_for_the_stop_file(alone: Here, tmp_path: Path, rank: int):
    trainer = keeping_trainer(alone, tmp_path)
    trainer.here = replace(alone, world=replace(alone.world, rank=rank, size=2))
    run = RunDirectory(tmp_path)
    run.stop_file.touch()
    ending = Ending(trainer, run, Signals(), Deadline(time.time() - 100, time.time() - 50))
    assert ending.asked(False) == float(rank == 0)
    assert (ending._deadline is None) == (rank == 1)


@pytest.mark.parametrize("replaced", [False, True])
def test_a_run_whose_directory_is_gone_twice_in_a_row_ends(alone: Here, tmp_path: Path, replaced: bool):
    run = RunDirectory(tmp_path / "run")
    run.path.mkdir()
    ending = Ending(keeping_trainer(alone, tmp_path), run, Signals(), None)
    ending._refuse_deleted()
    (run.path / "config.json").touch()
    ending._refuse_deleted()
    shutil.rmtree(run.path)
    if replaced:
        run.path.touch()
    ending._refuse_deleted()
    with pytest.raises(RunFailed, match=r"was deleted, moved or unmounted while the run trained \(step 0\)"):
        ending._refuse_deleted()


@pytest.mark.parametrize("again", [False, True])
def test_what_was_asked_of_the_run_before_is_forgotten_but_where_its_launcher_goes_on(tmp_path: Path, again: bool):
    run = RunDirectory(tmp_path)
    for path in (run.stop_file, run.stopped_file):
        path.touch()
    begin_anew(run, again)
    assert (run.stop_file.exists(), run.stopped_file.exists()) == (again, False)


def test_slurm_is_asked_once_about_an_end_that_stays(alone: Here, tmp_path: Path):
    trainer, asked = keeping_trainer(alone, tmp_path), list[float]()
    assert trainer.keeper is not None
    trainer.keeper.took = 0.0
    # The slack of 1,020 s is 15.2 s: in 4.8 s it is time to stop, and 5 s before that it is asked if that still holds.
    deadline = Deadline(time.time() - 1000, time.time() + 20)
    deadline._ask = lambda: asked.append(deadline.end) or deadline.end  # type: ignore[func-returns-value]
    ending = Ending(trainer, RunDirectory(tmp_path), Signals(), deadline)
    for _ in range(4):
        ending._look(False)
        deadline.wait(5)
    assert len(asked) == 1 and ending.asked(False) == 0.0


def test_an_end_that_slurm_does_not_know_is_asked_for_less_and_less_often(monkeypatch: pytest.MonkeyPatch):
    now, asked = 1000.0, list[float]()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    deadline = Deadline(0.0, ask=lambda: asked.append(now))  # type: ignore[arg-type,func-returns-value]
    for seconds in (0, 1, 10, 11, 29, 31, 60, 71):
        now = 1000.0 + seconds
        deadline.ask_while_unknown()
        deadline.wait(5)
    assert [each - 1000 for each in asked] == [0, 10, 31, 71]

"""Jobs of the real Slurm stop in time and go on: at their limit, requeued, asked by signals to whoever gets them.

All jobs run at once, since they mostly wait; the chain over a time limit of a minute waits longest.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from meshrun.check.cluster import Cluster
from meshrun.config import RunDirectory
from tests.cluster.jobs import OVER, PYTHON, Job, meshrun, sbatch, until
from tests.launch.command import events, wait_until
from tests.launch.command import meshrun as here
from tests.train.test_ending import SLOW

LONG, SHORT = 240, 60
"""Steps of the chain, and of what is asked to stop."""
ON_ONE_NODE = ("--gpus-per-node", 2, "--time", "10min", "--steps", SHORT, "--pause", 0.2)
PATIENCE = 400.0
pytestmark = pytest.mark.timeout(1.5 * PATIENCE)

WHOEVER = """
touch_stop() {{ touch runs/{name}-1/stop; }}
trap touch_stop USR2
{launcher} run {slow} --pause 0.2 --steps 1000 --record-ids --name {name} --no-tensorboard &
wait $! || wait $!
"""
"""A script of one's own: its shell gets the signal, and passes it on through the file."""
LAUNCHERS = {"mpirun": f"mpirun.openmpi --allow-run-as-root -n 2 {PYTHON} -m meshrun"}


@dataclass
class Course:
    """A job and its run."""

    run: RunDirectory
    job: Job
    stopped: dict[str, Any] = field(default_factory=dict)

    def start(self, rank: int) -> dict[str, Any]:
        """Where a rank runs, once it has done some steps."""
        wait_until(lambda: len(events(self.run.path, rank, "step")) > 5, PATIENCE)
        return events(self.run.path, rank, "start")[-1]

    @property
    def result(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.run.path / "result.json").read_text())
        return found

    def used(self, rank: int) -> list[int]:
        """Steps that samples were read for, as a rank has written them down."""
        return [each["step"] for each in events(self.run.path, rank, "ids")]


@dataclass(frozen=True)
class Courses:
    """All of them, and the losses of the same training where nobody stops it."""

    losses: list[float]
    by_name: dict[str, Course]


def submitted(cluster: Cluster, folder: Path, name: str, *words: object) -> Course:
    options = ("--record-ids", "--no-tensorboard", "--until-done", "--name", name, "--json", *words)
    said = meshrun(cluster, "ctl", "submit", SLOW, *options, cwd=folder, timeout=PATIENCE)
    assert said.status == 0, said.err
    number = int(said.document["job"])
    return Course(RunDirectory(Path(said.document["run"])), Job(number, folder / f"job-{number}.log"))


def of_ones_own(cluster: Cluster, folder: Path, name: str) -> Course:
    text = WHOEVER.format(launcher=LAUNCHERS[name], slow=SLOW, name=name)
    job = sbatch(cluster, text, folder, "-N1", "--ntasks=2", "--time=10", "--partition=crowded")
    return Course(RunDirectory(folder / f"runs/{name}-1"), job)


@pytest.fixture(scope="module")
def courses(kept_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Courses]:
    cluster, folder = kept_cluster, tmp_path_factory.mktemp("courses")
    here(folder, "version")  # starts the process that such commands are forks of, which is not to be measured
    began = time.monotonic()
    reference = here(folder, "run", SLOW, "--procs", 2, "--steps", LONG, "--json", "--name", "reference")
    assert reference.status == 0, reference.err
    # A machine that has much else to do needs more time to start.
    minutes = min(3, 1 + int((time.monotonic() - began) // 8))
    made: dict[str, Course] = {}
    pause = 1.2 * 60 * minutes / LONG  # longer than one job may take, and shorter than two
    two = ("--nodes", 2, "--gpus-per-node", 1)
    made["limit"] = submitted(
        cluster, folder, "limit", *two, "--time", f"{minutes}min", "--steps", LONG, "--pause", pause
    )
    made["requeue"] = submitted(cluster, folder, "requeue", *ON_ONE_NODE)
    made |= {name: of_ones_own(cluster, folder, name) for name in LAUNCHERS if shutil.which(LAUNCHERS[name].split()[0])}

    made["requeue"].start(rank=1)
    cluster.run("ctl", ["scontrol", "requeue", made["requeue"].job.id], check=True)
    for name in made.keys() & LAUNCHERS.keys():
        made[name].start(rank=1)
        cluster.run("ctl", ["scancel", "--signal=USR2", "--batch", made[name].job.id], check=True)
    for each in made.values():
        until(cluster, each.job, *OVER, seconds=PATIENCE)
    yield Courses(reference.document["losses"], made)


@pytest.mark.parametrize(("name", "steps"), [("limit", LONG), ("requeue", SHORT)])
def test_a_job_goes_on_after_it_has_stopped_with_no_step_lost_or_repeated(
    cluster: Cluster, courses: Courses, name: str, steps: int
):
    lost_nothing(cluster, courses.by_name[name], courses.losses[:steps])


def lost_nothing(cluster: Cluster, course: Course, losses: list[float]) -> None:
    about = cluster.job(course.job.id)
    assert (about["JobState"], int(about["Restarts"]) > 0) == ("COMPLETED", True)
    for rank in (0, 1):
        assert course.used(rank) == list(range(1, len(losses) + 1))
    assert course.result["losses"] == losses
    assert course.run.stopped() is None


@pytest.mark.parametrize(("name", "why"), [("limit", r"the job ends in \d+ s"), ("requeue", "it got SIGTERM")])
def test_all_ranks_stopped_after_the_same_step_for_a_reason(courses: Courses, name: str, why: str):
    stopped_together(courses.by_name[name], why)


def stopped_together(course: Course, why: str) -> None:
    stops = [[(each["step"], each["why"]) for each in events(course.run.path, rank, "stopped")] for rank in (0, 1)]
    assert stops[0] == stops[1] and stops[0]
    assert all(re.fullmatch(why, each) for _, each in stops[0])


@pytest.mark.every  # a rank that gets it is in tests/train/test_ending.py, a job that goes on above
def test_a_job_of_which_one_rank_was_asked_to_end_goes_on(cluster: Cluster, courses: Courses, tmp_path: Path):
    course = submitted(cluster, tmp_path, "term", *ON_ONE_NODE)
    rank = course.start(rank=1)
    cluster.run(rank["host"], ["kill", "-TERM", rank["pid"]], check=True)
    until(cluster, course.job, *OVER, seconds=PATIENCE)
    lost_nothing(cluster, course, courses.losses[:SHORT])
    stopped_together(course, "it got SIGTERM")


@pytest.mark.parametrize("name", LAUNCHERS)
def test_a_signal_to_the_shell_of_a_job_stops_ranks_whose_launcher_passes_none_on(courses: Courses, name: str):
    if name not in courses.by_name:
        pytest.skip(f"{LAUNCHERS[name].split()[0]} is not installed")
    course = courses.by_name[name]
    stopped = course.run.stopped()
    assert stopped is not None and stopped["why"] == f"runs/{name}-1/stop was made"
    assert course.used(0) == course.used(1) == list(range(1, stopped["step"] + 1))
    assert stopped["result"]["losses"] == courses.losses[: stopped["step"]]
    assert (course.run.checkpoints / f"step-{stopped['step']:08d}").is_dir()
    assert f"stopped after step {stopped['step']} of 1,000, since" in course.job.log.read_text()

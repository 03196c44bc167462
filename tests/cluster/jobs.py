"""Jobs and commands on the nodes of a virtual cluster.

job = sbatch(cluster, "srun hostname", tmp_path, "-N2", "--time=5")
ended = wait(cluster, job)                      # ended.state is COMPLETED, ended.log what it printed
meshrun(cluster, "ctl", "submit", TINY, "--nodes", 2, cwd=tmp_path).document
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from meshrun.check.cluster import Cluster
from tests.launch.command import Ended

PYTHON = sys.executable
OVER = (
    "COMPLETED",
    "FAILED",
    "CANCELLED",
    "TIMEOUT",
    "NODE_FAIL",
    "PREEMPTED",
    "OUT_OF_MEMORY",
    "BOOT_FAIL",
    "DEADLINE",
)


@dataclass(frozen=True)
class Job:
    """A job that was submitted, and where its output goes."""

    id: int
    log: Path


@dataclass(frozen=True)
class EndedJob:
    """A job that is over."""

    state: str
    status: int
    restarts: int
    log: str


def sbatch(cluster: Cluster, script: str, cwd: Path, *options: object, env: Mapping[str, str] | None = None) -> Job:
    """Submit a script; its first line is added. Output and errors go to job-ID.log in that folder."""
    words = ["sbatch", "--parsable", "--open-mode=append", "--output=job-%j.log", *map(str, options)]
    told = cluster.run("ctl", words, cwd=cwd, env=env, given=f"#!/bin/bash\n{script}\n", check=True)
    number = int(told.stdout.partition(";")[0])
    return Job(number, cwd / f"job-{number}.log")


def state(cluster: Cluster, job: Job | int) -> str:
    """Slurm's word for where a job is: PENDING, RUNNING, COMPLETING, COMPLETED, …; GONE if it is forgotten."""
    return _shown(cluster, job).get("JobState", "GONE")


def until(cluster: Cluster, job: Job | int, *states: str, seconds: float = 60.0) -> str:
    """Wait until a job is in one of these states."""
    began = time.monotonic()
    while (now := state(cluster, job)) not in states:
        waited = time.monotonic() - began
        assert waited < seconds, f"job {job} is {now} and not {' or '.join(states)} after {seconds:g} s"
        time.sleep(min(0.25 + waited / 20, 1.5))  # each question is three processes
    return now


def wait(cluster: Cluster, job: Job, seconds: float = 60.0) -> EndedJob:
    """Wait for the end of a job, through all its requeues."""
    until(cluster, job, *OVER, seconds=seconds)
    about = _shown(cluster, job)
    log = job.log.read_text(errors="replace") if job.log.exists() else ""
    return EndedJob(about["JobState"], int(about["ExitCode"].partition(":")[0]), int(about["Restarts"]), log)


def meshrun(
    cluster: Cluster,
    node: str,
    *words: object,
    cwd: Path,
    env: Mapping[str, str] | None = None,
    timeout: float = 90.0,
    launcher: tuple[str, ...] = (),
) -> Ended:
    """Run `meshrun` on a node in a folder to its end, started by a launcher such as srun if one is given."""
    ran = cluster.run(node, [*launcher, PYTHON, "-m", "meshrun", *words], cwd=cwd, env=env, timeout=timeout)
    return Ended(ran.returncode, ran.stdout, ran.stderr, time.time())


def _shown(cluster: Cluster, job: Job | int) -> dict[str, str]:
    return cluster.job(job.id if isinstance(job, Job) else job)

"""What a Slurm job tells a process in it: its number, how often it was started, its GPUs, and when it must end.

job_id(os.environ)               # "4711", or None outside of a job
told_end_of_job(os.environ)      # 1794700000.0, in seconds since 1970, as it was when the job began
end_of_job(os.environ)           # the same as it is now, since limits get extended: Slurm is asked
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime

from meshrun.config import whole_number

Env = Mapping[str, str]
Ask = Callable[[Sequence[str], Env], str]
"""A command and its environment -> what it prints; nothing where it cannot be run."""

PATIENCE = 10.0
"""Seconds that Slurm has to answer: a controller that is being restarted may take long."""


def job_id(env: Env) -> str | None:
    """The number of the job that this process is in; one of an array has a number of its own too."""
    return env.get("SLURM_JOB_ID") or env.get("SLURM_JOBID") or None


def element_id(env: Env) -> str | None:
    """The job as Slurm's commands must be asked for it: in an array 17_2, since 17 alone may mean all its elements."""
    array, index = env.get("SLURM_ARRAY_JOB_ID"), env.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{index}" if array and index else job_id(env)


def in_job(env: Env) -> bool:
    return job_id(env) is not None


def has_account(env: Env) -> bool:
    """Whether sbatch finds an account to charge in the environment."""
    return bool(env.get("SBATCH_ACCOUNT") or env.get("SLURM_ACCOUNT"))


def restart_count(env: Env) -> int:
    """How often Slurm has started this job before."""
    return whole_number(env.get("SLURM_RESTART_COUNT", "")) or 0


def place_in_job(env: Env) -> str | None:
    """A name for this step of the job, the same when Slurm starts the job again; None outside of a job."""
    job = job_id(env)
    return f"slurm-{job}.{env.get('SLURM_STEP_ID') or 'batch'}" if job is not None else None


def gpus_on_node(env: Env) -> int | None:
    """How many GPUs of this node the job has; None outside of a job, and where nothing says so."""
    if not in_job(env):
        return None
    if (count := whole_number(env.get("SLURM_GPUS_ON_NODE", ""))) is not None:
        return count
    for name in ("SLURM_JOB_GPUS", "CUDA_VISIBLE_DEVICES"):
        if listed := env.get(name):
            return len([each for each in listed.split(",") if each.strip()])
    return None


def _answer(command: Sequence[str], env: Env) -> str:
    try:
        ran = subprocess.run(
            command, env=dict(env), capture_output=True, text=True, timeout=PATIENCE, check=False, errors="replace"
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return ran.stdout if ran.returncode == 0 else ""


def told_end_of_job(env: Env) -> float | None:
    """As `end_of_job`, but as it was when the job began, and without asking anybody; older Slurms do not tell it."""
    return _moment(env.get("SLURM_JOB_END_TIME", "")) if in_job(env) else None


def end_of_job(env: Env, ask: Ask = _answer) -> float | None:
    """When Slurm ends this job, in seconds since 1970; None outside of a job and for one without a limit.

    Slurm is asked, which takes long where it does not answer.
    """
    job = job_id(env)
    if job is None or not job.isdecimal():
        return None
    # Seconds, so that neither time zones nor a user's own format can be misread.
    env = {**env, "SLURM_TIME_FORMAT": "%s"}
    for line in ask(["squeue", "--noheader", f"--jobs={job}", "--format=%A %e"], env).splitlines():
        # The number of an array is also that of one of its jobs: of the others nothing is wanted.
        number, _, end = line.partition(" ")
        if number == job and (found := _moment(end)) is not None:
            return found
    told = re.search(r"\bEndTime=(\S+)", ask(["scontrol", "show", "job", job], env))
    return _moment(told[1]) if told is not None else None


def _moment(text: str) -> float | None:
    """A time in seconds since 1970, or as Slurm writes it by itself; None for N/A and Unknown."""
    text = text.strip()
    if text.isdecimal():
        return float(text)
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None

"""Slurm's commands: submit, look, cancel, requeue; what they say comes back as values, what they refuse as sentences.

slurm = Slurm.here()                                 # a UserError where there is no Slurm
job = slurm.submit(run / "job.sh")                   # "4711"
slurm.job(job).state                                 # "PENDING"; None once Slurm has forgotten it
slurm.jobs()                                         # all of this user
slurm.cancel(job); slurm.requeue(job)
"""

from __future__ import annotations

import getpass
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from meshrun.config import whole_number
from meshrun.errors import RunFailed, UserError
from meshrun.launch.reasons import explain
from meshrun.world.environment import of_new_job

TIMEOUT = 60.0
"""Seconds after which a command of Slurm counts as hanging."""

OVER = (
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED"),
    *("REVOKED", "TIMEOUT"),
)
"""States in which a job does nothing any more."""

_SEPARATOR = "\x1f"
_FIELDS = ("%A", "%i", "%T", "%r", "%M", "%l", "%S", "%D", "%N", "%o")
"""As squeue writes them. The last one, the script's path, is the only one with any characters that people like."""

Run = Callable[[Sequence[str], Mapping[str, str]], "subprocess.CompletedProcess[str]"]


@dataclass(frozen=True)
class Job:
    """A job as squeue shows it; an element of an array is one of its own."""

    id: str
    shown: str
    """The id as people see it: 17_2 for an element of an array."""
    state: str
    reason: str
    elapsed: str
    limit: str
    start: str
    """When it started, or when Slurm thinks that it will; N/A where it does not know."""
    nodes: int
    hosts: str
    script: Path

    @property
    def over(self) -> bool:
        return self.state in OVER


About = Mapping[str, str]


def run_command(
    argv: Sequence[str], env: Mapping[str, str], patience: float = TIMEOUT
) -> subprocess.CompletedProcess[str]:
    """Run one of Slurm's commands to its end, which it has so many seconds for."""
    try:
        return subprocess.run(
            argv, env=dict(env), capture_output=True, text=True, errors="replace", timeout=patience, check=False
        )
    except subprocess.TimeoutExpired:
        raise RunFailed(
            f"{argv[0]} has not answered within {patience:.0f} s; Slurm may be down, try again later"
        ) from None
    except OSError as error:
        raise UserError(f"{argv[0]} cannot be started: {error.strerror}") from None


def is_here() -> bool:
    """Whether this machine has Slurm's commands."""
    return shutil.which("sbatch") is not None and shutil.which("squeue") is not None


@dataclass(frozen=True)
class Slurm:
    """The Slurm that this machine is part of."""

    run: Run = run_command

    @classmethod
    def here(cls, instead: str = "") -> Slurm:
        """Refuses in a sentence where there is none, and says what can be done here `instead`."""
        if not is_here():
            other = f", or {instead}" if instead else ""
            raise UserError(
                f"no Slurm on this machine: there is no sbatch; run this on a login node of the cluster{other}"
            )
        return cls()

    def submit(self, script: Path, *flags: str) -> str:
        """The new job's id."""
        ended = self.run(["sbatch", "--parsable", *flags, str(script)], of_new_job())
        if ended.returncode:
            raise UserError(explain(ended.stderr or ended.stdout))
        job = next(iter(reversed(ended.stdout.split())), "").partition(";")[0]
        if whole_number(job) is None:
            raise RunFailed(f"sbatch answers {ended.stdout[:200]!r}, in which there is no number of a job")
        return job

    def jobs(self) -> list[Job]:
        """This user's jobs, with those that ended a short while ago."""
        return self._listed("--user", getpass.getuser())

    def job(self, id: str) -> Job | None:
        """The job, or None when Slurm does not know it any more."""
        return next(iter(self.elements(id)), None)

    def elements(self, id: str) -> list[Job]:
        """The job, or each element of it if it is an array."""
        return self._listed("--jobs", id)

    def about(self, id: str) -> About:
        """All that scontrol shows of a job, by its names; nothing of one that it does not know."""
        return shown(self.run(["scontrol", "show", "job", id], of_new_job()).stdout)

    def cancel(self, id: str) -> None:
        ended = self.run(["scancel", id], of_new_job())
        if ended.returncode:
            raise RunFailed(_failed("scancel", ended))

    def requeue(self, id: str) -> None:
        """Put a job that runs back into the queue, under its own id."""
        ended = self.run(["scontrol", "requeue", id], of_new_job())
        # Asked from within the job, Slurm ends the job's processes at once, and so the very command that asks.
        if ended.returncode > 0:
            raise RunFailed(_failed("scontrol", ended))

    def _listed(self, *which: str) -> list[Job]:
        argv = ["squeue", "--noheader", "--states=all", "--array", *which, "--format", _SEPARATOR.join(_FIELDS)]
        ended = self.run(argv, of_new_job())
        if ended.returncode:
            if "Invalid job id" in ended.stderr:
                return []
            raise RunFailed(_failed("squeue", ended))
        return [parsed(line) for line in ended.stdout.splitlines() if line.count(_SEPARATOR) >= len(_FIELDS) - 1]


def shown(text: str) -> About:
    """What scontrol has printed of a job."""
    return dict(re.findall(r"\b(\w+)=(\S*)", text))


def is_preempted(job: About) -> bool:
    """Whether Slurm takes the nodes of this job, which still runs, for one of a higher priority."""
    return job.get("PreemptTime", "None") not in ("None", "N/A", "Unknown")


def is_requeued(job: About, restarts: int) -> bool:
    """Whether somebody puts this job, which was started again so many times, back into the queue just now."""
    counted = job.get("Restarts", "")
    return counted.isdecimal() and int(counted) > restarts


def _failed(command: str, ended: subprocess.CompletedProcess[str]) -> str:
    return f"{command} failed: {' '.join(ended.stderr.split()) or 'without a word'}"


def parsed(line: str) -> Job:
    """A line of squeue in the form that we ask for."""
    id, shown, state, reason, elapsed, limit, start, nodes, hosts, script = line.split(_SEPARATOR, len(_FIELDS) - 1)
    count = whole_number(nodes) or 0
    return Job(id, shown, state, reason, elapsed, limit, start, count, hosts, Path(script))

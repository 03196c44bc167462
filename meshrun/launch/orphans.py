"""A Slurm job that has lost its first node: the batch shell is gone with it, and nobody would end the job or go on.

    orphan = Orphan("4711", "n1")
    orphan.is_one()                      # whether Slurm has given up that node, and the job's batch shell was there
    orphan.requeue()                     # the job begins again elsewhere, from its newest checkpoint

With --no-kill Slurm lets a job go on without a node, whichever it is: the nodes that are left have to see to it.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

from meshrun.errors import RunFailed, UserError
from meshrun.launch.slurm import About, Slurm
from meshrun.world.hostlist import expand_hosts


@dataclass(frozen=True)
class Orphan:
    """The job, and the host that its batch shell was on."""

    job: str
    host: str
    slurm: Slurm = field(default_factory=Slurm)

    def is_one(self) -> bool:
        """False also where Slurm cannot be asked."""
        with contextlib.suppress(RunFailed, UserError):
            return has_lost(self.slurm.about(self.job), self.host)
        return False

    def requeue(self) -> str:
        """Have Slurm begin anew, or at least give the nodes back that nobody would; returns what was done."""
        try:
            self.slurm.requeue(self.job)
            return f"job {self.job} has lost its first node, {self.host}, and was put back into the queue"
        except (RunFailed, UserError) as error:
            with contextlib.suppress(RunFailed, UserError):
                self.slurm.cancel(self.job)
            return f"job {self.job} has lost its first node, {self.host}, and was ended: {error}"


def has_lost(job: About, host: str) -> bool:
    """Whether a running batch job, as scontrol shows it, has no longer the host among its nodes."""
    if job.get("JobState") != "RUNNING" or job.get("BatchFlag") != "1":
        return False
    return host not in expand_hosts(job.get("NodeList", host))

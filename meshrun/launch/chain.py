"""A training that is longer than a job: what is written down of a submitted run, and how it goes on after each job.

    record = Record.load(run)                            # RUN/submission.json
    decision = decide(record, seen)                      # pure: complete, failed, over, or another link
    decision.sentence, decision.status

A chain is made of links: one job that is put back into the queue, or jobs that follow one another, as the site wants
it. The last line of a job's script asks for the next link (`meshrun next`). Whatever happens, there is an end: a chain
has a bounded number of links, and one that stops twice at the same step is over.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from meshrun import strict_json
from meshrun.config import RunDirectory, write_json
from meshrun.errors import UserError
from meshrun.launch.job import WORTH_A_RESTART
from meshrun.launch.submission import NAME, Submission

FORMAT = 1
_JOB = re.compile(r"[A-Za-z0-9_.+][A-Za-z0-9_.+-]{0,63}")
KILLED = 128
"""Exit statuses above it are those of processes that a signal has ended: a lost node, or the time limit."""


@dataclass(frozen=True)
class Link:
    """A link of the chain that is over."""

    job: str
    status: int
    step: int | None
    """The step up to which all is saved."""
    what: str
    """What was decided then: complete, failed, cancelled, over or next."""
    sentence: str


@dataclass(frozen=True)
class Record:
    """What is known of a submitted run: RUN/submission.json."""

    submission: Submission
    jobs: tuple[str, ...] = ()
    """Ids of its jobs, the newest last; a requeued job has the same one again."""
    index: int | None = None
    """Its place in the job array of a sweep."""
    links: tuple[Link, ...] = ()
    cancelled: bool = False
    ended: str = ""
    """Why there will be no further link; nothing while there may be one."""

    @property
    def used(self) -> int:
        """Links used so far, with the one that is pending or running."""
        return len(self.links) + (not self.ended)

    @classmethod
    def load(cls, run: Path) -> Record:
        path = run / NAME
        try:
            document = strict_json.read(path)
            document.pop("format", None)
            record: Record = strict_json.of_type(cls, document, "it")
            if (wrong := next((job for job in record.jobs if not _JOB.fullmatch(job)), None)) is not None:
                raise ValueError(f"it names the job {wrong!r:.80}, a number that Slurm gives to none")
            return record
        except FileNotFoundError:
            raise UserError(f"{run} was not submitted: it has no {NAME}; meshrun submit makes runs that have") from None
        except (OSError, ValueError) as error:
            raise UserError(f"{path} cannot be read: {error}") from None

    def save(self, run: Path) -> None:
        document = {
            **{each.name: getattr(self, each.name) for each in dataclasses.fields(self)},
            "submission": self.submission.to_json(),
            "links": [dataclasses.asdict(link) for link in self.links],
        }
        write_json(run / NAME, {"format": FORMAT, **document})

    def over(self, job: str, decision: Decision, seen: Seen) -> Record:
        """The record once a link is over."""
        link = Link(job, seen.status, seen.step, decision.what, decision.sentence)
        return replace(self, links=(*self.links, link), ended="" if decision.what == "next" else decision.sentence)


@dataclass(frozen=True)
class Seen:
    """How a run stands when its job's step has ended."""

    status: int
    """Of the step."""
    complete: bool
    stopped: dict[str, Any] | None
    """What stopped.json says, if the training stopped in time."""
    saved: int | None
    """The newest step of which all is saved; None where there is no checkpoint."""
    ending: bool = False
    """Whether Slurm is ending the job for another reason than its time limit: somebody has cancelled it."""
    preempted: bool = False
    requeued: bool = False
    """Whether somebody else has put the job back into the queue already."""
    by_user: bool = False
    """Whether a person has asked the run to rest, by making the file `stop` in it."""

    @property
    def step(self) -> int | None:
        """The step after which the next link goes on."""
        return self.stopped["step"] if self.stopped is not None else self.saved


@dataclass(frozen=True)
class Decision:
    """What becomes of a chain."""

    what: Literal["complete", "failed", "cancelled", "queued", "over", "next"]
    """queued: it goes on without us."""
    sentence: str
    status: int


def decide(record: Record, seen: Seen) -> Decision:
    """What to do after a link."""
    if seen.complete and seen.status == 1:
        return Decision("complete", "the training is complete, but failed to keep all of it: its log says what", 1)
    if seen.complete:
        return Decision("complete", "the training is complete", 0)
    most = record.submission.links
    no_more = ", so no further link follows" if most > 1 else ""
    if seen.requeued and not record.cancelled:
        return Decision("queued", "the job was put back into the queue from outside, and the run goes on there", 0)
    if record.cancelled or seen.ending:
        return Decision("cancelled", f"the job was cancelled{no_more}", seen.status or 1)
    where, status = _where(seen), seen.status
    if seen.stopped is None and status != WORTH_A_RESTART and status <= KILLED:
        how = f"failed with exit status {status}" if status else "ended without a result"
        return Decision("failed", f"the training {how}{no_more}", status or 1)
    if seen.stopped is not None and not seen.stopped.get("saved", True):
        return Decision("over", f"{where}, and keeps no state to go on from (--checkpoint none)", 1)
    again = f"sbatch {record.submission.script_path} goes on"
    # A training that stopped in time, and was to do no more, has done what it was asked to.
    rested = 0 if seen.stopped is not None else status
    if seen.by_user:
        return Decision("over", f"{where}{no_more}; {again}", rested)
    if seen.preempted:
        return Decision("next", f"{where}; another job needed its nodes, so it is queued again", 0)
    if most == 1:
        return Decision("over", f"{where}; {again}, and --until-done would do so by itself", rested)
    if record.links and record.links[-1].step == seen.step:
        return Decision("over", f"{where}, as in the link before: it makes no progress, so the chain ends", status or 1)
    used = len(record.links) + 1
    if used >= most:
        return Decision("over", f"{where}, and all {most} links are used (--links)", status or 1)
    return Decision("next", f"{where}; link {used + 1} of at most {most} goes on", 0)


def seen_of(run: RunDirectory, status: int, ending: bool, preempted: bool, requeued: bool) -> Seen:
    """How a run stands, from what it has left on the disk."""
    stopped = run.stopped()
    by_user = (stopped or {}).get("by") == "user" or run.asked_to_stop_by() == "user"
    return Seen(status, is_complete(run, status), stopped, run.saved_step(), ending, preempted, requeued, by_user)


def is_complete(run: RunDirectory, status: int = 1) -> bool:
    """A run that has reached its end has a result; one that was asked to go on after that refuses to."""
    result = run.result()
    if run.stopped() is not None or result is None:
        return False
    try:
        return bool(status == 0 or result["steps"] == run.document().get("resolved", {}).get("steps"))
    except UserError:
        return False


def _where(seen: Seen) -> str:
    if seen.stopped is not None:
        return f"stopped after step {seen.stopped['step']:,} of {seen.stopped['of']:,}, since {seen.stopped['why']}"
    kept = "before its first checkpoint" if seen.saved is None else f"with all of step {seen.saved:,} saved"
    return f"cut off {kept} (exit status {seen.status})"

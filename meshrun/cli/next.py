"""`meshrun next RUN --status N`: the last line of a job's script, which decides how a submitted run goes on.

Not for people: the script of `meshrun submit` calls it, on the job's first node, once the training's step has ended
with exit status N. It prints what it does and why into the job's log, and its exit status becomes that of the job.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from pathlib import Path

from meshrun import strict_json
from meshrun.config import RunDirectory
from meshrun.errors import RunFailed, UserError
from meshrun.launch.chain import Decision, Record, decide, seen_of
from meshrun.launch.slurm import Job, Slurm, is_preempted, is_requeued
from meshrun.world.environment import inherited
from meshrun.world.rendezvous import forget
from meshrun.world.slurm import element_id, job_id, restart_count

RETRIES = (0.0, 2.0, 5.0)
"""Seconds to wait before each try to start the next link."""


def next_command(run: Path, status: int, as_json: bool) -> int:
    """Say how a submitted run goes on after its job, and see to it."""
    record, id = Record.load(run), element_id(inherited())
    if id is None:
        raise UserError("next decides at the end of a job, and this is none; sbatch the script of the run instead")
    with contextlib.suppress(OSError):
        forget(run.parent, job_id(inherited()) or id)
    slurm = Slurm.here()
    job, preempted, requeued = _looked_up(slurm, id)
    ending = job is not None and job.state in ("COMPLETING", "CANCELLED") and job.reason != "TimeLimit"
    seen = seen_of(RunDirectory(run), status, ending, preempted, requeued)
    decision = decide(record, seen)
    # What Slurm, or who else may, takes away and gives back is no link of ours.
    after = record if preempted or decision.what == "queued" else record.over(id, decision, seen)
    after.save(run)
    if decision.what == "next":
        decision = _go_on(slurm, run, after, decision, id)
    print(
        strict_json.dumps({"run": str(run), **vars(decision)}) if as_json else f"meshrun: {decision.sentence}",
        flush=True,
    )
    return decision.status


def _looked_up(slurm: Slurm, id: str) -> tuple[Job | None, bool, bool]:
    """The job, whether it is preempted, and requeued; a controller that does not answer decides nothing."""
    try:
        job, about = slurm.job(id), slurm.about(id)
    except RunFailed:
        return None, False, False
    return job, is_preempted(about), is_requeued(about, restart_count(inherited()))


def _go_on(slurm: Slurm, run: Path, record: Record, decision: Decision, id: str) -> Decision:
    """Start the next link; a controller that is being restarted gets some seconds for it."""
    failed = ""
    for pause in RETRIES:
        time.sleep(pause)
        try:
            new = _next_job(slurm, record, id)
        except (UserError, RunFailed) as error:
            failed = str(error)
            continue
        if new is None:
            return replace(decision, sentence=f"{decision.sentence}: job {id} is back in the queue")
        replace(record, jobs=(*record.jobs, new)).save(run)
        return replace(decision, sentence=f"{decision.sentence}: job {new}")
    over = Decision("failed", f"the next link could not be started: {failed}", 1)
    replace(record, ended=over.sentence).save(run)
    return over


def _next_job(slurm: Slurm, record: Record, id: str) -> str | None:
    """Requeue, or submit where the site wants that or does not let us requeue: the new job, None if it is the same."""
    if record.submission.rules.chain == "requeue":
        with contextlib.suppress(RunFailed):
            slurm.requeue(id)
            return None
    element = () if record.index is None else (f"--array={record.index}",)
    new = slurm.submit(record.submission.script_path, f"--dependency=afterany:{id}", *element)
    return new if record.index is None else f"{new}_{record.index}"

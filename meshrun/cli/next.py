"""`meshrun next RUN --status N`: the last line of a job's script, which decides how a submitted run goes on.

Not for people: the script of `meshrun submit` calls it, on the job's first node, once the training's step has ended
with exit status N. It prints what it does and why into the job's log, and its exit status becomes that of the job.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

from meshrun.config import RunDirectory
from meshrun.errors import RunFailed, UserError
from meshrun.launch.chain import Decision, Record, decide, seen_of
from meshrun.launch.slurm import Job, Slurm
from meshrun.world.slurm import job_id


def next_command(run: Path, status: int, as_json: bool) -> int:
    """Say how a submitted run goes on after its job, and see to it."""
    record, id = Record.load(run), job_id(os.environ)
    if id is None:
        raise UserError("next decides at the end of a job, and this is none; sbatch the script of the run instead")
    slurm = Slurm.here()
    job = _looked_up(slurm, id)
    ending = job is not None and job.state in ("COMPLETING", "CANCELLED") and job.reason != "TimeLimit"
    preempted = slurm.is_preempted(id)
    seen = seen_of(RunDirectory(run), status, ending, preempted)
    decision = decide(record, seen)
    # What Slurm takes away and gives back by itself is no link of ours.
    after = record if preempted else record.over(id, decision, seen)
    after.save(run)
    if decision.what == "next":
        decision = _go_on(slurm, run, after, decision, job.shown if job is not None else id, id)
    print(json.dumps({"run": str(run), **vars(decision)}) if as_json else f"meshrun: {decision.sentence}", flush=True)
    return decision.status


def _looked_up(slurm: Slurm, id: str) -> Job | None:
    try:
        return slurm.job(id)
    except RunFailed:
        return None  # a controller that does not answer must not decide how a training goes on


def _go_on(slurm: Slurm, run: Path, record: Record, decision: Decision, shown: str, id: str) -> Decision:
    """Start the next link, in the way of the site, or in the other one if Slurm does not let us."""
    try:
        if record.submission.rules.chain == "requeue":
            try:
                slurm.requeue(id)
                return replace(decision, sentence=f"{decision.sentence}: job {shown} is back in the queue")
            except RunFailed:
                pass
        element = () if record.index is None else (f"--array={record.index}",)
        new = slurm.submit(record.submission.script_path, f"--dependency=afterany:{shown}", *element)
    except (UserError, RunFailed) as error:
        failed = Decision("failed", f"the next link could not be started: {error}", 1)
        replace(record, ended=failed.sentence).save(run)
        return failed
    new = new if record.index is None else f"{new}_{record.index}"
    replace(record, jobs=(*record.jobs, new)).save(run)
    return replace(decision, sentence=f"{decision.sentence}: job {new}")

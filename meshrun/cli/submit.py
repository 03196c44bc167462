"""`meshrun submit TARGET`: a training as a Slurm job, from a login node to its end with one command.

    meshrun submit digits --nodes 2 --gpus-per-node 4 --time 2h
    meshrun submit llama.py --nodes 8 --site juwels-booster --account X --until-done
    meshrun submit digits --sweep lr=1e-3,3e-4 --sweep width=64,128
    meshrun submit digits --nodes 2 --gpus-per-node 4 --dry-run

The job is a run directory, made here: config.json has all options, job.sh only starts what it says. `--dry-run` prints
the script without importing torch or the target.
"""

from __future__ import annotations

import contextlib
import functools
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshrun import strict_json
from meshrun.cli.job_plan import PATIENCE, Plan, cluster_here, planned
from meshrun.cli.target import Target, failed_in, make
from meshrun.config import RunConfig, RunDirectory, write_whole
from meshrun.errors import RunFailed, UserError
from meshrun.experiment import Experiment
from meshrun.launch import limits
from meshrun.launch.chain import Record
from meshrun.launch.script import script
from meshrun.launch.slurm import TIMEOUT, Slurm
from meshrun.launch.submission import Element, Submission
from meshrun.layout import parse


def submit_command(words: list[str]) -> int:
    if "--dry-run" in words or "--help" in words:
        plan = planned(words, static="--help" not in words, here=lambda: cluster_here(PATIENCE))
        return _shown(plan) if plan is not None else 0
    slurm = Slurm.here("look at the job here (--dry-run prints its script, meshrun rehearse plays it)")
    # What the target prints while it is imported is no part of the one document on standard output.
    with contextlib.redirect_stdout(sys.stderr) if "--json" in words else contextlib.nullcontext():
        plan = _checked(words)
    _warn(plan)
    submission, job = _submitted(plan, slurm)
    as_json, given = plan.asked.as_json, plan.asked.beyond
    told: dict[str, Any] = {"script": script(submission), "run": str(submission.run), "job": job}
    if submission.sweep:
        told["runs"] = [{"run": str(each.run), "values": each.values} for each in submission.sweep]
    if not as_json:
        print(f"job {job}: {submission.script_path}", file=sys.stderr)
        for each in submission.sweep:
            print(f"{each.run}: {each.values}", file=sys.stderr)
    if not given["wait"] and (as_json or not given["follow"]):
        print(strict_json.dumps(told) if as_json else f"meshrun follow {submission.run} shows it live")
        return 0
    from meshrun.cli.following import follow

    return follow(slurm, submission.run, told if as_json else None, quiet=not given["follow"])


def _shown(plan: Plan) -> int:
    text = script(plan.submission)
    if plan.asked.as_json:
        print(strict_json.dumps({"script": text, "run": str(plan.submission.run)}))
    else:
        print(text, end="")
    return 0


def _checked(words: list[str]) -> Plan:
    """What the words ask for; what cannot work is refused before anything waits in a queue for it."""
    here = functools.cache(lambda: cluster_here(TIMEOUT))
    # First what can be refused at once: importing the target takes seconds.
    planned(words, here=here)
    plan = planned(words, static=False, here=here)
    assert plan is not None
    asked, resources = plan.asked, plan.submission.resources
    for choice in plan.choices:
        config = choice.config
        layout = parse(config.layout).resolve(resources.ranks, resources.procs, config.allow_tp_across_nodes)
        if layout.dp < layout.size:
            from meshrun.cli.configured import how_of, override
            from meshrun.train.refusals import refuse

            refuse(override(_experiment(asked.target, config), config)[0], layout, how_of(config))
    return plan


def _experiment(target: Target, config: RunConfig) -> Experiment:
    """What the job will train; an error in the user's own code is told in a sentence."""
    try:
        return make(target, config.options, config.data)
    except (UserError, RunFailed):
        raise
    except Exception as error:
        raise RunFailed(failed_in(target, error)) from error


def _warn(plan: Plan) -> None:
    """What may go wrong, and what nobody has verified."""
    runs, site = plan.submission.run.parent, plan.site
    if why := limits.node_local(runs):
        print(f"meshrun: {runs} may not be seen by other nodes: {why}; the job will tell (--runs)", file=sys.stderr)
    if site is not None and (unverified := site.unverified()):
        names = ", ".join(dict.fromkeys(name for name, _ in unverified))
        where = f"(meshrun sites show {site.name})"
        print(f"meshrun: in the profile of {site.title} nobody has verified {names} {where}", file=sys.stderr)


def _submitted(plan: Plan, slurm: Slurm) -> tuple[Submission, str]:
    """Make the run directories, write the script, and hand it to Slurm; a job that it rejects leaves nothing behind."""
    made: list[Path] = []
    try:
        submission = _made(plan, made)
        write_whole(submission.script_path, script(submission))
        submission.script_path.chmod(0o755)
        # A sweep's own folder has a record too, of no place in the array.
        recorded = [(submission.run, None), *((each.run, at) for at, each in enumerate(submission.sweep))]
        for folder, index in recorded:
            Record(submission, index=index).save(folder)
        job = slurm.submit(submission.script_path)
    except (UserError, RunFailed, OSError):
        for folder in made:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    for folder, index in recorded:
        id = job if index is None else f"{job}_{index}"
        # Read anew, since the job may have begun, and even ended.
        record = Record.load(folder)
        replace(record, jobs=(id, *record.jobs)).save(folder)
    return submission, job


def _made(plan: Plan, made: list[Path]) -> Submission:
    """The submission with the directories that the runs have got."""
    runs = []
    for choice in plan.choices:
        runs.append(RunDirectory.create(choice.config))
        made.append(runs[-1].path)
    if not plan.submission.sweep:
        return replace(plan.submission, name=runs[0].path.name, run=runs[0].path)
    folder = plan.submission.run
    folder.mkdir(mode=0o770, parents=True)  # as run directories are
    (folder / "logs").mkdir()
    made.append(folder)
    pairs = zip(runs, plan.choices, strict=True)
    return replace(plan.submission, sweep=tuple(Element(run.path, choice.values) for run, choice in pairs))

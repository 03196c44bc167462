"""What has been submitted: all runs that Slurm or the folder of runs knows, and the one that a word means.

rows(slurm, Path("runs"))                            # as `meshrun jobs` lists them
found_run(slurm, "digits-3", Path("runs"))           # or a run directory, or the number of a job
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from meshrun.cli.following import ended, values_of
from meshrun.config import RunDirectory, whole_number
from meshrun.errors import UserError
from meshrun.files import open_plain
from meshrun.launch.chain import Record
from meshrun.launch.reasons import pending
from meshrun.launch.slurm import Job, Slurm
from meshrun.launch.submission import NAME, SCRIPT

_BLOCK = 1 << 16
"""Bytes at the end of an events file in which its last step is."""


@dataclass(frozen=True)
class Row:
    """A submitted run, as it is listed."""

    job: str
    run: str
    state: str
    reason: str
    elapsed: str
    limit: str
    step: int | None
    of: int | None
    links: int
    most: int
    values: str = ""
    """What a run of a sweep has of its own, in words."""

    def line(self) -> str:
        step = "" if self.step is None else f"step {self.step:,}" + (f" of {self.of:,}" if self.of else "")
        links = f"link {self.links} of {self.most}" if self.most > 1 else ""
        time = f"{self.elapsed}/{self.limit}" if self.limit else ""
        shown = "  ".join(filter(None, (self.values, time, step, links, self.reason)))
        run = Path(self.run)
        run = run.relative_to(Path.cwd()) if Path.cwd() in run.parents else run
        return f"{self.job:>10}  {self.state:<10}  {run}  {shown}".rstrip()


def found_run(slurm: Slurm, which: str, runs: Path) -> Path:
    """The run or sweep that a word means."""
    run = _named(slurm, which, runs)
    if any(Record.load(folder).ended for folder in all_of(run)):
        jobs = slurm.jobs()
        for folder in all_of(run):
            adopted(folder, Record.load(folder), jobs)
    return run


def _named(slurm: Slurm, which: str, runs: Path) -> Path:
    for folder in (Path(which), runs / which):
        if (folder / NAME).is_file():
            return folder.absolute()
    if re.fullmatch(r"\d+(_\d+)?", which):
        for job in slurm.elements(which):
            run = _run_of(job) if "_" in which else job.script.parent
            if run is not None and (run / NAME).is_file():
                return run
        for path in runs.glob(f"*/{NAME}"):
            with contextlib.suppress(UserError):  # another run, of a newer version, or damaged by whoever owns it
                if which in Record.load(path.parent).jobs:
                    return path.parent.absolute()
    raise UserError(
        f"{which!r} is neither a submitted run in {runs} nor the number of a job of meshrun; meshrun jobs lists them"
    )


def all_of(run: Path) -> list[Path]:
    """The run itself; of a sweep, its runs as well."""
    record = Record.load(run)
    return [run, *(element.run for element in record.submission.sweep if record.index is None)]


def adopted(run: Path, record: Record, jobs: Sequence[Job]) -> Record:
    """The record of a run whose script somebody has submitted by hand after its chain was over: it goes on."""
    if not record.ended:
        return record
    alive = [job.shown for job in jobs if not job.over and _run_of(job) == run]
    strangers = [id for id in alive if id not in record.jobs]
    if not strangers:
        return record
    renewed = replace(record, jobs=(*record.jobs, *strangers), ended="", cancelled=False)
    renewed.save(run)
    return renewed


def called_off(slurm: Slurm, run: Path) -> list[str]:
    """Let no further link of a run, or of a sweep's runs, follow; returns the jobs of theirs that are not over."""
    alive = []
    for folder in all_of(run):
        if _alive(slurm, Record.load(folder)):
            replace(Record.load(folder), cancelled=True).save(folder)
            # Asked again: a last link may have followed just before.
            alive += _alive(slurm, Record.load(folder))
    return alive


def _alive(slurm: Slurm, record: Record) -> list[str]:
    def is_over(job: Job) -> bool:
        # Of one that is being cleared away it is known whether it comes back.
        return job.over or bool(record.ended and job.state == "COMPLETING")

    return [id for id in record.jobs[-1:] if not all(map(is_over, slurm.elements(id)))]


def rows(slurm: Slurm, runs: Path) -> list[Row]:
    """All submitted runs that Slurm or the folder of runs knows, the newest last."""
    listed = slurm.jobs()
    known = [(run, job) for job in listed if (run := _run_of(job)) is not None]
    here = [path.parent.absolute() for path in runs.glob(f"*/{NAME}")]
    found = []
    for run in dict.fromkeys((*here, *(run for run, _ in known))):
        try:
            record = adopted(run, Record.load(run), listed)
        except UserError:
            continue  # of a newer version, or being removed
        if record.submission.sweep and record.index is None:
            continue  # its runs stand for it
        # Of jobs that are over, only its own: Slurm also remembers one that it rejected, of a run that was never made.
        jobs = [job for of, job in known if of == run and (job.shown in record.jobs or not job.over)]
        found.append(_row(run, record, jobs[-1] if jobs else None))
    return sorted(found, key=lambda row: (whole_number(row.job.partition("_")[0]) or 0, row.job))


def _row(run: Path, record: Record, job: Job | None) -> Row:
    step, of = _progress(RunDirectory(run))
    id = record.jobs[-1] if record.jobs else "?"
    links, most, values = record.used, record.submission.links, values_of(record)
    if job is not None and not job.over and not record.ended:
        reason = pending(job.reason) if job.state == "PENDING" else job.hosts
        return Row(id, str(run), job.state.lower(), reason, job.elapsed, job.limit, step, of, links, most, values)
    end = ended(run, record, job)
    reason = "" if end.state == "complete" else end.sentence
    elapsed, limit = (job.elapsed, job.limit) if job is not None else ("", "")
    return Row(id, str(run), end.state, reason, elapsed, limit, step, of, links, most, values)


def _run_of(job: Job) -> Path | None:
    """The run that a job trains, if it is one of meshrun's."""
    folder = job.script.parent
    if job.script.name != SCRIPT or not (folder / NAME).is_file():
        return None
    try:
        sweep = Record.load(folder).submission.sweep
    except UserError:
        return None
    index = job.shown.partition("_")[2]
    place = whole_number(index)
    return sweep[place].run if place is not None and place < len(sweep) else folder


def _progress(run: RunDirectory) -> tuple[int | None, int | None]:
    """The last step that rank 0 has finished, and how many there are to be."""
    try:
        of: Any = run.document().get("resolved", {}).get("steps")
    except UserError:
        of = None
    try:
        with open_plain(run.events_of(0)) as file:  # of a directory that anybody may have made
            file.seek(max(0, file.seek(0, os.SEEK_END) - _BLOCK))
            steps = re.findall(rb'"kind": "step", "step": (\d+)', file.read())
    except OSError:
        return None, of
    return (int(steps[-1]) if steps else None), of

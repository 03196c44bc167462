"""A submitted run, shown live: where its job stands, then the training's own story, and at the end how it ended.

    follow(slurm, run.path)              # until the end; returns the exit status

CTRL-C ends the following, and not the job. What is followed is the run: through requeues, and through all jobs of a
chain.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from meshrun import strict_json
from meshrun.config import RunDirectory
from meshrun.errors import RunFailed, printable
from meshrun.files import read_plain
from meshrun.launch.chain import Record, is_complete
from meshrun.launch.reasons import pending
from meshrun.launch.slurm import Job, Slurm
from meshrun.observe.events import read_events
from meshrun.observe.failures import told_in
from meshrun.observe.history import table
from meshrun.observe.story import Follow, Story

LOOK = 0.5
"""Seconds between two looks at the run directory."""
ASK = (1.0, 15.0)
"""Seconds between two questions to Slurm: at first, and at most once nothing changes."""
GRACE = 10.0
"""Seconds after the end of a job in which its record may still say how it goes on: file systems are late."""
TAIL = 15
"""Lines of a failed job's log that are shown."""


@dataclass(frozen=True)
class End:
    """How a submitted run has ended."""

    run: Path
    job: str
    state: str
    """complete, stopped, failed, cancelled, or Slurm's own word in small letters."""
    sentence: str
    result: dict[str, Any] | None
    values: str = ""
    """What a run of a sweep has of its own, in words."""
    explained: bool = True
    """Whether the sentence says why, so that nobody needs to look into the job's log for it."""

    @property
    def status(self) -> int:
        return 0 if self.state in ("complete", "stopped") else 1

    def document(self) -> dict[str, Any]:
        return {
            **(self.result or {}),
            "run": str(self.run),
            "job": self.job,
            "state": self.state,
            **({"values": self.values} if self.values else {}),
            **({} if self.status == 0 else {"error": self.sentence, "status": self.status}),
        }

    def line(self) -> str:
        return f"{self.run}{f' ({self.values})' if self.values else ''}: {self.sentence}"


def follow(slurm: Slurm, run: Path, told: dict[str, Any] | None = None, quiet: bool = False) -> int:
    """Follow a run or a sweep to its end, of which alone is told if it is to be `quiet`.

    `told`, for scripts, is printed with what was reached, and nothing else.
    """
    quiet = quiet or told is not None
    record = Record.load(run)
    runs = [element.run for element in record.submission.sweep] or [run]
    try:
        ends = _together(slurm, runs, quiet) if len(runs) > 1 else [_one(slurm, run, quiet)]
    except KeyboardInterrupt:
        print(f"\nthe job goes on; meshrun follow {run} shows it again, meshrun cancel {run} ends it", file=sys.stderr)
        return 130
    failed = next((end for end in ends if end.status), None)
    if told is not None:
        several = {"runs": [end.document() for end in ends]}
        print(strict_json.dumps({**told, **(ends[0].document() if len(runs) == 1 else several)}))
        if failed is not None:
            print(f"meshrun: {printable(failed.sentence)}", file=sys.stderr)
        return 0 if failed is None else 1
    for end in ends if failed is None or len(ends) > 1 else ():
        print(printable(end.line()), flush=True)
    if failed is not None:
        for line in () if failed.explained else tail(failed):
            print(printable(line), file=sys.stderr)
        raise RunFailed(failed.line() if len(ends) > 1 else failed.sentence)
    return 0


def _one(slurm: Slurm, run: Path, quiet: bool) -> End:
    """Follow one run; its story is told by the events of its rank 0, wherever that is."""
    directory = RunDirectory(run)
    with contextlib.ExitStack() as scene:
        if not quiet:
            story = scene.enter_context(Story(Console(stderr=True)))
            # Whoever comes late still learns what is being trained.
            for event in [event for event in read_events(directory.events_of(0)) if event["kind"] == "start"][-1:]:
                story.tell(event)
            is_own = run.stat().st_uid == os.getuid()
            scene.enter_context(Follow(story, directory.events_of(0), directory.log_of(0), is_own))
        last, known = "", len(Record.load(run).links)
        for looked in watch(slurm, run):
            if isinstance(looked, End):
                return looked
            if not quiet:
                links = Record.load(run).links
                # How a link ended, and that another one comes; then where that stands.
                lines = [link.sentence for link in links[known:] if link.what == "next"]
                known = len(links)
                if (line := described(looked)) != last:
                    last = line
                    lines.append(line)
                for line in lines:
                    story.console.print(printable(line), markup=False, highlight=False, soft_wrap=True)
            time.sleep(LOOK)
    raise AssertionError("a run that is watched ends")


def _together(slurm: Slurm, runs: list[Path], quiet: bool) -> list[End]:
    """Follow the runs of a sweep: how many wait, train, and have ended."""
    watched = {run: watch(slurm, run) for run in runs}
    seen: dict[Path, Job | End | None] = {}
    last = ""
    while True:
        for run, looks in watched.items():
            if not isinstance(seen.get(run), End):
                seen[run] = next(looks)
        ends = [each for each in seen.values() if isinstance(each, End)]
        states = [each.state.lower() for each in seen.values() if each is not None]
        line = "sweep: " + ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
        if not quiet and line != last:
            last = line
            print(line, file=sys.stderr)
        if len(ends) == len(runs):
            return ends
        time.sleep(LOOK)


def watch(slurm: Slurm, run: Path) -> Iterator[Job | End | None]:
    """Where the run stands, whenever asked, and at last how it ended; None while Slurm does not say."""
    wait, asked = ASK[0], -ASK[1]
    over: float | None = None
    job: Job | None = None
    while True:
        record = Record.load(run)
        if record.ended:
            yield ended(run, record, None)
            return
        now = time.monotonic()
        if now - asked >= wait and record.jobs:
            asked, before = now, job
            # A controller that is being restarted does not answer, and that is no news of the job.
            with contextlib.suppress(RunFailed):
                job = slurm.job(record.jobs[-1])
                over = (over or now) if job is None or job.over else None
            wait = ASK[0] if job is None or before is None or job.state != before.state else min(1.5 * wait, ASK[1])
        if over is not None and now - over > GRACE:
            yield ended(run, record, job)
            return
        yield job


def ended(run: Path, record: Record, job: Job | None) -> End:
    """How a run has ended, from its record and its files, and from Slurm where these say nothing."""
    directory, id = RunDirectory(run), record.jobs[-1] if record.jobs else "?"
    result, stopped, values = directory.result(), directory.stopped(), values_of(record)
    what = record.links[-1].what if record.links and record.ended else ""
    # Who has gone on with it by hand after its last job may have brought it to its end.
    if result is not None and (what == "complete" or is_complete(directory)):
        return End(run, id, "complete", _completed(run, result), result, values)
    if record.cancelled or what == "cancelled":
        return End(run, id, "cancelled", f"job {id} was cancelled", None, values)
    if what == "over" and stopped is not None and (record.submission.links == 1 or stopped.get("by") == "user"):
        return End(run, id, "stopped", record.ended, stopped.get("result"), values)
    state, log = "failed" if record.ended else job.state if job is not None else "GONE", log_of(record, run, id)
    words = _words(run, id, record) if stopped is None else ""
    if not log.exists() and not record.ended:
        sentence = (
            f"job {id} ended as {state} without a word: its node could not write {log}; "
            f"runs must be on a disk that all nodes share (--runs)"
        )
        return End(run, id, state.lower(), sentence, None, values)
    decided = record.ended if what != "failed" or not words else ""
    sentence = "; ".join(filter(None, (words, decided))) or f"job {id} ended as {state}"
    explained = bool(record.ended and (words or stopped))
    return End(run, id, state.lower(), f"{sentence}; log: {log}", None, values, explained)


def values_of(record: Record) -> str:
    """What a run of a sweep has of its own, in words."""
    sweep, index = record.submission.sweep, record.index
    return sweep[index].values if index is not None and 0 <= index < len(sweep) else ""


def _completed(run: Path, result: dict[str, Any]) -> str:
    scores = "".join(
        f", {name} {metric} {value:.4f}"
        for name, found in table(result.get("eval")).items()
        for metric, value in found.items()
        if metric not in ("count", "skipped")
    )
    return f"complete after {result['steps']:,} steps{scores}; report: {run}/report.html"


def described(job: Job | None) -> str:
    """Where a job stands, as a line for people."""
    if job is None:
        return "waiting for Slurm to tell of the job"
    if job.state == "PENDING":
        start = f"; Slurm expects it to start at {job.start.replace('T', ' ')}" if job.start[:1].isdigit() else ""
        return f"job {job.shown} is pending: {pending(job.reason)}{start}"
    where = f" on {job.hosts}" if job.hosts and job.state in ("RUNNING", "COMPLETING") else ""
    return f"job {job.shown} is {job.state.lower()}{where}"


def log_of(record: Record, run: Path, job: str) -> Path:
    """Slurm's log of a job; those of a sweep are all in its own folder."""
    return (run if record.index is None else record.submission.run) / "logs" / f"slurm-{job}.out"


def tail(end: End) -> list[str]:
    """The last lines of a failed job's log."""
    return _lines(log_of(Record.load(end.run), end.run, end.job))[-TAIL:]


def _words(run: Path, job: str, record: Record) -> str:
    """What meshrun itself said last in the job, but for how it goes on: the first error of any rank."""
    of_chain = tuple(link.sentence for link in record.links)
    said = told_in(_lines(log_of(record, run, job)))
    # What was said in earlier links of a requeued job holds no more.
    over = tuple(link.sentence for link in (record.links[:-1] if record.ended else record.links))
    began = max((at for at, line in enumerate(said, 1) if line.startswith(over)), default=0)
    return next((line for line in reversed(said[began:]) if not line.startswith(of_chain)), "")


def _lines(path: Path) -> list[str]:
    try:
        return read_plain(path).decode(errors="replace").splitlines()
    except OSError:
        return []

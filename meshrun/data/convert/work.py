"""Parts made by several processes at once, in whatever order, and told as one.

    totals = make_all(parts, jobs, partial(make_part, parts.folder), Crew(workers=4), told)

A part that an earlier start has left is checked and used. The first thing that goes wrong, in the order of the inputs,
ends the work; parts that are made by then stay.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from meshrun.data.convert.inputs import Job
from meshrun.data.convert.parts import Parts, whole_part
from meshrun.data.download import Told
from meshrun.errors import BadSample, RunFailed

SHOWN = 20
"""Bad samples that are told in full."""
Made = dict[str, Any]
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Crew:
    """Who does the work: so many processes, each of which calls `begin` first."""

    workers: int = 1
    begin: Callable[[], None] | None = None


class Bad:
    """Samples of a part that cannot be used: how many, and why the first of them cannot."""

    def __init__(self) -> None:
        self.count = 0
        self.why: list[str] = []

    def add(self, bad: BadSample) -> None:
        self.count += 1
        if len(self.why) < SHOWN:
            self.why.append(str(bad).rpartition("; ")[0])  # without what one could do


@dataclass
class Totals:
    """What all parts have together."""

    parts: int = 0
    resumed: int = 0
    """Parts that were there already."""
    samples: int = 0
    bad: int = 0
    empty: int = 0
    tokens: int = 0
    why: list[str] = field(default_factory=list)
    """The first bad samples, each with its reason."""

    def add(self, made: Made, kept: bool) -> None:
        self.parts += 1
        self.resumed += kept
        self.samples += made["samples"]
        self.bad += made["bad"]
        self.empty += made.get("empty", 0)
        self.tokens += made.get("tokens", 0)
        self.why = [*self.why, *made["why"]][:SHOWN]


def make_all(parts: Parts, jobs: Iterable[Job], make: Callable[[Job], Made], crew: Crew, told: Told) -> Totals:
    """Have every part, and what they are in sum."""
    totals = Totals()
    work = partial(_kept_or_made, parts.folder, make)
    if crew.workers == 1:
        if crew.begin is not None:
            crew.begin()
        for job in jobs:
            totals.add(*work(job))
            told.advance(job.bytes)
        return totals
    waiting: deque[tuple[Job, concurrent.futures.Future[tuple[Made, bool]]]] = deque()
    with _pool(crew) as pool:
        try:
            for job in jobs:
                waiting.append((job, pool.submit(work, job)))
                # Enough for all to be busy; what is told stays in order.
                if len(waiting) > 4 * crew.workers:
                    _take(waiting, totals, told)
            while waiting:
                _take(waiting, totals, told)
        except BaseException as error:
            pool.shutdown(wait=not isinstance(error, KeyboardInterrupt), cancel_futures=True)
            if isinstance(error, BrokenProcessPool):
                raise lost(parts.folder) from error
            raise
    return totals


def alone(function: Callable[..., _Result], *arguments: Any) -> _Result:
    """Call a function in a process of its own: threads that it starts must not be there when others are forked."""
    with _pool(Crew(1)) as pool:
        try:
            return pool.submit(function, *arguments).result()
        except BrokenProcessPool as error:
            raise lost(None) from error


def lost(folder: Path | None) -> RunFailed:
    """A process is gone, without a word."""
    kept = f"what is done so far is kept in {folder}: run the same command again, " if folder else "run it again, "
    return RunFailed(f"a process that converts was killed, perhaps for want of memory; {kept}or with fewer --workers")


def _take(waiting: deque[tuple[Job, concurrent.futures.Future[tuple[Made, bool]]]], totals: Totals, told: Told) -> None:
    job, future = waiting.popleft()
    totals.add(*future.result())
    told.advance(job.bytes)


def _kept_or_made(folder: Path, make: Callable[[Job], Made], job: Job) -> tuple[Made, bool]:
    kept = whole_part(folder, job.number)
    return (kept.facts, True) if kept is not None else (make(job), False)


def _pool(crew: Crew) -> concurrent.futures.ProcessPoolExecutor:
    return concurrent.futures.ProcessPoolExecutor(
        crew.workers,
        mp_context=multiprocessing.get_context("fork"),
        initializer=_born,
        initargs=(os.getpid(), crew.begin),
    )


def _born(parent: int, begin: Callable[[], None] | None) -> None:
    """In a process of the pool: it ends with whoever started it, and says nothing when stopped by CTRL-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if hasattr(os, "sched_getaffinity"):  # Linux
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)
    if begin is not None:
        begin()

"""The starts of a run, from the events of its first rank: a run that is resumed, or loses a rank, has several.

A start that has neither found a state to go on from nor made a step is none.

legs_of(run.events_of(0))          # [Leg(began=…, seconds=31.2, layout="dp=2", first_step=0, last_step=120), …]
"""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass
from pathlib import Path

from meshrun import strict_json
from meshrun.files import open_plain
from meshrun.observe.events import Event
from meshrun.observe.numbers import number, whole

START, STEP, RESUMED = (b'"kind": "%s"' % kind for kind in (b"start", b"step", b"resumed"))


@dataclass(frozen=True)
class Leg:
    """One start of a run, until its last event."""

    began: float
    """In seconds since 1970."""
    seconds: float
    launcher: str
    layout: str
    world: int
    first_step: int
    """The last step that was finished before it."""
    last_step: int


def is_refusal(event: Event) -> bool:
    """Whether a start says that it ends before its first step: nothing of the run, if others came further."""
    return event.get("kind") == "failure" and not whole(event.get("step"))


def legs_of(events: Path) -> list[Leg]:
    """The starts that a file of events tells of; a file of many steps is searched, and not read."""
    try:
        with open_plain(events) as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
            starts = _starts(text)
            ends = [*starts[1:], len(text)]
            return [leg for first, end in zip(starts, ends, strict=True) if (leg := _leg(text, first, end)) is not None]
    except (OSError, ValueError):  # none yet, or nothing in it
        return []


def _starts(text: mmap.mmap) -> list[int]:
    """Where lines begin that tell of a start."""
    found, at = [], text.find(START)
    while at >= 0:
        found.append(text.rfind(b"\n", 0, at) + 1)
        at = text.find(START, at + 1)
    return found


def _leg(text: mmap.mmap, first: int, end: int) -> Leg | None:
    start, last = _event(text, first), _last(text, first, end)
    if not math.isfinite(number(start.get("time"))):
        return None
    step = text.rfind(STEP, first, end)
    resumed = text.find(RESUMED, first, end)
    if step < 0 and resumed < 0:
        return None  # it was refused, or failed before it had begun
    before = _step(text, resumed) if resumed >= 0 else 0
    reached = _step(text, step) if step >= 0 else before
    since = number(start.get("began"), number(start.get("time")))
    return Leg(
        began=since,
        seconds=max(0.0, number(last.get("time"), since) - since),
        launcher=str(start.get("launcher") or start.get("source") or ""),
        layout=str(start.get("layout") or ""),
        world=whole(start.get("world")),
        first_step=before,
        last_step=reached,
    )


def _last(text: mmap.mmap, first: int, end: int) -> Event:
    """The last whole event of a stretch of lines that is not of a later start, which was refused."""
    while end > first:
        line = text.rfind(b"\n", first, end - 1) + 1 or first
        if (event := _event(text, line)) and not is_refusal(event):
            return event
        end = line
    return {}


def _step(text: mmap.mmap, at: int) -> int:
    """The step of the event around a place."""
    return whole(_event(text, text.rfind(b"\n", 0, at) + 1).get("step"))


def _event(text: mmap.mmap, line: int) -> Event:
    end = text.find(b"\n", line)
    try:
        found = strict_json.loads(text[line : end if end >= 0 else len(text)])
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}

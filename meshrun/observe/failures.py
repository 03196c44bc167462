"""Which rank failed first, and what the user reads about it.

    failed = first_failure(run, {1: "was killed by SIGKILL"}, "node7")
    failed.sentence, failed.by_user

    write_traceback(error, file)                 # into a rank's log, between marks, so that `Follow` can pass it over
    told_in(log.read_text().splitlines())        # what a job's log says of failures, a sentence each
    of_reader(str(error))                        # of torch's text on an error in a process that reads data, the same

When one rank dies the others fail a moment later, since they wait for it: their errors are consequences. A rank that
was killed wrote no event, so it comes before those that did; among events the earliest that is no consequence wins.
"""

from __future__ import annotations

import contextlib
import re
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from meshrun.config import RunDirectory
from meshrun.observe.events import Event, read_events

MARKS = ("---- traceback of what ended this rank", "---- end of traceback")
_WHERE = re.compile(r"    (?P<file>\S.*?):(?P<line>\d+) in [\w<>]+: ")


@dataclass(frozen=True)
class FirstFailure:
    """The first error of any rank, for the user."""

    sentence: str
    lines: list[str]
    """Its last lines: what the rank's program printed, or where it was."""
    log: Path
    by_user: bool

    @property
    def text(self) -> str:
        if self.by_user:
            return self.sentence
        shown = "".join(f"\n    {line}" for line in self.lines)
        log = f"\n    log: {self.log}" if self.log.exists() else ""
        return f"{self.sentence}{shown}{log}"


def notes_in(memory: Path, rank: int) -> Path:
    """The file in the node's memory in which a rank says why it ends, and that its disk is full: no disk is needed."""
    return memory / f"notes-{rank:05d}.jsonl"


def first_failure(
    run: RunDirectory,
    ended: Mapping[int, str],
    host: str,
    since: float = 0.0,
    memory: Path | None = None,
    stepless: str = " before its first step",
) -> FirstFailure:
    """`ended` says how each failed rank's process ended; what ranks wrote before `since` is of an earlier start.

    `memory` is the run's folder in this node's memory. `stepless` is said of a killed rank that has finished no step.
    """
    said = {rank: _failure_of(run, rank, since, memory) for rank in ended}
    spoke = [(bool(event.get("secondary")), event["time"], rank) for rank, event in said.items() if event is not None]
    silent = [rank for rank, event in said.items() if event is None]
    causes = [entry for entry in spoke if not entry[0]]
    if causes:
        return _spoken(run, said[min(causes)[2]] or {})
    # Ranks that the agent ended say SIGTERM; who went another way went first.
    killed = sorted(silent, key=lambda rank: "SIGTERM" in ended[rank])
    if killed and "SIGTERM" not in ended[killed[0]]:
        return _killed(run, killed[0], ended[killed[0]], host, stepless)
    if spoke:
        return _spoken(run, said[min(spoke)[2]] or {})
    return _killed(run, killed[0], ended[killed[0]], host, stepless)


def _failure_of(run: RunDirectory, rank: int, since: float, memory: Path | None) -> Event | None:
    events = _readable(run.events_of(rank))
    if memory is not None:
        events += read_events(notes_in(memory, rank))
    failures = (event for event in events if event["kind"] == "failure" and event["time"] >= since)
    return next((event for event in failures if _is_whole(event)), None)


def _readable(events: Path) -> list[Event]:
    """What a rank has said, as far as the disk lets it be read: why that fails is not why the rank did."""
    with contextlib.suppress(OSError):
        return read_events(events)
    return []


def _is_whole(event: Event) -> bool:
    """Whether a failure says all that is shown of it: a file of events may be damaged."""
    texts, lines = isinstance(event.get("sentence"), str), event.get("lines")
    return texts and isinstance(lines, list) and isinstance(event.get("rank"), int) and event["rank"] >= 0


def _spoken(run: RunDirectory, event: Event) -> FirstFailure:
    return FirstFailure(event["sentence"], event["lines"], run.log_of(event["rank"]), bool(event.get("by_user")))


def directory_gone(run: RunDirectory, when: str = "") -> str:
    """A sentence for a run whose directory, or what every start of it reads there, is no longer there."""
    if (run.path / "events").is_dir():
        return f"{run.path}/config.json, which every start of the run reads, was deleted while the run trained{when}"
    return f"{run.path} was deleted, moved or unmounted while the run trained{when}, so that nothing of it can be kept"


def _killed(run: RunDirectory, rank: int, how: str, host: str, stepless: str) -> FirstFailure:
    if not (run.path / "config.json").exists():
        return FirstFailure(directory_gone(run), [], run.log_of(rank), False)
    steps = [event.get("step") for event in _readable(run.events_of(rank)) if event["kind"] == "step"]
    where = f" after step {steps[-1]}" if steps else stepless
    lines = tail(run.log_of(rank))
    apart = OTHER_COLLECTIVE if any("collective mismatch" in line for line in lines) else ""
    return FirstFailure(f"rank {rank} on {host} {how}{where}{apart}", lines, run.log_of(rank), False)


OTHER_COLLECTIVE = (
    ": it got another tensor than it waited for, since some ranks have called the model, a barrier or another "
    "collective more often than others, or in another order; let all ranks do so alike, and use unwrap(model) where "
    "one rank computes alone"
)
"""What gloo, which ends the process, means by a collective mismatch."""


def write_traceback(error: BaseException, file: TextIO) -> None:
    """All of an error, for a log."""
    print(f"{MARKS[0]}\n{''.join(traceback.format_exception(error))}{MARKS[1]}", file=file)


def told_in(lines: Sequence[str]) -> list[str]:
    """The sentences of meshrun in a log; of an error also in which line of the user's own program it was."""
    told: list[str] = []
    where = ""
    for line in lines:
        if line.startswith("meshrun: "):
            told.append(line.removeprefix("meshrun: "))
            where = ""
        elif place := _WHERE.match(line):
            where = f" ({Path(place['file']).name}:{place['line']})"
        elif line.startswith("    log: ") and told and where:
            told[-1] += where
            where = ""
    return told


def tail(log: Path, lines: int = 8) -> list[str]:
    """The last lines of a log."""
    try:
        return log.read_text(errors="replace").splitlines()[-lines:]
    except OSError:
        return []


def of_reader(text: str, not_the_users: Sequence[str] = ()) -> tuple[str, list[str]] | None:
    """What torch says of an error in a process that reads data, as a sentence and the user's lines; None for others.

    torch sends such an error as the text of its traceback.
    """
    found = re.match(r"Caught (\S+) in DataLoader worker process \d+\.\nOriginal Traceback[^\n]*\n", text)
    if found is None:
        return None
    # Frames are indented, what follows them is not: the error itself, and the notes on it.
    said = [line for line in text[found.end() :].splitlines() if line and not line.startswith(" ")]
    frames = re.findall(r'^  File "(.+)", line (\d+), in (.+)\n +(.+)$', text, re.M)
    own = [frame for frame in frames if not frame[0].startswith(tuple(not_the_users))] or frames[-1:]
    first, *notes = said or [found[1]]
    sentence = first + (f" ({'; '.join(notes)})" if notes else "")
    return sentence, [f"{file}:{line} in {name}: {code}" for file, line, name, code in own]

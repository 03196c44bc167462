"""What a run directory tells, as data: sums of every rank, curves of the first, failures with their causes first.

    history = read(Path("runs/digits-3"))
    history.steps, history.ranks[1].step_time, history.failures

Any part may be missing or half written: a run that failed, or still goes on, has a history too.
"""

from __future__ import annotations

import io
import math
from array import array
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshrun import strict_json
from meshrun.config import RunDirectory, whole_number
from meshrun.errors import UserError
from meshrun.files import open_plain, read_plain
from meshrun.observe.drawing import drawable
from meshrun.observe.events import Event
from meshrun.observe.legs import Leg, is_refusal, legs_of
from meshrun.observe.numbers import number, whole

TIMED_STEPS = 20_000
"""Steps of a rank, evenly spaced, that its mean times are taken from; the first rank is read whole."""
BYTES_A_STEP = 150
MOST_LINES = 20
MOST_TEXT = 1_000
MOST_PRINTED = 40_000
MOST_PICTURES = 24
MOST_OF_A_PICTURE = 1 << 20


@dataclass
class Rank:
    """What a rank's events say, in sums."""

    number: int
    start: Event = field(default_factory=dict)
    steps: int = 0
    samples: float = 0.0
    seconds: float = 0.0
    waited: float = 0.0
    last_step: int = 0
    ended: bool = False
    first_time: float = math.inf
    last_time: float = -math.inf
    notes: list[str] = field(default_factory=list)
    after: str = ""
    """What was printed after the training."""
    failures: list[Event] = field(default_factory=list)
    _settled: bool = False

    def add(self, event: Event) -> None:
        kind, moment = event.get("kind"), number(event.get("time"))
        if math.isfinite(moment):
            self.first_time, self.last_time = min(self.first_time, moment), max(self.last_time, moment)
        if kind == "start":
            self.start, self.ended, self._settled = event, False, False
            self.failures = [failure for failure in self.failures if not is_refusal(failure)]
        elif kind == "step":
            self.last_step = whole(event.get("step"))
            seconds = number(event.get("seconds"))
            # The first step after a start pays for allocations: it says nothing about the speed.
            if self._settled and math.isfinite(seconds):
                self.steps += 1
                self.seconds += seconds
                self.waited += number(event.get("data_wait"), 0.0)
                self.samples += number(event.get("samples"), 0.0)
            self._settled = True
        elif kind == "note":
            self.notes.append(cut(event.get("text")))
        elif kind == "after":
            self.after = cut(event.get("text"), MOST_PRINTED)
        elif kind == "failure":
            self.failures.append(event)
        elif kind == "end":
            self.ended = True

    @property
    def step_time(self) -> float:
        return self.seconds / self.steps if self.steps else math.nan

    @property
    def wait(self) -> float:
        return self.waited / self.steps if self.steps else math.nan

    @property
    def host(self) -> str:
        return str(self.start.get("host", ""))


@dataclass
class Track:
    """Values over steps. Steps that a resumed run makes again replace those of the first time."""

    steps: array[int] = field(default_factory=lambda: array("q"))
    columns: dict[str, array[float]] = field(
        default_factory=lambda: {name: array("d") for name in ("loss", "grad_norm", "lr", "samples", "seconds")}
    )
    evals: dict[int, Event] = field(default_factory=dict)

    def add(self, event: Event) -> None:
        step = whole(event.get("step"))
        if event.get("kind") == "step":
            if self.steps and step <= self.steps[-1]:
                again = bisect_left(self.steps, step)
                del self.steps[again:]
                for column in self.columns.values():
                    del column[again:]
                self.evals = {at: event for at, event in self.evals.items() if at < step}
            self.steps.append(step)
            for name, column in self.columns.items():
                column.append(number(event.get(name)))
        elif event.get("kind") == "eval" and isinstance(event.get("scores"), dict):
            self.evals[step] = event

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """Steps and values, less what is missing or cannot be drawn."""
        pairs = [pair for pair in zip(self.steps, self.columns[name], strict=True) if drawable(pair[1])]
        return [step for step, _ in pairs], [value for _, value in pairs]


@dataclass(frozen=True)
class Failure:
    """A sentence, and the ranks that said it: when a loss is not a number, all of them do."""

    ranks: list[int]
    host: str
    step: int
    sentence: str
    lines: list[str]
    secondary: bool


@dataclass(frozen=True)
class History:
    """All that a run directory tells."""

    name: str
    config: dict[str, Any]
    result: dict[str, Any]
    ranks: list[Rank]
    track: Track
    pictures: dict[str, bytes] = field(default_factory=dict)
    """SVG drawings that what came after the training has left, by name."""
    legs: list[Leg] = field(default_factory=list)
    """Its starts."""

    @property
    def start(self) -> Event:
        return next((rank.start for rank in self.ranks if rank.start), {})

    @property
    def failures(self) -> list[Failure]:
        return _failures(self.ranks)

    @property
    def steps(self) -> int:
        return whole(self.result.get("steps")) or (self.track.steps[-1] if self.track.steps else 0)

    @property
    def seconds(self) -> float:
        """Of all starts together, less the time between them."""
        first = min((rank.first_time for rank in self.ranks), default=math.nan)
        last = max((rank.last_time for rank in self.ranks), default=math.nan)
        known = sum(leg.seconds for leg in self.legs) if self.legs else last - first
        return known if len(self.legs) > 1 else number(self.result.get("seconds"), known)

    @property
    def world(self) -> int:
        return whole(self.result.get("world")) or whole(self.start.get("world")) or len(self.ranks)

    def fact(self, name: str) -> str:
        """Of the result, or else of the first rank's start."""
        return str(self.result.get(name) or self.start.get(name) or "")

    def scores(self) -> dict[str, dict[str, float]]:
        """The last evaluation."""
        last = max(self.track.evals, default=None)
        return table(self.result.get("eval")) or (table(self.track.evals[last]["scores"]) if last is not None else {})


def read(run: Path) -> History:
    paths = RunDirectory(run).events.glob("rank-*.jsonl")
    numbered = {whole_number(path.stem.removeprefix("rank-")): path for path in paths}
    files = {number: path for number, path in numbered.items() if number is not None}
    if not files and not (run / "config.json").is_file():
        what = "does not exist" if not run.exists() else "holds neither config.json nor events/rank-00000.jsonl"
        raise UserError(f"{run} is no run directory: it {what}; give one that a run has made, such as runs/digits-1")
    track = Track()
    ranks: list[Rank] = []
    for each, path in sorted(files.items()):
        rank = Rank(each)
        every = 1 if not ranks else max(1, path.stat().st_size // (BYTES_A_STEP * TIMED_STEPS))
        for event in _events(path, every):
            rank.add(event)
            if not ranks:
                track.add(event)
        ranks.append(rank)
    asked, result = _document(run / "config.json"), _document(run / "result.json")
    legs = legs_of(RunDirectory(run).events_of(0))
    history = History(run.resolve().name, asked, result, ranks, track, _pictures(run / "pictures"), legs)
    if not track.steps:
        _from_result(track, history.result)
    return history


def _events(path: Path, every: int) -> Iterator[Event]:
    """The events of a file, of its steps one in `every` and the last; what is no event, after a crash, is left out."""
    seen, passed = 0, b""
    with io.BufferedReader(open_plain(path)) as file:
        for line in file:
            if every > 1 and b'"kind": "step"' in line:
                seen, passed = seen + 1, line
                if seen % every != 1:
                    continue
            yield from _event(line)
    if every > 1 and seen % every != 1:
        yield from _event(passed)


def _event(line: bytes) -> list[Event]:
    try:
        event = strict_json.loads(line)
    except ValueError:
        return []
    return [event] if isinstance(event, dict) else []


def _document(path: Path) -> dict[str, Any]:
    try:
        document = strict_json.loads(read_plain(path))
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}


def _pictures(folder: Path) -> dict[str, bytes]:
    """The drawings there, less what would make a page too large to open."""
    # Whoever made the directory may have put a link there to a file that the reader would not show to others.
    paths = [path for path in sorted(folder.glob("*.svg")) if path.is_file() and not path.is_symlink()]
    paths = [path for path in paths if path.stat().st_size <= MOST_OF_A_PICTURE]
    return {path.stem: path.read_bytes() for path in paths[:MOST_PICTURES]}


def _from_result(track: Track, result: dict[str, Any]) -> None:
    losses, norms = (result[name] if isinstance(result.get(name), list) else [] for name in ("losses", "grad_norms"))
    for index, loss in enumerate(losses):
        norm = norms[index] if index < len(norms) else None
        track.add({"kind": "step", "step": index + 1, "loss": loss, "grad_norm": norm})


def _failures(ranks: list[Rank]) -> list[Failure]:
    """Causes before consequences, each in the order of time; one entry where several ranks say the same."""
    said = [(event, rank) for rank in ranks for event in rank.failures]
    said.sort(key=lambda each: (bool(each[0].get("secondary")), number(each[0].get("time"), 0.0)))
    found: dict[str, Failure] = {}
    if said and said[0][0].get("secondary"):
        for rank in ranks:
            if not rank.failures and not rank.ended:
                sentence = f"rank {rank.number} ended without a word; it was killed, or its node was lost"
                found[sentence] = Failure([rank.number], rank.host, rank.last_step, sentence, [], False)
    for event, rank in said:
        sentence = cut(event.get("sentence")) or "failed without a word"
        if sentence in found:
            found[sentence].ranks.append(rank.number)
            continue
        lines = event.get("lines")
        shown = [cut(line, MOST_TEXT // 4) for line in lines[-MOST_LINES:]] if isinstance(lines, list) else []
        host, step = str(event.get("host") or rank.host), whole(event.get("step"))
        found[sentence] = Failure([rank.number], host, step, sentence, shown, bool(event.get("secondary")))
    return list(found.values())


def table(value: Any) -> dict[str, dict[str, float]]:
    """Scores by name, less what is none."""
    if not isinstance(value, dict):
        return {}
    return {
        str(name): {str(metric): number(score) for metric, score in scores.items()}
        for name, scores in value.items()
        if isinstance(scores, dict)
    }


def cut(value: Any, most: int = MOST_TEXT) -> str:
    text = "" if value is None else str(value)
    return text if len(text) <= most else text[: most - 1] + "…"

"""ONE story on the terminal: what rank 0 does, as a progress bar or, in a log file, as a line now and then.

    with Story(Console(stderr=True)) as story:
        story.tell(event)              # an event of rank 0
        story.say("text")              # a line that the user's program printed

`Follow` tells the story from the files of a run that other processes write.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO, TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from meshrun.errors import printable
from meshrun.observe.aside import Aside
from meshrun.observe.events import Event, Follower
from meshrun.observe.failures import MARKS

LINE_EVERY = 10.0
"""Seconds between two progress lines where there is no terminal."""

NOISE = ("[c10d] The hostname of the client socket cannot be retrieved",)
"""What libraries print into a log that says nothing to a person: addresses without names are usual on fast networks."""


Entry = TypeVar("Entry")


class Story:
    """Shows events to a person."""

    def __init__(self, console: Console, out: TextIO | None = None) -> None:
        self.console, self._out = console, out
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed:,.0f}/{task.total:,.0f}"),
            TextColumn("loss {task.fields[loss]}"),
            TextColumn("{task.fields[rate]} samples/s"),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=console,
            refresh_per_second=4,
            transient=True,
        )
        self._task: TaskID | None = None
        self._rate, self._shown, self._total, self._saved = 0.0, 0.0, 0, False

    def __enter__(self) -> Story:
        return self

    def __exit__(self, *error: object) -> None:
        if self._task is not None:
            self._progress.stop()

    def say(self, line: str) -> None:
        """A line of the user's own program: above the bar, or where its standard output was sent."""
        if self._out is not None and not (self.console.is_terminal and self._out.isatty()):
            print(line, file=self._out, flush=True)
        else:
            self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def tell(self, event: Event) -> None:
        """Show an event; one that is damaged, or that another version of meshrun wrote, is passed over."""
        with contextlib.suppress(LookupError, TypeError, ValueError, AttributeError, ArithmeticError):
            self._tell(event)

    def _tell(self, event: Event) -> None:
        match event["kind"]:
            case "start":
                self._begin(event)
            case "step":
                self._step(event)
            case "eval":
                for name, scores in event["scores"].items():
                    self._line(f"step {event['step']:,}  {name}  {of_scores(scores)}")
            case "note":
                self._line(event["text"])
            case "after":
                for line in event["text"].splitlines():
                    self.say(line)
            case "restart" | "hang" | "straggler":
                self._line(event["sentence"])
            case "checkpoint":
                self._checkpoint(event)
            case "skipped":
                self._line(f"step {event['step']:,}: its batch is skipped, as {event['why']}")
            case "rollback":
                self._line(f"back from step {event['from_step']:,} to step {event['to_step']:,}, as {event['why']}")
            case "resumed":
                self._saved = True
                self._line(
                    f"goes on after step {event['step']:,} from {event['source']}, loaded in {event['seconds']:.1f} s"
                )

    def _checkpoint(self, event: Event) -> None:
        """The first one, to show that they work and what they cost, and each that fails."""
        if event.get("error"):
            self._line(f"step {event['step']:,}: the checkpoint could not be kept: {event['error']}")
        elif not self._saved:
            self._saved = True
            self._line(
                f"step {event['step']:,}: first checkpoint saved: {event['bytes'] / 1e6:,.1f} MB in "
                f"{event['seconds']:.1f} s (training paused for {1000 * event['stall']:.0f} ms)"
            )

    def _begin(self, event: Event) -> None:
        self._total = event["total_steps"]
        ranks = event["world"]
        self._line(
            f"{event['target']}: {self._total:,} step{'s' * (self._total != 1)} on {ranks} rank{'s' * (ranks > 1)} "
            f"({event['layout']}, {event['device'].partition(':')[0]})  ->  {event['run']}"
        )
        if self.console.is_terminal:
            self._task = self._progress.add_task("training", total=self._total, loss="-", rate="-")
            self._progress.start()

    def _step(self, event: Event) -> None:
        if event["seconds"]:
            rate = event["samples"] / event["seconds"]
            self._rate = rate if not self._rate else 0.9 * self._rate + 0.1 * rate
        now, last = time.monotonic(), event["step"] == self._total
        if self._task is not None:
            if now - self._shown > 0.1 or last:
                self._shown = now
                self._progress.update(
                    self._task, completed=event["step"], loss=f"{event['loss']:.4f}", rate=f"{self._rate:,.0f}"
                )
        elif now - self._shown > LINE_EVERY:
            if self._shown:
                left = (self._total - event["step"]) * event["seconds"]
                self._line(
                    f"step {event['step']:,}/{self._total:,}  loss {event['loss']:.4f}  {self._rate:,.0f} samples/s  "
                    f"{left:,.0f} s left"
                )
            self._shown = now

    def _line(self, text: str) -> None:
        self.console.print(printable(text), markup=False, highlight=False, soft_wrap=True)


def stopped_in_time(stopped: Mapping[str, Any], run: str) -> str:
    """A sentence on a training that was stopped before its end."""
    goes_on = f"meshrun resume {run} goes on" if stopped["saved"] else "nothing of it was kept (--checkpoint none)"
    return f"stopped after step {stopped['step']:,} of {stopped['of']:,}, since {stopped['why']}; {goes_on}"


def of_scores(scores: Mapping[str, float]) -> str:
    """What an evaluation of one set came to."""
    shown = [f"{name} {value:.4f}" for name, value in scores.items() if name not in ("count", "skipped")]
    missing = scores.get("skipped", 0)
    skipped = f", {missing:,.0f} sample{'s' * (missing != 1)} skipped" if missing else ""
    return "  ".join([*shown, f"(mean over {scores['count']:,.0f}{skipped})"])


class Follow(Aside):
    """Tells a story from rank 0's events and log while they are written; what an earlier start wrote is known."""

    def __init__(self, story: Story, events: Path, log: Path, is_own: bool = True, notes: Path | None = None) -> None:
        """`is_own`: whether it was this user's program that has printed, and may do so with colours.

        `notes`: where rank 0 says what the disk of its events refuses.
        """
        super().__init__("story")
        self._story, self._log, self._is_own, self._hides = story, Follower(log), is_own, False
        self._told = [Follower(file) for file in (notes, events) if file is not None]
        for file in (*self._told, self._log):
            file.new_lines()

    def _run(self) -> None:
        over = False
        while not over:
            over = self._over.wait(0.25)
            for line in _readable_now(self._log.new_lines):
                self._say(line.decode(errors="replace"))
            for event in [event for file in self._told for event in _readable_now(file.new)]:
                self._story.tell(event if self._is_own else {**event, "text": printable(str(event.get("text")))})
        if rest := self._log.rest:
            self._say(rest.decode(errors="replace"))

    def _say(self, line: str) -> None:
        """What the user's program prints; why it ended is said elsewhere, and its traceback stays in the log."""
        if line.endswith(MARKS[0]):
            self._hides = True
            line = line.removesuffix(MARKS[0])  # the program has left its last line open
            if line:
                self._story.say(line if self._is_own else printable(line))
        elif line == MARKS[1]:
            self._hides = False
        elif not self._hides and not any(noise in line for noise in NOISE):
            self._story.say(line if self._is_own else printable(line))


def _readable_now(read: Callable[[], list[Entry]]) -> list[Entry]:
    """What a file has more than before; a launcher that may open no further file reads it at the next look."""
    with contextlib.suppress(OSError):
        return read()
    return []

"""TensorBoard scalars, where tensorboard is installed.

board = Board.open(run.path / "tensorboard", run.events_of(0))      # None where it is not installed, or not possible
board.add(event)

Curves that a full disk has cut off are written anew, from the events of the run, when it takes them again.
"""

from __future__ import annotations

import contextlib
import importlib.util
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshrun.observe.events import Event, read_events

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

EVERY = 10
"""Steps between two points of a curve: writing all of them would cost more than some steps do."""


OPEN_AFTER = 10.0
"""Seconds after which curves that could not be written are tried again."""


class Board:
    """Writes what events say as curves."""

    def __init__(self, folder: Path, events: Path) -> None:
        self._folder, self._events = folder, events
        self._writer: SummaryWriter | None = None
        self._open_at = 0.0

    @classmethod
    def open(cls, folder: Path, events: Path) -> Board | None:
        if importlib.util.find_spec("tensorboard") is None or not _is_text(folder):
            return None
        board = cls(folder, events)
        board._try(board._open)
        return board

    def add(self, event: Event) -> None:
        if self._writer is not None:
            self._try(lambda: self._draw(event))
        elif time.monotonic() >= self._open_at:
            self._try(self._open_anew)

    def close(self) -> None:
        if self._writer is None:
            self._try(self._open_anew)
        if self._writer is not None:
            self._try(self._writer.close)

    def _try(self, action: Callable[[], None]) -> None:
        """A training must not end because of its curves: what they are written with is opened anew, a while later."""
        try:
            action()
        except Exception:
            broken, self._writer, self._open_at = self._writer, None, time.monotonic() + OPEN_AFTER
            if broken is not None:
                with contextlib.suppress(Exception):
                    broken.close()

    def _open(self) -> None:
        from torch.utils.tensorboard import SummaryWriter

        _pass_over_lost_threads()
        self._writer = SummaryWriter(str(self._folder))

    def _open_anew(self) -> None:
        self._open()
        for event in read_events(self._events):
            self._draw(event)
        assert self._writer is not None
        self._writer.flush()

    def _draw(self, event: Event) -> None:
        assert self._writer is not None
        step = event.get("step", 0)
        if event["kind"] == "step" and (step == 1 or step % EVERY == 0):
            rate = event["samples"] / event["seconds"] if event["seconds"] else 0.0
            for name, value in (("loss", event["loss"]), ("grad_norm", event["grad_norm"]), ("lr", event["lr"])):
                self._writer.add_scalar(f"train/{name}", value, step)
            self._writer.add_scalar("speed/samples_per_s", rate, step)
        if event["kind"] == "eval":
            for name, scores in event["scores"].items():
                for metric, value in scores.items():
                    if metric not in ("count", "skipped"):
                        self._writer.add_scalar(f"{name}/{metric}", value, step)


def _pass_over_lost_threads() -> None:
    """Have no traceback printed when the thread that writes curves ends on a full disk: the next point finds out."""
    tell = threading.excepthook
    if getattr(tell, "passes_over_tensorboard", False):
        return

    def told(args: Any) -> None:
        if not type(args.thread).__module__.startswith("tensorboard."):
            tell(args)

    told.passes_over_tensorboard = True  # type: ignore[attr-defined]
    threading.excepthook = told


def _is_text(folder: Path) -> bool:
    """Whether the name of a folder is UTF-8: TensorBoard takes no other."""
    try:
        str(folder).encode()
    except UnicodeEncodeError:
        return False
    return True

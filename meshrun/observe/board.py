"""TensorBoard scalars, where tensorboard is installed.

board = Board.open(run.path / "tensorboard")      # None where it is not installed
board.add(event)
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from meshrun.observe.events import Event

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

EVERY = 10
"""Steps between two points of a curve: writing all of them would cost more than some steps do."""


class Board:
    """Writes what events say as curves."""

    def __init__(self, writer: SummaryWriter) -> None:
        self._writer = writer

    @classmethod
    def open(cls, folder: Path) -> Board | None:
        if importlib.util.find_spec("tensorboard") is None:
            return None
        from torch.utils.tensorboard import SummaryWriter

        return cls(SummaryWriter(str(folder)))

    def add(self, event: Event) -> None:
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

    def close(self) -> None:
        self._writer.close()

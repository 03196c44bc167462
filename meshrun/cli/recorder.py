"""What a rank says of its run: events, in its file and to whoever listens, and why it ends.

    recorder = Recorder(run, rank=3, tell=None)
    recorder("step", step=12, loss=0.7)
    recorder.failure(error, rank=3)            # one sentence, the user's own lines, and the traceback in the log
    recorder.close()

What is written here is all that `watch`, `report` and the launcher know of a rank.
"""

from __future__ import annotations

import contextlib
import socket
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import meshrun
from meshrun import mesh
from meshrun.config import RunDirectory
from meshrun.data.staging import missing_of
from meshrun.errors import RunFailed, UserError, described
from meshrun.observe.board import Board
from meshrun.observe.events import Event, EventFile
from meshrun.observe.failures import FirstFailure, notes_in, of_reader, write_traceback

Tell = Callable[[Event], None]

_NOT_THE_USERS = (str(Path(meshrun.__file__).parent), str(Path(torch.__file__).parent), "<frozen")
"""Where lines of a traceback come from that say nothing to the user."""
_ONE_SAMPLE = "Expected more than 1 value per channel when training"
_MORE_SAMPLES = (
    "BatchNorm needs several samples at a time: give larger micro-batches (--micro 2), a larger batch (--batch), or "
    "take statistics over all ranks (--sync-batchnorm)"
)


class Recorder:
    """Hands each event to the events file and, on rank 0, to TensorBoard and to whoever shows it."""

    def __init__(self, run: RunDirectory, rank: int, tell: Tell | None, memory: Path | None = None) -> None:
        """`memory` is the run's folder in the node's memory, where the launcher finds what the disk refuses."""
        self._run, self._rank, self._tell, self._memory = run, rank, tell, memory
        self._file = EventFile(run.events_of(rank))
        self.board: Board | None = None
        self.step, self._refused = 0, False

    def __call__(self, kind: str, **fields: Any) -> None:
        self._file.write(kind, **fields)
        self._tell_refusal()
        self.step = fields.get("step", self.step)
        for listener in (self.board.add if self.board else None, self._tell):
            if listener is not None:
                listener({"kind": kind, **fields})

    def _tell_refusal(self) -> None:
        """Once each time that the disk takes no events: the launcher, which reads them there, hears it from memory."""
        refused_before, self._refused = self._refused, bool(self._file.refusal)
        if self._refused and not refused_before and self._memory is not None:
            EventFile(notes_in(self._memory, self._rank)).write(
                "note",
                text=f"cannot write {self._run.events_of(self._rank)}: {self._file.refusal}; the run goes on, and is "
                f"shown again when there is room",
            )

    def failure(self, error: BaseException, rank: int) -> FirstFailure:
        """Write down why this rank ends: a sentence in the events, the traceback in the log."""
        host, log = socket.gethostname(), self._run.log_of(rank)
        if isinstance(error, RuntimeError) and isinstance(error.__cause__, StopIteration):
            error = error.__cause__  # which the program raised inside of one of our generators
        if isinstance(error, UserError | RunFailed):
            sentence, lines = str(error), list[str]()
        else:
            with contextlib.suppress(OSError), log.open("a", errors="backslashreplace") as file:
                write_traceback(error, file)
            step = f" at step {self.step + 1}" if self.step else ""
            told = described(error)
            said, lines = of_reader(told.partition(": ")[2], _NOT_THE_USERS) or (told, last_lines(error))
            said = missing_of(error) or said
            if _ONE_SAMPLE in said:
                said += f"; {_MORE_SAMPLES}"
            sentence = f"rank {rank} on {host} failed{step}: {said}"
        by_user, secondary = isinstance(error, UserError), isinstance(error, mesh.PeerLost)
        about = {"rank": rank, "host": host, "step": self.step, "by_user": by_user, "secondary": secondary}
        self("failure", sentence=sentence, lines=lines, **about)
        if self._memory is not None:
            EventFile(notes_in(self._memory, rank)).write("failure", sentence=sentence, lines=lines, **about)
        return FirstFailure(sentence, lines, log, by_user)

    def close(self) -> None:
        self._file.close()
        if self.board is not None:
            self.board.close()


def last_lines(error: BaseException, most: int = 4) -> list[str]:
    """Where it happened in the user's own program, the innermost call last, and the notes on it."""
    frames, notes = list(traceback.extract_tb(error.__traceback__)), getattr(error, "__notes__", [])
    own = [frame for frame in frames if not frame.filename.startswith(_NOT_THE_USERS)]
    frames = own if own or notes else frames  # what a reader has met has the user's lines as notes
    return [*(f"{frame.filename}:{frame.lineno} in {frame.name}: {frame.line}" for frame in frames[-most:]), *notes]

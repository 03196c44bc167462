"""What happened on a rank, one JSON line an event, in `events/rank-00000.jsonl`.

    events = EventFile(run.events_of(rank), rank, host)
    events.write("step", step=1, loss=2.3)
    read_events(path)                    # all complete lines, as dicts
    Follower(path).new()                 # those that have come since the last call

Kinds: `start`, `step`, `eval`, `note` (a sentence for the user), `after` (what was printed then), `failure`, `end`.
Every event has `time` and `kind`.
"""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import Any

Event = dict[str, Any]


def _now() -> float:
    return round(time.time(), 4)


class EventFile:
    """Appends events; each is one write, so that a reader or a crash never sees the middle of a line as its end."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)
        self._lost, self._torn = 0, False

    def write(self, kind: str, **fields: Any) -> None:
        """Write an event. On a full disk it is lost, and counted: a training must not end because of its diary."""
        if self._lost:
            lost = {"kind": "note", "text": f"{self._lost} events before this one could not be written"}
            if not self._append({"time": _now(), **lost}):
                self._lost += 1
                return
            self._lost = 0
        self._lost += not self._append({"time": _now(), "kind": kind, **fields})

    def _append(self, event: Event) -> bool:
        line = (b"\n" if self._torn else b"") + json.dumps(event, allow_nan=True).encode() + b"\n"
        try:
            written = self._file.write(line)
        except OSError:
            return False
        self._torn = written != len(line)
        return not self._torn

    def close(self) -> None:
        self._file.close()


class Follower:
    """Reads a file that is still being written."""

    def __init__(self, path: Path) -> None:
        self._path, self._read = path, 0
        self.rest = b""
        """What stands after the last complete line."""

    def new_lines(self) -> list[bytes]:
        """Complete lines since the last call; none while the file does not exist."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._read)
                chunk = file.read()
        except FileNotFoundError:
            return []
        self._read += len(chunk)
        *lines, self.rest = (self.rest + chunk).split(b"\n")
        return lines

    def new(self) -> list[Event]:
        """Events since the last call."""
        events = []
        for line in self.new_lines():
            with contextlib.suppress(ValueError):  # the rest of a line that a full disk has cut off
                events.append(json.loads(line))
        return events


def read_events(path: Path) -> list[Event]:
    """All events of a rank."""
    return Follower(path).new()

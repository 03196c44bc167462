"""What happened on a rank, one JSON line an event, in `events/rank-00000.jsonl`.

    events = EventFile(run.events_of(rank), rank, host)
    events.write("step", step=1, loss=2.3)
    read_events(path)                    # all complete lines, as dicts
    Follower(path).new()                 # those that have come since the last call

Kinds: `start`, `step`, `eval`, `note` (a sentence for the user), `failure`, `end`. Every event has `time` and `kind`.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

Event = dict[str, Any]


class EventFile:
    """Appends events; each is one write, so that a reader or a crash never sees the middle of a line as its end."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)

    def write(self, kind: str, **fields: Any) -> None:
        line = json.dumps({"time": round(time.time(), 4), "kind": kind, **fields}, allow_nan=True)
        self._file.write(line.encode() + b"\n")

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
        return [json.loads(line) for line in self.new_lines()]


def read_events(path: Path) -> list[Event]:
    """All events of a rank."""
    return Follower(path).new()

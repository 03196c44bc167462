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
import io
import os
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

from meshrun import strict_json
from meshrun.files import open_plain

Event = dict[str, Any]
MOST_WAITING = 100_000
"""Lines that wait for a disk: some ten megabytes."""


def _now() -> float:
    return round(time.time(), 4)


def _is_time(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


class LineFile:
    """Appends lines; each is one write, so that a reader or a crash never sees the middle of a line as its end.

    Threads may share it. Lines that a full or read-only disk refuses wait in memory, and are written as soon as it
    takes them again.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._waiting = path, deque[bytes]()
        self._file: io.FileIO | None = None
        self._writing = threading.RLock()
        self.lost = 0
        """Lines that were given up, since too many waited."""
        self.refusal = ""
        """Why lines wait; nothing while all of them are in the file."""
        self.flush()

    def add(self, line: bytes) -> None:
        with self._writing:
            if len(self._waiting) < MOST_WAITING:
                self._waiting.append(line + b"\n")
            else:
                self.lost += 1
            self.flush()

    def flush(self) -> bool:
        """Write what waits; whether all lines are in the file now."""
        with self._writing:
            try:
                file = self._file or self._open()
                while self._waiting:
                    line = self._waiting[0]
                    written = file.write(line) or 0
                    if written < len(line):  # the next line hears why
                        self._waiting[0] = line[written:]
                        return False
                    self._waiting.popleft()
            except OSError as error:
                self.refusal = error.strerror or str(error)
                return False
            self.refusal = ""
            return True

    def _open(self) -> io.FileIO:
        self._path.parent.mkdir(exist_ok=True)
        file = self._file = io.FileIO(self._path, "a+")
        size = file.seek(0, os.SEEK_END)
        if size and os.pread(file.fileno(), 1, size - 1) != b"\n":
            self._waiting.appendleft(b"\n")  # a process that was killed while it wrote has left half a line
        return file

    def close(self) -> None:
        """Write what waits, if that can be done, and close the file."""
        self.flush()
        if self._file is not None:
            self._file.close()


class EventFile:
    """The events of one process, a line each. A training does not end because its disk refuses an event."""

    def __init__(self, path: Path) -> None:
        self._lines = LineFile(path)

    @property
    def refusal(self) -> str:
        """Why events wait in memory; nothing while all of them are in the file."""
        return self._lines.refusal

    def write(self, kind: str, **fields: Any) -> None:
        if self._lines.lost and self._lines.flush():
            text = f"{self._lines.lost} events before this one could not be written"
            self._add({"kind": "note", "text": text})
            self._lines.lost = 0
        self._add({"kind": kind, **fields})

    def _add(self, event: Event) -> None:
        self._lines.add(strict_json.dumps({"time": _now(), **event}).encode())

    def close(self) -> None:
        self._lines.close()


class Follower:
    """Reads a file that is still being written."""

    def __init__(self, path: Path) -> None:
        self._path, self._read = path, 0
        self.rest = b""
        """What stands after the last complete line."""

    def new_lines(self) -> list[bytes]:
        """Complete lines since the last call; none while the file does not exist."""
        try:
            with open_plain(self._path) as file:
                file.seek(self._read)
                chunk = file.readall()
        except (FileNotFoundError, NotADirectoryError):
            return []
        self._read += len(chunk)
        *lines, self.rest = (self.rest + chunk).split(b"\n")
        return lines

    def new(self) -> list[Event]:
        """Events since the last call."""
        events = []
        for line in self.new_lines():
            with contextlib.suppress(ValueError):  # the rest of a line that a full disk has cut off
                event = strict_json.loads(line)
                if isinstance(event, dict) and isinstance(event.get("kind"), str) and _is_time(event.get("time")):
                    events.append(event)
        return events


def read_events(path: Path) -> list[Event]:
    """All events of a rank."""
    return Follower(path).new()

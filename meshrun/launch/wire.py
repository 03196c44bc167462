"""JSON documents over a socket, one a line: how a launcher speaks with its nursery and with other nodes.

wire = Wire(connection)
wire.send({"kind": "alive"})
for document in wire.receive(): …      # when select says that there is something; none and `closed` at the end
with Beat(lambda: wire.send({"alive": True})): …

Whoever sends something else, or a line without end, finds the connection closed.
"""

from __future__ import annotations

import json
import math
import socket
import threading
from collections.abc import Callable
from typing import Any

PATIENCE = 5.0
"""Seconds after which a peer that takes nothing in counts as gone."""
BEAT = 1.0
"""Seconds between two signs of life."""

Document = dict[str, Any]


class Wire:
    """One end of a connection."""

    def __init__(self, connection: socket.socket, longest: float = math.inf) -> None:
        """`longest`: bytes of a line, where the peer is not to be trusted with this process's memory."""
        self.socket, self._longest = connection, longest
        self.closed = False
        self._rest = b""
        self._sending = threading.Lock()
        connection.settimeout(PATIENCE)

    def fileno(self) -> int:
        return self.socket.fileno()

    def send(self, document: Document) -> None:
        """A peer that is gone is found out by reading; sending to it does nothing."""
        try:
            with self._sending:  # signs of life come from a thread of their own
                self.socket.sendall(json.dumps(document).encode() + b"\n")
        except OSError:
            self.closed = True

    def receive(self) -> list[Document]:
        """All complete documents that have come."""
        try:
            chunk = self.socket.recv(1 << 20)
        except TimeoutError:
            return []
        except OSError:
            chunk = b""
        if not chunk:
            self.closed = True
            return []
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        try:
            if any(len(line) > self._longest for line in (*lines, self._rest)):
                raise ValueError
            found = [json.loads(line) for line in lines]
            if not all(isinstance(each, dict) for each in found):
                raise ValueError
        except (ValueError, RecursionError):  # the latter for what is nested too deep
            self.closed, self._rest = True, b""  # somebody who does not speak this language
            return []
        return found

    def close(self) -> None:
        self.closed = True
        self.socket.close()


class Beat:
    """Signs of life beside whatever a launcher does: a disk that makes it wait must not look like its death."""

    def __init__(self, send: Callable[[], None]) -> None:
        self._send, self._over = send, threading.Event()
        self._thread = threading.Thread(target=self._run, name="beat", daemon=True)

    def __enter__(self) -> Beat:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(BEAT):
            self._send()

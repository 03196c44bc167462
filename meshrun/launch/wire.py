"""JSON documents over a socket, one a line: how a launcher speaks with its nursery and with other nodes.

wire = Wire(connection)
wire.send({"kind": "alive"})
for document in wire.receive(): …      # when select says that there is something; none and `closed` at the end

Whoever sends something else, or a line without end, finds the connection closed.
"""

from __future__ import annotations

import json
import math
import socket
from typing import Any

PATIENCE = 5.0
"""Seconds after which a peer that takes nothing in counts as gone."""

Document = dict[str, Any]


class Wire:
    """One end of a connection."""

    def __init__(self, connection: socket.socket, longest: float = math.inf) -> None:
        """`longest`: bytes of a line, where the peer is not to be trusted with this process's memory."""
        self.socket, self._longest = connection, longest
        self.closed = False
        self._rest = b""
        connection.settimeout(PATIENCE)

    def fileno(self) -> int:
        return self.socket.fileno()

    def send(self, document: Document) -> None:
        """A peer that is gone is found out by reading; sending to it does nothing."""
        try:
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

"""JSON documents over a socket, one a line: how a launcher speaks with its nursery and with other nodes.

wire = Wire(connection)
wire.send({"kind": "alive"})
for document in wire.receive(): …      # when select says that there is something; none and `closed` at the end
"""

from __future__ import annotations

import json
import socket
from typing import Any

PATIENCE = 5.0
"""Seconds after which a peer that takes nothing in counts as gone."""

Document = dict[str, Any]


class Wire:
    """One end of a connection."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
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
            found = [json.loads(line) for line in lines]
        except ValueError:
            self.closed = True  # somebody who does not speak this language
            return []
        return [each for each in found if isinstance(each, dict)]

    def close(self) -> None:
        self.closed = True
        self.socket.close()

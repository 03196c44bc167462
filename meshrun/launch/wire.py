"""JSON documents over a socket, one a line: how a launcher speaks with its nursery and with other nodes.

wire = Wire(connection)
wire.send({"kind": "alive"})
for document in wire.receive(): …      # when `readable` says that there is something; none and `closed` at the end
with Beat(lambda: wire.send({"alive": True})): …

Whoever sends something else, or a line without end, finds the connection closed.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import select
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

PATIENCE = 5.0
"""Seconds after which a peer that takes nothing in counts as gone."""
BEAT = 1.0
"""Seconds between two signs of life."""

Document = dict[str, Any]


def readable(fds: Iterable[int], seconds: float | None = None) -> set[int]:
    """Wait so many seconds, or without an end, for file descriptors that have something to read or are closed.

    `select.select` refuses descriptors above 1,023, of which the launcher of a thousand ranks has more.
    """
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return {fd for fd, _ in poll.poll(None if seconds is None else math.ceil(1000 * seconds))}


class Wire:
    """One end of a connection."""

    def __init__(self, connection: socket.socket, longest: float = math.inf) -> None:
        """`longest`: bytes of a line, where the peer is not to be trusted with this process's memory."""
        self.socket, self._longest = connection, longest
        self.closed = False
        self._lines: list[bytes] = []
        """Complete lines that nobody has asked for yet."""
        self._rest = b""
        self._sending = threading.Lock()
        self._own: _Seal | None = None
        self._other: _Seal | None = None
        connection.settimeout(PATIENCE)

    def fileno(self) -> int:
        return self.socket.fileno()

    def seal(self, own: bytes, other: bytes) -> None:
        """From now on lines carry a code made with the sender's key; a line without the right one ends the connection.

        The code also counts the lines, so that none can be left out, repeated or moved.
        """
        self._own, self._other = _Seal(own), _Seal(other)

    @property
    def sealed(self) -> bool:
        return self._own is not None

    def send(self, document: Document) -> None:
        """A peer that is gone is found out by reading; sending to it does nothing."""
        line = json.dumps(document).encode()
        try:
            with self._sending:  # signs of life come from a thread of their own
                self.socket.sendall((self._own.code(line) + b" " if self._own else b"") + line + b"\n")
        except OSError:
            self.closed = True

    @property
    def pending(self) -> bool:
        """Whether lines have come that nobody has asked for yet."""
        return bool(self._lines)

    def receive(self) -> Iterator[Document]:
        """All complete documents that have come; those that are not asked for come first at the next call."""
        if not self._lines:
            self._read()
        while self._lines and not self.closed:
            try:
                document = json.loads(self._opened(self._lines.pop(0)))
                if not isinstance(document, dict):
                    raise ValueError
            except (ValueError, RecursionError):  # the latter for what is nested too deep
                self.closed = True  # somebody who does not speak this language
                return
            yield document

    def _read(self) -> None:
        try:
            chunk = self.socket.recv(1 << 20)
        except TimeoutError:
            return
        except OSError:
            chunk = b""
        *self._lines, self._rest = (self._rest + chunk).split(b"\n")
        if not chunk or any(len(line) > self._longest for line in (*self._lines, self._rest)):
            self.closed, self._rest = True, b""

    def _opened(self, line: bytes) -> bytes:
        """A line without its code, which must be right."""
        if self._other is None:
            return line
        code, _, text = line.partition(b" ")
        if not hmac.compare_digest(code, self._other.code(text)):
            raise ValueError
        return text

    def close(self) -> None:
        self.closed = True
        self.socket.close()


class _Seal:
    """Codes of one line after the other in one direction of a connection."""

    def __init__(self, key: bytes) -> None:
        self._key, self._count = key, 0

    def code(self, line: bytes) -> bytes:
        self._count += 1
        return hmac.new(self._key, self._count.to_bytes(8) + line, hashlib.sha256).hexdigest().encode()


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

"""A second copy of a rank's state, in the memory of another node: the loss of a node is then no loss of state.

    neighbour = Neighbour(here, memory)      # on all ranks; the rank in the same seat of the next node keeps the copy
    neighbour.send(index)                    # beside the training; `busy` until it has arrived

A socket of its own, and no collective: those belong to the training, and end with it. The copy lies beside the
neighbour's own state under the name `spare-RANK`. Sender and receiver first prove to each other that they know a secret
which only ranks of this run have (`handshake`): nothing is kept of anybody else's, and nothing is sent to anybody else.
Until then a connection costs the receiver one descriptor for some seconds.
"""

from __future__ import annotations

import contextlib
import secrets
import selectors
import socket
import struct
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from meshrun.mesh import Here
from meshrun.state.manifest import MOST_BYTES, Index, Unfit
from meshrun.state.memory import forget, mark
from meshrun.store.handshake import LINE, Greeting, prove

_LENGTH = struct.Struct("<Q")
"""The length of the index that follows."""
_CHUNK = 4 << 20
_PATIENCE = 60.0
_ARRIVED = b"!"
_STRANGERS = 16
"""Connections that have not proved anything yet; senders do so at once."""
_MEETING = 5.0
"""Seconds in which a sender has proved that it knows the secret."""


class Neighbour:
    """Sends this rank's image to another node, and keeps another rank's."""

    def __init__(self, here: Here, memory: Path) -> None:
        self.here, self.memory = here, memory
        self._sending: threading.Thread | None = None
        self.notes: list[str] = []
        self._told = False
        listener = socket.create_server((here.address, 0))
        secret = here.from_rank_0(secrets.token_hex(32))
        seats = here.gathered((here.world.node, here.world.local_rank, *listener.getsockname()[:2]))
        self._secret, self._to = secret.encode(), _partner(seats, here.rank)
        threading.Thread(target=self._listen, args=(listener,), name="neighbour", daemon=True).start()

    @property
    def busy(self) -> bool:
        return self._sending is not None and self._sending.is_alive()

    def wait(self) -> None:
        """Until what is being sent has arrived."""
        if self._sending is not None:
            self._sending.join()

    def send(self, index: Index) -> None:
        """Begin to send the image that an index describes; the image must not change until that is done."""
        if self._to is not None:
            self._sending = threading.Thread(target=self._send, args=(index,), name="spare", daemon=True)
            self._sending.start()

    def _send(self, index: Index) -> None:
        assert self._to is not None
        named = replace(index, name=f"spare-{self.here.rank:05d}.safetensors").encode()
        path = self.memory / index.name
        try:
            with socket.create_connection(self._to, _PATIENCE) as connection, path.open("rb") as image:
                prove(connection, self._secret)
                connection.sendall(_LENGTH.pack(len(named)) + named)
                connection.sendfile(image, 0, index.file.bytes)
                connection.shutdown(socket.SHUT_WR)
                why = None if connection.recv(1) == _ARRIVED else "the rank there did not keep it"
        except (OSError, ValueError) as error:
            why = str(error)
        if why is not None and not self._told:
            # That a neighbour is gone the training sees by itself; for any other reason the next copy is tried again.
            self._told = True
            self.notes.append(
                f"rank {self.here.rank} could not leave a copy of its state on the next node, at {self._to[0]}: {why}"
            )

    def _listen(self, listener: socket.socket) -> None:
        door = _Door(listener, self._secret)
        while True:
            for connection in door.senders():
                receive = threading.Thread(target=self._hear, args=(connection,), name="neighbour", daemon=True)
                try:
                    receive.start()
                except RuntimeError:  # no further thread can be started; other senders wait
                    self._hear(connection)

    def _hear(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError, Unfit, ValueError):
            self._keep(connection)

    def _keep(self, connection: socket.socket) -> None:
        (length,) = _LENGTH.unpack(_read(connection, _LENGTH.size))
        if length > MOST_BYTES:
            return
        index = Index.decode(_read(connection, length))
        if not index.name.startswith("spare-"):
            return
        path = self.memory / index.name
        beside = path.with_name(f".{path.name}")
        try:
            with beside.open("wb") as file:
                left = index.file.bytes
                while left:
                    chunk = connection.recv(min(_CHUNK, left))
                    if not chunk:
                        return
                    file.write(chunk)
                    left -= len(chunk)
            forget(path)
            beside.replace(path)
            mark(path, index)
            connection.send(_ARRIVED)
        finally:
            beside.unlink(missing_ok=True)


@dataclass
class _Stranger:
    connection: socket.socket
    greeting: Greeting
    since: float = field(default_factory=time.monotonic)
    line: bytes = b""


class _Door:
    """Who connects, until it has proved that it is a rank of this run: few at a time, in one thread, for seconds."""

    def __init__(self, listener: socket.socket, secret: bytes) -> None:
        self._listener, self._secret = listener, secret
        self._strangers: dict[int, _Stranger] = {}
        """By file descriptor, the oldest one first."""
        self._selector = selectors.PollSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        listener.setblocking(False)

    def senders(self) -> list[socket.socket]:
        """Connections of ranks that have come within a second."""
        found = []
        for ready, _ in self._selector.select(1.0):
            if ready.fileobj is self._listener:
                self._admit()
            elif (stranger := self._strangers.get(ready.fd)) is not None and self._proven(stranger):
                self._let_go(stranger)
                stranger.connection.settimeout(_PATIENCE)
                found.append(stranger.connection)
        late = time.monotonic() - _MEETING
        for stranger in [each for each in self._strangers.values() if each.since < late]:
            self._show_out(stranger)
        return found

    def _admit(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # whoever it was is gone, or this process may open no further file for a while
            time.sleep(0.05)
            return
        connection.setblocking(False)
        stranger = _Stranger(connection, Greeting(self._secret))
        self._strangers[connection.fileno()] = stranger
        self._selector.register(connection, selectors.EVENT_READ)
        if len(self._strangers) > _STRANGERS:
            self._show_out(next(iter(self._strangers.values())))
        with contextlib.suppress(OSError):  # found out by reading
            connection.send(stranger.greeting.challenge)

    def _proven(self, stranger: _Stranger) -> bool:
        """Whether a sender has proved that it is one; it has been sent this side's proof then."""
        try:
            chunk = stranger.connection.recv(LINE - len(stranger.line))
        except BlockingIOError:
            return False
        except OSError:
            chunk = b""
        stranger.line += chunk
        whole = stranger.line.endswith(b"\n")
        if chunk and not whole and len(stranger.line) < LINE:
            return False
        if whole and (answer := stranger.greeting.answer(stranger.line.rstrip(b"\n"))) is not None:
            with contextlib.suppress(OSError):  # found out by reading
                stranger.connection.send(answer)
            return True
        self._show_out(stranger)
        return False

    def _let_go(self, stranger: _Stranger) -> None:
        self._selector.unregister(stranger.connection)
        del self._strangers[stranger.connection.fileno()]

    def _show_out(self, stranger: _Stranger) -> None:
        self._let_go(stranger)
        stranger.connection.close()


def _read(connection: socket.socket, length: int) -> bytes:
    found = bytearray()
    while len(found) < length:
        chunk = connection.recv(length - len(found))
        if not chunk:
            raise ValueError("the other side has hung up")
        found += chunk
    return bytes(found)


def _partner(seats: list[tuple[int, int, str, int]], rank: int) -> tuple[str, int] | None:
    """Where the rank listens that sits where this one does, one node further; None where there is but one node."""
    node, seat = seats[rank][:2]
    nodes = sorted({each[0] for each in seats})
    if len(nodes) == 1:
        return None
    after = nodes[(nodes.index(node) + 1) % len(nodes)]
    there = [each for each in seats if each[0] == after]
    _, _, host, port = there[seat % len(there)]
    return host, port

"""A second copy of a rank's state, in the memory of another node: the loss of a node is then no loss of state.

    neighbour = Neighbour(here, memory)      # on all ranks; the rank in the same seat of the next node keeps the copy
    neighbour.send(index)                    # beside the training; `busy` until it has arrived

A socket of its own, and no collective: those belong to the training, and end with it. The copy lies beside the
neighbour's own state under the name `spare-RANK`.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import socket
import struct
import threading
from dataclasses import replace
from pathlib import Path

from meshrun.mesh import Here
from meshrun.state.manifest import MOST_BYTES, Index, Unfit
from meshrun.state.memory import forget, mark

_HEAD = struct.Struct("<32sQ")
"""The word that only ranks of this run know, and the length of the index that follows."""
_CHUNK = 4 << 20
_PATIENCE = 60.0
_ARRIVED = b"!"


class Neighbour:
    """Sends this rank's image to another node, and keeps another rank's."""

    def __init__(self, here: Here, memory: Path) -> None:
        self.here, self.memory = here, memory
        self._sending: threading.Thread | None = None
        self.notes: list[str] = []
        self._told = False
        listener = socket.create_server((here.address, 0))
        word = here.from_rank_0(secrets.token_bytes(32))
        seats = here.gathered((here.world.node, here.world.local_rank, *listener.getsockname()[:2]))
        self._word, self._to = word, _partner(seats, here.rank)
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
                connection.sendall(_HEAD.pack(self._word, len(named)) + named)
                connection.sendfile(image, 0, index.file.bytes)
                connection.shutdown(socket.SHUT_WR)
                why = None if connection.recv(1) == _ARRIVED else "the rank there did not keep it"
        except OSError as error:
            why = str(error)
        if why is not None and not self._told:
            # That a neighbour is gone the training sees by itself; for any other reason the next copy is tried again.
            self._told = True
            self.notes.append(
                f"rank {self.here.rank} could not leave a copy of its state on the next node, at {self._to[0]}: {why}"
            )

    def _listen(self, listener: socket.socket) -> None:
        while True:
            with contextlib.suppress(OSError):
                connection, _ = listener.accept()
                # Of its own, so that somebody who connects and says nothing keeps nobody waiting.
                threading.Thread(target=self._hear, args=(connection,), name="neighbour", daemon=True).start()

    def _hear(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError, Unfit, ValueError):
            connection.settimeout(_PATIENCE)
            word, length = _HEAD.unpack(_read(connection, _HEAD.size))
            if hmac.compare_digest(word, self._word) and length <= MOST_BYTES:
                self._keep(connection, length)

    def _keep(self, connection: socket.socket, length: int) -> None:
        index = Index.decode(_read(connection, length))
        if not index.name.startswith("spare-"):
            return
        path = self.memory / index.name
        beside = path.with_name(f".{path.name}")
        try:
            with beside.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, index.file.bytes)
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
    return there[seat % len(there)][2:]

"""A node's way to the store on another one: torch's clients connect here, and the relay proves the secret for them.

    with Relay("10.11.0.1", 40123, secret) as relay:
        TCPStore("127.0.0.1", relay.port, …)         # any process of this user on this machine

Connections of other users of this machine are closed without a word.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time

from meshrun.store.handshake import prove
from meshrun.store.owners import owner_of_peer
from meshrun.store.server import LOOPBACK, PATIENCE

_CHUNK = 1 << 18
_GIVE_UP = 30.0
"""Seconds in which the store has let this node in: strangers may keep its port busy, and push others out meanwhile."""


class Relay:
    """Passes connections of this user on to the store at an address of another node, until it is closed."""

    def __init__(self, address: str, port: int, secret: bytes) -> None:
        self._store, self._secret = (address, port), secret
        self._is_closed = False
        self._listener = socket.create_server((LOOPBACK, 0), backlog=socket.SOMAXCONN)
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._run, name="store relay", daemon=True).start()

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Take no more connections; those that are open end with one of their sides."""
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits in accept
        self._listener.close()

    def _run(self) -> None:
        while not self._is_closed:
            try:
                connection = self._listener.accept()[0]
            except OSError:  # closed, gone again, or this process is out of descriptors
                time.sleep(0.01)
                continue
            if owner_of_peer(connection) != os.geteuid():
                connection.close()
                continue
            passing = threading.Thread(target=self._pass_on, args=(connection,), name="store relay", daemon=True)
            try:
                passing.start()
            except RuntimeError:  # no further thread can be started just now
                connection.close()

    def _pass_on(self, near: socket.socket) -> None:
        with near, contextlib.suppress(OSError), self._reached() as far:
            for side in (near, far):
                side.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _splice(near, far)

    def _reached(self) -> socket.socket:
        """A connection to the store, once both sides have proved the secret."""
        give_up = time.monotonic() + _GIVE_UP
        while True:
            try:
                with contextlib.ExitStack() as stack:
                    far = stack.enter_context(socket.create_connection(self._store, timeout=PATIENCE))
                    prove(far, self._secret)
                    far.settimeout(None)
                    stack.pop_all()
                    return far
            except (TimeoutError, ConnectionResetError):
                if self._is_closed or time.monotonic() > give_up:
                    raise
                time.sleep(0.05)


def _splice(near: socket.socket, far: socket.socket) -> None:
    """Copy bytes both ways until one side ends."""
    others = {near.fileno(): far, far.fileno(): near}
    sources = {near.fileno(): near, far.fileno(): far}
    ready = select.poll()
    for descriptor in others:
        ready.register(descriptor, select.POLLIN)
    while True:
        for descriptor, _ in ready.poll():
            data = sources[descriptor].recv(_CHUNK)
            if not data:
                return
            others[descriptor].sendall(data)

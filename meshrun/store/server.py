"""The store's server: torch's TCPStore clients of this user's processes, and of nodes that know the run's secret.

    with Server() as server:
        TCPStore("127.0.0.1", server.port, …)        # any process of this user on this machine
        server.port_at("10.11.0.1", secret)          # where other nodes connect (`relay`)

On loopback the kernel says whose connection it is (`owners`), and those of other users are closed without a word. At
any other address a client has to prove first that it knows the secret (`handshake`), and until then is sent a nonce and
nothing else. A thread serves all of them, so that a launcher that waits for a disk keeps nobody waiting.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import threading
import time
from collections import deque
from dataclasses import dataclass, field

from meshrun.store.handshake import LINE, Greeting
from meshrun.store.keys import BadCommand, Keys, Session
from meshrun.store.owners import owner_of_peer

LOOPBACK = "127.0.0.1"
UNPROVEN = 64
"""Connections from other nodes that have not proved the secret yet; the oldest is closed for one more."""
PATIENCE = 5.0
"""Seconds in which a connection from another node has to prove the secret."""
_CHUNK = 1 << 18


@dataclass(eq=False)
class _Client:
    """A connection: `greeting` until it has proved the secret, `session` from then on."""

    socket: socket.socket
    session: Session | None = None
    greeting: Greeting | None = None
    since: float = field(default_factory=time.monotonic)
    heard: bytes = b""
    unsent: bytearray = field(default_factory=bytearray)


class Server:
    """Keys and values for the ranks of one run, until it is closed."""

    def __init__(self, port: int = 0) -> None:
        self._keys, self._selector = Keys(), selectors.DefaultSelector()
        self._secrets: dict[socket.socket, bytes | None] = {}
        """Listening sockets -> the secret that their clients have to prove; None on loopback."""
        self._ports: dict[str, int] = {}
        self._unproven: deque[_Client] = deque()
        self._ours, self._theirs = socket.socketpair()
        self._selector.register(self._theirs, selectors.EVENT_READ)
        self.port = self._listen(LOOPBACK, port, None)
        self._thread = threading.Thread(target=self._run, name="store", daemon=True)
        self._thread.start()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def port_at(self, address: str, secret: bytes) -> int:
        """The port for other nodes at an address of this machine, which is listened on from the first call on."""
        if address not in self._ports:
            self._ports[address] = self._listen(address, 0, secret)
        return self._ports[address]

    def close(self) -> None:
        """Close all connections, and listen no more."""
        self._ours.close()
        self._thread.join()
        for key in list(self._selector.get_map().values()):
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.close()
        self._selector.close()

    def _listen(self, address: str, port: int, secret: bytes | None) -> int:
        listener = socket.create_server((address, port), backlog=socket.SOMAXCONN)
        listener.setblocking(False)
        self._secrets[listener] = secret
        self._selector.register(listener, selectors.EVENT_READ)
        return int(listener.getsockname()[1])

    def _run(self) -> None:
        while True:
            for key, events in self._selector.select(PATIENCE if self._unproven else None):
                if key.fileobj is self._theirs:
                    return
                if key.data is None:
                    assert isinstance(key.fileobj, socket.socket)
                    self._accept(key.fileobj)
                    continue
                if events & selectors.EVENT_WRITE:
                    self._flush(key.data)
                if events & selectors.EVENT_READ:
                    self._hear(key.data)
            while self._unproven and time.monotonic() - self._unproven[0].since > PATIENCE:
                self._drop(self._unproven[0])

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection = listener.accept()[0]
        except OSError:  # gone again, or this process is out of descriptors
            time.sleep(0.01)
            return
        secret = self._secrets[listener]
        if secret is None and owner_of_peer(connection) != os.geteuid():
            connection.close()
            return
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        client = _Client(connection)
        self._selector.register(connection, selectors.EVENT_READ, client)
        if secret is None:
            self._admit(client)
            return
        if len(self._unproven) >= UNPROVEN:  # a node proves itself at once: the one that has waited longest is none
            self._drop(self._unproven[0])
        client.greeting = Greeting(secret)
        self._unproven.append(client)
        self._send(client, client.greeting.challenge)

    def _admit(self, client: _Client) -> None:
        client.session = Session(self._keys, lambda data: self._send(client, data))

    def _hear(self, client: _Client) -> None:
        try:
            data = client.socket.recv(_CHUNK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        try:
            if not data:
                self._drop(client)
            elif client.session is not None:
                client.session.feed(data)
            else:
                self._check(client, data)
        except (BadCommand, ValueError):  # the latter for a counter that holds no number
            self._drop(client)

    def _check(self, client: _Client, data: bytes) -> None:
        assert client.greeting is not None
        client.heard += data
        line, end, rest = client.heard.partition(b"\n")
        if not end and len(line) < LINE:
            return
        answer = client.greeting.answer(line) if end else None
        if answer is None:
            self._drop(client)
            return
        self._unproven.remove(client)
        self._admit(client)
        self._send(client, answer)
        assert client.session is not None
        client.session.feed(rest)

    def _send(self, client: _Client, data: bytes) -> None:
        client.unsent += data
        self._flush(client)

    def _flush(self, client: _Client) -> None:
        try:
            sent = client.socket.send(client.unsent)
        except BlockingIOError:
            sent = 0
        except OSError:  # reading finds out that the client is gone
            client.unsent.clear()
            return
        del client.unsent[:sent]
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if client.unsent else 0)
        if self._selector.get_key(client.socket).events != events:
            self._selector.modify(client.socket, events, client)

    def _drop(self, client: _Client) -> None:
        if client in self._unproven:
            self._unproven.remove(client)
        if client.session is not None:
            client.session.close()
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(client.socket)
        client.socket.close()

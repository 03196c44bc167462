"""A small server that every rank runs while the doctor is at work, and how to ask it something.

    with Listener("slurm-42.0.0", ports=[]) as listener:
        ask("n1", listener.port, {"job": "slurm-42.0.0", "kind": "time"}, timeout=1.0)     # {"time": …}, or None

Whoever connects says the job's name first. Then it can leave a letter, ask for the time, or send bytes to be counted.
On one machine it listens on loopback alone, and other users are not heard.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import socketserver
import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any

from meshrun import strict_json
from meshrun.store.owners import owner_of_peer
from meshrun.store.server import LOOPBACK

Document = dict[str, Any]
Forms = Mapping[str, Mapping[str, Any]]
"""For each phase the names in its letters, and what is of which type."""
LONGEST = 16 << 20
"""Bytes of an answer: more than rank 0 has to say of all ranks."""
LONGEST_LETTER = 256 << 10
"""Bytes of a letter, which may be a stranger's: more than any rank has to say of itself."""
CHUNK = 1 << 18


MOST = 256
"""Connections that are served at a time: each takes a thread. Who is not served asks again."""


class Listener:
    """Answers at an address, on every interface where that is empty, until it is closed."""

    def __init__(
        self, job: str, ports: Iterable[int] = (), address: str = "", size: int = 1, forms: Forms | None = None
    ) -> None:
        """`ports` are tried before a free one is taken; `size` ranks may leave letters of these forms."""
        self.letters: dict[tuple[str, int], Document] = {}
        self.answers: dict[str, Document] = {}
        self._job, self._size, self._forms = job, size, forms or {}
        for port in (*ports, 0):
            with contextlib.suppress(OSError):
                self._server = _Server((address, port), _Talk)
                break
        self._server.listener = self
        self.port: int = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def reply(self, asked: Document) -> Document:
        """What to say to one line of a peer."""
        if asked.get("job") != self._job:
            return {"error": "this is another job's"}
        match asked.get("kind"):
            case "time":
                return {"time": time.time()}
            case "bytes":
                return {"count": 0}  # of all that follows, until the peer has no more
            case "letter":
                match asked:
                    case {"rank": int(rank), "phase": str(phase), "token": str(), "document": document} if (
                        0 <= rank < self._size and self.understands(phase, document)
                    ):
                        self.letters[phase, rank] = asked
                        return {"answer": self.answers.get(phase)}
        return {"error": "not understood"}

    def understands(self, phase: str, document: object) -> bool:
        """Whether a rank may say this: strangers may know the job's name, or write where ranks leave files."""
        form = self._forms.get(phase)
        if form is None or not isinstance(document, dict):
            return False
        try:
            for name, hint in form.items():
                strict_json.of_type(hint, document.get(name), name)
        except ValueError:
            return False
        return True


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True
    request_queue_size = 1024
    listener: Listener

    def __init__(self, *place: Any) -> None:
        super().__init__(*place)
        self._room = threading.Semaphore(MOST)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Whether to serve a connection: one of this machine is this user's own, and there are not too many."""
        del client_address
        is_own = self.server_address[0] != LOOPBACK or owner_of_peer(request) == os.geteuid()
        return is_own and self._room.acquire(blocking=False)

    def process_request(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no further thread can be started
            self._room.release()
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()


class _Talk(socketserver.StreamRequestHandler):
    timeout = 10.0

    def handle(self) -> None:
        assert isinstance(self.server, _Server)
        with contextlib.suppress(OSError, ValueError):
            while line := self.rfile.readline(LONGEST_LETTER):
                asked = strict_json.loads(line)
                if not isinstance(asked, dict):
                    return
                reply = self.server.listener.reply(asked)
                if "count" in reply:
                    while chunk := self.rfile.read1(CHUNK):
                        reply["count"] += len(chunk)
                self.wfile.write(json.dumps(reply).encode() + b"\n")


def ask(address: str, port: int, question: Document, timeout: float) -> Document | None:
    """The reply of a listener of the same job; None where nobody answers."""
    try:
        with socket.create_connection((address, port), timeout=timeout) as connection:
            return ask_on(connection, question)
    except (OSError, ValueError):
        return None


def ask_on(connection: socket.socket, question: Document) -> Document | None:
    """The same over a connection that is open."""
    connection.sendall(json.dumps(question).encode() + b"\n")
    with connection.makefile("rb") as lines:
        reply = strict_json.loads(lines.readline(LONGEST) or b"null")
    return reply if isinstance(reply, dict) and "error" not in reply else None

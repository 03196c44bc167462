"""A mutual proof of a shared secret, before anything else is said on a connection between nodes.

    greeting = Greeting(secret)              # the side that listens
    send(greeting.challenge)
    answer = greeting.answer(line)           # None: the line proves nothing, the connection is to be closed

    prove(connection, secret)                # the side that connects; raises where the other side proves nothing

Each proof covers its sender's role and the nonces of both sides. The secret itself is never sent.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import socket
import time

CLIENT, SERVER = "store client", "store server"
LINE = 256
"""Bytes of the longest line of a handshake."""


def proof(secret: bytes, *words: str) -> str:
    """Proof that its sender knows the secret, for these words alone.

    In a handshake the words are the sender's role and the nonces of both sides: then a proof can neither be replayed in
    another handshake nor be sent back to the side that made it.
    """
    # JSON keeps the borders between the words, which a stranger may have chosen.
    return hmac.new(secret, json.dumps(words).encode(), hashlib.sha256).hexdigest()


def is_proof(said: str, secret: bytes, *words: str) -> bool:
    """Whether a text is the proof for these words; a nearly right one takes as long to refuse as any other."""
    return hmac.compare_digest(said.encode(errors="replace"), proof(secret, *words).encode())


class Greeting:
    """One handshake, seen from the side that listens."""

    def __init__(self, secret: bytes) -> None:
        self._secret, self._nonce = secret, secrets.token_hex(32)

    @property
    def challenge(self) -> bytes:
        return f"{self._nonce}\n".encode()

    def answer(self, line: bytes) -> bytes | None:
        """The proof of this side, for a client that has proved its own; None for any other."""
        nonce, _, said = line.decode(errors="replace").partition(" ")
        if not is_proof(said, self._secret, CLIENT, self._nonce, nonce):
            return None
        return f"{proof(self._secret, SERVER, self._nonce, nonce)}\n".encode()


def prove(connection: socket.socket, secret: bytes) -> None:
    """Prove to the listening side that this one knows the secret, and have it prove the same.

    All of it is given the time that the connection has for one operation.
    """
    limit = connection.gettimeout()
    give_up = None if limit is None else time.monotonic() + limit
    challenge, nonce = _line(connection, give_up), secrets.token_hex(32)
    connection.sendall(f"{nonce} {proof(secret, CLIENT, challenge, nonce)}\n".encode())
    answer = _line(connection, give_up)
    connection.settimeout(limit)
    if not is_proof(answer, secret, SERVER, challenge, nonce):
        raise ConnectionRefusedError("the process that listens there does not know the secret of this run")


def _line(connection: socket.socket, give_up: float | None) -> str:
    """A line, read byte by byte: what follows it belongs to the next reader."""
    line = b""
    while not line.endswith(b"\n") and len(line) < LINE:
        if give_up is not None:
            connection.settimeout(max(0.001, give_up - time.monotonic()))
        byte = connection.recv(1)
        if not byte:
            raise ConnectionResetError("the connection was closed before the handshake was complete")
        line += byte
    return line.decode(errors="replace").rstrip("\n")

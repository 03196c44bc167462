"""Who may take part in a run: whoever can read its directory, which holds a secret for as long as nodes may join.

secret = make(run)                       # the first node, before anybody can ask to join
proof(secret, nonce)                     # a node that joins, for the number that it was sent: read(run) is its secret

The secret itself never goes over the network, and a proof is of no use for a second time.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import socket
import time
from pathlib import Path

from meshrun.errors import UserError

NAME = ".join"
SEEN_WITHIN = 3.0
"""Seconds that a network's file system may take to show a file."""


def make(run: Path) -> bytes:
    """A new secret, in a file for this user alone."""
    remove(run)
    secret = secrets.token_hex(32).encode()
    file = os.open(run / NAME, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(file, "wb") as opened:
        opened.write(secret)
        opened.flush()
        os.fsync(file)
    return secret


def read(run: Path) -> bytes:
    """The secret of a run that this node is to join."""
    give_up = time.monotonic() + SEEN_WITHIN
    while True:
        try:
            return (run / NAME).read_bytes()
        except OSError as error:
            if time.monotonic() > give_up:
                raise UserError(
                    f"{socket.gethostname()} cannot see {run} of the run that it joins ({error.strerror}: {NAME}); "
                    f"runs must be on a disk that all nodes share (--runs)"
                ) from None
        time.sleep(0.1)


def remove(run: Path) -> None:
    """From now on nobody can join."""
    with contextlib.suppress(OSError):
        (run / NAME).unlink()


def proof(secret: bytes, nonce: str) -> str:
    """That whoever says it knows the secret."""
    return hmac.new(secret, nonce.encode(), hashlib.sha256).hexdigest()


def is_proof(said: str, secret: bytes, nonce: str) -> bool:
    """Whether it is that; it takes as long for one that is nearly right."""
    return hmac.compare_digest(said.encode(errors="replace"), proof(secret, nonce).encode())

"""Who may take part in a run: whoever can read its directory, which holds a secret for as long as nodes may join.

    secret = make(run)                                  # the first node, before anybody can ask to join
    proof(secret, "client", server_nonce, client_nonce) # a node that joins; read(run) is its secret
    proof(secret, "server", server_nonce, client_nonce) # the first node's answer, once it has checked that

The secret itself never goes over the network. Both sides prove that they know it, each with its role and both nonces in
the proof, so that a proof is of no use in another handshake or for the other role.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import socket
import stat
import time
from dataclasses import dataclass
from pathlib import Path

from meshrun.errors import UserError
from meshrun.store.handshake import is_proof, proof

NAME = ".join"
FIRST, JOINING = "the first node", "a joining node"
"""The roles of the two sides of a handshake."""
LONGEST = 256
"""The most bytes of a nonce, a proof or a secret that are read."""
SEEN_WITHIN = 3.0
"""Seconds that a network's file system may take to show a file."""


class Unseen(UserError):
    """This machine does not have the run directory that the first node names."""


@dataclass(frozen=True)
class Handshake:
    """Proofs and keys of one connection: each depends on the secret, the run directory and a nonce of either side.

    A stranger between the two sides can pass the nonces and proofs on, but not learn the keys: every later line carries
    a code made with the key of its sender (`Wire.seal`), so that he can read lines, hold them back and nothing else.
    """

    secret: bytes
    run: str
    """The run directory in the words of the first node."""
    nonce: str
    """Chosen by the first node."""
    answer: str
    """The nonce chosen by the joining node."""

    def proof(self, role: str) -> str:
        """Shows the other side that the side of this role knows the secret."""
        return proof(self.secret, "proof", role, self.run, self.nonce, self.answer)

    def is_proof(self, said: str, role: str) -> bool:
        return is_proof(said, self.secret, "proof", role, self.run, self.nonce, self.answer)

    def key(self, role: str) -> bytes:
        """The key for the lines that the side of this role sends."""
        return proof(self.secret, "lines", role, self.run, self.nonce, self.answer).encode()


def new_nonce() -> str:
    return secrets.token_hex(32)


def make(run: Path) -> bytes:
    """A new secret, in a file for this user alone."""
    _refuse_unsafe(run)
    remove(run)
    secret = secrets.token_hex(32).encode()
    try:
        file = os.open(run / NAME, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(file, "wb") as opened:
            opened.write(secret)
            opened.flush()
            os.fsync(file)
    except OSError as error:
        raise UserError(f"cannot write {run / NAME}, by which nodes may join: {error.strerror} (--runs)") from None
    return secret


def read(run: Path) -> bytes:
    """The secret of a run that this node is to join, whose directory is this user's own."""
    give_up = time.monotonic() + SEEN_WITHIN
    while True:
        try:
            _refuse_unsafe(run)
            if content := _content(run / NAME):
                return content
            # A full disk has left it so, or it is just being written: anybody could prove to know that it is empty.
            raise OSError(errno.ENODATA, "it is empty")
        except OSError as error:
            if time.monotonic() > give_up:
                raise Unseen(
                    f"{socket.gethostname()} cannot see {run} of the run that it joins ({error.strerror}: {NAME}); "
                    f"runs must be on a disk that all nodes share (--runs)"
                ) from None
        time.sleep(0.1)


def _refuse_unsafe(run: Path) -> None:
    """A run directory decides what its ranks execute: another user must neither own it nor be able to change it."""
    found = run.stat()
    if found.st_uid != os.getuid():
        raise UserError(
            f"{run} belongs to another user, whose number is {found.st_uid}; a run with several nodes must be in a "
            f"directory of the user who starts them, here {os.getuid()} (--runs, --join)"
        )
    if found.st_mode & stat.S_IWOTH:
        raise UserError(
            f"{run} may be written to by every user of the machine; a run with several nodes must be in a directory "
            f"that other users cannot change: chmod o-w {run}"
        )


def _content(path: Path) -> bytes:
    """A secret, from a file that only this user can have written."""
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(file, "rb") as opened:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
            raise UserError(f"{path} must be a file that this user alone can read and write; remove it and start again")
        return opened.read(LONGEST)


def remove(run: Path) -> None:
    """From now on nobody can join."""
    with contextlib.suppress(OSError):
        (run / NAME).unlink()

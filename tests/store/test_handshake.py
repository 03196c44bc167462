"""Proofs that both sides of a connection know a run's secret."""

from __future__ import annotations

import socket

import pytest

from meshrun.store.handshake import CLIENT, is_proof, proof, prove

SECRET = b"5" * 64
WORDS = ("client", "server's nonce", "client's nonce")


def test_a_proof_holds_for_its_words():
    assert is_proof(proof(SECRET, *WORDS), SECRET, *WORDS)


@pytest.mark.parametrize(
    "words",
    [
        ("server", "server's nonce", "client's nonce"),
        ("client", "client's nonce", "server's nonce"),
        ("client", "server's nonce", "another nonce"),
        ("client", "server's nonceclient's nonce"),
        ("client", "server's nonce", "client's", " nonce"),
        (),
    ],
)
def test_a_proof_holds_neither_for_another_role_nor_for_other_nonces(words: tuple[str, ...]):
    assert not is_proof(proof(SECRET, *WORDS), SECRET, *words)


@pytest.mark.parametrize("said", ["", "0" * 64, "\ud800", proof(b"6" * 64, *WORDS)])
def test_who_does_not_know_the_secret_proves_nothing(said: str):
    assert not is_proof(said, SECRET, *WORDS)


@pytest.mark.parametrize("answer", [b"0" * 64, b"", proof(SECRET, CLIENT, "n", "n").encode()])
def test_who_listens_without_knowing_the_secret_is_refused(answer: bytes):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"n\n" + answer + b"\n")
        with pytest.raises(ConnectionRefusedError, match="does not know the secret"):
            prove(ours, SECRET)


def test_a_connection_that_ends_in_the_handshake_is_an_error():
    ours, theirs = socket.socketpair()
    with ours:
        theirs.close()
        with pytest.raises(OSError):
            prove(ours, SECRET)

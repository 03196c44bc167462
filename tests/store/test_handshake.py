"""Proofs that both sides of a connection know a run's secret."""

from __future__ import annotations

import pytest

from meshrun.store.handshake import is_proof, proof

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

"""Proofs that both sides of a connection know a run's secret."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

import pytest

from meshrun.store.handshake import CLIENT, LINE, SERVER, Greeting, is_proof, proof, prove

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


def test_every_letter_of_a_proof_counts():
    right = proof(SECRET, *WORDS)
    for place, letter in enumerate(right):
        wrong = "0" if letter != "0" else "1"
        assert not is_proof(right[:place] + wrong + right[place + 1 :], SECRET, *WORDS)
    assert not is_proof(right[:-1], SECRET, *WORDS) and not is_proof(right + "0", SECRET, *WORDS)


@pytest.mark.parametrize("answer", [b"0" * 64, b"", proof(SECRET, CLIENT, "n", "n").encode()])
def test_who_listens_without_knowing_the_secret_is_refused(answer: bytes):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"n\n" + answer + b"\n")
        with pytest.raises(ConnectionRefusedError, match="does not know the secret"):
            prove(ours, SECRET)


def test_a_line_without_an_end_is_not_waited_for():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(5.0)
        theirs.sendall(b"f" * 2 * LINE)
        with pytest.raises(ConnectionRefusedError, match="does not know the secret"):
            prove(ours, SECRET)


def test_a_connection_that_ends_in_the_handshake_is_an_error():
    ours, theirs = socket.socketpair()
    with ours:
        theirs.close()
        with pytest.raises(OSError):
            prove(ours, SECRET)


@pytest.mark.parametrize("quick", [0, 1])
def test_a_handshake_has_one_time_limit_however_slowly_its_lines_come(quick: int):
    """Byte by byte each is in time; `quick` lines come at once before that."""
    over = threading.Event()
    ours, theirs = socket.socketpair()

    def trickle() -> None:
        theirs.sendall((b"f" * 64 + b"\n") * quick)
        while not over.wait(0.02):
            with contextlib.suppress(OSError):
                theirs.send(b"f")

    sender = threading.Thread(target=trickle)
    sender.start()
    began = time.monotonic()
    with ours, theirs:
        ours.settimeout(0.3)
        with pytest.raises(TimeoutError):
            prove(ours, SECRET)
        over.set()
        sender.join()
    assert time.monotonic() - began < 4, "255 bytes would take 5 s"


def test_after_a_handshake_a_connection_waits_as_long_as_before():
    greeting = Greeting(SECRET)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(30.0)
        theirs.sendall(greeting.challenge)

        def answer() -> None:
            proven = greeting.answer(theirs.recv(256).rstrip(b"\n"))
            assert proven is not None
            theirs.sendall(proven)

        server = threading.Thread(target=answer)
        server.start()
        prove(ours, SECRET)
        server.join()
        assert ours.gettimeout() == 30.0


@pytest.mark.parametrize("own", [CLIENT, SERVER])
def test_a_proof_of_an_earlier_handshake_or_of_the_other_role_opens_none(own: str):
    greeting, earlier = Greeting(SECRET), Greeting(SECRET)
    nonce = "0" * 64
    mine = greeting.challenge.decode().strip()
    assert greeting.answer(f"{nonce} {proof(SECRET, CLIENT, mine, nonce)}".encode()) is not None
    before = earlier.challenge.decode().strip()
    assert greeting.answer(f"{nonce} {proof(SECRET, own, before, nonce)}".encode()) is None
    assert greeting.answer(f"{nonce} {proof(SECRET, SERVER, mine, nonce)}".encode()) is None
    answer = greeting.answer(f"{nonce} {proof(SECRET, CLIENT, mine, nonce)}".encode())
    assert answer == f"{proof(SECRET, SERVER, mine, nonce)}\n".encode()

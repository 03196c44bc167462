"""Messages between launchers: whole lines of JSON objects, whatever parts they come in; else the wire is closed."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from meshrun.launch import wire as module
from meshrun.launch.wire import Beat, Wire, readable


@pytest.fixture
def pair() -> Iterator[tuple[Wire, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield Wire(ours, longest=100), theirs


def test_a_message_may_come_in_any_parts(pair: tuple[Wire, socket.socket]):
    wire, other = pair
    other.sendall(b'{"a": 1}\n{"b"')
    assert list(wire.receive()) == [{"a": 1}]
    other.sendall(b": 2}\n")
    assert list(wire.receive()) == [{"b": 2}] and not wire.closed


@pytest.mark.parametrize(
    "line", [b"GET / HTTP/1.1\n", b"[1, 2]\n", b"3\n", b"x" * 101, b'{"a": "' + b"x" * 100 + b'"}\n', b"[" * 99 + b"\n"]
)
def test_who_speaks_another_language_or_without_end_is_not_listened_to(pair: tuple[Wire, socket.socket], line: bytes):
    wire, other = pair
    other.sendall(line)
    assert list(wire.receive()) == [] and wire.closed


def test_silence_is_no_end_and_an_end_is(pair: tuple[Wire, socket.socket], monkeypatch: pytest.MonkeyPatch):
    wire, other = pair
    monkeypatch.setattr(module, "PATIENCE", 0.05)
    wire.socket.settimeout(0.05)
    assert list(wire.receive()) == [] and not wire.closed
    other.close()
    assert list(wire.receive()) == [] and wire.closed


def test_sealed_lines_are_taken_once_in_order_and_from_who_has_the_key():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        wire, other = Wire(ours), Wire(theirs)
        assert not wire.sealed
        wire.seal(b"one", b"other")
        other.seal(b"other", b"one")
        for number in range(3):
            other.send({"number": number})
            assert list(wire.receive()) == [{"number": number}]
        other.seal(b"other", b"one")  # counts from the beginning again, as somebody who repeats a line
        other.send({"number": 0})
        assert list(wire.receive()) == [] and wire.closed


def test_what_is_sent_is_one_line_and_a_peer_that_is_gone_is_noticed(pair: tuple[Wire, socket.socket]):
    wire, other = pair
    wire.send({"a": "ü\n"})
    assert other.recv(100) == b'{"a": "\\u00fc\\n"}\n'
    other.close()
    for _ in range(10):
        wire.send({"a": 1})
    assert wire.closed


def test_readers_are_told_apart_and_waiting_ends(pair: tuple[Wire, socket.socket]):
    wire, other = pair
    began = time.monotonic()
    assert readable([wire.fileno()], 0.05) == set() and time.monotonic() - began >= 0.05
    other.sendall(b"x")
    assert readable([wire.fileno(), other.fileno()], 1.0) == {wire.fileno()}


def test_signs_of_life_come_until_the_end(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "BEAT", 0.01)
    sent: list[float] = []
    with Beat(lambda: sent.append(time.monotonic())):
        while len(sent) < 3:
            time.sleep(0.01)
    count = len(sent)
    time.sleep(0.05)
    assert len(sent) == count


@pytest.mark.parametrize("code", [b"", b"0" * 64, b"\xff"])
def test_a_line_with_an_empty_or_a_wrong_code_ends_the_connection(code: bytes):
    ours, theirs = socket.socketpair()
    wire = Wire(ours)
    wire.seal(own=b"a" * 32, other=b"b" * 32)
    theirs.sendall(code + b' {"order": "Stop"}\n')
    assert list(wire.receive()) == [] and wire.closed
    for end in (ours, theirs):
        end.close()


def test_lines_of_several_threads_are_sent_one_after_the_other():
    class Slow:
        """A connection that takes its time for a line."""

        at_once = most = 0

        def settimeout(self, _seconds: float) -> None:
            pass

        def sendall(self, _line: bytes) -> None:
            self.at_once += 1
            self.most = max(self.most, self.at_once)
            time.sleep(0.01)
            self.at_once -= 1

    connection: Any = Slow()
    wire = Wire(connection)
    threads = [threading.Thread(target=wire.send, args=({"alive": number},)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert connection.most == 1

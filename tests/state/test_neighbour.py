"""A rank keeps the state that ranks of its own run send it, and nothing of anybody else's."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshrun.state import neighbour as module
from meshrun.state.manifest import MOST_BYTES
from meshrun.state.memory import memory_files
from meshrun.state.neighbour import Neighbour
from meshrun.store import handshake
from tests.launch.command import wait_until

from .test_exchange import index

IMAGE = os.urandom(1 << 20)


class Rank:
    """One of two ranks on two nodes, as far as a neighbour needs to know it."""

    def __init__(self, rank: int, word: str, seats: list[Any]) -> None:
        self.rank, self.address, self.world = rank, "127.0.0.1", self
        self.node, self.local_rank = rank, 0
        self._word, self._seats = word, seats

    def from_rank_0(self, _value: str) -> str:
        return self._word

    def gathered(self, value: Any) -> list[Any]:
        self._seats[self.rank] = value
        return self._seats


class Pair:
    """Two neighbours in this process, of which the second one keeps what the first sends."""

    def __init__(self, folder: Path) -> None:
        self.seats: list[Any] = [(0, 0, "127.0.0.1", 1), (1, 0, "127.0.0.1", 1)]
        self.folders = [folder / "sender", folder / "keeper"]
        for each in self.folders:
            each.mkdir()
        self.keeper = Neighbour(Rank(1, "word", self.seats), self.folders[1])  # type: ignore[arg-type]
        self.where: tuple[str, int] = self.seats[1][2:]
        (self.folders[0] / "rank-00000.safetensors").write_bytes(IMAGE)

    def send(self, word: str = "word") -> list[str]:
        """What is noted of one copy that a rank with this word sends."""
        sender = Neighbour(Rank(0, word, self.seats), self.folders[0])  # type: ignore[arg-type]
        sender.send(index(size=len(IMAGE)))
        sender.wait()
        return sender.notes

    @property
    def kept(self) -> list[str]:
        return sorted(each.name for each in self.folders[1].iterdir())


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    yield Pair(tmp_path)


def listeners() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == "neighbour"]


def test_a_copy_of_the_state_arrives_whole(pair: Pair):
    assert pair.send() == []
    (file,) = memory_files(pair.folders[1])
    assert file.index == replace(index(size=len(IMAGE)), name="spare-00000.safetensors")
    assert file.path.read_bytes() == IMAGE


def test_nothing_is_kept_of_a_sender_with_another_word(pair: Pair):
    (note,) = pair.send(word="guess")
    assert "rank 0 could not leave a copy of its state on the next node, at 127.0.0.1: " in note
    assert pair.kept == []
    assert pair.send() == [], "the right one is still heard"


def test_a_proof_holds_for_one_connection_alone(pair: Pair):
    named = replace(index(size=1), name="spare-00000.safetensors").encode()
    with socket.create_connection(pair.where, 5) as first, socket.create_connection(pair.where, 5) as second:
        challenge = first.recv(256).decode().strip()
        line = f"nonce {handshake.proof(b'word', handshake.CLIENT, challenge, 'nonce')}\n".encode()
        assert second.recv(256)
        rest = module._LENGTH.pack(len(named)) + named + b"x"
        second.sendall(line)
        assert closed(second) and pair.kept == []
        first.sendall(line)
        assert first.recv(256)
        first.sendall(rest)
        wait_until(lambda: pair.kept == ["spare-00000.json", "spare-00000.safetensors"], 10)


def test_nothing_is_sent_to_a_listener_that_does_not_prove_the_secret(pair: Pair, monkeypatch: pytest.MonkeyPatch):
    """A rank's port may be taken by another user's process once the rank is gone."""
    monkeypatch.setattr(module, "_PATIENCE", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as impostor:
        pair.seats[1] = (1, 0, *impostor.getsockname())
        heard: list[bytes] = []

        def serve() -> None:
            connection = impostor.accept()[0]
            connection.settimeout(10)
            with connection:
                connection.sendall(b"0" * 64 + b"\n")
                line = connection.recv(256)
                # Back to its sender, as if it were a proof of this side's.
                connection.sendall(line.split()[1] + b"\n")
                heard.extend(iter(lambda: connection.recv(1 << 16), b""))

        thread = threading.Thread(target=serve)
        thread.start()
        (note,) = pair.send()
        thread.join()
    assert "does not know the secret of this run" in note and heard == []


def test_a_listener_that_sends_its_proof_byte_by_byte_keeps_nobody_waiting(pair: Pair, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "_PATIENCE", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as impostor:
        pair.seats[1] = (1, 0, *impostor.getsockname())

        def serve() -> None:
            with impostor.accept()[0] as connection, contextlib.suppress(OSError):
                for _ in range(60):
                    connection.sendall(b"0")
                    time.sleep(0.1)

        thread = threading.Thread(target=serve)
        thread.start()
        began = time.monotonic()
        (note,) = pair.send()
        assert "timed out" in note and time.monotonic() - began < 4
        thread.join()


def closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(64) == b""
    except ConnectionResetError:
        return True


@pytest.mark.parametrize("noise", [b"", b"x" * 39, b"\0" * 4096])
def test_strangers_cost_no_thread_few_descriptors_and_are_shown_out(
    pair: Pair, noise: bytes, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(module, "_MEETING", 0.5)
    before, files = len(listeners()), len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    strangers = []
    for _ in range(100):
        strangers.append(socket.create_connection(pair.where, 5))
        strangers[-1].sendall(noise)
    assert len(listeners()) == before
    assert pair.send() == []
    assert len(os.listdir("/proc/self/fd")) <= files + len(strangers) + module._STRANGERS + 4  # noqa: PTH208
    for each in strangers:
        with each:
            while not closed(each):  # after the nonce
                pass


def test_a_copy_is_kept_though_no_thread_can_be_started(pair: Pair, monkeypatch: pytest.MonkeyPatch):
    start = threading.Thread.start

    def fail(thread: threading.Thread) -> None:
        if thread.name == "neighbour":
            raise RuntimeError("can't start new thread")
        start(thread)

    sender = Neighbour(Rank(0, "word", pair.seats), pair.folders[0])  # type: ignore[arg-type]
    monkeypatch.setattr(threading.Thread, "start", fail)
    for _ in range(2):
        sender.send(index(size=len(IMAGE)))
        sender.wait()
    assert sender.notes == [] and len(memory_files(pair.folders[1])) == 1


def test_a_silent_stranger_keeps_no_sender_waiting(pair: Pair):
    with socket.create_connection(pair.where, 5):
        began = time.monotonic()
        assert pair.send() == [] and time.monotonic() - began < module._MEETING


def say(pair: Pair, name: str, content: bytes, length: int | None = None) -> bytes:
    """What a rank of this run is answered that sends an image of four bytes under this name."""
    named = replace(index(size=4), name=name).encode()
    length = len(named) if length is None else length
    with socket.create_connection(pair.where, 5) as connection:
        handshake.prove(connection, b"word")
        try:
            connection.sendall(module._LENGTH.pack(length) + named + content)
            connection.shutdown(socket.SHUT_WR)
            return connection.recv(1)
        except OSError:  # the other side was quicker to hang up
            return b""


def test_a_copy_takes_the_place_of_no_state_but_a_copy(pair: Pair):
    assert say(pair, "rank-00001.safetensors", b"evil") == b"" and pair.kept == []
    assert say(pair, "spare-00001.safetensors", b"good") == module._ARRIVED


def test_a_copy_that_is_cut_off_is_not_kept(pair: Pair):
    assert say(pair, "spare-00001.safetensors", b"cut") == b"" and pair.kept == []


def test_an_index_that_is_too_long_is_not_waited_for(pair: Pair, monkeypatch: pytest.MonkeyPatch):
    asked: list[int] = []
    read = module._read
    monkeypatch.setattr(module, "_read", lambda wire, length: [asked.append(length), read(wire, length)][1])
    assert say(pair, "spare-00001.safetensors", b"data", length=MOST_BYTES + 1) == b"" and asked == [8]
    assert say(pair, "spare-00001.safetensors", b"data", length=MOST_BYTES) == b"" and asked[1:] == [8, MOST_BYTES]


def test_each_rank_of_a_node_sends_to_the_seat_of_its_own_on_the_next_one():
    seats = [(0, 0, "a", 1), (0, 1, "a", 2), (2, 0, "c", 3), (2, 1, "c", 4), (1, 0, "b", 5)]
    found = [module._partner(seats, rank) for rank in range(5)]
    assert found == [("b", 5), ("b", 5), ("a", 1), ("a", 2), ("c", 3)]
    assert module._partner(seats[:2], 1) is None


def test_a_copy_is_named_after_the_rank_in_the_whole_run(pair: Pair):
    sender = Neighbour(Rank(0, "word", pair.seats), pair.folders[0])  # type: ignore[arg-type]
    sender.here.rank = 7  # type: ignore[misc]
    sender.send(index(size=len(IMAGE)))
    sender.wait()
    assert pair.kept == ["spare-00007.json", "spare-00007.safetensors"]


def test_a_newer_copy_never_lies_beside_the_index_of_the_older_one(pair: Pair, monkeypatch: pytest.MonkeyPatch):
    assert pair.send() == []
    seen: list[list[str]] = []
    real = Path.replace

    def noting(path: Path, target: Any) -> Path:
        moved = real(path, target)
        if path.name.endswith("safetensors"):
            seen.append(pair.kept)
        return moved

    monkeypatch.setattr(Path, "replace", noting)
    assert pair.send() == []
    assert seen == [["spare-00000.safetensors"]]


def test_a_copy_that_is_not_kept_is_told_once(pair: Pair):
    sender = Neighbour(Rank(0, "word", pair.seats), pair.folders[0])  # type: ignore[arg-type]
    for _ in range(2):
        sender.send(replace(index(size=len(IMAGE) + 1)))  # longer than what is sent: the keeper waits for the rest
        sender.wait()
    assert len(sender.notes) == 1 and sender.notes[0].endswith("the rank there did not keep it")


def test_a_sender_that_stops_amid_its_copy_is_given_up(pair: Pair, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "_PATIENCE", 0.3)
    before = len(listeners())
    with socket.create_connection(pair.where, 5) as sender:
        handshake.prove(sender, b"word")
        named = replace(index(size=9), name="spare-00000.safetensors").encode()
        sender.sendall(module._LENGTH.pack(len(named)) + named + b"x")
        wait_until(lambda: len(listeners()) > before, 10)
        wait_until(lambda: len(listeners()) == before, 10)
    assert pair.kept == []

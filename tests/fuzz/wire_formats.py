"""Messages of other processes and hosts: what comes over sockets."""

from __future__ import annotations

import contextlib
import io
import secrets
import socket
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshrun.check.doctor.listener import ask_on
from meshrun.data import download
from meshrun.data.download import Quiet
from meshrun.errors import RunFailed, UserError
from meshrun.launch.nodes import Asked, Hub, Joined, Said, _Peer
from meshrun.launch.wire import Wire
from meshrun.state.manifest import Unfit
from meshrun.state.neighbour import Neighbour
from meshrun.store.handshake import Greeting, prove
from meshrun.store.keys import MAGIC, BadCommand, Keys, Session
from tests.fuzz.data_formats import put
from tests.fuzz.engine import Format, WrongValue
from tests.fuzz.mutations import of_bytes, of_json
from tests.state.test_exchange import index

LINE = 1 << 16
"""Bytes that one message may have."""


@contextlib.contextmanager
def spoken(data: bytes) -> Any:
    """A connection whose other side has sent these bytes, as far as the system keeps them, and has hung up."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.setblocking(False)
        with contextlib.suppress(OSError):
            theirs.send(data)
        with contextlib.suppress(OSError):
            theirs.shutdown(socket.SHUT_WR)
        yield ours


def _read_wire(data: bytes, _: Path) -> Any:
    with spoken(data) as connection:
        wire, found = Wire(connection, LINE), []
        while not wire.closed:
            found += wire.receive()
    if not all(isinstance(each, dict) for each in found):
        raise WrongValue("a message is no document")
    return found


def _read_answer(data: bytes, _: Path) -> Any:
    with spoken(data) as connection:
        try:
            return ask_on(connection, {"kind": "hello"})
        except (OSError, ValueError) as error:  # as `ask` does
            raise UserError(str(error) or "no answer") from None


_hubs: dict[Path, Hub] = {}


def _hub(folder: Path) -> Hub:
    if folder not in _hubs:
        _hubs[folder] = Hub(0, folder)
    return _hubs[folder]


def _read_stranger(data: bytes, folder: Path) -> Any:
    """What somebody who knows no secret says to the first node."""
    hub = _hub(folder)
    with spoken(data) as connection:
        peer = _Peer(Wire(connection, LINE), 0.0)
        news = []
        while not peer.wire.closed:
            news += hub._listen(peer, 0.0)
    if peer.member or any(isinstance(each, Joined | Said | Asked) for each in news):
        raise WrongValue(f"a stranger was believed: {news}")
    return news


def _read_member(data: bytes, folder: Path) -> Any:
    """What a node of the run says, whose program may be of another version."""
    hub = _hub(folder)
    with spoken(data) as connection:
        peer = _Peer(Wire(connection, LINE), 0.0, member=True)
        return [hub._understood(peer, said) for said in _read_wire(data, folder)]


def _read_store(data: bytes, _: Path) -> Any:
    """What a process that got a session says to the store: its own user's, or one of a node that knows the secret."""
    keys, said = Keys(), bytearray()
    session = Session(keys, said.extend)
    try:
        session.feed(data)
    except (BadCommand, ValueError) as error:  # as `Server` does
        raise UserError(str(error)) from None
    finally:
        session.close()
    return keys.values


def _store_examples(_: Path) -> list[bytes]:
    def text(value: bytes) -> bytes:
        return struct.pack("<Q", len(value)) + value

    first, key = struct.pack("<BI", 0, MAGIC), text(b"rank0")
    several = struct.pack("<Q", 2) + key + text(b"rank1")
    return [
        first + b"\1" + key + text(b"7") + b"\3" + key + b"\4" + key + struct.pack("<q", 3),
        first + b"\2" + key + text(b"") + text(b"x") + b"\x09" + key + text(b"y") + b"\5" + several + b"\6" + several,
        first + b"\x0b" + struct.pack("<Q", 1) + key + text(b"1") + b"\x0a" + several + b"\7\x0d\1\0\0\0\x11",
        first + b"\x0e" + key + text(b"v") + b"\x10" + key + b"\x0f" + key + b"\x12" + key + struct.pack("<q", 2),
    ]


def _read_handshake(data: bytes, _: Path) -> Any:
    """What somebody who knows no secret says to the store, or answers in its place."""
    secret = secrets.token_bytes(32)
    if Greeting(secret).answer(data) is not None:
        raise WrongValue("a stranger got a session")
    with spoken(data) as connection:
        try:
            prove(connection, secret)
        except OSError as error:
            return str(error)
    raise WrongValue("a stranger was taken for the store")


def _read_copy(data: bytes, folder: Path) -> Any:
    """What a rank that has proved itself sends as a copy of its state: the length of an index, the index, and bytes."""
    keeper = Neighbour.__new__(Neighbour)
    keeper.memory = folder
    for path in folder.iterdir():
        path.unlink()
    with spoken(data) as connection:
        connection.settimeout(10)
        try:
            keeper._keep(connection)
        except (OSError, Unfit, ValueError) as error:  # as `Neighbour._hear` does
            raise UserError(str(error)) from None
    left = sorted(path.name for path in folder.iterdir())
    if any(not name.startswith("spare-") for name in left):
        raise WrongValue(f"files of other names were left: {left}")
    return left


def _copy_examples(_: Path) -> list[bytes]:
    named = replace(index(size=64), name="spare-00000.safetensors").encode()
    return [struct.pack("<Q", len(named)) + named + bytes(range(64))]


class _Answer(io.BytesIO):
    """What a server sends for a file: a status, headers, and the content."""

    def __init__(self, data: bytes) -> None:
        head, _, content = data.partition(b"\n\n")
        status, *lines = head.decode("latin-1").split("\n")
        super().__init__(content)
        self.status = int(status) if status.isascii() and status.isdigit() and len(status) < 6 else 200
        pairs = [line.partition(": ") for line in lines]
        named = {name.lower(): value for name, _, value in pairs}
        self.headers = _Headers(named)


class _Headers(dict[str, str]):
    def __getitem__(self, name: str) -> Any:
        return self.get(name.lower())


def _read_download(data: bytes, folder: Path) -> Any:
    part, note = put(folder, ".file.part", b"some"), folder / ".file.note"
    note.unlink(missing_ok=True)
    answer = _Answer(data)
    try:
        found = download._received(answer, "https://host/file", part, note, Quiet())
    except download._CutOff as cut:  # after which it is tried again
        raise RunFailed(str(cut)) from None
    except OSError as error:  # as `fetch` does
        raise download.unwritable(folder / "file", error) from None
    if found.size != part.stat().st_size:
        raise WrongValue("the size is not that of the file")
    return found


FORMATS = [
    Format("wire", lambda _: [b'{"alive": 3}\n{"fact": "Gone", "generation": 1}\n'], _read_wire, of_json),
    Format(
        "hub-stranger",
        lambda _: [b'{"nonce": "cd", "proof": "ab"}\n', b'{"hello": "n1", "ranks": 2, "before": "ab"}\n'],
        _read_stranger,
        of_json,
    ),
    Format(
        "hub-member",
        lambda _: [
            b'{"alive": 3}\n{"fact": "Ended", "rank": 1, "code": -9, "own": true}\n{"fact": "Gone", "generation": 1}\n',
            b'{"fact": "Verdict", "rank": 1, "sentence": "x", "action": "end"}\n{"fact": "Asked", "signal": 10}\n',
        ],
        _read_member,
        of_json,
    ),
    Format("store", _store_examples, _read_store, of_bytes),
    Format("store-handshake", lambda _: [b"ab" * 32 + b" " + b"cd" * 32 + b"\n"], _read_handshake, of_bytes),
    Format("neighbours-copy", _copy_examples, _read_copy, of_bytes),
    Format("doctor-answer", lambda _: [b'{"answer": {"a": 1}}\n', b'{"error": "x"}\n'], _read_answer, of_json),
    Format(
        "download",
        lambda _: [
            b'200\nContent-Length: 7\nETag: "abc"\n\ncontent',
            b"206\nContent-Range: bytes 4-10/11\nContent-Length: 7\n\ncontent",
            b"200\nLast-Modified: Wed, 21 Oct 2015 07:28:00 GMT\n\ncontent",
        ],
        _read_download,
        of_bytes,
    ),
]

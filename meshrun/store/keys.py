"""Keys and values in the protocol of torch's TCPStore, as its clients of versions 2.11 to 2.13 speak it.

    keys = Keys()
    session = Session(keys, send=connection.sendall)     # one for each client
    session.feed(data)                                   # answers through `send`, also once a key that it awaits is set
    session.close()

torch's own server takes commands from every process that can connect. This one leaves it to `server` who gets a
session, and torch's clients need no change. The numbers of commands are those of `QueryType` in torch's
TCPStoreBackend.hpp.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable

MAGIC = 0x3C85F7CE
LONGEST = 64 << 20
"""Bytes of the longest key or value; torch's own server takes 8 MiB."""

_VALIDATE = 0
_READY, _NOT_READY = b"\0", b"\1"
_STOP_WAITING, _WAIT_CANCELED = b"\0", b"\1"


class BadCommand(Exception):
    """A client has sent what is no command of TCPStore."""


class _Incomplete(Exception):
    """The rest of a command is still on its way."""


class Keys:
    """All values and queues of one store, and the sessions that wait for keys."""

    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}
        self.queues: dict[bytes, deque[bytes]] = {}
        self.waiting: dict[bytes, list[Session]] = {}

    def set(self, key: bytes, value: bytes) -> None:
        self.values[key] = value
        self.wake(key)

    def add(self, key: bytes, amount: int) -> int:
        amount += int(self.values.get(key, b"0"))
        if not -(1 << 63) <= amount < 1 << 63:
            raise BadCommand("a counter has left the range of 64 bits")
        self.set(key, str(amount).encode())
        return amount

    def has(self, key: bytes) -> bool:
        return key in self.values or bool(self.queues.get(key))

    def wake(self, key: bytes) -> None:
        """Tell all sessions that wait for this key."""
        for session in self.waiting.pop(key, []):
            session.arrived(key)

    def wake_one(self, key: bytes) -> None:
        """Tell the session that has waited longest for this queue: one entry serves one client."""
        sessions = self.waiting.get(key)
        if sessions:
            sessions.pop(0).arrived(key)


class Session:
    """The commands of one client."""

    def __init__(self, keys: Keys, send: Callable[[bytes], None]) -> None:
        self._keys, self._send = keys, send
        self._data, self._at = bytearray(), 0
        self._is_validated = False
        self._awaited: set[bytes] = set()

    def feed(self, data: bytes) -> None:
        """Carry out all commands that are complete; raises BadCommand for bytes that are none."""
        self._data += data
        while self._data:
            self._at = 0
            try:
                self._command()
            except _Incomplete:
                return
            del self._data[: self._at]

    def arrived(self, key: bytes) -> None:
        """A key that this client awaits is there."""
        self._awaited.discard(key)
        if not self._awaited:
            self._send(_STOP_WAITING)

    def close(self) -> None:
        """Wait for nothing any more."""
        for key in self._awaited:
            sessions = self._keys.waiting.get(key, [])
            if self in sessions:
                sessions.remove(self)
        self._awaited = set()

    def _command(self) -> None:
        number = self._take(1)[0]
        if not self._is_validated:
            if number != _VALIDATE or self._number("<I") != MAGIC:
                raise BadCommand("the client does not begin as a TCPStore client does")
            self._is_validated = True
        elif number in _COMMANDS:
            _COMMANDS[number](self)
        else:
            raise BadCommand(f"command {number} of TCPStore is not known to this version of meshrun")

    def _set(self) -> None:
        key, value = self._text(), self._text()
        self._keys.set(key, value)

    def _compare_set(self) -> None:
        key, expected, desired = self._text(), self._text(), self._text()
        values = self._keys.values
        if values.get(key, b"") == expected:
            self._keys.set(key, desired)
        # As torch has it: the expected value is the answer for a key that is not there.
        self._answer(values.get(key, expected))

    def _get(self) -> None:
        self._answer(self._keys.values.get(self._text(), b""))

    def _add(self) -> None:
        key, amount = self._text(), self._number("<q")
        self._send(struct.pack("<q", self._keys.add(key, amount)))

    def _check(self) -> None:
        keys = self._texts()
        self._send(_READY if all(map(self._keys.has, keys)) else _NOT_READY)

    def _wait(self) -> None:
        keys = self._texts()
        if all(map(self._keys.has, keys)):
            self._send(_STOP_WAITING)
        else:
            self._await({key for key in keys if not self._keys.has(key)})

    def _count(self) -> None:
        self._send(struct.pack("<q", len(self._keys.values)))

    def _delete(self) -> None:
        self._send(struct.pack("<q", self._keys.values.pop(self._text(), None) is not None))

    def _append(self) -> None:
        key, value = self._text(), self._text()
        self._keys.set(key, self._keys.values.get(key, b"") + value)

    def _multi_get(self) -> None:
        for key in self._texts():
            self._answer(self._keys.values.get(key, b""))

    def _multi_set(self) -> None:
        pairs = [(self._text(), self._text()) for _ in range(self._number("<Q"))]
        for key, value in pairs:
            self._keys.set(key, value)

    def _cancel_wait(self) -> None:
        self.close()
        self._send(_WAIT_CANCELED)

    def _ping(self) -> None:
        self._send(self._take(4))

    def _queue_push(self) -> None:
        key, value = self._text(), self._text()
        self._keys.queues.setdefault(key, deque()).append(value)
        self._keys.wake_one(key)

    def _queue_pop(self) -> None:
        queue = self._keys.queues.get(self._text(), deque())
        self._send(struct.pack("<q", len(queue)))
        if queue:
            self._answer(queue.popleft())

    def _queue_length(self) -> None:
        self._send(struct.pack("<q", len(self._keys.queues.get(self._text(), ()))))

    def _list(self) -> None:
        self._send(struct.pack("<q", len(self._keys.values)))
        for key in self._keys.values:
            self._answer(key)

    def _barrier(self) -> None:
        key, size = self._text(), self._number("<q")
        count = int(self._keys.values.get(key, b"0")) + 1
        self._keys.values[key] = str(count).encode()
        if count < size:
            self._await({key})
        else:
            self._keys.wake(key)
            self._send(_STOP_WAITING)

    def _await(self, keys: set[bytes]) -> None:
        self._awaited = keys
        for key in keys:
            self._keys.waiting.setdefault(key, []).append(self)

    def _answer(self, value: bytes) -> None:
        self._send(struct.pack("<Q", len(value)) + value)

    def _take(self, count: int) -> bytes:
        end = self._at + count
        if end > len(self._data):
            raise _Incomplete
        taken, self._at = bytes(self._data[self._at : end]), end
        return taken

    def _number(self, form: str) -> int:
        return int(struct.unpack(form, self._take(struct.calcsize(form)))[0])

    def _text(self) -> bytes:
        length = self._number("<Q")
        if length > LONGEST:
            raise BadCommand(f"a key or value of {length} bytes is longer than {LONGEST}")
        return self._take(length)

    def _texts(self) -> list[bytes]:
        return [self._text() for _ in range(self._number("<Q"))]


_COMMANDS: dict[int, Callable[[Session], None]] = {
    1: Session._set,
    2: Session._compare_set,
    3: Session._get,
    4: Session._add,
    5: Session._check,
    6: Session._wait,
    7: Session._count,
    8: Session._delete,
    9: Session._append,
    10: Session._multi_get,
    11: Session._multi_set,
    12: Session._cancel_wait,
    13: Session._ping,
    14: Session._queue_push,
    15: Session._queue_pop,
    16: Session._queue_length,
    17: Session._list,
    18: Session._barrier,
}

"""Whose connection it is: the user at the other end of a connection within this machine, as the kernel tells it.

owner_of_peer(connection)        # the user id, or None where no living process holds that end
owner_of_listener(port)          # who listens on a loopback port
shut_out_strangers(ports)        # end the connections of other users to ports of this process
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from meshrun.errors import RunFailed

TABLES = ("/proc/net/tcp", "/proc/net/tcp6")
"""The kernel's lists of TCP sockets; a socket for IPv6 that is connected over IPv4 stands in the second."""
ESTABLISHED, LISTENING = "01", "0A"
TRIES = 3
"""The kernel writes a long list in parts: a socket that has its place changed meanwhile may be in none of them."""


@dataclass(frozen=True)
class _Socket:
    local: str
    remote: str
    state: str
    owner: int
    inode: int
    """0 for a socket that its process has closed; the kernel then gives root as its owner."""


def owner_of_peer(connection: socket.socket) -> int | None:
    """The user whose process holds the other end of an IPv4 connection; None once that end is closed."""
    ends = _written(*connection.getpeername()[:2]), _written(*connection.getsockname()[:2])
    for _ in range(TRIES):
        for found in _sockets():
            if (found.local, found.remote) == ends and found.state == ESTABLISHED and found.inode:
                return found.owner
    return None


def owner_of_listener(port: int) -> int | None:
    """The user who listens on a port of 127.0.0.1; None if nobody does."""
    where = _written("127.0.0.1", port)
    return next((found.owner for found in _sockets() if found.local == where and found.state == LISTENING), None)


def listening_ports() -> set[int]:
    """The ports on which this process listens."""
    own = _own_inodes()
    return {_port(found.local) for found in _sockets() if found.state == LISTENING and found.inode in own}


def shut_out_strangers(ports: set[int]) -> int:
    """End the connections of other users of this machine to these ports of this process; returns how many there were.

    A connection that only makes noise is gone then; one that has taken a rank's place raises in whoever waits for it.
    """
    found = [each for each in _sockets() if each.state == ESTABLISHED and each.inode]
    owners = {(each.local, each.remote): each.owner for each in found}
    own, shut = _own_inodes(), 0
    for each in found:
        peer = owners.get((each.remote, each.local), os.geteuid())
        if each.inode in own and _port(each.local) in ports and peer != os.geteuid():
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(own[each.inode])) as connection:
                connection.shutdown(socket.SHUT_RDWR)
                shut += 1
    return shut


def _sockets() -> Iterator[_Socket]:
    for table in TABLES:
        try:
            text = Path(table).read_text()
        except FileNotFoundError:
            if table == TABLES[0]:
                raise RunFailed(f"{table} is not there, which says whose connections to this run's ports are") from None
            continue  # a kernel without IPv6
        for line in text.splitlines()[1:]:
            fields = line.split()
            yield _Socket(_as_ipv4(fields[1]), _as_ipv4(fields[2]), fields[3], int(fields[7]), int(fields[9]))


def _written(address: str, port: int) -> str:
    """An IPv4 address and port in the kernel's letters."""
    return f"{int.from_bytes(socket.inet_aton(address), sys.byteorder):08X}:{port:04X}"


def _as_ipv4(written: str) -> str:
    """The IPv4 address that an address for IPv6 stands for, where it stands for one."""
    prefix = f"{0:016X}{int.from_bytes(bytes((0, 0, 255, 255)), sys.byteorder):08X}"
    return written.removeprefix(prefix)


def _port(written: str) -> int:
    return int(written.rpartition(":")[2], 16)


def _own_inodes() -> dict[int, int]:
    """The sockets of this process -> their descriptors."""
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        try:
            name = str(entry.readlink())
        except OSError:  # closed meanwhile
            continue
        if name.startswith("socket:["):
            found[int(name[len("socket:[") : -1])] = int(entry.name)
    return found

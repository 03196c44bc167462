"""Whose connection it is: the user at the other end of a connection within this machine, as the kernel tells it.

owner_of_peer(connection)        # the user id, or None where no living process holds that end
owner_of_listener(port)          # who listens on a loopback port
shut_out_strangers(ports)        # end the connections of other users to ports of this process
take_no_more(ports)              # nobody can connect to these ports of gloo's any more
connections_of_gloo()            # those to ranks, and those of other users

The kernel is asked for one connection (`sock_diag`), which takes as long with many connections on the machine as with
few: a list of all of them would let any user slow down this one's runs. Its lists are read only where it answers no
such question.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import ipaddress
import os
import socket
import struct
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

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
End = tuple[Address, int]
"""An address and a port."""
Ends = tuple[End, End]
"""This end of a connection, and the other."""

_NETLINK_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, _NLMSG_ERROR = 4, 20, 1, 2
_HEADER = struct.Struct("=IHHII")
"""nlmsghdr: length, type, flags, number, port."""
_REQUEST = struct.Struct("=BBxxI2s2s16s16sI8s")
"""inet_diag_req_v2: family, protocol, states, then the ends of a socket, its interface and its cookie."""
_ANSWER = struct.Struct("=BBxx48x12xII")
"""inet_diag_msg: family, state, then the owner and the inode."""

_SO_ATTACH_FILTER = 26
_DROP_ALL = struct.pack("HBBI", 0x06, 0, 0, 0)
"""A filter of packets (BPF) of one instruction: keep none of them."""


@dataclass(frozen=True)
class _Socket:
    local: str
    remote: str
    state: str
    owner: int
    inode: int
    """0 for a socket that its process has closed; the kernel then gives root as its owner."""


def owner_of_peer(connection: socket.socket) -> int | None:
    """The user whose process holds the other end of a connection; None once that end is closed, or is elsewhere."""
    try:
        local, remote = _end(connection.getpeername()), _end(connection.getsockname())
    except OSError:  # it was reset before it was accepted
        return None
    try:
        return _asked(local, remote)
    except OSError:  # a kernel, or a container, without this service
        pass
    with contextlib.suppress(OSError):  # no file can be opened just now: nobody is known then
        return _listed(_written(*local), _written(*remote))
    return None


def owner_of_listener(port: int) -> int | None:
    """The user to whom a client of a port of 127.0.0.1 connects; None if nobody listens there."""
    owners = {found.local: found.owner for found in _sockets() if found.state == LISTENING}
    # The kernel prefers the listener at this very address to one at all addresses.
    places = (_written(ipaddress.ip_address(each), port) for each in ("127.0.0.1", "0.0.0.0", "::"))
    return next((owners[place] for place in places if place in owners), None)


def listening_ports() -> set[int]:
    """The ports on which this process listens."""
    own = _own_sockets()
    return {_port(found.local) for found in _sockets() if found.state == LISTENING and found.inode in own}


def shut_out_strangers(ports: set[int]) -> int:
    """End the connections of other users of this machine to these ports of this process; returns how many there were.

    A connection that only makes noise is gone then; one that has taken a rank's place raises in whoever waits for it.
    """
    shut = 0
    for descriptor in _own_sockets().values():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            is_tcp = connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM
            if (
                is_tcp
                and connection.getsockname()[1] in ports
                and owner_of_peer(connection) not in (None, os.geteuid())
            ):
                connection.shutdown(socket.SHUT_RDWR)
                shut += 1
    return shut


def take_no_more(ports: set[int]) -> int:
    """Have the kernel drop whatever comes to those of these ports that are gloo's; returns how many these are.

    gloo takes every connection to a port of a group for as long as the group is there, and ends the process when it
    has no descriptor for one more; who is connected already stays so. NCCL takes connections of ranks later, too.
    """
    found = 0
    drop_all = ctypes.create_string_buffer(_DROP_ALL)
    program = struct.pack("HP", 1, ctypes.addressof(drop_all))
    for taking, _ in sockets_of_gloo():
        for port in taking:
            if port.getsockname()[1] in ports:
                found += 1
                with contextlib.suppress(OSError):  # a kernel without such filters
                    port.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
    return found


def connections_of_gloo() -> tuple[set[Ends], set[Ends]]:
    """gloo's connections in this process: those to ranks, and those that other users of this machine have or had."""
    ranks: set[Ends] = set()
    others: set[Ends] = set()
    for _, connections in sockets_of_gloo():
        for each in connections:
            with contextlib.suppress(OSError):  # it is closed
                ends = _end(each.getsockname()), _end(each.getpeername())
                (ranks if _may_be_rank(each, *ends) else others).add(ends)
    return ranks, others


def _may_be_rank(connection: socket.socket, local: End, remote: End) -> bool:
    """Whether the other end is of this user, or of another machine."""
    owner = owner_of_peer(connection)
    return owner == os.geteuid() or (owner is None and local[0] != remote[0] and not remote[0].is_loopback)


def sockets_of_gloo() -> Iterator[tuple[list[socket.socket], list[socket.socket]]]:
    """gloo's ports in this process, and the connections that it waits on together with them.

    Others in a process do not wait so. They are copies, which are closed afterwards: the number of a descriptor may
    stand for something else a moment later.
    """
    for descriptors in _polled_together():
        with contextlib.ExitStack() as stack:
            sockets = []
            for descriptor in descriptors:
                with contextlib.suppress(OSError):  # no socket, or closed meanwhile
                    sockets.append(stack.enter_context(socket.socket(fileno=os.dup(descriptor))))
            taking = [each for each in sockets if each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)]
            if taking:
                yield taking, [each for each in sockets if each not in taking]


def _polled_together() -> list[list[int]]:
    """For each of the kernel's lists of descriptors that this process waits on, these."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if str(entry.readlink()) == "anon_inode:[eventpoll]":
                lines = Path(f"/proc/self/fdinfo/{entry.name}").read_text().splitlines()
                found.append([int(line.split()[1]) for line in lines if line.startswith("tfd:")])
    return found


def _asked(local: End, remote: End) -> int | None:
    """The owner of the connected socket with these ends, as the kernel answers; an OSError where it does not."""
    state, owner, inode = _answer(local, remote)
    if state == ESTABLISHED and not inode:  # nobody has accepted it yet: it will be of who listens there
        state, owner, inode = _answer(local, (type(local[0])(0), 0))
        return owner if state == LISTENING and inode else None
    # Where nobody is connected so, the kernel finds who listens there.
    return owner if state == ESTABLISHED and inode else None


def _answer(local: End, remote: End) -> tuple[str, int, int]:
    """State, owner and inode of the socket with these ends, else of the one that listens; no state of none."""
    family = socket.AF_INET if local[0].version == 4 else socket.AF_INET6
    ends = (local[1].to_bytes(2), remote[1].to_bytes(2), *(end[0].packed.ljust(16, b"\0") for end in (local, remote)))
    request = _REQUEST.pack(family, socket.IPPROTO_TCP, 0xFFFFFFFF, *ends, 0, b"\xff" * 8)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as kernel:
        kernel.settimeout(1.0)
        header = _HEADER.pack(_HEADER.size + len(request), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, 1, 0)
        kernel.sendto(header + request, (0, 0))
        answer = kernel.recv(4096)
    kind = _HEADER.unpack_from(answer)[1] if len(answer) >= _HEADER.size + 4 else 0
    if kind == _NLMSG_ERROR:
        (code,) = struct.unpack_from("=i", answer, _HEADER.size)
        if code == -errno.ENOENT:
            return "", 0, 0
        raise OSError(-code, os.strerror(-code))
    if kind != _SOCK_DIAG_BY_FAMILY or len(answer) < _HEADER.size + _ANSWER.size:
        raise OSError(errno.EBADMSG, os.strerror(errno.EBADMSG))
    _, state, owner, inode = _ANSWER.unpack_from(answer, _HEADER.size)
    return f"{state:02X}", int(owner), int(inode)


def _listed(local: str, remote: str) -> int | None:
    """The same from the kernel's lists."""
    for _ in range(TRIES):
        for found in _sockets():
            if (found.local, found.remote) == (local, remote) and found.state == ESTABLISHED:
                return found.owner if found.inode else owner_of_listener(_port(local))  # nobody has accepted it yet
    return None


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


def _end(name: tuple[str, int]) -> End:
    """What a socket calls one of its ends; an IPv4 address that is written for IPv6 as what it is."""
    address = ipaddress.ip_address(name[0].partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address, name[1]


def _written(address: Address, port: int) -> str:
    """An address and port in the kernel's letters."""
    packed = address.packed
    words = [int.from_bytes(packed[at : at + 4], sys.byteorder) for at in range(0, len(packed), 4)]
    return f"{''.join(f'{word:08X}' for word in words)}:{port:04X}"


def _as_ipv4(written: str) -> str:
    """The IPv4 address that an address for IPv6 stands for, where it stands for one."""
    prefix = f"{0:016X}{int.from_bytes(bytes((0, 0, 255, 255)), sys.byteorder):08X}"
    return written.removeprefix(prefix)


def _port(written: str) -> int:
    return int(written.rpartition(":")[2], 16)


def _own_sockets() -> dict[int, int]:
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

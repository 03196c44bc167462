"""Whose connections they are, as the kernel tells it, and what becomes of those of other users."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import select
import socket
import struct
from collections.abc import Iterator

import pytest

from meshrun.store import owners
from meshrun.store.owners import (
    connections_of_gloo,
    listening_ports,
    owner_of_listener,
    owner_of_peer,
    shut_out_strangers,
    take_no_more,
)
from meshrun.store.relay import Relay
from meshrun.store.server import Server

NOBODY = 65534
ROOT_ONLY = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user to try this")


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def of_nobody(where: tuple[str, int], family: int = socket.AF_INET) -> socket.socket:
    """A connection whose end belongs to another user; the socket's owner is who has made it."""
    os.seteuid(NOBODY)
    try:
        connection = socket.socket(family)
    finally:
        os.seteuid(0)
    connection.settimeout(5)
    connection.connect(where)
    return connection


def test_the_owner_of_a_connection_and_of_a_port_is_known(listener: socket.socket):
    port = listener.getsockname()[1]
    with socket.create_connection(listener.getsockname()):
        assert owner_of_peer(listener.accept()[0]) == os.geteuid()
    assert owner_of_listener(port) == os.geteuid()
    assert port in listening_ports()


def test_a_connection_that_was_closed_has_no_owner(listener: socket.socket):
    """The kernel shows root as the owner of a socket that nobody holds: it must not pass for one of root's."""
    socket.create_connection(listener.getsockname()).close()
    assert owner_of_peer(listener.accept()[0]) is None


def reset(where: tuple[str, int]) -> None:
    """Connect, and have the kernel reset the connection, which then still waits to be accepted."""
    with socket.create_connection(where) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def test_a_connection_that_was_reset_has_no_owner(listener: socket.socket):
    reset(listener.getsockname())
    assert owner_of_peer(listener.accept()[0]) is None


def test_connections_that_are_reset_before_they_are_accepted_end_neither_the_store_nor_a_relay():
    with Server() as server, Relay("127.0.0.1", server.port_at("127.0.0.1", b"secret"), b"secret") as relay:
        for port in (server.port, relay.port):
            for _ in range(20):
                reset(("127.0.0.1", port))
            with socket.create_connection(("127.0.0.1", port), timeout=5) as client:
                client.sendall(b"\0\xce\xf7\x85\x3c" + b"\x0dping")
                assert client.recv(4) == b"ping"


def refused(*_ends: object) -> None:
    raise OSError(93, "Protocol not supported")


def test_without_the_kernels_answer_for_one_connection_its_lists_are_read(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(owners, "_asked", refused)
    with socket.create_connection(listener.getsockname()):
        assert owner_of_peer(listener.accept()[0]) == os.geteuid()


def test_the_owner_is_found_without_a_list_of_all_connections(listener: socket.socket, monkeypatch: pytest.MonkeyPatch):
    """Any user can make that list long, and each connection to the store would take as long as reading it."""
    monkeypatch.setattr(owners, "TABLES", ("/nowhere",))
    with socket.create_connection(listener.getsockname()):
        assert owner_of_peer(listener.accept()[0]) == os.geteuid()


def test_where_no_file_can_be_opened_nobody_is_known(listener: socket.socket, monkeypatch: pytest.MonkeyPatch):
    def full(*_arguments: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(owners, "_asked", full)
    monkeypatch.setattr(owners, "_sockets", full)
    with socket.create_connection(listener.getsockname()):
        assert owner_of_peer(listener.accept()[0]) is None


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
def test_the_owner_of_a_connection_over_ipv6_is_known():
    server = socket.create_server(("::1", 0), family=socket.AF_INET6)
    with server, socket.create_connection(server.getsockname()[:2]):
        assert owner_of_peer(server.accept()[0]) == os.geteuid()


@pytest.mark.parametrize("asks", [True, False], ids=["the kernel is asked", "its lists are read"])
@pytest.mark.parametrize("user", [0, pytest.param(NOBODY, marks=ROOT_ONLY)])
def test_a_connection_that_nobody_has_accepted_yet_is_of_who_listens(
    user: int, asks: bool, monkeypatch: pytest.MonkeyPatch
):
    """A busy rank accepts late: it was taken for one that is gone, and whoever had connected gave up."""
    if not asks:
        monkeypatch.setattr(owners, "_NETLINK_SOCK_DIAG", 99)
    os.seteuid(user or os.geteuid())
    try:
        server = socket.create_server(("127.0.0.1", 0))
    finally:
        os.seteuid(os.getuid())
    with server, socket.create_connection(server.getsockname()) as connection:
        assert owner_of_peer(connection) == (user or os.geteuid())


@ROOT_ONLY
@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0", "::"])
def test_who_listens_on_a_loopback_port_is_known_also_where_he_listens_on_all_addresses(address: str):
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    os.seteuid(NOBODY)
    try:
        server = socket.create_server((address, 0), family=family, dualstack_ipv6=address == "::")
    finally:
        os.seteuid(0)
    with server:
        assert owner_of_listener(server.getsockname()[1]) == NOBODY


@ROOT_ONLY
@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_another_users_connection_is_told_apart_over_either_protocol(listener: socket.socket, family: int):
    host, port = listener.getsockname()
    with of_nobody(("::ffff:" + host if family == socket.AF_INET6 else host, port), family):
        assert owner_of_peer(listener.accept()[0]) == NOBODY


@ROOT_ONLY
def test_connections_of_other_users_are_ended_and_own_ones_stay(listener: socket.socket):
    where = listener.getsockname()
    with socket.create_connection(where) as own, of_nobody(where) as strange:
        ends = [listener.accept()[0] for _ in range(2)]
        assert shut_out_strangers({where[1]}) == 1
        assert strange.recv(1) == b""
        ends[0].sendall(b"x")
        assert own.recv(1) == b"x"


def can_connect(where: tuple[str, int]) -> bool:
    try:
        socket.create_connection(where, timeout=0.2).close()
    except TimeoutError:
        return False
    return True


def test_nobody_connects_to_a_port_that_takes_no_more_and_who_is_connected_stays(listener: socket.socket):
    where = listener.getsockname()
    with (
        socket.create_connection(where) as own,
        listener.accept()[0] as end,
        socket.create_server(("127.0.0.1", 0)) as before,
        select.epoll() as waited_on,
    ):
        waited_on.register(before, select.EPOLLIN)
        assert take_no_more({where[1]}) == 0 and can_connect(where), "only a port that is polled with others is gloo's"
        waited_on.register(listener, select.EPOLLIN)
        assert take_no_more({where[1] + 1}) == 0 and can_connect(where), "another port is meant"
        assert take_no_more({where[1]}) == 1 and not can_connect(where)
        own.sendall(b"x")
        assert end.recv(1) == b"x"


@ROOT_ONLY
def test_whoever_has_taken_a_ranks_place_is_not_counted_as_one(listener: socket.socket):
    where = listener.getsockname()
    with select.epoll() as waited_on, contextlib.ExitStack() as stack:
        waited_on.register(listener, select.EPOLLIN)
        for connect in (lambda: socket.create_connection(where), lambda: of_nobody(where)):
            stack.enter_context(connect())
            waited_on.register(stack.enter_context(listener.accept()[0]), select.EPOLLIN)
        of_nobody(where).close()
        waited_on.register(stack.enter_context(listener.accept()[0]), select.EPOLLIN)
        assert list(map(len, connections_of_gloo())) == [1, 2]


@ROOT_ONLY
def test_the_store_closes_the_connection_of_another_user_without_a_word():
    with Server() as server, of_nobody(("127.0.0.1", server.port)) as strange:
        assert strange.recv(1) == b""


def test_a_client_without_the_secret_gets_a_nonce_and_nothing_else():
    with Server() as server:
        where = "127.0.0.1", server.port_at("127.0.0.1", b"secret")
        with socket.create_connection(where, timeout=5) as client:
            assert len(client.recv(100)) == 65
            client.sendall(b"0" * 64 + b" " + b"0" * 64 + b"\n")
            assert client.recv(100) == b""


def test_silent_connections_to_the_port_for_nodes_are_held_in_small_number_and_for_a_short_time():
    with Server() as server:
        where = "127.0.0.1", server.port_at("127.0.0.1", b"secret")
        clients = [socket.create_connection(where, timeout=5) for _ in range(80)]
        assert clients[0].recv(65) != b""
        assert clients[0].recv(1) == b"", "the first has made room for others"
        for client in clients:
            client.close()


@ROOT_ONLY
def test_connections_of_other_users_to_other_ports_stay(listener: socket.socket):
    with of_nobody(listener.getsockname()):
        end = listener.accept()[0]
        assert shut_out_strangers({listener.getsockname()[1] + 1}) == 0
        end.close()


@ROOT_ONLY
def test_a_relay_closes_the_connection_of_another_user_without_a_word():
    with (
        Server() as server,
        Relay("127.0.0.1", server.port_at("127.0.0.1", b"secret"), b"secret") as relay,
        of_nobody(("127.0.0.1", relay.port)) as strange,
    ):
        assert strange.recv(1) == b""


def test_an_end_that_its_process_has_closed_has_no_owner(listener: socket.socket, monkeypatch: pytest.MonkeyPatch):
    with socket.create_connection(listener.getsockname()) as near, listener.accept()[0] as far:
        ends = owners._written(*owners._end(near.getsockname())), owners._written(*owners._end(near.getpeername()))
        closed = owners._Socket(*ends, owners.ESTABLISHED, owner=0, inode=0)
        monkeypatch.setattr(owners, "_asked", refused)
        monkeypatch.setattr(owners, "_sockets", lambda: iter([closed]))
        assert owner_of_peer(far) is None


def test_who_listens_at_an_end_is_not_the_owner_of_a_connection_from_it(listener: socket.socket):
    """The kernel finds the listener where nobody is connected so."""
    where = ipaddress.ip_address("127.0.0.1"), listener.getsockname()[1]
    assert owners._asked(where, (where[0], 9)) is None
    assert owners._asked((where[0], 8), (where[0], 9)) is None, "nobody is there at all"


def test_only_ports_of_this_process_are_its_own(listener: socket.socket, monkeypatch: pytest.MonkeyPatch):
    assert listener.getsockname()[1] in owners.listening_ports()
    monkeypatch.setattr(owners, "_own_sockets", dict)
    assert owners.listening_ports() == set()


def test_of_two_that_listen_on_a_port_the_one_at_the_loopback_address_is_who_answers(monkeypatch: pytest.MonkeyPatch):
    def listening(address: str, owner: int) -> owners._Socket:
        return owners._Socket(owners._written(ipaddress.ip_address(address), 80), "", owners.LISTENING, owner, 1)

    everywhere = [listening("::", 3), listening("0.0.0.0", 2)]
    monkeypatch.setattr(owners, "_sockets", lambda: iter([*everywhere, listening("127.0.0.1", 1)]))
    assert owner_of_listener(80) == 1
    monkeypatch.setattr(owners, "_sockets", lambda: iter(everywhere))
    assert owner_of_listener(80) == 2 and owner_of_listener(81) is None


def test_a_connection_that_nobody_has_accepted_yet_is_of_who_listens_there(monkeypatch: pytest.MonkeyPatch):
    """Until then the kernel gives root as its owner."""
    end = ipaddress.ip_address("127.0.0.1"), 4711
    answers = {4712: (owners.ESTABLISHED, 0, 0), 0: (owners.LISTENING, 1000, 55)}
    monkeypatch.setattr(owners, "_answer", lambda _, remote: answers[remote[1]])
    assert owners._asked(end, (end[0], 4712)) == 1000

"""Single commands to the store, byte by byte: when clients that wait get their answer, and what ends a connection."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading

import pytest

from meshrun.store import relay as relay_module
from meshrun.store import server as server_module
from meshrun.store.handshake import CLIENT, LINE, proof, prove
from meshrun.store.keys import LONGEST, MAGIC, BadCommand, Keys, Session
from meshrun.store.relay import Relay
from meshrun.store.server import Server

SECRET = b"s" * 32
BEGIN = b"\0" + struct.pack("<I", MAGIC)
SET, GET, ADD, WAIT, APPEND, CANCEL, PING, PUSH, BARRIER = 1, 3, 4, 6, 9, 12, 13, 14, 18


def text(content: bytes) -> bytes:
    return struct.pack("<Q", len(content)) + content


def command(number: int, *parts: bytes) -> bytes:
    return bytes([number]) + b"".join(parts)


def wait_for(*keys: bytes) -> bytes:
    return command(WAIT, struct.pack("<Q", len(keys)), *map(text, keys))


def received(client: socket.socket, count: int) -> bytes:
    """So many bytes, or fewer where the connection ends."""
    found = b""
    while len(found) < count and (more := client.recv(count - len(found))):
        found += more
    return found


class Client:
    def __init__(self, keys: Keys) -> None:
        self.answers: list[bytes] = []
        self.session = Session(keys, self.answers.append)
        self.session.feed(BEGIN)

    def say(self, data: bytes) -> list[bytes]:
        self.session.feed(data)
        return self.answers


def test_a_wait_for_two_keys_ends_with_the_second():
    keys = Keys()
    client = Client(keys)
    client.say(wait_for(b"a", b"b"))
    keys.set(b"a", b"1")
    assert client.answers == []
    keys.set(b"b", b"1")
    assert client.answers == [b"\0"]


def test_a_client_that_is_gone_is_sent_nothing():
    keys = Keys()
    client = Client(keys)
    client.say(wait_for(b"a"))
    client.session.close()
    keys.set(b"a", b"1")
    assert client.answers == []


def test_an_entry_of_a_queue_wakes_the_client_that_has_waited_longest_and_no_other():
    keys = Keys()
    first, second, pushing = Client(keys), Client(keys), Client(keys)
    for client in (first, second):
        client.say(wait_for(b"q"))
    pushing.say(command(PUSH, text(b"q"), text(b"entry")))
    assert (first.answers, second.answers) == ([b"\0"], [])


def test_a_barrier_opens_for_all_when_the_last_has_come():
    keys = Keys()
    clients = [Client(keys) for _ in range(3)]
    for client in clients:
        assert [each.answers for each in clients] == [[], [], []]
        client.say(command(BARRIER, text(b"b"), struct.pack("<q", 3)))
    assert [each.answers for each in clients] == [[b"\0"]] * 3


def test_a_client_that_does_not_begin_as_torchs_do_is_refused():
    for begin in (command(PING) + BEGIN[1:], BEGIN[:1] + struct.pack("<I", MAGIC + 1)):
        with pytest.raises(BadCommand, match="does not begin as a TCPStore client does"):
            Session(Keys(), print).feed(begin)


def test_a_text_that_is_too_long_is_refused_before_it_has_come():
    client = Client(Keys())
    with pytest.raises(BadCommand, match="longer than"):
        client.say(command(SET) + struct.pack("<Q", LONGEST + 1))


@pytest.mark.parametrize(("before", "amount"), [((1 << 63) - 1, 1), (-(1 << 63), -1)])
def test_a_counter_does_not_leave_the_range_of_64_bits(before: int, amount: int):
    keys = Keys()
    keys.set(b"n", str(before).encode())
    with pytest.raises(BadCommand, match="64 bits"):
        Client(keys).say(command(ADD, text(b"n"), struct.pack("<q", amount)))


def on_loopback(server: Server) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", server.port), timeout=5)
    client.sendall(BEGIN)
    return client


def test_a_counter_that_holds_no_number_ends_its_client_and_not_the_store():
    with Server() as server, on_loopback(server) as client, on_loopback(server) as other:
        client.sendall(command(SET, text(b"n"), text(b"x")) + command(ADD, text(b"n"), struct.pack("<q", 1)))
        assert client.recv(1) == b""
        other.sendall(command(PING, b"ping"))
        assert received(other, 4) == b"ping"


def test_a_long_answer_comes_whole():
    long = bytes(range(256)) * 32_768
    with Server() as server, on_loopback(server) as client:
        client.sendall(command(SET, text(b"long"), text(long)) + command(GET, text(b"long")))
        assert received(client, 8 + len(long)) == text(long)


def knock(server: Server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port_at("127.0.0.1", SECRET)), timeout=20)


def test_a_stranger_that_says_nothing_is_shown_out_in_time(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(server_module, "PATIENCE", 0.2)
    with Server() as server, knock(server) as stranger:
        assert len(received(stranger, 65)) == 65
        stranger.settimeout(8)
        assert stranger.recv(1) == b""


def test_a_line_without_an_end_is_not_waited_for(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(server_module, "PATIENCE", 600.0)
    with Server() as server, knock(server) as stranger:
        received(stranger, 65)
        stranger.sendall(b"0" * LINE)
        assert stranger.recv(1) == b""


def test_commands_that_come_together_with_the_proof_are_answered():
    with Server() as server, knock(server) as client:
        challenge, nonce = received(client, 65).decode().strip(), "n" * 64
        line = f"{nonce} {proof(SECRET, CLIENT, challenge, nonce)}\n".encode()
        client.sendall(line + BEGIN + command(PING, b"ping"))
        assert received(client, 65 + 4)[65:] == b"ping"


def test_a_client_behind_a_relay_may_wait_for_longer_than_a_handshake_may_take(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(relay_module, "PATIENCE", 0.2)
    with (
        Server() as server,
        Relay("127.0.0.1", server.port_at("127.0.0.1", SECRET), SECRET) as relay,
        socket.create_connection(("127.0.0.1", relay.port), timeout=20) as client,
        knock(server) as other,
    ):
        client.sendall(BEGIN + wait_for(b"late"))
        prove(other, SECRET)
        late = threading.Timer(0.6, other.sendall, [BEGIN + command(SET, text(b"late"), text(b"1"))])
        late.start()
        assert client.recv(1) == b"\0"
        late.join()


def test_a_key_that_is_appended_to_is_there_for_those_who_wait_for_it():
    keys = Keys()
    waiting, appending = Client(keys), Client(keys)
    waiting.say(wait_for(b"list"))
    appending.say(command(APPEND, text(b"list"), text(b"entry")))
    assert waiting.answers == [b"\0"]


def test_an_entry_of_a_queue_does_not_wake_a_client_that_has_hung_up():
    with Server() as server, on_loopback(server) as lives, on_loopback(server) as pushing:
        with on_loopback(server) as gone:
            gone.sendall(wait_for(b"queue") + command(PING, b"ping"))
            assert received(gone, 4) == b"ping"
        lives.sendall(wait_for(b"queue") + command(PING, b"ping"))
        assert received(lives, 4) == b"ping"
        pushing.sendall(command(PUSH, text(b"queue"), text(b"entry")))
        assert lives.recv(1) == b"\0"


def test_a_wait_that_was_cancelled_is_not_answered_later():
    keys = Keys()
    client = Client(keys)
    client.say(wait_for(b"a"))
    assert client.say(command(CANCEL)) == [b"\1"]
    keys.set(b"a", b"1")
    assert client.answers == [b"\1"]


@pytest.mark.parametrize("owner", [None, 0x7FFFFFFF])
def test_a_client_whose_user_is_another_or_cannot_be_told_is_shown_out(
    owner: int | None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(server_module, "owner_of_peer", lambda _: owner)
    with Server() as server, on_loopback(server) as client, contextlib.suppress(OSError):
        client.sendall(command(PING, b"1234"))
        assert client.recv(4) == b""


def test_a_client_that_takes_no_answers_keeps_nobody_waiting():
    with Server() as server, on_loopback(server) as lazy, on_loopback(server) as quick:
        lazy.sendall(command(SET, text(b"big"), text(bytes(1 << 20))) + command(PING, b"1234"))
        assert received(lazy, 4) == b"1234"
        lazy.sendall(64 * command(GET, text(b"big")))
        assert lazy.recv(8, socket.MSG_PEEK), "the store has begun to answer"
        quick.sendall(command(PING, b"1234"))
        assert received(quick, 4) == b"1234"


def test_a_node_that_has_proved_itself_stays(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(server_module, "PATIENCE", 0.2)
    with Server() as server, knock(server) as node, knock(server) as stranger:
        prove(node, SECRET)
        assert len(received(stranger, 65)) == 65 and stranger.recv(1) == b"", "the one that proves nothing goes"
        node.sendall(BEGIN + command(PING, b"1234"))
        assert received(node, 4) == b"1234"


def test_a_relay_that_strangers_push_out_of_the_stores_port_tries_again():
    """The port keeps few connections that have proved nothing, and closes the oldest for each further one."""
    pushed_out = 3

    def serve(port: socket.socket, server: Server) -> None:
        for _ in range(pushed_out):
            port.accept()[0].close()
        with port.accept()[0] as near, knock(server) as far:
            relay_module._splice(near, far)

    with Server() as server, socket.create_server(("127.0.0.1", 0)) as port:
        threading.Thread(target=serve, args=(port, server), daemon=True).start()
        with (
            Relay("127.0.0.1", port.getsockname()[1], SECRET) as relay,
            socket.create_connection(("127.0.0.1", relay.port), timeout=20) as client,
        ):
            client.sendall(BEGIN + command(PING, b"ping"))
            assert received(client, 4) == b"ping"


def test_a_relay_gives_up_on_a_store_that_lets_nobody_in(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(relay_module, "_GIVE_UP", 0.2)

    def refuse(port: socket.socket) -> None:
        with contextlib.suppress(OSError):  # the test is over
            while True:
                port.accept()[0].close()

    with socket.create_server(("127.0.0.1", 0)) as port:
        threading.Thread(target=refuse, args=(port,), daemon=True).start()
        with (
            Relay("127.0.0.1", port.getsockname()[1], SECRET) as relay,
            socket.create_connection(("127.0.0.1", relay.port), timeout=5) as client,
        ):
            assert client.recv(1) == b""
        port.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("side", [0, 1])
def test_a_relayed_connection_ends_with_either_side(side: int):
    near, far = socket.socketpair(), socket.socketpair()
    passing = threading.Thread(target=relay_module._splice, args=(near[0], far[0]), daemon=True)
    passing.start()
    (near, far)[side][1].close()
    passing.join(5)
    assert not passing.is_alive()

"""Who answers at the address that a node joins: another user, somebody between the two, a run of another program."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from meshrun.cli import run as run_module
from meshrun.cli.command import Asked
from meshrun.cli.target import find
from meshrun.config import FORMAT, RunConfig, write_json
from meshrun.errors import RunFailed, UserError
from meshrun.launch import secret
from meshrun.launch.node import Stopped
from meshrun.launch.nodes import Hub
from meshrun.launch.post import Post
from meshrun.launch.secret import Unseen
from tests.launch.command import TINY
from tests.launch.test_hub import Open, answering, door  # noqa: F401 - fixtures
from tests.launch.test_post import Ranks

NOBODY = 65534

as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder to another user")


class Rogue:
    """Listens at a port of its own and does with each connection what a test says; counts what is sent to it."""

    def __init__(self, talk: Callable[[socket.socket], None]) -> None:
        self._server, self._talk = socket.create_server(("127.0.0.1", 0)), talk
        self.where = f"127.0.0.1:{self._server.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                with self._server.accept()[0] as connection, contextlib.suppress(OSError, ValueError):
                    connection.settimeout(10)
                    self._talk(connection)

    def close(self) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self._thread.join()


@pytest.fixture
def rogue() -> Iterator[Callable[[Callable[[socket.socket], None]], Rogue]]:
    made: list[Rogue] = []

    def make(talk: Callable[[socket.socket], None]) -> Rogue:
        made.append(Rogue(talk))
        return made[-1]

    yield make
    for each in made:
        each.close()


def line(document: Any) -> bytes:
    return json.dumps(document).encode() + b"\n"


def naming(run: object) -> Callable[[socket.socket], None]:
    """A first node that names a directory, and hopes that its own words are a proof."""

    def talk(connection: socket.socket) -> None:
        connection.sendall(line({"run": str(run), "nonce": "a" * 64}))
        said = json.loads(connection.recv(4096))
        connection.sendall(line({"proof": said["proof"]}) + line({"welcome": "deadbeef"}))

    return talk


@pytest.mark.parametrize("path", ["relative", "/\0", "/" + "x" * 5000, ""])
def test_a_directory_that_there_cannot_be_is_no_run(rogue: Any, path: str):
    with pytest.raises(RunFailed, match="names a run directory that there cannot be"):
        Post.reach(rogue(naming(path)).where, 1, 5)


@as_root
def test_a_run_directory_of_another_user_is_refused(rogue: Any, tmp_path: Path):
    secret.make(tmp_path)
    os.chown(tmp_path, NOBODY, NOBODY)
    os.chown(tmp_path / ".join", NOBODY, NOBODY)
    with pytest.raises(UserError, match=f"{tmp_path} belongs to another user, whose number is {NOBODY}; a run with"):
        Post.reach(rogue(naming(tmp_path)).where, 1, 5)


@as_root
def test_a_secret_that_another_user_has_put_there_is_refused(rogue: Any, tmp_path: Path):
    secret.make(tmp_path)
    os.chown(tmp_path / ".join", NOBODY, NOBODY)
    with pytest.raises(UserError, match=r"\.join must be a file that this user alone can read and write"):
        Post.reach(rogue(naming(tmp_path)).where, 1, 5)


def test_a_secret_that_others_can_read_is_refused(tmp_path: Path):
    secret.make(tmp_path)
    (tmp_path / ".join").chmod(0o644)
    with pytest.raises(UserError, match="this user alone"):
        secret.read(tmp_path)


def test_a_secret_is_not_read_through_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(secret, "SEEN_WITHIN", 0.0)
    (tmp_path / "target").write_text("x" * 64)
    (tmp_path / ".join").symlink_to(tmp_path / "target")
    with pytest.raises(Unseen):
        secret.read(tmp_path)


def test_a_run_directory_that_everybody_can_change_takes_no_nodes_and_is_not_joined(rogue: Any, tmp_path: Path):
    secret.make(tmp_path)
    tmp_path.chmod(0o777)
    sentence = f"{tmp_path} may be written to by every user of the machine; .* chmod o-w {tmp_path}"
    with pytest.raises(UserError, match=sentence):
        Post.reach(rogue(naming(tmp_path)).where, 1, 5)
    with pytest.raises(UserError, match=sentence):
        Hub(0, tmp_path)


def test_who_does_not_know_the_secret_of_the_directory_that_he_names_is_found_out(rogue: Any, tmp_path: Path):
    secret.make(tmp_path)
    where = rogue(naming(tmp_path)).where
    with pytest.raises(RunFailed, match=f"{where} does not know the secret of {tmp_path}, which it names"):
        Post.reach(where, 1, 5)


def test_a_welcome_without_a_proof_is_none(rogue: Any, tmp_path: Path):
    secret.make(tmp_path)

    def talk(connection: socket.socket) -> None:
        connection.sendall(line({"run": str(tmp_path), "nonce": "a" * 64}) + line({"welcome": "deadbeef"}))
        connection.recv(4096)

    with pytest.raises(RunFailed, match="did not take this node"):
        Post.reach(rogue(talk).where, 1, 5)


def between(real: int, forge: Callable[[bytes], bytes]) -> Callable[[socket.socket], None]:
    """Somebody who passes on the whole handshake with the real first node, and then one forged line."""

    def talk(connection: socket.socket) -> None:
        with socket.create_connection(("127.0.0.1", real), timeout=10) as first:
            for to, by in ((connection, first), (first, connection)) * 2 + ((connection, first),):
                passed = by.recv(1 << 16)
                to.sendall(passed)
            connection.sendall(forge(passed))
            connection.recv(1 << 16)

    return talk


SEAT = {"order": "Seat", "job": "j", "generation": 0, "node": 0, "nodes": 1, "first": 0, "size": 1} | {
    "address": "127.0.0.1",
    "port": 9,
}


@pytest.mark.parametrize(
    "forge",
    [
        lambda _: line(SEAT),
        lambda welcome: welcome,
        lambda welcome: welcome.partition(b" ")[0] + b" " + line(SEAT),
        lambda _: line({"over": "\x1b[2J", "failed": True, "cut_off": False}),
    ],
)
def test_somebody_between_two_nodes_can_order_nothing(rogue: Any, answering: Open, forge: Any):  # noqa: F811
    joined, node = Post.reach(rogue(between(answering.hub.port, forge)).where, 1, 5), Ranks()
    begun: list[object] = []
    node.begin = begun.append  # type: ignore[method-assign]
    assert joined.serve(node, Stopped(), asks_for_all=False) is None and begun == []  # type: ignore[arg-type]
    joined.close()


def test_a_node_does_not_come_back_to_a_stranger_at_the_same_address(rogue: Any, answering: Open):  # noqa: F811
    joined = Post.reach(f"127.0.0.1:{answering.hub.port}", 1, 5)
    joined.where = rogue(naming(joined.run)).where
    with pytest.raises(RunFailed, match="does not know the secret"):
        joined.again()
    joined.close()


def test_a_run_of_another_program_than_the_one_that_was_typed_is_not_joined(answering: Open):  # noqa: F811
    config = RunConfig("/somewhere/tiny.py:experiment", procs=1)
    write_json(answering.run / "config.json", {"format": FORMAT, "config": config.to_json()})
    target = find(TINY)
    typed = f"{target.path}:{target.entry}"
    where = f"127.0.0.1:{answering.hub.port}"
    asked = Asked(target, RunConfig(typed, procs=1, join=where, timeout=5.0), as_json=False)
    with pytest.raises(UserError) as refused:
        run_module._join(asked, where, None)
    assert str(refused.value) == (
        f"the run at {where}, {answering.run}, trains /somewhere/tiny.py:experiment and not {typed}; "
        f"a node joins with the command that the first one was started with (TARGET, --join)"
    )
    assert not any(peer.member for peer in answering.hub._peers.values()), "the run was not held up"

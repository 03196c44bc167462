"""A rank whose partner is gone without hanging up waits no longer than the launcher needs to say so."""

from __future__ import annotations

import json
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshrun.launch.parting import dead_file, is_anybody_gone, let_go
from tests.launch.command import PROGRAMS, wait_until


@pytest.fixture
def echo() -> Iterator[int]:
    """A server that says what it hears, for connections that are none of gloo's."""
    server = socket.create_server(("127.0.0.1", 0))

    def answer(connection: socket.socket) -> None:
        connection.sendall(connection.recv(4))

    def serve() -> None:
        for _ in range(2):
            threading.Thread(target=answer, args=(server.accept()[0],), daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    yield server.getsockname()[1]
    server.close()


def test_a_rank_that_waits_for_one_that_is_gone_is_let_go_as_soon_as_the_launcher_says_so(tmp_path: Path, echo: int):
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    words = [sys.executable, PROGRAMS / "parting.py", str(store.port), str(echo), tmp_path]
    ranks = [subprocess.Popen([*words, str(rank)], stdout=subprocess.PIPE, text=True) for rank in range(2)]
    try:
        wait_until((tmp_path / "waits").exists, 60)
        dead_file(tmp_path, 0).write_text(json.dumps({"ranks": [], "final": False}))
        time.sleep(1)
        assert ranks[0].poll() is None, "asked to stop, but nobody is gone: it may finish its step"
        dead_file(tmp_path, 0).write_text(json.dumps({"ranks": [1], "final": False}))
        said = ranks[0].communicate(timeout=60)[0].split()
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert 1 <= float(said[0]) < 30
    assert said[1:] == ["heard", "here", "True"], "its store and its own connection are as they were"


@pytest.mark.parametrize(
    ("text", "gone"), [('{"ranks": [2], "final": false}', True), ('{"ranks": []}', False), ("{", False), ("{}", False)]
)
def test_ranks_that_are_gone_are_named_by_the_launcher(tmp_path: Path, text: str, gone: bool):
    dead_file(tmp_path, 3).write_text(text)
    assert is_anybody_gone(dead_file(tmp_path, 3)) is gone
    assert not is_anybody_gone(dead_file(tmp_path, 4))


def is_shut(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False


@pytest.mark.parametrize("takes", [True, False])
def test_only_connections_that_are_waited_on_together_with_the_port_that_takes_them_are_shut(takes: bool):
    ours, theirs = socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as server, ours, theirs, select.epoll() as waiting:
        for polled in (ours, server) if takes else (ours,):
            waiting.register(polled.fileno(), select.EPOLLIN)
        assert let_go() == takes
        assert is_shut(theirs) == takes
        with socket.create_connection(server.getsockname(), timeout=5):
            pass  # the port itself is open still
        assert let_go() == 0 or takes

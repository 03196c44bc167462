"""The first node's port is open to anybody: who may take part, and what becomes of those who may not."""

from __future__ import annotations

import json
import socket
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from meshrun.errors import RunFailed, UserError
from meshrun.launch import nodes, secret, wire
from meshrun.launch.head import Outcome
from meshrun.launch.job import Verdict
from meshrun.launch.nodes import Hub, Joined, Left, Said
from meshrun.launch.post import Post
from meshrun.launch.ranks import Ended
from tests.launch.command import wait_until


class Open:
    """A hub and whoever knocks at its port, with a clock of its own."""

    def __init__(self, run: Path) -> None:
        self.run, self.hub, self.now = run, Hub(0, run), 0.0
        self.knocked: list[socket.socket] = []

    def knock(self) -> socket.socket:
        self.knocked.append(socket.create_connection(("127.0.0.1", self.hub.port), timeout=5))
        self.news()
        return self.knocked[-1]

    def news(self, seconds: float = 0.05) -> list[nodes.Joined | nodes.Left | nodes.Said | nodes.Asked | nodes.Blind]:
        """All news of some real time, in which the hub's own clock stands still."""
        found, end = [], time.monotonic() + seconds
        while time.monotonic() < end:
            found += list(self.hub.news(self.now))
            time.sleep(0.005)
        return found

    def say(
        self, who: socket.socket, *documents: Any
    ) -> list[nodes.Joined | nodes.Left | nodes.Said | nodes.Asked | nodes.Blind]:
        who.sendall(b"".join(json.dumps(each).encode() + b"\n" for each in documents))
        return self.news()

    def hello(
        self, who: socket.socket, **changes: Any
    ) -> list[nodes.Joined | nodes.Left | nodes.Said | nodes.Asked | nodes.Blind]:
        nonce = json.loads(who.recv(4096).splitlines()[0])["nonce"]
        proof = secret.proof(secret.read(self.run), nonce)
        return self.say(who, {"hello": "node7", "ranks": 2, "proof": proof, **changes})

    def node(self) -> socket.socket:
        who = self.knock()
        (joined,) = self.hello(who)
        assert isinstance(joined, Joined) and (joined.member.host, joined.member.ranks) == ("node7", 2)
        return who


@pytest.fixture
def door(tmp_path: Path) -> Iterator[Open]:
    made = Open(tmp_path)
    yield made
    made.hub.finish(Outcome())
    for each in made.knocked:
        each.close()


def is_shown_out(who: socket.socket) -> bool:
    """Whether the other side has closed the connection; what it had said before does not matter."""
    who.settimeout(1)
    try:
        while who.recv(1 << 16):
            pass
    except ConnectionResetError:
        pass
    except TimeoutError:
        return False
    return True


def test_a_node_that_reads_the_run_directory_is_taken(door: Open):
    who = door.node()
    (said,) = door.say(who, {"fact": "Ended", "rank": 3, "code": -9, "own": True})
    assert isinstance(said, Said) and said.what == Ended(3, -9, True)
    (said,) = door.say(who, {"fact": "Verdict", "rank": -1, "sentence": "nothing moves", "action": "end"})
    assert isinstance(said, Said) and said.what == Verdict(-1, "nothing moves", "end")
    assert door.say(who, {"alive": 12}) == [] and door.hub.progress == 12


def test_the_secret_is_for_this_user_alone_new_for_each_launch_and_removed_at_the_end(tmp_path: Path):
    (tmp_path / ".join").write_text("old")
    (tmp_path / ".join").chmod(0o644)
    hub = Hub(0, tmp_path)
    assert stat.S_IMODE((tmp_path / ".join").stat().st_mode) == 0o600
    first = secret.read(tmp_path)
    hub.finish(Outcome())
    assert not (tmp_path / ".join").exists()
    assert len(first) == 64 and secret.make(tmp_path) != first


@pytest.mark.parametrize(
    "changes", [{"proof": ""}, {"proof": "\udc80"}, {"proof": 7}, {"ranks": 0}, {"ranks": "a"}, {"hello": "\udc80"}]
)
def test_who_cannot_prove_to_know_the_secret_is_no_rank(door: Open, changes: dict[str, Any]):
    who = door.knock()
    assert door.hello(who, **changes) == []
    assert is_shown_out(who)


def test_a_proof_cannot_be_used_again(door: Open):
    first, second = door.knock(), door.knock()
    nonce = json.loads(first.recv(4096))["nonce"]
    hello = {"hello": "node7", "ranks": 2, "proof": secret.proof(secret.read(door.run), nonce)}
    assert door.say(second, hello) == [] and is_shown_out(second)
    assert len(door.say(first, hello)) == 1


@pytest.mark.parametrize(
    "sent",
    [
        b"[" * 200_000 + b"\n",
        b"[]\n",
        b"GET / HTTP/1.0\r\n\r\n",
        b'{"alive": 5}\n',
        b'{"fact": "Gone", "generation": 0}\n',
        b"\xff\n",
    ],
)
def test_strangers_who_say_something_else_are_shown_out_and_the_run_goes_on(door: Open, sent: bytes):
    who = door.knock()
    who.sendall(sent)
    assert door.news(0.2) == [] and is_shown_out(who)
    assert door.hub.progress == 0
    door.node()


@pytest.mark.parametrize("member", [True, False])
def test_a_line_without_end_does_not_fill_the_memory(door: Open, member: bool):
    who = door.node() if member else door.knock()
    sent, left = 0, list[Any]()
    who.settimeout(0.05)
    for _ in range(200):
        try:
            sent += who.send(b"x" * 65536)
        except TimeoutError:
            pass
        except OSError:
            break
        left += door.hub.news(door.now)
    assert sent < 12 << 20 and is_shown_out(who)
    assert [type(each) for each in left] == ([Left] if member else [])


@pytest.mark.parametrize(
    "fact",
    [
        {"fact": "Ended", "x": 1},
        {"fact": "Ended", "rank": 1, "code": "a", "own": True},
        {"fact": "Ended", "rank": 1, "code": 10**9, "own": True},
        {"fact": "Ended", "rank": None, "code": 1, "own": True},
        {"fact": "Gone", "generation": "0"},
        {"fact": "Verdict", "rank": 1, "sentence": "s", "action": ["end"]},
        {"fact": "Verdict", "rank": 1, "sentence": 5, "action": "end"},
        {"alive": "a"},
        {"hello": "node8", "ranks": 1, "proof": ""},
    ],
)
def test_a_node_that_says_what_cannot_be_understood_counts_as_lost(door: Open, fact: dict[str, Any]):
    who, other = door.node(), door.node()
    (left,) = door.say(who, fact)
    assert isinstance(left, Left) and is_shown_out(who)
    assert len(door.say(other, {"fact": "Gone", "generation": 0})) == 1


def test_strangers_cannot_keep_nodes_out(door: Open, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(nodes, "STRANGERS", 3)
    strangers = [door.knock() for _ in range(4)]
    assert [is_shown_out(each) for each in strangers] == [True, False, False, False]
    door.node()


def test_strangers_who_never_say_hello_are_shown_out_though_they_keep_the_line_busy(door: Open):
    who = door.knock()
    for _ in range(3):
        door.now += nodes.SILENCE / 2
        who.sendall(b"x")
        door.news()
    assert is_shown_out(who)


def serving(door: Open, over: threading.Event) -> None:
    while not over.is_set():
        door.news(0.02)


@pytest.fixture
def answering(door: Open) -> Iterator[Open]:
    over = threading.Event()
    thread = threading.Thread(target=serving, args=(door, over))
    thread.start()
    yield door
    over.set()
    thread.join()


def test_a_node_learns_where_the_run_is(answering: Open):
    post = Post.reach(f"127.0.0.1:{answering.hub.port}", 2, 5)
    assert post.run == answering.run.resolve()


def test_a_node_that_cannot_see_the_run_directory_says_so(answering: Open, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(secret, "SEEN_WITHIN", 0.2)
    (answering.run / ".join").unlink()
    with pytest.raises(UserError) as refused:
        Post.reach(f"127.0.0.1:{answering.hub.port}", 2, 5)
    assert str(refused.value) == (
        f"{socket.gethostname()} cannot see {answering.run} of the run that it joins (No such file or directory: "
        f".join); runs must be on a disk that all nodes share (--runs)"
    )


def test_a_node_with_another_secret_is_told_that_it_was_not_taken(answering: Open):
    (answering.run / ".join").write_text("another")
    where = f"127.0.0.1:{answering.hub.port}"
    with pytest.raises(RunFailed, match=f"the run at {where} did not take this node"):
        Post.reach(where, 2, 5)


def test_a_node_that_comes_back_takes_the_place_of_what_it_was(answering: Open):
    where = f"127.0.0.1:{answering.hub.port}"
    before = Post.reach(where, 2, 5)
    again = before.again()
    assert again.id != before.id and again.run == before.run
    wait_until(lambda: list(answering.hub._peers) == [again.id], 30)
    before.close()
    again.close()


def test_signs_of_life_are_given_though_the_launcher_is_busy_with_something_else(
    door: Open, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(wire, "BEAT", 0.05)
    who = door.node()
    with wire.Beat(door.hub.beat):
        time.sleep(0.5)  # a disk that is away, say
    who.settimeout(1)
    assert who.recv(1 << 16).count(b'{"alive": true}') >= 3


def test_a_node_asks_for_the_end_of_the_whole_run(door: Open):
    who = door.node()
    assert door.say(who, {"fact": "Asked", "signal": 12}) == [nodes.Asked(12)]
    assert [type(each) for each in door.say(who, {"fact": "Asked", "signal": 0})] == [Left]


def test_a_node_that_cannot_see_the_run_may_say_so_without_the_secret(door: Open):
    who = door.knock()
    assert door.say(who, {"blind": "node7"}) == [nodes.Blind("node7")] and is_shown_out(who)
    other = door.knock()
    assert door.say(other, {"blind": "\u0007"}) == [] and is_shown_out(other)

"""The first node's port is open to anybody: who may take part, and what becomes of those who may not."""

from __future__ import annotations

import json
import os
import resource
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from meshrun.errors import RunFailed, UserError
from meshrun.launch import nodes, secret, wire
from meshrun.launch.head import Outcome
from meshrun.launch.job import Failure, Seat, Verdict
from meshrun.launch.nodes import Hub, Joined, Left, Said, Unfit
from meshrun.launch.post import Post
from meshrun.launch.ranks import Ended
from meshrun.launch.secret import FIRST, JOINING, Handshake
from meshrun.launch.wire import Wire
from tests.launch.command import wait_until


class Open:
    """A hub and whoever knocks at its port, with a clock of its own."""

    def __init__(self, run: Path) -> None:
        self.run, self.hub, self.now = run, Hub(0, run), 0.0
        self.knocked: list[Wire] = []

    def knock(self) -> Wire:
        self.knocked.append(Wire(socket.create_connection(("127.0.0.1", self.hub.port), timeout=5)))
        self.news()
        return self.knocked[-1]

    def news(self, seconds: float = 0.05) -> list[Any]:
        """All news of some real time, in which the hub's own clock stands still."""
        found, end = [], time.monotonic() + seconds
        while time.monotonic() < end:
            found += list(self.hub.news(self.now))
            time.sleep(0.005)
        return found

    def say(self, who: Wire, *documents: Any) -> list[Any]:
        for each in documents:
            who.send(each)
        return self.news()

    def challenge(self, who: Wire) -> Handshake:
        """The joining side of a handshake that the first node has begun."""
        said = next(who.receive())
        return Handshake(secret.read(self.run), said["run"], said["nonce"], secret.new_nonce())

    def prove(self, who: Wire) -> None:
        """Shake hands as a node does that reads the run directory."""
        shaken = self.challenge(who)
        assert self.say(who, {"nonce": shaken.answer, "proof": shaken.proof(JOINING)}) == []
        assert shaken.is_proof(next(who.receive())["proof"], FIRST)
        who.seal(own=shaken.key(JOINING), other=shaken.key(FIRST))

    def hello(self, who: Wire, **changes: Any) -> list[Any]:
        self.prove(who)
        return self.say(who, {"hello": "node7", "ranks": 2, **changes})

    def node(self) -> Wire:
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


def is_shown_out(who: Wire) -> bool:
    """Whether the other side has closed the connection; what it had said before does not matter."""
    who.socket.settimeout(1)
    try:
        while who.socket.recv(1 << 16):
            pass
    except ConnectionResetError:
        pass
    except TimeoutError:
        return False
    return True


def test_a_node_reaches_the_store_at_the_address_at_which_it_has_reached_the_first_one(door: Open):
    there = socket.create_connection(("127.0.0.1", door.hub.port), 5, source_address=("127.0.0.2", 0))
    who = Wire(there)
    door.knocked.append(who)
    door.news()
    (joined,) = door.hello(who)
    next(who.receive())
    asked: list[str] = []
    store: Any = SimpleNamespace(port_at=lambda address, _: asked.append(address) or 4711)
    door.hub.order(joined.member.id, Seat("job", 0, 1, 2, 2, 4, "", 0), store)
    order = next(who.receive())
    assert (order["order"], order["address"], order["port"], asked) == ("Seat", "127.0.0.1", 4711, ["127.0.0.1"])


def test_a_node_that_reads_the_run_directory_is_taken(door: Open):
    who = door.node()
    (said,) = door.say(who, {"fact": "Ended", "rank": 3, "code": -9, "own": True})
    assert isinstance(said, Said) and said.what == Ended(3, -9, True)
    (said,) = door.say(who, {"fact": "Verdict", "rank": -1, "sentence": "nothing moves", "action": "end"})
    assert isinstance(said, Said) and said.what == Verdict(-1, "nothing moves", "end")
    assert door.say(who, {"alive": 12}) == [] and door.hub.progress == 12


@pytest.fixture
def crowd() -> Iterator[None]:
    """This process holds more descriptors than `select.select` can tell apart."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(limits[1], 4096), limits[1]))
    opened = [os.dup(0) for _ in range(1100)]
    yield
    for each in opened:
        os.close(each)
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.usefixtures("crowd")
def test_a_node_is_taken_and_heard_by_a_launcher_with_more_than_1023_descriptors(door: Open):
    who = door.node()
    assert door.hub.fds[-1] > 1023
    assert door.say(who, {"alive": 7}) == [] and door.hub.progress == 7


def test_the_secret_is_for_this_user_alone_new_for_each_launch_and_removed_at_the_end(tmp_path: Path):
    (tmp_path / ".join").write_text("old")
    (tmp_path / ".join").chmod(0o644)
    hub = Hub(0, tmp_path)
    assert stat.S_IMODE((tmp_path / ".join").stat().st_mode) == 0o600
    first = secret.read(tmp_path)
    hub.finish(Outcome())
    assert not (tmp_path / ".join").exists()
    assert len(first) == 64 and secret.make(tmp_path) != first


@pytest.mark.parametrize("changes", [{"ranks": 0}, {"ranks": "a"}, {"hello": "\udc80"}, {"hello": "x" * 256}])
def test_a_node_that_cannot_be_one_is_shown_out(door: Open, changes: dict[str, Any]):
    who = door.knock()
    assert door.hello(who, **changes) == []
    assert is_shown_out(who)


@pytest.mark.parametrize("proof", ["", "\udc80", 7, None, "f" * 64])
def test_who_cannot_prove_to_know_the_secret_is_shown_out(door: Open, proof: Any):
    who = door.knock()
    shaken = door.challenge(who)
    assert door.say(who, {"nonce": shaken.answer, "proof": proof}) == [] and is_shown_out(who)


@pytest.mark.parametrize(
    ("changes", "role"), [({}, FIRST), ({"run": "/elsewhere"}, JOINING), ({"nonce": "another"}, JOINING)]
)
def test_a_proof_of_the_other_side_or_of_another_handshake_is_none(door: Open, changes: dict[str, str], role: str):
    who = door.knock()
    shaken = door.challenge(who)
    proof = replace(shaken, **changes).proof(role)
    assert door.say(who, {"nonce": shaken.answer, "proof": proof}) == [] and is_shown_out(who)


def test_a_proof_cannot_be_used_again(door: Open):
    first, second = door.knock(), door.knock()
    shaken = door.challenge(first)
    proof = {"nonce": shaken.answer, "proof": shaken.proof(JOINING)}
    assert door.say(second, proof) == [] and is_shown_out(second)
    assert door.say(first, proof) == [] and not is_shown_out(first)


def test_a_hello_without_the_code_of_its_sender_is_none_though_it_comes_with_a_right_proof(door: Open):
    who = door.knock()
    shaken = door.challenge(who)
    proof = {"nonce": shaken.answer, "proof": shaken.proof(JOINING)}
    who.socket.sendall(f'{json.dumps(proof)}\n{{"hello": "node7", "ranks": 2}}\n'.encode())
    assert door.news() == [] and is_shown_out(who)


@pytest.mark.parametrize(
    "forge", [lambda _: b'{"alive": 9}\n', lambda line: line.replace(b": 5", b": 9"), lambda line: line + line]
)
def test_a_line_that_somebody_else_adds_changes_or_repeats_ends_the_connection(
    door: Open, forge: Callable[[bytes], bytes]
):
    who = door.node()
    network = who.socket
    who.socket, heard = socket.socketpair()
    who.send({"alive": 5})
    line = heard.recv(1 << 16)
    for each in (who.socket, heard):
        each.close()
    who.socket = network
    network.sendall(forge(line))
    assert [type(each) for each in door.news()] == [Left] and is_shown_out(who)
    assert door.hub.progress in (0, 5)


def test_words_of_a_node_reach_nobody_with_control_characters(door: Open):
    who, other = door.node(), door.knock()
    (said,) = door.say(who, {"fact": "Verdict", "rank": 1, "sentence": "a\x1b[2Jb", "action": "end"})
    assert said.what.sentence == "a\\x1b[2Jb"
    door.prove(other)
    (unfit,) = door.say(other, {"unfit": "node8", "why": "\x1b]0;owned\x07"})
    assert unfit == Unfit("node8", "\\x1b]0;owned\\x07")


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
    who.socket.sendall(sent)
    assert door.news(0.2) == [] and is_shown_out(who)
    assert door.hub.progress == 0
    door.node()


@pytest.mark.parametrize("member", [True, False])
def test_a_line_without_end_does_not_fill_the_memory(door: Open, member: bool):
    who = door.node() if member else door.knock()
    sent, left = 0, list[Any]()
    who.socket.settimeout(0.05)
    for _ in range(200):
        try:
            sent += who.socket.send(b"x" * 65536)
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
        {"hello": "node8", "ranks": 1},
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


def test_strangers_push_out_no_node_that_has_proved_to_know_the_secret(door: Open, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(nodes, "STRANGERS", 3)
    who = door.knock()
    door.prove(who)
    for _ in range(4):
        door.knock()
    assert len(door.say(who, {"hello": "node7", "ranks": 2})) == 1


def test_strangers_who_never_say_hello_are_shown_out_though_they_keep_the_line_busy(door: Open):
    who = door.knock()
    for _ in range(3):
        door.now += nodes.SILENCE / 2
        who.socket.sendall(b"x")
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
    who.socket.settimeout(1)
    assert who.socket.recv(1 << 16).count(b'{"alive": true}') >= 3


def test_a_node_asks_for_the_end_of_the_whole_run(door: Open):
    who = door.node()
    assert door.say(who, {"fact": "Asked", "signal": 12}) == [nodes.Asked(12)]
    assert [type(each) for each in door.say(who, {"fact": "Asked", "signal": 0})] == [Left]


@pytest.mark.parametrize("said", [{"hello": "node7", "ranks": 2}, {"unfit": "node7", "why": "no GPU"}])
def test_who_has_proved_nothing_neither_joins_nor_ends_a_run(door: Open, said: dict[str, Any]):
    who = door.knock()
    assert door.say(who, said) == []
    assert is_shown_out(who)


def test_what_a_node_says_after_a_line_that_cannot_be_understood_is_not_heard(door: Open):
    who = door.node()
    (news,) = door.say(who, {"nonsense": 1}, {"fact": "Asked", "signal": 15})
    assert isinstance(news, Left)


def test_progress_is_that_of_the_node_which_is_farthest(door: Open):
    ahead, behind = door.node(), door.node()
    door.say(ahead, {"alive": 12})
    door.say(behind, {"alive": 7})
    assert door.hub.progress == 12


def test_signs_of_life_are_for_members(door: Open):
    stranger = door.knock()
    next(stranger.receive())
    door.hub.beat()
    stranger.socket.settimeout(0.3)
    with pytest.raises(TimeoutError):
        stranger.socket.recv(1)


@pytest.mark.parametrize(
    ("outcome", "failed", "cut_off"),
    [
        (Outcome(sentence="a node is missing"), True, False),
        (Outcome(sentence="its time is up", cut_off=True), True, True),
        (Outcome((Failure(0, -9, 0.0),)), True, True),
        (Outcome((Failure(0, -9, 0.0), Failure(1, 1, 0.0))), True, False),
    ],
)
def test_nodes_learn_whether_a_run_has_failed_and_whether_it_would_go_well_another_time(
    tmp_path: Path, outcome: Outcome, failed: bool, cut_off: bool
):
    door = Open(tmp_path)
    who = door.node()
    door.hub.finish(outcome)
    (over,) = [said for said in who.receive() if "over" in said]
    assert (over["over"], over["failed"], over["cut_off"]) == (outcome.sentence, failed, cut_off)
    who.close()


def test_a_run_that_is_over_takes_no_further_node_and_lets_go_of_those_it_has(tmp_path: Path):
    door = Open(tmp_path)
    who = door.node()
    door.hub.finish(Outcome())
    assert is_shown_out(who)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", door.hub.port), timeout=5)
    who.close()


def test_a_node_that_hangs_up_is_lost_at_once_and_its_connection_is_closed(door: Open):
    who = door.node()
    (peer,) = door.hub._peers.values()
    who.close()
    assert door.news() == [Left(peer.id)]
    assert peer.wire.fileno() == -1 and door.hub.fds == [door.hub._server.fileno()]

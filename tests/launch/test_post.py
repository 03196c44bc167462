"""Launchers of several nodes that are asked to stop, and one that calls the first node again."""

from __future__ import annotations

import contextlib
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from meshrun.config import RunDirectory
from meshrun.errors import CutOff, RunFailed, UserError
from meshrun.launch import local, post, secret
from meshrun.launch.head import Head, Member, Outcome, Wanted
from meshrun.launch.job import Job, silent
from meshrun.launch.node import Stopped
from meshrun.launch.nodes import Asked
from meshrun.launch.post import Post
from meshrun.launch.ranks import Ended, Gone, Stop
from meshrun.launch.wire import Wire
from tests.launch.test_hub import Open, answering, door, serving  # noqa: F401 - fixtures


class Ranks:
    """A node whose ranks end some turns after they were told to; a signal may come in the first turn."""

    def __init__(self, stopped: Stopped | None = None, signalled: int = 0) -> None:
        self.fds: list[int] = []
        self.stops: list[Any] = []
        self.waits = ""
        self._stopped, self._signalled = stopped, signalled
        self._turns = 0

    @property
    def busy(self) -> bool:
        return self._turns < 3

    def begin(self, seat: object) -> None:
        pass

    def stop(self, stop: Stop) -> None:
        self.stops.append(stop)

    def news(self) -> Iterator[Ended | Gone]:
        self._turns += bool(self.stops)
        if self._stopped is not None:
            self._stopped.by = self._signalled
        if self._turns == 3:
            yield Gone(0)

    def progress(self) -> int:
        return 0


class Others:
    """A hub over which another node tells, again and again, that CTRL-C was pressed there."""

    fds: tuple[int, ...] = ()
    progress = 0

    def news(self, _now: float) -> list[Asked]:
        return [Asked(signal.SIGINT)]

    def finish(self, _outcome: object) -> None:
        pass


def test_one_ctrl_c_that_reaches_all_nodes_lets_ranks_finish_their_step():
    stopped, node = Stopped(), Ranks()
    stopped.note(signal.SIGINT)
    head = Head(0, Wanted(), silent)
    head.join(Member(local.ME, "host", 1), 0.0)
    head.tick(0.0)
    local._run(head, node, Others(), SimpleNamespace(port=1), stopped, silent, lambda: "")  # type: ignore[arg-type]
    assert node.stops == [Stop(final=True)] and not node.busy
    assert not stopped.at_once
    stopped.note(signal.SIGINT)
    assert stopped.at_once


class Nobody(Others):
    """A hub where no node has come."""

    def news(self, _now: float) -> list[Asked]:
        return []


def test_a_run_that_waits_for_nodes_ends_when_its_time_is_over(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(local, "ASK_EVERY", 0.2)
    head, said = Head(0, Wanted(2, 2), silent), iter(["", "the job ends in 0 s"])
    outcome = local._run(head, Ranks(), Nobody(), 1, Stopped(), silent, lambda: next(said))  # type: ignore[arg-type]
    assert outcome.cut_off and outcome.sentence == (
        "the run stopped while it waited for nodes, since the job ends in 0 s"
    )


def heard(first: Open, asks_for_all: bool) -> list[object]:
    """What the first node hears of one whose launcher gets a signal while it waits."""
    found: list[object] = []
    news = first.hub._understood
    first.hub._understood = lambda *said: found.append(news(*said)) or found[-1]  # type: ignore[method-assign,func-returns-value]
    joined, stopped = Post.reach(f"127.0.0.1:{first.hub.port}", 2, 5), Stopped()
    node = Ranks(stopped, signal.SIGTERM)
    assert joined.serve(node, _Once(stopped), asks_for_all) is None  # type: ignore[arg-type]
    joined.close()
    first.news(0.1)
    return [each for each in found if each is not None]


class _Once:
    """Signals as they are noted, of which the loop has enough after some turns."""

    def __init__(self, stopped: Stopped) -> None:
        self._stopped, self._turns = stopped, 0

    @property
    def by(self) -> int:
        return self._stopped.by

    @property
    def at_once(self) -> bool:
        self._turns += 1
        return self._turns > 3


@pytest.mark.parametrize("asks_for_all", [False, True])
def test_a_signal_to_a_node_that_joined_by_hand_is_for_that_node_alone(answering: Open, asks_for_all: bool):  # noqa: F811
    asked = [each for each in heard(answering, asks_for_all) if isinstance(each, Asked)]
    assert asked == ([Asked(signal.SIGTERM)] if asks_for_all else [])


def test_ranks_of_a_node_that_leaves_are_not_told_that_the_run_ends(answering: Open):  # noqa: F811
    joined, node = Post.reach(f"127.0.0.1:{answering.hub.port}", 2, 5), Ranks()
    post._leave(node, joined, Stopped(), silent)  # type: ignore[arg-type]
    assert node.stops == [Stop(patient=True)]
    joined.close()


def test_a_node_comes_back_to_the_same_run_only(answering: Open, tmp_path: Path):  # noqa: F811
    joined = Post.reach(f"127.0.0.1:{answering.hub.port}", 2, 5)
    joined.run = tmp_path / answering.run.name
    with pytest.raises(RunFailed, match=f"is {answering.run} and not {joined.run} any more"):
        joined.again()
    joined.close()


def test_who_does_not_prove_the_secret_is_no_first_node(tmp_path: Path):
    secret.make(tmp_path)
    ours, theirs = (Wire(each) for each in socket.socketpair())
    theirs.send({"run": str(tmp_path), "nonce": "n"})
    theirs.send({"proof": "0" * 64})
    with pytest.raises(RunFailed, match="does not know the secret"):
        post.prove(ours, "n1:1", time.monotonic() + 20)
    for wire in (ours, theirs):
        wire.close()


@pytest.mark.parametrize("path", ["runs/a-1", "", "/" + "x" * 5000])
def test_a_run_directory_that_cannot_be_one_is_refused(path: str):
    with pytest.raises(RunFailed, match="that there cannot be"):
        post.directory_named(path)


@pytest.mark.parametrize(
    "where",
    [
        *("host", "host:x", ":1", "host:0", "host:65536", "host:²", f"host:{10**30}", "http://host:1", "a b:1", "[]:1"),
        *("x" * 300 + ":1", "a..b:1", "\udcff:1"),
    ],
)
def test_an_address_without_a_host_or_a_port_is_refused(where: str):
    with pytest.raises(UserError, match=r"\(--join\)"):
        post.address_in(where)


def test_a_result_is_the_end_of_a_run(tmp_path: Path):
    ends = post.Ends(RunDirectory(tmp_path))
    assert not ends.written()
    (tmp_path / "result.json").touch()
    assert ends.written()


def test_a_first_node_whose_port_is_closed_for_some_time_is_not_called_any_more(monkeypatch: pytest.MonkeyPatch):
    def refused() -> None:
        raise ConnectionRefusedError

    monkeypatch.setattr(post, "REFUSED", 0.3)
    lost: Any = SimpleNamespace(again=refused)
    never: Any = SimpleNamespace(reached=lambda: False)
    began = time.monotonic()
    assert post._found_again(lost, 60.0, Stopped(), never, lambda: False) is None
    assert time.monotonic() - began < 30


class FewTurns(Stopped):
    """A signal comes after so many turns of the loop."""

    def __init__(self, turns: int) -> None:
        self.turns, self.at_once = turns, False

    @property
    def by(self) -> int:  # type: ignore[override]
        self.turns -= 1
        return signal.SIGTERM if self.turns < 0 else 0


@pytest.mark.parametrize("speaks", [False, True])
def test_a_first_node_that_is_silent_is_lost_and_one_that_speaks_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, speaks: bool
):
    monkeypatch.setattr(post, "SILENCE", 0.05)
    monkeypatch.setattr(post, "LOOK_EVERY", 0.02)
    ours, theirs = (Wire(each) for each in socket.socketpair())
    node = Ranks()
    if speaks:
        monkeypatch.setattr(node, "news", lambda: theirs.send({"alive": True}) or time.sleep(0.02) or [])  # type: ignore[func-returns-value]
    stopped = FewTurns(20)
    assert Post(ours, "n1:1", tmp_path, "me", 2).serve(node, stopped, False) is None  # type: ignore[arg-type]
    assert (stopped.turns >= 0) == (not speaks)
    for wire in (ours, theirs):
        wire.close()


def taken_part(
    run: Path, monkeypatch: pytest.MonkeyPatch, over: dict[str, Any] | None, as_one: bool = False, result: bool = False
) -> None:
    """Take part in a run of which all that is heard is its last word; without one, it is lost."""

    def serve(*_: object) -> dict[str, Any] | None:
        if result:
            (run / "result.json").touch()
        return over

    node = SimpleNamespace(close=lambda: None, stop=lambda _: None, elsewhere=[], busy=False)
    monkeypatch.setattr(post, "Node", lambda *_: node)
    joined: Any = SimpleNamespace(run=run, where="n1:1", serve=serve, close=lambda: None)
    nothing: Any = None
    post.take_part(joined, nothing, nothing, silent, nothing, patience=0.0, as_one=as_one)


FAILED = {"over": "rank 3 failed", "failed": True, "cut_off": False}
LOST = {"over": "", "failed": True, "cut_off": True}


@pytest.mark.parametrize(
    ("over", "as_one", "error", "sentence"),
    [
        (FAILED, False, RunFailed, "rank 3 failed"),
        (FAILED, True, RunFailed, ""),
        (LOST, False, CutOff, "the run has failed; its first node, n1:1, says why"),
        (LOST, True, CutOff, ""),
        (None, False, CutOff, "the run's first node, n1:1, is lost, and all ranks here were ended"),
    ],
)
def test_a_node_ends_as_the_run_does(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    over: dict[str, Any] | None,
    as_one: bool,
    error: type[Exception],
    sentence: str,
):
    (tmp_path / "result.json").touch()  # of an earlier leg of the same run
    with pytest.raises(RunFailed) as ended:
        taken_part(tmp_path, monkeypatch, over, as_one)
    assert type(ended.value) is error
    assert str(ended.value).startswith(sentence) and bool(str(ended.value)) == bool(sentence)


@pytest.mark.parametrize(
    ("over", "as_one"), [({"over": "", "failed": False, "cut_off": False}, False), (None, False), (FAILED, True)]
)
def test_a_node_ends_well_where_the_run_has_a_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, over: dict[str, Any] | None, as_one: bool
):
    taken_part(tmp_path, monkeypatch, over, as_one, result=True)


def test_ranks_of_a_node_that_is_cut_off_learn_that_all_ranks_elsewhere_are_out_of_reach():
    node = Ranks()
    node.elsewhere = [0, 1, 4]  # type: ignore[attr-defined]
    post._end_ranks(node, Stopped())  # type: ignore[arg-type]
    assert node.stops == [Stop(dead=(0, 1, 4))] and not node.busy


def test_a_first_node_that_is_away_for_a_moment_is_found_again(monkeypatch: pytest.MonkeyPatch):
    seconds = iter(range(100))
    monkeypatch.setattr(post, "time", SimpleNamespace(monotonic=lambda: next(seconds), sleep=lambda _: None))
    monkeypatch.setattr(post, "REFUSED", 10.0)
    refused, stranger = ConnectionRefusedError(), RunFailed("it does not know the secret")
    answers: list[Any] = [refused, refused, OSError(), refused, refused, stranger, refused, "found"]

    def again() -> object:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    never: Any = SimpleNamespace(reached=lambda: False)
    lost: Any = SimpleNamespace(again=again)
    found: Any = post._found_again(lost, 60.0, Stopped(), never, lambda: False)
    assert found == "found"


@pytest.mark.parametrize(("over", "orphan"), [(True, False), (False, True)])
def test_nobody_is_called_once_the_run_is_over_or_its_first_node_is_known_to_be_gone(over: bool, orphan: bool):
    ends: Any = SimpleNamespace(reached=lambda: over)
    assert post._found_again(SimpleNamespace(), 60.0, Stopped(), ends, lambda: orphan) is None  # type: ignore[arg-type]


def test_the_first_signal_is_the_reason_though_other_nodes_tell_of_another(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(local, "LOOK_EVERY", 0.01)
    stopped, node = Stopped(), Ranks()
    stopped.note(signal.SIGTERM)
    head = Head(0, Wanted(), silent)
    head.join(Member(local.ME, "host", 1), 0.0)
    head.tick(0.0)
    local._run(head, node, Others(), SimpleNamespace(port=1), stopped, silent, lambda: "")  # type: ignore[arg-type]
    assert stopped.by == signal.SIGTERM


def test_steps_that_other_nodes_have_finished_are_progress():
    class Lost(Ranks):
        def news(self) -> Iterator[Ended | Gone]:
            yield from (Ended(0, -9, True), Gone(0))

    head, others = Head(0, Wanted(), silent), Nobody()
    others.progress = 7
    head.join(Member(local.ME, "host", 1), 0.0)
    head.tick(0.0)
    local._run(head, Lost(), others, SimpleNamespace(port=1), Stopped(), silent, lambda: "")  # type: ignore[arg-type]
    assert head.progress == 7


@pytest.mark.parametrize(
    ("outcome", "error"),
    [
        (Outcome(sentence="no node came", cut_off=True), CutOff),
        (Outcome(sentence="it hangs"), RunFailed),
        (Outcome(sentence="n2 cannot see runs/a-1", by_user=True), UserError),
    ],
)
def test_a_run_that_was_cut_off_is_told_from_one_that_failed(
    monkeypatch: pytest.MonkeyPatch, outcome: Outcome, error: type[Exception]
):
    monkeypatch.setattr(local, "_run", lambda *_: outcome)
    nursery: Any = SimpleNamespace()
    with pytest.raises(error) as ended:
        local.launch(Job(["-c", ""], 1), nursery=nursery)
    assert type(ended.value) is error and str(ended.value) == outcome.sentence


def test_a_node_that_is_not_to_take_part_says_so_before_it_is_counted(answering: Open):  # noqa: F811
    def refuse(run: Path) -> None:
        raise UserError(f"not {run.name}")

    with pytest.raises(UserError, match=f"not {answering.run.name}"):
        Post.reach(f"127.0.0.1:{answering.hub.port}", 2, 5, refuse)


def test_a_signal_after_the_last_word_of_a_run_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    over = {"over": "", "failed": False, "cut_off": False}
    monkeypatch.setattr(post, "Stopped", lambda: contextlib.nullcontext(SimpleNamespace(by=signal.SIGTERM)))
    taken_part(tmp_path, monkeypatch, over)


def test_ranks_that_are_lost_elsewhere_are_named_to_a_node(tmp_path: Path):
    ours, theirs = (Wire(each) for each in socket.socketpair())
    node = Ranks()
    theirs.send({"order": "Stop", "dead": [3, 5], "patient": False, "final": False, "hurried": False})
    theirs.send({"over": ""})
    assert Post(ours, "n1:1", tmp_path, "me", 2).serve(node, Stopped(), False) == {"over": ""}  # type: ignore[arg-type]
    assert node.stops == [Stop(dead=(3, 5))]
    for wire in (ours, theirs):
        wire.close()


def test_who_is_told_twice_to_end_waits_for_no_rank():
    node: Any = SimpleNamespace(busy=True, fds=[], news=lambda: pytest.fail("it waits"))
    stopped: Any = SimpleNamespace(at_once=True)
    assert list(post._until_gone(node, stopped)) == []

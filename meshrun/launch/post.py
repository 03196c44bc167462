"""Another node of a run than the first: its launcher's connection to that one, lost and made again.

    post = Post.reach("node7:29500", ranks=4, patience=60)
    take_part(post, job, watch, tell, nursery, patience=60)      # until the run is over

When the first node is silent, be it that the network is cut, ranks here are ended: they leave what they hold in this
node's memory. Then it is called again and again, and this node comes back as a new one.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path

from meshrun.config import RunDirectory, whole_number
from meshrun.errors import CutOff, RunFailed, UserError, printable
from meshrun.launch import secret
from meshrun.launch.job import Interrupted, Job, Seat, Tell, Watch
from meshrun.launch.lock import is_left
from meshrun.launch.node import LOOK_EVERY, Node, Stopped
from meshrun.launch.nodes import LINE, SILENCE
from meshrun.launch.ranks import Nursery, Stop
from meshrun.launch.wire import BEAT, Beat, Document, Wire, readable

CONNECTED = 5.0
"""Seconds for a connection to be made."""
REFUSED = 3.0
"""Seconds after which a machine that answers, but has nobody at that port, has lost its launcher for good."""


LONGEST_PATH = 4096
"""The most characters of a directory's name."""

Accept = Callable[[Path], None]


class Post:
    """One connection to the first node."""

    def __init__(self, wire: Wire, where: str, run: Path, id: str, ranks: int) -> None:
        self._wire, self.where, self.run, self.id, self.ranks = wire, where, run, id, ranks
        self._progress = 0

    @classmethod
    def reach(cls, where: str, ranks: int, patience: float, accept: Accept = lambda _run: None) -> Post:
        """Connect to the first node, which may not have started yet, and be told of the run.

        `accept` raises an error where this node is not to take part in the run of that directory.
        """
        host, port = address_in(where)
        give_up = time.monotonic() + patience
        while True:
            try:
                wire = Wire(socket.create_connection((host, port), timeout=CONNECTED), LINE)
                break
            except (OSError, OverflowError) as error:
                if time.monotonic() > give_up:
                    raise RunFailed(
                        f"the run's first node did not answer at {where} within {patience:.0f} s: {error} "
                        f"(--join, --timeout)"
                    ) from None
                time.sleep(0.2)
        return cls.welcomed(wire, where, ranks, give_up, accept)

    @classmethod
    def welcomed(
        cls,
        wire: Wire,
        where: str,
        ranks: int,
        give_up: float,
        accept: Accept = lambda _run: None,
        before: Post | None = None,
    ) -> Post:
        """Join the run of whoever has answered, once both sides have proved to belong to it.

        `before` is the lost connection of this node, which may come back to the same run alone.
        """
        hello = {"hello": socket.gethostname(), "ranks": ranks}
        try:
            run = prove(wire, where, give_up)
            if before is not None and run != before.run:
                raise RunFailed(f"what answers at {where} is {run} and not {before.run} any more (--join)")
            accept(run)
            wire.send({**hello, "before": before.id} if before is not None else hello)
            for said in lines(wire, give_up):
                match said:
                    case {"welcome": str(id)}:
                        return cls(wire, where, run, id, ranks)
            raise RunFailed(f"the run at {where} did not take this node (--join)")
        except (RunFailed, UserError):
            wire.close()
            raise

    def serve(self, node: Node, stopped: Stopped, asks_for_all: bool) -> Document | None:
        """Do as the first node says; returns its last word, or None if it is lost or this node is to go.

        `asks_for_all`: a signal that asks this launcher to stop is meant for the whole run.
        """
        with Beat(lambda: self._wire.send({"alive": self._progress})):
            return self._served(node, stopped, asks_for_all)

    def _served(self, node: Node, stopped: Stopped, asks_for_all: bool) -> Document | None:
        heard = looked = time.monotonic()
        asked = False
        while not stopped.by or (asks_for_all and not stopped.at_once):
            ready = readable([self._wire.fileno(), *node.fds], LOOK_EVERY)
            now = time.monotonic()
            if self._wire.fileno() in ready or self._wire.pending:
                heard = now
                for said in self._wire.receive():
                    match said:
                        case {"order": "Seat", **fields}:
                            node.begin(Seat(**fields))
                        case {"order": "Stop", **fields}:
                            node.stop(Stop(**{**fields, "dead": tuple(fields["dead"])}))
                        case {"over": _}:
                            return said
            if self._wire.closed or now - heard > SILENCE:
                return None
            for fact in node.news():
                self._wire.send({"fact": type(fact).__name__, **asdict(fact)})
            if stopped.by and asks_for_all and not asked:
                asked = True
                self._wire.send({"fact": "Asked", "signal": stopped.by})
            if now - looked > BEAT:
                looked, self._progress = now, node.progress()
        return None

    def say_alive(self, node: Node) -> None:
        """As long as ranks here compute, the others' step needs them."""
        self._progress = node.progress()
        self._wire.send({"alive": self._progress})

    def again(self) -> Post:
        """Try once to come back as a new node."""
        wire = Wire(socket.create_connection(address_in(self.where), timeout=CONNECTED), LINE)
        return Post.welcomed(wire, self.where, self.ranks, time.monotonic() + 2 * SILENCE, before=self)

    def close(self) -> None:
        self._wire.close()


def take_part(
    post: Post,
    job: Job,
    watch: Watch,
    tell: Tell,
    nursery: Nursery,
    patience: float,
    as_one: bool = False,
    is_orphan: Callable[[], bool] = lambda: False,
) -> None:
    """Start and end ranks as the first node says, until it says that the run is over.

    `as_one`: all nodes were started together, so that a signal here is for all, and the first one says what failed.
    `is_orphan`: whether somebody knows that a first node which does not answer never will.
    """
    node, run = Node(job, nursery, watch, partial(secret.read, post.run)), RunDirectory(post.run)
    ends, over = Ends(run), None
    try:
        with Stopped() as stopped:
            while True:
                over = post.serve(node, stopped, as_one)
                if over is not None:
                    break
                if stopped.by:
                    _leave(node, post, stopped, tell)
                    break
                post.close()
                _end_ranks(node, stopped)
                tell("note", text=f"{socket.gethostname()} has lost the run's first node, {post.where}; it calls again")
                found = _found_again(post, patience, stopped, ends, is_orphan)
                if found is None:
                    break
                tell("note", text=f"{socket.gethostname()} has found the run's first node again")
                post = found
    finally:
        node.close()
        post.close()
    if stopped.by and over is None:
        raise Interrupted(stopped.by)
    if over is None and not ends.reached():
        raise CutOff(
            f"the run's first node, {post.where}, is lost, and all ranks here were ended; "
            f"what was reached is in {post.run}: meshrun resume {post.run} goes on"
        )
    if over is not None and over["failed"] and not (as_one and ends.written()):
        why = printable(over["over"]) or f"the run has failed; its first node, {post.where}, says why"
        raise (CutOff if over["cut_off"] else RunFailed)("" if as_one else why)
    tell("note", text=f"the run is over; its results are in {post.run}")


class Ends:
    """Whether a run has come to its end, told from its directory by one who may not be able to ask."""

    NAMES = ("result.json", "stopped.json")

    def __init__(self, run: RunDirectory) -> None:
        self._run, self._before = run, self._times(run)

    def reached(self) -> bool:
        """Whether it has ended, well or not: its owner has let go of it."""
        with contextlib.suppress(OSError):
            return self.written() or is_left(self._run)
        return False

    def written(self) -> bool:
        """Whether there is a result, or a word on where it stopped in time, that was not there before."""
        return any(now > before for now, before in zip(self._times(self._run), self._before, strict=True))

    def _times(self, run: RunDirectory) -> list[float]:
        times = []
        for name in self.NAMES:
            try:
                times.append((run.path / name).stat().st_mtime)
            except OSError:
                times.append(0.0)
        return times


def _leave(node: Node, post: Post, stopped: Stopped, tell: Tell) -> None:
    """Ranks here may finish their step and what they write; the others go on without this node."""
    node.stop(Stop(patient=True))  # not final: ranks would take it as the end of the whole run
    if node.waits:
        tell("note", text=node.waits)
    for _ in _until_gone(node, stopped):
        post.say_alive(node)


def _end_ranks(node: Node, stopped: Stopped) -> None:
    """All ranks elsewhere are out of reach, so that those here can only leave what they hold."""
    node.stop(Stop(dead=tuple(node.elsewhere)))
    for _ in _until_gone(node, stopped):
        pass


def _until_gone(node: Node, stopped: Stopped) -> Iterator[None]:
    """Wait for the ranks of this node to end, with a pause a second."""
    told = time.monotonic()
    while node.busy and not stopped.at_once:
        readable(node.fds, LOOK_EVERY)
        list(node.news())
        if time.monotonic() - told > BEAT:
            told = time.monotonic()
            yield


def _found_again(
    post: Post, patience: float, stopped: Stopped, ends: Ends, is_orphan: Callable[[], bool]
) -> Post | None:
    """The connection made anew; None if the run is over, its first launcher is gone, or this node is to go."""
    give_up, refused = time.monotonic() + patience, None
    while time.monotonic() < give_up and not stopped.by and not ends.reached() and not is_orphan():
        try:
            return post.again()
        except ConnectionRefusedError:
            refused = refused or time.monotonic()
            if time.monotonic() - refused > REFUSED:
                return None
        except (OSError, RunFailed, UserError):
            refused = None
        time.sleep(0.2)
    return None


def prove(wire: Wire, where: str, give_up: float) -> Path:
    """Shake hands with whoever has answered at that address; returns the run directory that both sides know.

    From then on lines come from the other side of this handshake, or the connection ends.
    """
    run, shaken = None, None
    for said in lines(wire, give_up):
        match said:
            case {"run": str(path), "nonce": str(nonce)} if shaken is None:
                run = directory_named(path)
                shaken = secret.Handshake(secret.read(run), path, nonce, secret.new_nonce())
                wire.send({"nonce": shaken.answer, "proof": shaken.proof(secret.JOINING)})
            case {"proof": str(proof)} if run is not None and shaken is not None:
                if not shaken.is_proof(proof, secret.FIRST):
                    raise RunFailed(
                        f"what answers at {where} does not know the secret of {run}, which it names (--join)"
                    )
                wire.seal(own=shaken.key(secret.JOINING), other=shaken.key(secret.FIRST))
                return run
            case _:
                break
    if run is not None:
        raise RunFailed(f"the run at {where} did not take this node, whose {run} is not the one there (--join)")
    raise RunFailed(f"what answers at {where} is no run that takes nodes (--join)")


def directory_named(path: str) -> Path:
    """The run directory that somebody names who has proved nothing yet, without links that could change later."""
    with contextlib.suppress(OSError, RuntimeError, ValueError):  # a loop of links; a name that no file can have
        if path.startswith("/") and len(path) <= LONGEST_PATH:
            return Path(path).resolve()
    raise RunFailed("what answers there names a run directory that there cannot be (--join)")


def lines(wire: Wire, give_up: float) -> Iterator[Document]:
    """What the other side says, until it hangs up or the time is over."""
    while not wire.closed and time.monotonic() < give_up:
        yield from wire.receive()


def address_in(where: str) -> tuple[str, int]:
    """Host and port of "host:port"."""
    host, _, port = where.rpartition(":")
    number, host = whole_number(port), host.strip("[]")
    if not _may_be_host(host) or number is None or not 0 < number < 65536:
        raise UserError(
            f"join is {where!r:.200}; it must be HOST:PORT of the run's first node, the port from 1 to 65535 (--join)"
        )
    return host, number


def _may_be_host(host: str) -> bool:
    """Whether a text can be a name or an address: else looking it up fails in other ways than that there is none."""
    try:
        return bool(host.encode("idna")) and "/" not in host and not any(each.isspace() for each in host)
    except UnicodeError:
        return False

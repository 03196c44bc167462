"""Several nodes in one run: the first one's launcher decides, the others' launchers are connected to it.

    hub = Hub(port, run.path)                       # the first node: `launch(job, hub=hub, wanted=Wanted(1, 4))`
    post = Post.reach("node7:29500", ranks=4)       # another node
    post.serve(job, watch, tell)                    # until the run is over, or the first node is lost

A launcher that is gone takes its connection along, so that it is missed at once; one whose machine or network is gone
is missed after some seconds of silence. The first node serves the store and cannot be missed: the others then end.
Anybody may knock at the first node's port: who does not prove to know the run's secret, or says what cannot be
understood, is shown out, and the run goes on.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import select
import socket
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from meshrun.errors import RunFailed, UserError
from meshrun.launch import secret
from meshrun.launch.head import Member, Outcome
from meshrun.launch.job import Interrupted, Job, Seat, Tell, Verdict, Watch, port_refused
from meshrun.launch.node import LOOK_EVERY, Node, Stopped
from meshrun.launch.ranks import Ended, Gone, Nursery, Stop
from meshrun.launch.wire import Document, Wire

BEAT = 1.0
"""Seconds between two signs of life."""
SILENCE = 10.0
"""Seconds without one after which a launcher counts as lost."""
LINE = 1 << 20
"""Bytes of the longest line that is read from another machine."""
ACTIONS = ("restart", "end", "report")
STRANGERS = 64
"""Connections of nodes that have not said yet who they are."""


@dataclass(frozen=True)
class Joined:
    """A node has come."""

    member: Member


@dataclass(frozen=True)
class Left:
    """A node is lost."""

    id: str


@dataclass(frozen=True)
class Said:
    """What a node tells of its ranks."""

    id: str
    what: Ended | Gone | Verdict


@dataclass
class _Peer:
    wire: Wire
    heard: float
    id: str = field(default_factory=lambda: uuid.uuid4().hex[:8])
    nonce: str = field(default_factory=lambda: secrets.token_hex(32))
    member: bool = False


class Hub:
    """The first node's connections to the others."""

    def __init__(self, port: int, run: Path) -> None:
        try:
            self._server = socket.create_server(("", port))
        except OSError as error:
            raise port_refused(port, error) from None
        self._server.setblocking(False)
        self.port: int = self._server.getsockname()[1]
        self._run, self._secret = run, secret.make(run)
        self._peers: dict[str, _Peer] = {}
        self._beat = 0.0
        self.progress = 0

    @property
    def fds(self) -> list[int]:
        return [self._server.fileno(), *(peer.wire.fileno() for peer in self._peers.values())]

    def news(self, now: float) -> Iterator[Joined | Left | Said]:
        """All that has come, from nodes and of them."""
        ready = select.select(self.fds, [], [], 0)[0]
        if self._server.fileno() in ready:
            with contextlib.suppress(OSError):  # whoever knocked may be gone
                self._challenge(_Peer(Wire(self._server.accept()[0], LINE), now))
        if now - self._beat > BEAT:
            self._beat = now
            for peer in filter(_is_member, self._peers.values()):
                peer.wire.send({"alive": True})
        for peer in list(self._peers.values()):
            if peer.wire.fileno() in ready:
                yield from self._listen(peer, now)
            if peer.wire.closed or now - peer.heard > SILENCE:
                del self._peers[peer.id]
                peer.wire.close()
                if peer.member:
                    yield Left(peer.id)

    def _challenge(self, peer: _Peer) -> None:
        strangers = [each for each in self._peers.values() if not each.member]
        if len(strangers) >= STRANGERS:  # a node answers at once: the one that has waited longest is none
            strangers[0].wire.close()
            del self._peers[strangers[0].id]
        self._peers[peer.id] = peer
        peer.wire.send({"run": str(self._run.resolve()), "nonce": peer.nonce})

    def _listen(self, peer: _Peer, now: float) -> Iterator[Joined | Said]:
        for said in peer.wire.receive():
            news = self._welcome(peer, said) if not peer.member else self._understood(peer, said)
            if peer.wire.closed:
                return
            if news is not None:
                yield news
        if peer.member:  # others have to become one in time
            peer.heard = now

    def _welcome(self, peer: _Peer, said: Document) -> Joined | None:
        match said:
            case {"hello": str(host), "ranks": int(ranks), "proof": str(proof)} if (
                secret.is_proof(proof, self._secret, peer.nonce) and host.isprintable() and 0 < ranks < 1 << 16
            ):
                peer.member = True
                peer.wire.send({"welcome": peer.id})
                return Joined(Member(peer.id, host, ranks))
        peer.wire.closed = True
        return None

    def _understood(self, peer: _Peer, said: Document) -> Said | None:
        match said:
            case {"alive": int(progress)}:
                self.progress = max(self.progress, progress)
                return None
            case {"fact": "Ended", "rank": int(rank), "code": int(code), "own": bool(own)} if abs(code) < 256:
                return Said(peer.id, Ended(rank, code, own))
            case {"fact": "Gone", "generation": int(generation)}:
                return Said(peer.id, Gone(generation))
            case {"fact": "Verdict", "rank": int(rank), "sentence": str(text), "action": action} if action in ACTIONS:
                return Said(peer.id, Verdict(rank, text, action))
        peer.wire.closed = True
        return None

    def order(self, member: str, order: Seat | Stop, port: int) -> None:
        """Pass an order on; a node reaches the store at the address at which it has reached this one."""
        if member not in self._peers:
            return
        wire = self._peers[member].wire
        if isinstance(order, Seat):
            order = replace(order, address=wire.socket.getsockname()[0], port=port)
        wire.send({"order": type(order).__name__, **asdict(order)})

    def finish(self, outcome: Outcome) -> None:
        """Tell all nodes that the run is over."""
        for peer in self._peers.values():
            peer.wire.send({"over": outcome.sentence, "failed": bool(outcome.failures or outcome.sentence)})
            peer.wire.close()
        self._server.close()
        secret.remove(self._run)


def _is_member(peer: _Peer) -> bool:
    return peer.member


class Post:
    """Another node's connection to the first one."""

    def __init__(self, wire: Wire, where: str, run: Path, id: str) -> None:
        self._wire, self._where, self.run, self.id = wire, where, run, id

    @classmethod
    def reach(cls, where: str, ranks: int, patience: float) -> Post:
        """Connect to the first node, which may not have started yet, and be told of the run."""
        host, _, port = where.rpartition(":")
        if not host or not port.isdigit():
            raise UserError(f"join is {where!r}; it must be HOST:PORT of the run's first node (--join)")
        give_up = time.monotonic() + patience
        while True:
            try:
                wire = Wire(socket.create_connection((host.strip("[]"), int(port)), timeout=5), LINE)
                break
            except (OSError, OverflowError) as error:
                if time.monotonic() > give_up:
                    raise RunFailed(
                        f"the run's first node did not answer at {where} within {patience:.0f} s: {error} "
                        f"(--join, --timeout)"
                    ) from None
                time.sleep(0.2)
        run = None
        while not wire.closed and time.monotonic() < give_up:
            for said in wire.receive():
                match said:
                    case {"run": str(path), "nonce": str(nonce)}:
                        run = Path(path)
                        proof = secret.proof(secret.read(run), nonce)
                        wire.send({"hello": socket.gethostname(), "ranks": ranks, "proof": proof})
                    case {"welcome": str(id)} if run is not None:
                        return cls(wire, where, run, id)
        if run is not None:
            raise RunFailed(f"the run at {where} did not take this node, whose {run} is not the one there (--join)")
        raise RunFailed(f"what answers at {where} is no run that takes nodes (--join)")

    def serve(self, job: Job, watch: Watch, tell: Tell, nursery: Nursery) -> None:
        """Start and end ranks as the first node says, until it says that the run is over."""
        node = Node(job, nursery, watch)
        try:
            with Stopped() as stopped:
                over = self._serve(node, stopped, tell)
        finally:
            node.close()
            self._wire.close()
        if stopped.by:
            raise Interrupted(stopped.by)
        if over is None:
            raise RunFailed(
                f"the run's first node, {self._where}, is lost, and all ranks here were ended; "
                f"what was reached is in {self.run}: meshrun resume {self.run} goes on"
            )
        if over["failed"]:
            raise RunFailed(over["over"] or f"the run has failed; its first node, {self._where}, says why")
        tell("note", text=f"the run is over; its results are in {self.run}")

    def _serve(self, node: Node, stopped: Stopped, tell: Tell) -> Document | None:
        heard = beat = time.monotonic()
        while not stopped.by:
            ready = select.select([self._wire.fileno(), *node.fds], [], [], LOOK_EVERY)[0]
            now = time.monotonic()
            if self._wire.fileno() in ready:
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
            if now - beat > BEAT:
                beat = now
                self._wire.send({"alive": node.progress()})
        # Its ranks may finish their step and what they write; the others go on without this node.
        node.stop(Stop(final=True))
        if node.waits:
            tell("note", text=node.waits)
        while node.busy and not stopped.at_once:
            select.select(node.fds, [], [], LOOK_EVERY)
            list(node.news())
            if time.monotonic() - beat > BEAT:  # as long as they compute, the others' step needs them
                beat = time.monotonic()
                self._wire.send({"alive": node.progress()})
        return None


def nodes_of(text: str) -> tuple[int, int]:
    """The least and the most nodes that an option asks for: "2", or "1:4"."""
    found = re.fullmatch(r"(\d+)(?::(\d+))?", text)
    least, most = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= least <= most:
        raise UserError(f"nodes is {text!r}; it must be a number, or least:most such as 1:4 (--nodes)")
    return least, most

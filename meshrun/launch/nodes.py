"""Several nodes in one run: the first one's launcher decides, the others' launchers are connected to it.

    hub = Hub(port, run.path)                       # the first node: `launch(job, hub=hub, wanted=Wanted(1, 4))`

The other end is in `post`. A launcher that is gone takes its connection along, so that it is missed at once; one whose
machine or network is gone is missed after some seconds of silence, and may come back as a new one.
Anybody may knock at the first node's port: who does not prove to know the run's secret, or says what cannot be
understood, is shown out, and the run goes on.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import select
import socket
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from meshrun.errors import UserError
from meshrun.launch import secret
from meshrun.launch.head import Member, Outcome
from meshrun.launch.job import Seat, Verdict, port_refused
from meshrun.launch.ranks import Ended, Gone, Stop
from meshrun.launch.wire import Document, Wire

SILENCE = 5.0
"""Seconds without a sign of life after which a launcher counts as lost; they come every second, from a thread."""
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
class Asked:
    """A node's launcher got a signal that asks the whole run to stop."""

    signal: int


@dataclass(frozen=True)
class Blind:
    """A node that was to take part cannot see the run's directory."""

    host: str


@dataclass(frozen=True)
class Unfit:
    """A node that was to take part cannot: it has failed before it could join."""

    host: str
    why: str


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
        self.progress = 0

    @property
    def fds(self) -> list[int]:
        return [self._server.fileno(), *(peer.wire.fileno() for peer in self._peers.values())]

    def beat(self) -> None:
        """Give all nodes a sign of life."""
        for peer in filter(_is_member, list(self._peers.values())):
            peer.wire.send({"alive": True})

    def news(self, now: float) -> Iterator[Joined | Left | Said | Asked | Blind | Unfit]:
        """All that has come, from nodes and of them."""
        ready = select.select(self.fds, [], [], 0)[0]
        if self._server.fileno() in ready:
            with contextlib.suppress(OSError):  # whoever knocked may be gone
                self._challenge(_Peer(Wire(self._server.accept()[0], LINE), now))
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

    def _listen(self, peer: _Peer, now: float) -> Iterator[Joined | Said | Asked | Blind | Unfit]:
        for said in peer.wire.receive():
            news = self._welcome(peer, said) if not peer.member else self._understood(peer, said)
            if news is not None:
                yield news
            if peer.wire.closed:
                return
        if peer.member:  # others have to become one in time
            peer.heard = now

    def _welcome(self, peer: _Peer, said: Document) -> Joined | Blind | Unfit | None:
        match said:
            case {"unfit": str(host), "why": str(why), "proof": str(proof)} if self._proves(peer, proof, host):
                peer.wire.closed = True
                return Unfit(host, why)
            case {"hello": str(host), "ranks": int(ranks), "proof": str(proof)} if (
                self._proves(peer, proof, host) and 0 < ranks < 1 << 16
            ):
                peer.member = True
                peer.wire.send({"welcome": peer.id})
                self._forget(said.get("before"))
                return Joined(Member(peer.id, host, ranks))
            case {"blind": str(host)} if host.isprintable() and len(host) < 256:
                peer.wire.closed = True
                return Blind(host)
        peer.wire.closed = True
        return None

    def _proves(self, peer: _Peer, proof: str, host: str) -> bool:
        return secret.is_proof(proof, self._secret, peer.nonce) and host.isprintable()

    def _forget(self, before: object) -> None:
        """A node that has come back is lost as what it was, though its old connection may not know it yet."""
        if isinstance(before, str) and before in self._peers:
            self._peers[before].wire.closed = True

    def _understood(self, peer: _Peer, said: Document) -> Said | Asked | None:
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
            case {"fact": "Asked", "signal": int(number)} if 0 < number < 65:
                return Asked(number)
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
            failed = bool(outcome.failures or outcome.sentence)
            peer.wire.send({"over": outcome.sentence, "failed": failed, "cut_off": outcome.is_cut_off})
            peer.wire.close()
        self._server.close()
        secret.remove(self._run)


def _is_member(peer: _Peer) -> bool:
    return peer.member


def nodes_of(text: str) -> tuple[int, int]:
    """The least and the most nodes that an option asks for: "2", or "1:4"."""
    found = re.fullmatch(r"(\d+)(?::(\d+))?", text)
    least, most = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= least <= most:
        raise UserError(f"nodes is {text!r}; it must be a number, or least:most such as 1:4 (--nodes)")
    return least, most

"""Several nodes in one run: the first one's launcher decides, the others' launchers are connected to it.

    hub = Hub(port, run.path)                       # the first node: `launch(job, hub=hub, wanted=Wanted(1, 4))`

The other end is in `post`. A launcher that is gone takes its connection along, so that it is missed at once; one whose
machine or network is gone is missed after some seconds of silence, and may come back as a new one.
Anybody may knock at the first node's port: who does not prove to know the run's secret, or says what cannot be
understood, is shown out, and the run goes on. The handshake:

    first node:    {"run": DIRECTORY, "nonce": N}
    joining node:  {"nonce": M, "proof": …}             # both proofs depend on the secret, the role, DIRECTORY, N and M
    first node:    {"proof": …}                         # from here on each line carries a code of its sender
    joining node:  {"hello": HOST, "ranks": 4}          # or {"unfit": HOST, "why": …}
    first node:    {"welcome": ID}
"""

from __future__ import annotations

import contextlib
import queue
import re
import socket
import threading
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from meshrun.errors import UserError, printable
from meshrun.launch import munge, secret
from meshrun.launch.head import Member, Outcome
from meshrun.launch.job import Seat, Verdict, port_refused
from meshrun.launch.ranks import Ended, Gone, Stop
from meshrun.launch.wire import Document, Wire, readable
from meshrun.store.server import Server
from meshrun.world.hostlist import LIMIT

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
    nonce: str = field(default_factory=secret.new_nonce)
    member: bool = False


class Hub:
    """The first node's connections to the others."""

    def __init__(self, port: int, run: Path, at: str = "") -> None:
        """`at`: the one address of this machine to listen at, where not all of them."""
        try:
            self._server = socket.create_server((at, port))
        except OSError as error:
            raise port_refused(port, error) from None
        self._server.setblocking(False)
        self.port: int = self._server.getsockname()[1]
        self._run, self._secret = run, secret.make(run)
        self._peers: dict[str, _Peer] = {}
        self.progress = 0
        self._checking: threading.Thread | None = None
        self._blind: queue.SimpleQueue[tuple[str, str, str]] = queue.SimpleQueue()
        """Nodes known by their credential not to see the run directory: host, connection, the credential for them."""

    @property
    def fds(self) -> list[int]:
        return [self._server.fileno(), *(peer.wire.fileno() for peer in self._peers.values())]

    def beat(self) -> None:
        """Give all nodes a sign of life."""
        for peer in filter(_is_member, list(self._peers.values())):
            peer.wire.send({"alive": True})

    def news(self, now: float) -> Iterator[Joined | Left | Said | Asked | Blind | Unfit]:
        """All that has come, from nodes and of them."""
        ready = readable(self.fds, 0)
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
        while not self._blind.empty():
            host, id, credential = self._blind.get()
            if id in self._peers:
                self._peers[id].wire.send({"credential": credential})
            yield Blind(host)

    def _challenge(self, peer: _Peer) -> None:
        strangers = [each for each in self._peers.values() if not each.wire.sealed]
        if len(strangers) >= STRANGERS:  # a node answers at once: the one that has waited longest is none
            strangers[0].wire.close()
            del self._peers[strangers[0].id]
        self._peers[peer.id] = peer
        peer.wire.send({"run": str(self._run.resolve()), "nonce": peer.nonce})

    def _listen(self, peer: _Peer, now: float) -> Iterator[Joined | Said | Asked | Unfit]:
        for said in peer.wire.receive():
            news = self._understood(peer, said) if peer.member else self._met(peer, said)
            if news is not None:
                yield news
            if peer.wire.closed:
                return
        if peer.member:  # others have to become one in time
            peer.heard = now

    def _met(self, peer: _Peer, said: Document) -> Joined | Unfit | None:
        """What somebody says who is no member yet: strangers can only prove that they are none."""
        match said:
            case {"unfit": str(host), "why": str(why)} if peer.wire.sealed and _is_host(host):
                peer.wire.closed = True
                return Unfit(host, printable(why))
            case {"hello": str(host), "ranks": int(ranks)} if (
                peer.wire.sealed and _is_host(host) and 0 < ranks < 1 << 16
            ):
                peer.member = True
                peer.wire.send({"welcome": peer.id})
                self._forget(said.get("before"))
                return Joined(Member(peer.id, host, ranks))
            case {"nonce": str(answer), "proof": str(proof)} if not peer.wire.sealed:
                shaken = secret.Handshake(self._secret, str(self._run.resolve()), peer.nonce, answer)
                if len(answer) <= secret.LONGEST and shaken.is_proof(proof, secret.JOINING):
                    peer.wire.send({"proof": shaken.proof(secret.FIRST)})
                    peer.wire.seal(own=shaken.key(secret.FIRST), other=shaken.key(secret.JOINING))
                    return None
            case {"blind": str(host), "nonce": str(answer), "credential": str(credential)} if (
                not peer.wire.sealed and _is_host(host)
            ):
                self._check(peer, host, answer, credential)
                return None
        peer.wire.closed = True
        return None

    def _check(self, peer: _Peer, host: str, answer: str, credential: str) -> None:
        """Find out whether a node that cannot read the secret is this user's; one at a time, and beside all else."""

        def check() -> None:
            words = (str(self._run.resolve()), peer.nonce, answer)
            if munge.is_own(credential, secret.JOINING, host, *words):
                self._blind.put((host, peer.id, munge.credential(secret.FIRST, *words) or ""))

        if self._checking is None or not self._checking.is_alive():
            self._checking = threading.Thread(target=check, name="credential", daemon=True)
            with contextlib.suppress(RuntimeError):  # no further thread can be started: the node asks again
                self._checking.start()

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
                return Said(peer.id, Verdict(rank, printable(text), action))
            case {"fact": "Asked", "signal": int(number)} if 0 < number < 65:
                return Asked(number)
        peer.wire.closed = True
        return None

    def order(self, member: str, order: Seat | Stop, store: Server) -> None:
        """Pass an order on; a node reaches the store at the address at which it has reached this one."""
        if member not in self._peers:
            return
        wire = self._peers[member].wire
        if isinstance(order, Seat):
            address = wire.socket.getsockname()[0]
            order = replace(order, address=address, port=store.port_at(address, self._secret))
        wire.send({"order": type(order).__name__, **asdict(order)})

    def finish(self, outcome: Outcome) -> None:
        """Tell all nodes that the run is over."""
        for peer in self._peers.values():
            failed = bool(outcome.failures or outcome.sentence)
            peer.wire.send({"over": outcome.sentence, "failed": failed, "cut_off": outcome.is_cut_off})
            peer.wire.close()
        self._server.close()
        secret.remove(self._run)


def _is_host(name: str) -> bool:
    return name.isprintable() and 0 < len(name) < 256


def _is_member(peer: _Peer) -> bool:
    return peer.member


def nodes_of(text: str) -> tuple[int, int]:
    """The least and the most nodes that an option asks for: "2", or "1:4"."""
    found = re.fullmatch(r"([0-9]{1,9})(?::([0-9]{1,9}))?", text)
    least, most = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= least <= most:
        raise UserError(f"nodes is {text!r}; it must be a number, or least:most such as 1:4 (--nodes)")
    if most > LIMIT:
        raise UserError(f"nodes is {text!r}; it must be at most {LIMIT:,}, more than any machine has (--nodes)")
    return least, most

"""The ways between nodes, tried by plain sockets: who reaches whom, how fast over which interface, whose clock is off.

    links = probe(mine, peers, job, quick=False)       # on the first rank of each node
    links.ways, links.clock, links.speeds

No process group is needed, so that a way that is broken can still be named.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from meshrun import strict_json
from meshrun.check.doctor.facts import Facts, is_loopback
from meshrun.check.doctor.listener import CHUNK, ask, ask_on
from meshrun.check.doctor.reading import resolved, source_for

SHORT = 2.0
"""Seconds after which a node that has not answered is not reachable."""
SEND_FOR, TRIES = 0.15, 3
ITSELF = ""
PINGS = 10
MOST = 32
"""Other nodes that a node tries to reach; in larger worlds those at distances of powers of two, and the first."""


@dataclass(frozen=True)
class Peer:
    """Another node, as its first rank described it."""

    node: int
    host: str
    port: int
    address: str | None
    interfaces: dict[str, str]
    """Name and address of each but loopback."""


@dataclass(frozen=True)
class Way:
    """One try to reach a node."""

    to: int
    by: str
    """`address`: the one that it gives to others; `name`: its host name; `master`: the launcher's for rank 0."""
    said: str
    """The name or address that was tried."""
    address: str | None
    """What it came to."""
    works: bool


@dataclass(frozen=True)
class Clock:
    ahead: float
    """Seconds that this node's clock is ahead of the first node's."""
    within: float
    """Half of the shortest round trip: it cannot be told better than that."""


@dataclass(frozen=True)
class Speed:
    """One stream of TCP to another node."""

    to: int
    interface: str
    bytes_per_s: float


@dataclass(frozen=True)
class Links:
    ways: tuple[Way, ...] = ()
    clock: Clock | None = None
    speeds: tuple[Speed, ...] = ()
    to_itself: float | None = None
    """Bytes a second that the node sends to itself in the same way: what a busy machine leaves for the network."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Links:
        return cls(
            tuple(Way(**each) for each in found["ways"]),
            Clock(**found["clock"]) if found["clock"] else None,
            tuple(Speed(**each) for each in found["speeds"]),
            found["to_itself"],
        )


def peer_of(facts: Facts) -> Peer:
    usable = {each.name: each.address for each in facts.network.interfaces if not is_loopback(each)}
    return Peer(facts.node, facts.host, facts.port, facts.network.address, usable)


def partners(node: int, nodes: Iterable[int]) -> list[int]:
    """The nodes that this one tries, its next neighbour first."""
    others = sorted(each for each in nodes if each != node)
    after = [*(each for each in others if each > node), *(each for each in others if each < node)]
    if len(after) <= MOST:
        return after
    return list(dict.fromkeys([*(after[(1 << step) - 1] for step in range(len(after).bit_length())), others[0]]))


def probe(mine: Facts, peers: dict[int, Peer], master: str | None, job: str, quick: bool) -> Links:
    """Try the ways from this node; `master` is what the launcher calls the first node."""
    to = partners(mine.node, peers)
    tries = [(peers[each], by) for each in to for by in ("address", "name")]
    if master is not None and mine.node != 0 and 0 in peers:
        tries.append((peers[0], "master"))
    with ThreadPoolExecutor(MOST) as pool:
        ways = list(pool.map(lambda each: _way(each[0], each[1], master, job), tries))
    clock = _clock(peers[0], job) if mine.node != 0 and 0 in peers else None
    there = tuple(way for way in ways if way is not None)
    if quick or not to:
        return Links(there, clock)
    speeds = _speeds(mine, peers[to[0]], job)
    own = speeds.pop(ITSELF, 0.0)
    return Links(there, clock, tuple(Speed(to[0], name, rate) for name, rate in speeds.items()), own or None)


def _way(peer: Peer, by: str, master: str | None, job: str) -> Way | None:
    said = {"address": peer.address, "name": peer.host, "master": master}[by]
    if said is None:
        return None
    found = resolved(said)
    if not found:
        return Way(peer.node, by, said, None, works=False)
    works = ask(found[0], peer.port, {"job": job, "kind": "time"}, SHORT) is not None
    return Way(peer.node, by, said, found[0], works and found[0] in peer.interfaces.values())


def _clock(first: Peer, job: str) -> Clock | None:
    """From the quickest of some round trips, as its answer left the other node nearest to the middle."""
    best: Clock | None = None
    for address in first.interfaces.values():
        with contextlib.suppress(OSError, ValueError), _connected(address, first.port) as connection:
            for _ in range(PINGS):
                before, began = time.time(), time.perf_counter()
                reply = ask_on(connection, {"job": job, "kind": "time"})
                took = time.perf_counter() - began
                if reply and (best is None or took / 2 < best.within):
                    best = Clock(before + took / 2 - float(reply["time"]), took / 2)
        if best is not None:
            break
    return best


def _speeds(mine: Facts, peer: Peer, job: str) -> dict[str, float]:
    """The best of some tries over each interface that leads to an address of the peer's, and within this node."""
    names = {each.address: each.name for each in mine.network.interfaces}
    ways = {ITSELF: ("127.0.0.1", "127.0.0.1", mine.port)}
    for address in peer.interfaces.values():
        own = source_for(address)
        if own in names:
            ways.setdefault(names[own], (own, address, peer.port))
    found = dict.fromkeys(ways, 0.0)
    # In turns, so that a moment in which the machine was busy does not decide about one of them.
    for _ in range(TRIES):
        for name, way in ways.items():
            found[name] = max(found[name], _sent(*way, job))
    return {name: rate for name, rate in found.items() if rate > 0}


def _sent(own: str, address: str, port: int, job: str) -> float:
    """Bytes a second that have really arrived."""
    chunk = b"\0" * CHUNK
    try:
        with _connected(address, port, own) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
            connection.settimeout(10 * SHORT)
            connection.sendall(json.dumps({"job": job, "kind": "bytes"}).encode() + b"\n")
            began = time.perf_counter()
            while time.perf_counter() < began + SEND_FOR:
                connection.sendall(chunk)
            connection.shutdown(socket.SHUT_WR)
            with connection.makefile("rb") as lines:
                arrived = strict_json.loads(lines.readline())["count"]
            return float(arrived) / (time.perf_counter() - began)
    except (OSError, ValueError, KeyError, TypeError):
        return 0.0


def _connected(address: str, port: int, own: str = "") -> socket.socket:
    return socket.create_connection((address, port), timeout=SHORT, source_address=(own, 0))

"""The examination: every rank reads, tries and measures; rank 0 judges.

    seen = examine(world, Path("runs"), Asked(site="juwels-booster", quick=False, port=None, timeout=30.0))
    seen.findings                    # on rank 0, and on a rank that has not heard of it; None on all others

Round by round, each beginning when all have told what they saw in the one before:

    facts    what a rank sees by itself                -> who is where
    links    the first rank of a node tries the others -> whether it is worth to form a process group
    work     the same products on all ranks, repeated while somebody stands out
    together the process group that training would form, and sums over it
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from meshrun.check.doctor import measure
from meshrun.check.doctor.case import Case, Finding, Held
from meshrun.check.doctor.exchange import Exchange, ports_of
from meshrun.check.doctor.facts import Facts, is_loopback
from meshrun.check.doctor.links import Links, Peer, peer_of, probe
from meshrun.check.doctor.listener import Forms, Listener
from meshrun.check.doctor.measure import Together, Work
from meshrun.check.doctor.ports import held_ports, left_over
from meshrun.check.doctor.reading import read
from meshrun.check.doctor.rules import judge
from meshrun.store.server import LOOPBACK
from meshrun.world import World
from meshrun.world.sites import load

Document = dict[str, Any]
IMPORT_S = 300.0
"""Seconds that ranks may take to import torch: from a busy file system that is long."""
FORMS: Forms = {
    "facts": {"facts": Facts},
    "links": {"links": Links, "sees": bool},
    "ready": {},
    **{f"work-{number}": {"works": list[Work]} for number in range(measure.ROUNDS)},
    "together": {"together": Together},
}
"""What ranks say in each round."""


@dataclass(frozen=True)
class Asked:
    """What the command line says."""

    site: str | None = None
    quick: bool = False
    port: int | None = None
    timeout: float = 30.0


@dataclass(frozen=True)
class Seen:
    """A world that was examined."""

    case: Case
    findings: list[Finding]
    seconds: float


def examine(world: World, runs: Path, asked: Asked) -> Seen | None:
    """Examine this world, on all its ranks; the first of them has the result."""
    began = time.monotonic()
    site = load(asked.site) if asked.site is not None else None
    # Before any listener of ours is there: this must tell whether somebody else has the port.
    held = held_ports(world, asked.port) if world.rank == 0 else ()
    ports = ports_of(world.job) if world.rank == 0 and world.size > 1 else ()
    with Listener(world.job, ports, LOOPBACK if world.nodes == 1 else "", world.size, FORMS) as listener:
        mine = read(world, runs, site, listener.port)
        addresses = [each.address for each in mine.network.interfaces if not is_loopback(each)]
        exchange = Exchange(world, runs, listener, ["127.0.0.1"] if world.nodes == 1 else addresses, asked.timeout)
        try:
            case = _rounds(world, runs, asked, mine, exchange, held)
        finally:
            exchange.close()
    if case is None:
        return None
    return Seen(case, judge(case), time.monotonic() - began)


def _rounds(
    world: World, runs: Path, asked: Asked, mine: Facts, exchange: Exchange, held: tuple[Held, ...]
) -> Case | None:
    roster = exchange.round("facts", {"facts": mine.to_json()}, _roster)
    if roster is None:
        return _unheard(world, mine)
    peers = {int(node): Peer(**each) for node, each in roster["peers"].items()}
    first = world.local_rank == 0
    links = probe(mine, peers, roster["master"], world.job, asked.quick) if first and len(peers) > 1 else Links()
    letter = {"links": links.to_json(), "sees": not mine.folder.error and exchange.sees_files()}
    plan = exchange.round("links", letter, lambda _: {"meet": not asked.quick and _could_meet(exchange, world, held)})
    rounds: list[list[Work]] = []
    together = Together()
    if plan is not None and not asked.quick:
        rounds = _work(world, exchange)
        together = measure.together(world, runs, asked.site) if plan["meet"] else measure.alone()
    exchange.tell("together", {"together": together.to_json()}, asked.timeout + measure.MEETING_S)
    if together.latency is not None:
        measure.leave()
    if world.rank != 0:
        return None
    case = _case(exchange, world, held)
    sums = {rank: Together(**each["together"]) for rank, each in exchange.heard["together"].items()}
    return replace(case, rounds=rounds, together=sums if rounds else {}, left=tuple(left_over(runs)))


def _case(exchange: Exchange, world: World, held: tuple[Held, ...]) -> Case:
    """What rank 0 knows before anything was measured."""
    heard = exchange.heard
    return Case(
        facts=[Facts.from_json(each["facts"]) for each in heard["facts"].values()],
        size=world.size,
        links={rank: Links.from_json(each["links"]) for rank, each in heard["links"].items()},
        blind=frozenset(rank for rank, each in heard["links"].items() if rank and not each["sees"]),
        unseen=frozenset(set(heard["links"]) - exchange.seen_files() - {0}) if exchange.files_work else frozenset(),
        held=held,
    )


def _roster(letters: dict[int, Document]) -> Document:
    facts = [Facts.from_json(letter["facts"]) for letter in letters.values()]
    firsts = {each.node: peer_of(each) for each in reversed(facts)}
    master = next((each.master for each in facts if each.rank == 0), None)
    return {
        "peers": {str(node): vars(peer) for node, peer in sorted(firsts.items())},
        "master": master.rpartition(":")[0] if master else None,
    }


def _could_meet(exchange: Exchange, world: World, held: tuple[Held, ...]) -> bool:
    """Whether a process group is worth a try: where something is in its way, it would only fail after a timeout."""
    in_the_way = ("ranks", "address", "network", "folder", "ports")
    return not any(finding.check in in_the_way for finding in judge(_case(exchange, world, held)))


def _work(world: World, exchange: Exchange) -> list[list[Work]]:
    """Rounds of the same work, begun by all ranks together, and repeated while somebody stands out."""
    import torch  # noqa: F401  (before the first round, since it takes ranks unequally long)

    exchange.round("ready", {}, lambda _: {"go": True}, patience=IMPORT_S)
    rounds: list[list[Work]] = []

    def more(letters: dict[int, Document]) -> Document:
        rounds.append([Work(**each) for letter in letters.values() for each in letter["works"]])
        return {"again": bool(measure.slow(rounds)) and len(rounds) < measure.ROUNDS}

    for number in range(measure.ROUNDS):
        works = [each.to_json() for each in measure.work(world)]
        answer = exchange.round(f"work-{number}", {"works": works}, more)
        if answer is None or not answer["again"]:
            break
    return rounds


def _unheard(world: World, mine: Facts) -> Case:
    """Rank 0 never answered: this rank can only tell of itself."""
    return Case(facts=[mine], size=world.size)

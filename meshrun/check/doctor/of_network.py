"""What can be wrong between nodes: addresses, interfaces, speed, clocks, ports.

for finding in addresses(case): …
"""

from __future__ import annotations

import shlex
import statistics
from collections.abc import Iterator

from meshrun.check.doctor.case import Case, Finding
from meshrun.check.doctor.facts import Facts, is_loopback
from meshrun.check.doctor.links import Speed, Way
from meshrun.world.grants import matching
from meshrun.world.network import Interface

SKEW = 0.5
TENTH = 0.1
"""Below this part of what the interface carries, one stream is not just slow: something is wrong with the link."""
TWENTIETH = 0.05
"""The same for NCCL's sums over InfiniBand, which are well below the cards' rate where ranks are many."""
ONE_STREAM = 1.25e9
"""Bytes a second that one stream of TCP, sent by Python, reaches on any fast network."""
THIRD = 1 / 3
"""An interface is the wrong one if another carries more than three times as much: less is noise."""


def addresses(case: Case) -> Iterator[Finding]:
    for host, ranks in case.nodes().items():
        has = ranks[0].network
        if has.problem and case.several_nodes:
            yield Finding(
                "address", has.problem, host, "the other nodes have nowhere to connect to", "--site NAME, whose "
                "profile says which address nodes have (meshrun sites)", (host,),
            )  # fmt: skip
        elif case.several_nodes and has.address not in [each.address for each in has.interfaces]:
            yield Finding(
                "address",
                f"{host} would tell the others to find it at {has.address}, which no interface of it has "
                f"({_interfaces(has.interfaces)})",
                host,
                "its own name stands for that address (/etc/hosts, DNS), and nobody can connect to it",
                f"mend {host}'s line in /etc/hosts, or --site NAME, whose profile says which address nodes have",
                (host,),
            )
    yield from _ways(case)


def _ways(case: Case) -> Iterator[Finding]:
    for rank, links in case.links.items():
        me = case.rank(rank)
        if me is None:
            continue
        tried = {(way.to, way.by): way for way in links.ways}
        for way in links.ways:
            to = case.host(way.to)
            if way.works or (way.by == "name" and _is_harmless(way, tried)):
                continue
            yield Finding("address", _of_way(me, to, way, case), me.host, _WHY[way.by], _FIX[way.by], (me.host,))


def _is_harmless(way: Way, tried: dict[tuple[int, str], Way]) -> bool:
    """A name that stands for nothing needs nobody, as long as the address works; one that misleads is wrong."""
    by_address = tried.get((way.to, "address"))
    return way.address is None and by_address is not None and by_address.works


_WHY = {
    "address": "ranks of these nodes cannot form a process group",
    "name": "whatever meets by host name (torchrun, gloo, mpirun) goes there and waits until it gives up",
    "master": "ranks of that node cannot find rank 0",
}
_FIX = {
    "address": "--site NAME, whose profile says which interface nodes reach each other by, or open the firewall "
    "between compute nodes",
    "name": "mend the name in /etc/hosts or DNS of that node, or give IP addresses (--site NAME does)",
    "master": "export MASTER_ADDR=IP, an address that `ip -4 addr` shows on the first node",
}


def _of_way(me: Facts, to: str, way: Way, case: Case) -> str:
    if way.address is None:
        return f"{me.host} cannot resolve {way.said!r}, the name of {to}"
    peer = next((each for each in case.facts if each.node == way.to), None)
    own = [each.address for each in peer.network.interfaces] if peer else []
    if way.by == "address":
        return f"{me.host} does not reach {to} at {way.address}, the address that {to} gives"
    if way.address.startswith("127."):
        return f"{me.host} takes {way.said!r} for {way.address}, which is itself and not {to}"
    if way.address not in own:
        return f"{me.host} takes {way.said!r} for {way.address}, which no interface of {to} has"
    return f"{me.host} does not reach {to} at {way.address}, which it takes {way.said!r} for"


def _interfaces(interfaces: tuple[Interface, ...]) -> str:
    return ", ".join(f"{each.name} {each.address}" for each in interfaces) or "there is none"


def network(case: Case) -> Iterator[Finding]:
    if not case.several_nodes:
        return
    misled: set[str] = set()
    for host, ranks in case.nodes().items():
        found = [*_asked(host, ranks[0])] or [*_slower_than_could_be(case, host, ranks[0])]
        yield from found
        misled |= {host} if found else set()
    yield from _slow_links(case, misled)
    yield from _infiniband(case)


def _asked(host: str, rank: Facts) -> Iterator[Finding]:
    """Interfaces that a variable names, and that cannot carry anything to another node."""
    names = [each.name for each in rank.network.interfaces]
    loopback = [each.name for each in rank.network.interfaces if is_loopback(each)]
    for variable, asked, prefixes in (
        ("GLOO_SOCKET_IFNAME", rank.network.gloo, False),
        ("NCCL_SOCKET_IFNAME", rank.network.nccl, True),
    ):
        if asked is None:
            continue
        meant = matching(asked, names, prefixes=prefixes)
        if meant and set(meant) - set(loopback):
            continue
        what = "the loopback interface" if meant else "no interface that is up there"
        others = ", ".join(name for name in names if name not in loopback)
        yield Finding(
            "network",
            f"{variable}={asked} names {what} of {host}; it has {', '.join(names)}",
            host,
            "ranks of other nodes cannot connect to it, and give up after the whole timeout",
            f"unset {variable} (meshrun chooses one), or name one of {others or 'none'}",
            (host,),
        )


def _slower_than_could_be(case: Case, host: str, rank: Facts) -> Iterator[Finding]:
    """As measured; where nothing was measured, as the drivers say."""
    used, links = rank.network.used(), case.links.get(rank.rank)
    if used is None:
        return
    measured = {speed.interface: speed.bytes_per_s for speed in links.speeds} if links else {}
    carry = measured or {each.name: 125_000.0 * each.speed for each in rank.network.interfaces if each.between_nodes}
    best = max(carry, key=lambda name: carry[name], default="")
    if not 0 < carry.get(used.name, 0) < THIRD * carry[best]:
        return
    asked = "GLOO_SOCKET_IFNAME names it" if rank.network.gloo else f"{rank.network.address} is its address"
    yield Finding(
        "network",
        f"collectives of {host} go over {used.name} ({asked}), which carries {_rate(carry[used.name])} to the next "
        f"node where {best} carries {_rate(carry[best])}",
        host,
        "every step waits for sums over all ranks, which take so many times longer",
        f"export GLOO_SOCKET_IFNAME={best} NCCL_SOCKET_IFNAME={best}, or --site NAME with that interface",
        (host,),
    )


def _slow_links(case: Case, misled: set[str]) -> Iterator[Finding]:
    """The link to the next node over the interface in use, against what it should carry and against other links."""
    links: list[tuple[Facts, Interface, Speed, float]] = []
    for rank, found in case.links.items():
        me = case.rank(rank)
        used = me.network.used() if me else None
        if me is not None and used is not None and me.host not in misled:
            could = min(125_000.0 * used.speed, found.to_itself or 0.0, ONE_STREAM)
            links += [(me, used, speed, could) for speed in found.speeds if speed.interface == used.name]
    for me, used, speed, could in links:
        others = [each.bytes_per_s for _, _, each, _ in links if each is not speed]
        among = statistics.median(others) if len(others) >= 2 else 0.0
        usual, word = max((among, "is"), (could, "would be"))
        if speed.bytes_per_s < TENTH * usual:
            to = case.host(speed.to)
            yield Finding(
                "network",
                f"{me.host} sends {_rate(speed.bytes_per_s)} to {to} over {used.name}, where {_rate(usual)} "
                f"{word} usual",
                f"{me.host}, {to}",
                "the slowest link is the pace of every sum over all ranks",
                f"leave one of them out (--exclude={me.host}, --exclude={to}) and tell the site",
                (me.host,),
            )


def _infiniband(case: Case) -> Iterator[Finding]:
    for host, ranks in case.nodes().items():
        has = ranks[0].network
        active = [port for port in has.infiniband if port.active]
        if not active or not any(case.together[each.rank].gpus for each in ranks if each.rank in case.together):
            continue
        carries = sum(port.gbit for port in active) / 8 * 1e9
        sums = [case.together[each.rank].bytes_per_s for each in ranks if each.rank in case.together]
        reached = min((each for each in sums if each is not None), default=carries)
        if has.nccl_without_infiniband or reached < TWENTIETH * carries:
            what = "NCCL_IB_DISABLE is set" if has.nccl_without_infiniband else (
                f"NCCL sums at {_rate(reached)} a rank, and {len(active)} InfiniBand ports carry {_rate(carries)}"
            )  # fmt: skip
            yield Finding(
                "network",
                f"NCCL on {host} seems to go over TCP: {what}",
                host,
                "over TCP it is about five times slower, and says nothing of it",
                "unset NCCL_IB_DISABLE; NCCL_DEBUG=INFO shows NET/IB or NET/Socket, NCCL_IB_HCA names the cards",
                (host,),
            )


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.1f} GB/s" if bytes_per_s >= 1e9 else f"{bytes_per_s / 1e6:.1f} MB/s"


def clocks(case: Case) -> Iterator[Finding]:
    """Against the median of all nodes, so that the one that is off is named; of two nodes it is the second."""
    ahead = {case.host(0): (0.0, 0.0)}
    for rank, links in case.links.items():
        me = case.rank(rank)
        if me is not None and links.clock is not None:
            ahead[me.host] = (links.clock.ahead, links.clock.within)
    usual = statistics.median(off for off, _ in ahead.values()) if len(ahead) > 2 else 0.0
    others = "the others'" if len(ahead) > 2 else f"that of {case.host(0)}"
    for host, (off, within) in ahead.items():
        if abs(off - usual) > SKEW + within:
            yield _clock(host, off - usual, others)


def _clock(host: str, off: float, others: str) -> Finding:
    return Finding(
        "clock",
        f"the clock of {host} is {abs(off):.1f} s {'ahead of' if off > 0 else 'behind'} {others}",
        host,
        "what happened first on which rank, when the job must stop, and which checkpoint is newest are told by clocks",
        f"have it set by the site (chronyc tracking shows it), or leave the node out: --exclude={host}",
        (host,),
    )


def ports(case: Case) -> Iterator[Finding]:
    host = case.host(0)
    for held in case.held:
        yield Finding(
            "ports",
            f"port {held.port} of {host}, which {held.named_by} names, is taken{f' by {held.by}' if held.by else ''}",
            host,
            "rank 0 cannot listen there, and the others would talk to somebody else",
            f"end that process, or give {held.named_by} another number; without it meshrun takes a free one",
            (host,),
        )
    if case.left:
        first, more = case.left[0], len(case.left) - 1
        also = f" (and {more} more)" if more else ""
        yield Finding(
            "ports",
            f"{first.file} says that rank 0 of a launch listens at {first.at}, where nobody does{also}",
            host,
            "that launch is over; one that got the same name would look there first and wait",
            f"rm {' '.join(shlex.quote(left.file) for left in case.left[:8])}",
            (host,),
        )

"""From all that was seen to what is wrong: pure functions, so that every sentence can be tried with a table of facts.

    findings = judge(case)
    findings[0].what          # "/dev/shm of n2 has 1.0 MiB free of 1.0 MiB, and 2 ranks need at least 128.0 MiB"

A rule says nothing where all is well. The same finding on many nodes is said once.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator

from meshrun.check.doctor import of_network, of_node
from meshrun.check.doctor.case import CHECKS, Case, Finding, ranks_text
from meshrun.check.doctor.measure import slow

Rule = Callable[[Case], Iterator[Finding]]


def judge(case: Case) -> list[Finding]:
    """All findings, in the order of the checks."""
    found = [finding for rule in RULES for finding in rule(case)]
    if not any(each.check in ("address", "network", "folder", "ranks", "ports") for each in found):
        found += not_together(case)
    order = list(CHECKS)
    return sorted(_merged(found), key=lambda each: order.index(each.check))


def missing(case: Case) -> Iterator[Finding]:
    heard = {each.rank for each in case.facts}
    lost = set(range(case.size)) - heard
    if lost:
        yield Finding(
            "ranks",
            f"{ranks_text(lost)} of {case.size} {'were' if len(lost) > 1 else 'was'} not heard",
            ranks_text(lost),
            "it was not started, has died, or reaches neither rank 0 nor its folder: the rest is told without it",
            "look at what the launcher says of it; --timeout SECONDS waits longer",
        )


def shared_folder(case: Case) -> Iterator[Finding]:
    """Written on one node, seen on the others."""
    first = case.rank(0)
    broken = {each.rank for each in case.facts if each.folder.error}
    if first is None or 0 in broken:
        return
    apart = (case.blind | case.unseen) - broken - {0}
    for host, ranks in case.nodes().items():
        folder = next((each.folder for each in ranks if each.rank in apart), None)
        if folder is not None:
            on = f" ({folder.filesystem} there)" if folder.filesystem else ""
            yield Finding(
                "folder",
                f"{folder.path} of {host}{on} is not the one that {first.host} has",
                host,
                "config.json, events and checkpoints of a run must be the same files for all nodes",
                "--runs DIR on a file system that all nodes share, such as $SCRATCH or $HOME",
                (host,),
            )


def versions(case: Case) -> Iterator[Finding]:
    for name in dict.fromkeys(name for each in case.facts for name in each.versions):
        found = {each.rank: each.versions.get(name, "none") for each in case.facts}
        # Of two that are equally frequent, the one of the lowest rank is called usual.
        usual = max(Counter(found.values()).items(), key=lambda item: item[1])[0]
        others = [each for each in case.facts if found[each.rank] != usual]
        if not others:
            continue
        hosts = tuple(dict.fromkeys(each.host for each in others))
        yield Finding(
            "versions",
            f"{name} is {found[others[0].rank]} on {', '.join(hosts[:8])} and {usual} elsewhere",
            ", ".join(hosts[:8]),
            "ranks of different versions speak different protocols and compute different numbers, or hang",
            "start the same environment on all nodes: the full path of one python on a shared file system",
            hosts,
        )


def speed(case: Case) -> Iterator[Finding]:
    for work, times in slow(case.rounds):
        me = case.rank(work.rank)
        if me is None:
            continue
        shared = not work.on_gpu and work.share < 0.6
        yield Finding(
            "speed",
            f"{me.who} takes {times:.1f} times as long for a matrix product as the others"
            + (f", and got {work.share:.0%} of its core" if shared else f" ({work.device})"),
            me.who,
            "all ranks wait for the slowest in every step",
            f"look for other processes on {me.host} (top), or leave the node out: --exclude={me.host}"
            if shared
            else f"leave the node out (--exclude={me.host}) and tell the site: clocked down, hot, or faulty",
            (me.host,),
        )


def not_together(case: Case) -> Iterator[Finding]:
    """A process group that could not be formed, where nothing else explains it."""
    failed = {rank: each.error for rank, each in case.together.items() if each.error}
    if failed:
        rank, error = min(failed.items())
        me = case.rank(rank)
        yield Finding(
            "network",
            f"ranks could not form a process group: {error}",
            me.who if me else ranks_text([rank]),
            "training begins with the same step",
            "--site NAME or GLOO_SOCKET_IFNAME for the network, --backend gloo to leave out NCCL",
            (me.host,) if me else (),
        )


RULES: tuple[Rule, ...] = (
    missing,
    of_node.cores,
    of_node.gpus,
    of_network.addresses,
    of_network.network,
    of_network.clocks,
    of_node.memory,
    of_node.folder,
    shared_folder,
    of_node.caches,
    versions,
    speed,
    of_network.ports,
    of_node.limits,
)


def _merged(findings: list[Finding]) -> list[Finding]:
    """One finding for all nodes that have the same: the first one's words, and everybody's place."""
    groups: dict[tuple[str, str, str], list[Finding]] = {}
    for each in findings:
        groups.setdefault((each.check, each.why, _without_hosts(each)), []).append(each)
    return [_one(group) for group in groups.values()]


def _without_hosts(finding: Finding) -> str:
    """The fix, less the names of the nodes, which would make every one differ."""
    text = finding.fix
    for host in sorted(finding.hosts, key=len, reverse=True):
        text = text.replace(host, "HOST")
    return text


def _one(group: list[Finding]) -> Finding:
    first = group[0]
    if len(group) == 1:
        return first
    where = list(dict.fromkeys(each.where for each in group))
    hosts = tuple(dict.fromkeys(host for each in group for host in each.hosts))
    shown = ", ".join(where[:8]) + (f", … ({len(where)})" if len(where) > 8 else "")
    more = f"; the same on {len(hosts) - 1} more node{'s' * (len(hosts) != 2)}" if len(hosts) > 1 else ""
    return dataclasses.replace(first, what=first.what + more, where=shown, hosts=hosts)

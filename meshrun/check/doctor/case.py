"""All that was seen of one world, and what a finding is: what rules read, and what they give.

case.nodes()                    # {"n1": [facts of its ranks], …}
Finding("memory", what, where, why, fix, hosts=("n2",))
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from meshrun.check.doctor.facts import Facts
from meshrun.check.doctor.links import Links
from meshrun.check.doctor.measure import Together, Work

CHECKS = {
    "ranks": "every rank was heard",
    "cores": "cores bound are those granted",
    "GPUs": "GPUs visible are those granted",
    "address": "nodes reach each other",
    "network": "collectives go over the fastest network",
    "clock": "clocks agree",
    "memory": "/dev/shm is large enough",
    "folder": "run directories are writable and shared",
    "caches": "caches are there, offline switches are set",
    "versions": "versions are equal",
    "speed": "no rank is slow",
    "ports": "no port is stale or taken",
    "limits": "limits of processes and of time",
}
"""What is looked at, in the order in which it is shown."""


@dataclass(frozen=True)
class Finding:
    """Something that is wrong."""

    check: str
    what: str
    where: str
    why: str
    fix: str
    """The flag, line or command that mends it."""
    hosts: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class Held:
    """A port that ranks would need, and that somebody has."""

    port: int
    named_by: str
    by: str
    """The process that has it, where this user may see it."""


@dataclass(frozen=True)
class Left:
    """Where a launch that is over said that its rank 0 listens."""

    file: str
    at: str


@dataclass(frozen=True)
class Case:
    """One world, as far as it was heard."""

    facts: list[Facts]
    size: int
    links: dict[int, Links] = field(default_factory=dict)
    """By the rank that tried them: the first of each node."""
    blind: frozenset[int] = frozenset()
    """Ranks that did not see in the folder of runs what rank 0 wrote there."""
    unseen: frozenset[int] = frozenset()
    """Ranks whose files rank 0 did not see there."""
    rounds: list[list[Work]] = field(default_factory=list)
    together: dict[int, Together] = field(default_factory=dict)
    held: tuple[Held, ...] = ()
    left: tuple[Left, ...] = ()

    def nodes(self) -> dict[str, list[Facts]]:
        """The ranks of each node, by the node's name."""
        found: dict[str, list[Facts]] = {}
        for each in sorted(self.facts, key=lambda each: (each.node, each.rank)):
            found.setdefault(each.host, []).append(each)
        return found

    def host(self, node: int) -> str:
        return next((each.host for each in self.facts if each.node == node), f"node {node}")

    def rank(self, rank: int) -> Facts | None:
        return next((each for each in self.facts if each.rank == rank), None)

    @property
    def several_nodes(self) -> bool:
        return any(each.nodes > 1 for each in self.facts)


def ranks_text(ranks: Iterable[int]) -> str:
    """`rank 3`, `ranks 0, 1`, `ranks 0, 1, … (512)`."""
    listed = sorted(ranks)
    text = ", ".join(map(str, listed[:6])) + (f", … ({len(listed)})" if len(listed) > 6 else "")
    return f"rank{'s' * (len(listed) != 1)} {text}"


def size_text(count: float) -> str:
    """Bytes for people, in powers of two as `df -h` has them."""
    for unit, width in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= width:
            return f"{count / width:.1f} {unit}"
    return f"{count:.0f} B"

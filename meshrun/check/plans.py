"""Which faults strike when: drawn from a seed, out of the kinds that there are.

for fault in plan(seed=1, count=200, ranks=2):            # the same seed, the same faults
    with KINDS[fault.kind].strike(scene, fault) as struck:
        …                                                 # the run must go on; `struck` says what that means

@kind("lightning", "what it does")                        # one more kind
def lightning(scene, fault):
    …                                                     # breaks something
    yield Struck(time.monotonic())
    …                                                     # heals it
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Literal

from meshrun.check.scene import Life, Scene
from meshrun.errors import UserError

Need = Literal["readers", "evaluation", "cluster"]
NEEDS: dict[Need, str] = {
    "readers": "processes that read for ranks; give at least one (--workers)",
    "evaluation": "a target that is evaluated; this one has no evaluation sets (--kinds)",
    "cluster": "several nodes under Slurm, which can be virtual ones on this machine (--cluster)",
}
"""What a run may lack, in the words that refuse a fault for it."""


@dataclass(frozen=True)
class Fault:
    """One fault of a plan."""

    number: int
    kind: str
    rank: int
    gap: int
    """Steps that are finished before it strikes."""
    seed: int

    @property
    def random(self) -> random.Random:
        return random.Random(self.seed)


@dataclass(frozen=True)
class Struck:
    """A fault has struck."""

    when: float
    new_life: bool = True
    """Whether ranks were lost, so that only a new life of all of them is going on."""
    launcher: bool = False
    """Whether the launcher was lost too, so that the run must be resumed."""
    before: Life | None = None
    """How far the run was just after it, where steps may have ended on the way to it that tell nothing."""
    how: str = "real"
    """"real", or "armed" where a rank was told to do to itself what the machine does not allow from outside."""


Strike = Callable[[Scene, Fault], AbstractContextManager[Struck]]


@dataclass(frozen=True)
class Kind:
    """A kind of fault."""

    name: str
    does: str
    strike: Strike
    weight: int
    """How often it is drawn: what takes long to recover from is drawn less."""
    at_the_end: bool = False
    """Whether its moment is the end of a run."""
    needs_disk: bool = False
    """Whether it breaks a disk of its own under the run directory."""
    needs: Need | None = None
    """What a run must have for it."""
    last: bool = False
    """Whether nothing else can strike into a run after it."""


KINDS: dict[str, Kind] = {}


def kind(
    name: str,
    does: str,
    weight: int = 2,
    at_the_end: bool = False,
    needs_disk: bool = False,
    needs: Need | None = None,
    last: bool = False,
) -> Callable[[Callable[[Scene, Fault], Iterator[Struck]]], Strike]:
    """Add a kind of fault."""

    def add(strike: Callable[[Scene, Fault], Iterator[Struck]]) -> Strike:
        made = contextmanager(strike)
        KINDS[name] = Kind(name, does, made, weight, at_the_end, needs_disk, needs, last)
        return made

    return add


def plan(
    seed: int, count: int, ranks: int, kinds: Sequence[str] | None = None, has: Collection[Need] = tuple(NEEDS)
) -> list[Fault]:
    """So many faults in an order that only the seed decides; each kind comes before any comes again too often.

    `has` is what runs have of what kinds need.
    """
    for name in kinds or ():
        if name not in KINDS:
            raise UserError(f"there is no fault {name!r}; there are {', '.join(KINDS)} (--kinds)")
        needs = KINDS[name].needs
        if needs is not None and needs not in has:
            raise UserError(f"{name} needs {NEEDS[needs]}")
    source = random.Random(seed)
    usual = [each for each in KINDS.values() if each.needs is None or each.needs in has]
    deck = list(kinds) if kinds is not None else [each.name for each in usual for _ in range(each.weight)]
    drawn: list[str] = []
    while len(drawn) < count:
        source.shuffle(deck)
        drawn += deck
    return [
        Fault(number, name, source.randrange(ranks), source.choice((0, 1, 2, 4, 7, 12)), source.getrandbits(32))
        for number, name in enumerate(drawn[:count])
    ]

"""State that lies in the memory of several nodes: what there is of it, and the way to the nodes that lack some.

    offers = gather(here, memory)                      # what every node has, known to every rank
    for indices in moments(offers, here): …            # of one step each, the newest first
    bring(here, memory, offers, indices, wanted)       # files that a node's ranks need and it does not have

Files travel whole, from one node's first rank to another's, in an order that all ranks know.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from meshrun.mesh import Here
from meshrun.state.manifest import Index
from meshrun.state.memory import fitting, forget, mark, memory_files

CHUNK = 16 << 20


@dataclass(frozen=True)
class Offer:
    """What a node has, and the rank that speaks for it: its first."""

    leader: int
    indices: list[Index]

    def has(self, wanted: Index) -> bool:
        return any(_same(each, wanted) for each in self.indices)


def gather(here: Here, memory: Path) -> list[Offer]:
    """What every node has."""
    own = [file.index.encode() for file in memory_files(memory)] if here.world.local_rank == 0 else []
    words = here.gathered((here.world.local_rank == 0, own))
    return [Offer(rank, [Index.decode(raw) for raw in found]) for rank, (leads, found) in enumerate(words) if leads]


def moments(offers: Sequence[Offer], here: Here) -> Iterator[list[Index]]:
    """The files of each step that fit together, the newest step first; those of this node before others."""
    own = _leader(here)
    # A copy of a file is the same file: the first node that has it stands for all.
    found: dict[tuple[object, ...], tuple[bool, Index]] = {}
    for offer in offers:
        for index in offer.indices:
            before = found.get(_key(index))
            found[_key(index)] = (offer.leader == own or (before is not None and before[0]), index)
    for step in sorted({index.step for _, index in found.values()}, reverse=True):
        group = fitting([index for _, index in found.values() if index.step == step])
        # The largest first, whose state is taken for that of all: small ones may have been written a moment earlier.
        yield sorted(group, key=lambda index: (not found[_key(index)][0], -index.file.bytes, index.name))


def bring(here: Here, memory: Path, offers: Sequence[Offer], indices: Sequence[Index], wanted: list[set[str]]) -> None:
    """`wanted` has the names of the files that each rank needs: its node gets those that it does not have."""
    leaders = here.gathered(_leader(here))
    for offer in offers:
        names = set().union(*(names for rank, names in enumerate(wanted) if leaders[rank] == offer.leader))
        for index in sorted(indices, key=lambda each: each.name):
            if index.name in names and not offer.has(index):
                source = next(each.leader for each in offers if each.has(index))
                if here.rank == source:
                    _send(memory / index.name, index.file.bytes, offer.leader)
                elif here.rank == offer.leader:
                    _receive(memory / index.name, index, source)
    # Who reads next must not come before the files are there.
    here.gathered(None)


def _send(path: Path, size: int, to: int) -> None:
    with path.open("rb", buffering=0) as file:
        for start in range(0, size, CHUNK):
            chunk = torch.zeros(min(CHUNK, size - start), dtype=torch.uint8)
            file.readinto(chunk.numpy().data)
            dist.send(chunk, to)


def _receive(path: Path, index: Index, source: int) -> None:
    """Without room for it the file is not marked as whole, and so not found; but what was sent must be taken."""
    with contextlib.ExitStack() as stack:
        forget(path)
        file = None
        with contextlib.suppress(OSError):
            file = stack.enter_context(path.open("wb", buffering=0))
        for start in range(0, index.file.bytes, CHUNK):
            chunk = torch.empty(min(CHUNK, index.file.bytes - start), dtype=torch.uint8)
            dist.recv(chunk, source)
            try:
                if file is not None and file.write(chunk.numpy().data) != len(chunk):
                    file = None
            except OSError:
                file = None
        if file is not None:
            with contextlib.suppress(OSError):
                mark(path, index)


def missing(memory: Path, indices: Sequence[Index]) -> str:
    """What of these files is not here, as a sentence; nothing if all are."""
    there = {_key(file.index) for file in memory_files(memory)}
    lacking = [index.name for index in indices if _key(index) not in there]
    return f"{lacking[0]} of step {indices[0].step} could not be brought to {memory}" if lacking else ""


def _leader(here: Here) -> int:
    return here.rank - here.world.local_rank


def _key(index: Index) -> tuple[object, ...]:
    moment = str(index.state.get("skipped")), index.state.get("evaluated")
    return index.name, index.step, index.world, index.layout, index.file.bytes, *moment


def _same(one: Index, other: Index) -> bool:
    return _key(one) == _key(other)

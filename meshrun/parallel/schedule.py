"""In which order the ranks of a pipeline compute: one list of actions a rank, made before anything runs.

    orders("1f1b", ranks=4, chunks=1, pieces=8)[0]     # what the first rank does: F0 F1 F2 F3 B0 F4 B1 …

    gpipe        all forward passes, then all backward passes
    1f1b         as few forward passes ahead as keep everybody busy, then one forward, one backward
    interleaved  1f1b over several chunks of the model a rank, which divides the idle time by their number
    zb           1f1b with the backward pass in two: what the stage before waits for first (I), the gradients of
                 weights (W) where a rank would be idle

Stage s is on rank s % ranks; chunk c of rank r is the stage c * ranks + r.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from meshrun.layout import Layout

Kind = Literal["F", "B", "I", "W"]


class Action(NamedTuple):
    """Forward, backward, or its two halves, of a micro-batch on a stage."""

    kind: Kind
    stage: int
    piece: int


def chunks_of(layout: Layout) -> int:
    """How many stages a rank has."""
    return 2 if layout.pp_variant == "interleaved" else 1


def orders(variant: str, ranks: int, chunks: int, pieces: int) -> list[list[Action]]:
    """What each rank does, in order."""
    if variant == "zb":
        return _zero_bubble(ranks, pieces)
    if variant == "interleaved":
        return [_interleaved(rank, ranks, chunks, pieces) for rank in range(ranks)]
    ahead = [pieces if variant == "gpipe" else min(pieces, ranks - 1 - rank) for rank in range(ranks)]
    return [
        _one_by_one(
            [Action("F", rank, piece) for piece in range(pieces)],
            [Action("B", rank, piece) for piece in range(pieces)],
            ahead[rank],
        )
        for rank in range(ranks)
    ]


def _one_by_one(forward: list[Action], backward: list[Action], ahead: int) -> list[Action]:
    """Some forward passes first, then one forward and one backward in turn, then the backward passes that are left."""
    turns = [each for pair in zip(forward[ahead:], backward, strict=False) for each in pair]
    return [*forward[:ahead], *turns, *backward[len(forward) - ahead :]]


def _interleaved(rank: int, ranks: int, chunks: int, pieces: int) -> list[Action]:
    """Rounds of `ranks` micro-batches through the first chunk, then through the second, and so on."""
    if pieces % ranks:
        raise ValueError(f"{pieces} micro-batches cannot be interleaved on {ranks} ranks")

    def places(kind: Kind, order: range) -> Iterator[Action]:
        for first in range(0, pieces, ranks):
            for chunk in order:
                for piece in range(first, first + ranks):
                    yield Action(kind, chunk * ranks + rank, piece)

    forward, backward = list(places("F", range(chunks))), list(places("B", range(chunks - 1, -1, -1)))
    return _one_by_one(forward, backward, min(len(forward), 2 * (ranks - rank - 1) + (chunks - 1) * ranks))


def _zero_bubble(ranks: int, pieces: int) -> list[list[Action]]:
    """Played through in time with halves of equal length: the urgent half first, weights where nothing else can be."""
    done: dict[Action, int] = {}
    plans: list[list[Action]] = [[] for _ in range(ranks)]
    counts = [{"F": 0, "I": 0, "W": 0} for _ in range(ranks)]
    now = 0
    while any(count["W"] < pieces for count in counts):
        for rank, count in enumerate(counts):
            action = _most_urgent(rank, ranks, pieces, count, done, now)
            if action is not None:
                count[action.kind] += 1
                plans[rank].append(action)
                done[action] = now + 1
        now += 1
    return plans


def _most_urgent(
    rank: int, ranks: int, pieces: int, count: dict[str, int], done: dict[Action, int], now: int
) -> Action | None:
    def ready(*needed: Action) -> bool:
        return all(done.get(each, now + 1) <= now for each in needed)

    forward, urgent = Action("F", rank, count["F"]), Action("I", rank, count["I"])
    after = [] if rank == ranks - 1 else [Action("I", rank + 1, urgent.piece)]
    if urgent.piece < count["F"] and ready(Action("F", rank, urgent.piece), *after):
        return urgent
    before = [] if rank == 0 else [Action("F", rank - 1, forward.piece)]
    # No more activations are kept than 1f1b keeps.
    if forward.piece < pieces and count["F"] - count["I"] < ranks - rank and ready(*before):
        return forward
    return Action("W", rank, count["W"]) if count["W"] < count["I"] else None


def idle_share(variant: str, ranks: int, chunks: int, pieces: int) -> float:
    """The share of time that a rank is idle when all passes of equal length cost the same and sending costs nothing.

    A backward pass is taken as twice a forward pass, and its halves as equal.
    """
    if variant == "interleaved":
        return (ranks - 1) / (chunks * pieces + ranks - 1)
    if variant == "zb":
        return (ranks - 1) / (3 * pieces + ranks - 1)
    return (ranks - 1) / (pieces + ranks - 1)

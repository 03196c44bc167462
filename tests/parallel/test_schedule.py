"""The order of a pipeline: everything once, in an order that can be, as little idle time as the formula says."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import pytest

from meshrun.parallel.schedule import Action, idle_share, orders

CASES = [
    (variant, ranks, chunks, pieces)
    for variant, all_chunks in (("gpipe", [1]), ("1f1b", [1]), ("zb", [1]), ("interleaved", [1, 2, 3]))
    for chunks in all_chunks
    for ranks in (1, 2, 3, 4, 8)
    for pieces in (1, 2, 4, 7, 8, 16)
    if variant != "interleaved" or pieces % ranks == 0
]
COSTS = {"F": 1, "B": 2, "I": 1, "W": 1}


def needs(action: Action, stages: int, split: bool) -> list[Action]:
    """What must have been computed before."""
    kind, stage, piece = action
    back = "I" if split else "B"
    if kind == "F":
        return [Action("F", stage - 1, piece)] if stage else []
    if kind == "W":
        return [Action("I", stage, piece)]
    return [Action("F", stage, piece), *([Action(back, stage + 1, piece)] if stage + 1 < stages else [])]


def played(variant: str, ranks: int, chunks: int, pieces: int) -> list[tuple[int, int]]:
    """(when it ends, how long it works) of each rank, if each does its list in order and messages take no time."""
    plans = orders(variant, ranks, chunks, pieces)
    ends: dict[Action, int] = {}
    clocks, places, busy = [0] * ranks, [0] * ranks, [0] * ranks
    while any(place < len(plan) for place, plan in zip(places, plans, strict=True)):
        moved = False
        for rank, plan in enumerate(plans):
            while places[rank] < len(plan):
                action = plan[places[rank]]
                before = needs(action, ranks * chunks, variant == "zb")
                if any(each not in ends for each in before):
                    break
                begin = max([clocks[rank], *(ends[each] for each in before)])
                clocks[rank] = ends[action] = begin + COSTS[action.kind]
                busy[rank] += COSTS[action.kind]
                places[rank] += 1
                moved = True
        waiting = [plan[place] for place, plan in zip(places, plans, strict=True) if place < len(plan)]
        assert moved, f"all ranks wait for each other: {waiting}"
    return list(zip(clocks, busy, strict=True))


@pytest.mark.parametrize("variant, ranks, chunks, pieces", CASES)
def test_every_pass_of_every_micro_batch_is_there_once_on_its_rank(variant: str, ranks: int, chunks: int, pieces: int):
    plans = orders(variant, ranks, chunks, pieces)
    kinds = "FIW" if variant == "zb" else "FB"
    for rank, plan in enumerate(plans):
        stages = [chunk * ranks + rank for chunk in range(chunks)]
        wanted = {Action(kind, stage, piece) for kind in kinds for stage in stages for piece in range(pieces)}  # type: ignore[arg-type]
        assert Counter(plan) == Counter(wanted)


@pytest.mark.parametrize("variant, ranks, chunks, pieces", CASES)
def test_no_rank_waits_for_one_that_waits_for_it(variant: str, ranks: int, chunks: int, pieces: int):
    assert len(played(variant, ranks, chunks, pieces)) == ranks


@pytest.mark.parametrize("variant, ranks, chunks, pieces", [each for each in CASES if each[3] >= 2 * each[1]])
def test_idle_time_is_what_the_formula_says(variant: str, ranks: int, chunks: int, pieces: int):
    """Of the whole time from the first forward pass to the last backward pass on any rank."""
    ended = played(variant, ranks, chunks, pieces)
    whole = max(end for end, _ in ended)
    assert all(busy == 3 * chunks * pieces for _, busy in ended)
    idle = Fraction(whole - 3 * chunks * pieces, whole)
    assert float(idle) == pytest.approx(idle_share(variant, ranks, chunks, pieces))


def alive(plan: list[Action]) -> int:
    """The most forward passes whose activations are kept at a time."""
    now = most = 0
    for action in plan:
        now += {"F": 1, "B": -1, "I": -1, "W": 0}[action.kind]
        most = max(most, now)
    return most


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("pieces", [1, 4, 16])
def test_1f1b_keeps_no_more_activations_than_there_are_stages_after_it(ranks: int, pieces: int):
    for rank, plan in enumerate(orders("1f1b", ranks, 1, pieces)):
        assert alive(plan) == min(pieces, ranks - rank)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("pieces", [1, 4, 16])
def test_zero_bubble_keeps_no_more_activations_than_1f1b(ranks: int, pieces: int):
    plain = orders("1f1b", ranks, 1, pieces)
    for split, whole in zip(orders("zb", ranks, 1, pieces), plain, strict=True):
        assert alive(split) <= alive(whole)


@pytest.mark.parametrize(("ranks", "chunks", "pieces"), [(2, 2, 2), (2, 2, 8), (4, 2, 8), (4, 3, 16)])
def test_interleaved_keeps_no_more_activations_than_fill_the_pipeline(ranks: int, chunks: int, pieces: int):
    for rank, plan in enumerate(orders("interleaved", ranks, chunks, pieces)):
        ahead = 2 * (ranks - rank - 1) + (chunks - 1) * ranks
        assert alive(plan) == min(chunks * pieces, ahead + 1)


@pytest.mark.parametrize("pieces", [2, 8])
def test_gpipe_keeps_the_activations_of_all_micro_batches(pieces: int):
    assert [alive(plan) for plan in orders("gpipe", 2, 1, pieces)] == [pieces, pieces]


def test_more_chunks_divide_the_idle_time():
    shares = [idle_share("interleaved", 4, chunks, 8) for chunks in (1, 2, 4)]
    assert shares[0] == idle_share("1f1b", 4, 1, 8)
    assert shares[0] > shares[1] > shares[2] and idle_share("zb", 4, 1, 8) < shares[0] / 2


def test_micro_batches_that_cannot_be_interleaved_are_refused():
    with pytest.raises(ValueError, match="3 micro-batches cannot be interleaved on 2 ranks"):
        orders("interleaved", 2, 2, 3)

"""Sides that take turns, each in a process of its own, and what comes of comparing them.

    taken = take_turns([Entry("meshrun", make_a, 64), Entry("bare", make_b, 64)], rounds=5, steps=20, device=device)
    ratios(taken["meshrun"], taken["bare"])             # (median, lower quartile, upper quartile)

Rounds alternate, in an order that is drawn anew each time, and a ratio is the median over rounds of one side's rate
over the other's in the same round: a machine that is slower for a while is so for all. On a GPU a side gives the memory
that it does not hold for good back after its turn; where even that is too much for all sides together, those that are
soon built again are let go, and sides of like hunger come one after the other.
"""

from __future__ import annotations

import contextlib
import random
import statistics
from collections.abc import Callable, Sequence

import torch

from meshrun.check.bench_process import OutOfMemory, SideFailed
from meshrun.check.bench_side import COMPARED, Built, Entry, SideProcess, Taken, memory_of
from meshrun.check.nan_safe import largest

FULL = 0.93
"""Of a GPU's memory that sides may take together; the rest is for what is no tensor."""
EASE = 1.8
"""Times what it needs that a side is given: one that keeps or records more where memory is ample must do so in every
turn."""


def ratios(one: Taken, other: Taken) -> tuple[float, float, float] | None:
    """The median over rounds of how many times as fast one is, and the quartiles."""
    if not one.turns or not other.turns:
        return None
    each = [a / b for a, b in zip(one.rates, other.rates, strict=True)]
    if len(each) == 1:
        return each[0], each[0], each[0]
    low, median, high = statistics.quantiles(each, n=4, method="inclusive")
    return median, low, high


def apart(one: Built, other: Built) -> float:
    """The largest relative difference of the first losses of two sides."""
    pairs = list(zip(one.losses[:COMPARED], other.losses[:COMPARED], strict=False))
    return largest(abs(a - b) / max(abs(a), 1e-12) for a, b in pairs)


def to_be_let_go(wanted: int, held: dict[str, int], cost: dict[str, float], total: int) -> list[str]:
    """Which sides must go so that another can take so much of the memory: no more than needed, and first those whose
    memory costs least to fill again."""
    going: list[str] = []
    for name in sorted((each for each in held if held[each]), key=lambda each: cost[each] / held[each]):
        if wanted + sum(size for each, size in held.items() if each not in going) <= FULL * total:
            break
        going.append(name)
    return going


def in_order(peaks: dict[str, int], held: dict[str, int], total: int, number: int) -> list[str]:
    """Who comes after whom in a round: drawn where all fit together, else by hunger, up and down in turns."""
    names = list(peaks)
    if EASE * max(peaks.values(), default=0) + sum(held.values()) <= FULL * total:
        return random.Random(number).sample(names, len(names))
    return sorted(names, key=lambda name: peaks[name], reverse=number % 2 == 0)


def take_turns(
    entries: Sequence[Entry],
    rounds: int,
    steps: int,
    device: torch.device,
    warm_up: int = 3,
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, Taken]:
    """Build every side once, then let them take turns; a `SideFailed` only of one that is needed."""
    with contextlib.ExitStack() as stack:
        sides = [stack.enter_context(SideProcess(entry, device)) for entry in entries]
        for side in sides:
            side.prepare()
        total = sides[0].ask(memory_of, device) if device.type == "cuda" and sides else 0
        for side in sides:
            _with_room(side, sides, total, lambda side: side.build(warm_up))
            how = f"first step after {side.taken.built.first_step_s:.1f} s" if side.taken.built else side.taken.error
            say(f"{side.entry.name}: {how}")
        for number in range(rounds):
            say(f"round {number + 1} of {rounds}")
            peaks = {side.entry.name: side.peak for side in sides}
            held = {side.entry.name: side.held for side in sides}
            for name in in_order(peaks, held, total, number):
                side = next(each for each in sides if each.entry.name == name)
                _with_room(side, sides, total, lambda side: side.turn(steps, warm_up))
        return {side.entry.name: side.taken for side in sides}


def _with_room(side: SideProcess, sides: list[SideProcess], total: int, act: Callable[[SideProcess], None]) -> None:
    """Have a side do something, with as much of the GPU's memory as it needs."""
    if side.taken.error is not None:
        return
    others = {each.entry.name: each for each in sides if each is not side}
    if total:
        # What is not known yet is as much as the hungriest so far.
        wanted = int(EASE * (side.peak or max(each.peak for each in sides)))
        held = {name: each.held for name, each in others.items()}
        total -= sum(each.lost for each in others.values())
        cost = {name: each.taken.built.first_step_s if each.taken.built else 0.0 for name, each in others.items()}
        for name in to_be_let_go(wanted, held, cost, total):
            others[name].let_go()
    for last in (False, True):
        try:
            act(side)
        except OutOfMemory as error:
            if last:
                side.fail(error)
            for each in sides:  # this one too: what is left of a build that failed is in the way of the next
                each.let_go()
        except SideFailed as error:
            side.fail(error)
            side.let_go()
        else:
            return
        if side.taken.error is not None:
            return

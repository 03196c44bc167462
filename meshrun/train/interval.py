"""How often to save: every so many steps, every so many minutes, or as often as pays.

    every = parse("auto")                    # or "500", "10min", "90s", "none"
    every.seconds(cost=0.4, mtbf=3600 * 24)  # Young and Daly: sqrt(2 * cost * time between failures)

Saving costs time in every interval; a failure costs half an interval on average. Their sum is least at that root.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from meshrun.config import seconds_in, whole_number
from meshrun.errors import UserError

LONGEST = 900.0
"""Seconds: people stop runs too, and nobody likes to lose more than a quarter of an hour."""
SHORTEST = 2.0
FIRST = 30.0
"""Seconds before the first checkpoint of `auto`, whose cost is not yet known."""


@dataclass(frozen=True)
class Every:
    """An interval between checkpoints: in steps, in seconds, or neither (as often as pays)."""

    steps: int | None = None
    given: float | None = None
    never: bool = False

    def seconds(self, cost: float | None, mtbf: float) -> float:
        """The interval in seconds, from the time that saving holds up the training."""
        if self.given is not None:
            return self.given
        return FIRST if cost is None else min(LONGEST, max(SHORTEST, math.sqrt(2 * cost * mtbf)))


def parse(text: str) -> Every:
    word = text.strip()
    if text in ("auto", "none"):
        return Every(never=text == "none")
    if steps := whole_number(word):
        return Every(steps=steps)
    if (given := seconds_in(word)) is not None:
        return Every(given=given)
    raise UserError(
        f"checkpoint is {text!r}; it must be auto, none, a number of steps such as 500, or a time such as 10min or 90s "
        f"(--checkpoint)"
    )


def failures_apart(hours: float, ranks: int, failures: int, seconds: float) -> float:
    """Seconds between two failures of the whole run: as expected of its ranks, or as seen if that is worse."""
    expected = hours * 3600 / ranks
    return min(expected, seconds / failures) if failures else expected

"""Steps whose loss is no number, or jumps: what to do about them.

    policy = Policy(on_nan="skip", on_spike="rollback")
    policy.judge(loss, norm, history)        # None, or Verdict("skip", "the loss is nan")
    where_from(update, here, skips_bad)      # the sentence that a run ends with: on which rank, with which samples

A jump is measured against the last losses: so many times their spread above their median. Both are robust, so that one
jump does not hide the next. All ranks judge the same numbers, so they come to the same verdict.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from meshrun.mesh import Here
from meshrun.train.totals import Update

WINDOW = 64
ENOUGH = 16
"""Losses that are looked back at, and how many there must be before a jump can be told."""
_SIGMA = 1.4826  # of a normal distribution, in median absolute deviations
_LEAST_SPREAD = 0.01
"""Of the median: losses that hardly vary may still move by some percent."""


@dataclass(frozen=True)
class Verdict:
    """What to do with a step, and why."""

    action: str
    why: str


@dataclass(frozen=True)
class Policy:
    """What was asked for."""

    on_nan: str = "stop"
    on_spike: str = "ignore"
    spike: float = 20.0

    @property
    def looks_first(self) -> bool:
        """Whether an update may only be applied once its numbers are known."""
        return self.on_nan != "stop" or self.on_spike not in ("ignore", "stop")

    def judge(self, loss: float, norm: float, history: Sequence[float]) -> Verdict | None:
        """`history` has the losses before this one, the last one last."""
        if not math.isfinite(loss) or not math.isfinite(norm):
            what = f"the loss is {loss}" if not math.isfinite(loss) else f"the gradient norm is {norm}"
            return Verdict(self.on_nan, what)
        if self.on_spike == "ignore":
            return None
        recent = [each for each in history[-WINDOW:] if math.isfinite(each)]
        if len(recent) < ENOUGH:
            return None
        median = statistics.median(recent)
        spread = _SIGMA * statistics.median(abs(each - median) for each in recent)
        limit = median + self.spike * max(spread, _LEAST_SPREAD * abs(median))
        if loss <= limit:
            return None
        return Verdict(self.on_spike, f"the loss jumps to {loss:.4g} from a median of {median:.4g} (--spike)")


def where_from(update: Update, here: Here, skips_bad: bool) -> str:
    """Say where a loss that is not a number came from: all ranks ask each other, as all have seen it."""
    own = update.pieces if not math.isfinite(update.own_total) else []
    found = [(rank, pieces) for rank, pieces in enumerate(here.gathered(own)) if pieces]
    step = update.step + 1
    if math.isfinite(update.loss):
        return (
            f"the gradient norm is {update.grad_norm} at step {step} while the loss is {update.loss:.6g}; "
            f"a smaller learning rate may help"
        )
    if not found and skips_bad:
        return (
            f"loss is {update.loss} at step {step}: nothing in it counts, as where no sample of it can be read; "
            f"--on-nan skip goes on without such a step"
        )
    if not found:
        return f"loss is {update.loss} at step {step}: the counts of all ranks add up to 0"
    rank, pieces = found[0]
    ids = [str(number) for piece in pieces for number in piece]
    named = ", ".join(ids[:8]) + (f" and {len(ids) - 8} more" if len(ids) > 8 else "")
    return f"loss is {update.loss} at step {step}, on rank {rank}, with the training samples {named}"

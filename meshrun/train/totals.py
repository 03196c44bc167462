"""What an update was, and what a run has reached: the numbers that a loop goes around with.

update.loss, update.grad_norm            # of one finished update
totals.add(update); totals.result()      # under the names that scripts rely on
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from meshrun.data.samples import NO_EFFORT, Effort
from meshrun.train.evaluate import Scores
from meshrun.train.ids import UsedIds


@dataclass
class Update:
    """One finished update. On a GPU its numbers may still be under way: asking for one waits for it."""

    step: int
    samples: int
    learning_rate: float
    data_wait: float
    pieces: list[list[int]]
    """This rank's samples of the step, a list a micro-batch."""
    values: list[float] | Tensor
    """(global loss total, global count, gradient norm, own total, how many ranks are asked to stop)."""
    ready: torch.cuda.Event | None
    seconds: float = 0.0
    """Since the update before, less what the caller of `steps` did in between."""
    effort: Effort = NO_EFFORT
    """What it took to read its samples."""

    def _numbers(self) -> list[float]:
        if self.ready is not None:
            self.ready.synchronize()
            self.ready = None
        if isinstance(self.values, Tensor):
            self.values = self.values.tolist()
        return self.values

    @property
    def loss(self) -> float:
        """The mean over the global batch."""
        total, count, *_ = self._numbers()
        return total / count if count else math.nan

    @property
    def count(self) -> float:
        """What the loss's sum over the global batch is divided by."""
        return self._numbers()[1]

    @property
    def grad_norm(self) -> float:
        """The norm of the global gradient before clipping."""
        return self._numbers()[2]

    @property
    def own_total(self) -> float:
        """The part of the loss's sum that this rank has computed."""
        return self._numbers()[3]

    @property
    def asked(self) -> bool:
        """Whether any rank is asked to stop: all of them know it of the same update."""
        return self._numbers()[4] > 0


@dataclass
class Totals:
    """What a run has reached so far."""

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    samples: int = 0
    seconds: float = 0.0
    data_wait: float = 0.0
    ids: UsedIds = field(default_factory=UsedIds)
    timed_samples: int = 0
    scores: Scores = field(default_factory=dict)
    best: dict[str, float] = field(default_factory=dict)
    skipped: list[int] = field(default_factory=list)
    """Steps, counted from 1, whose update is no part of the weights."""

    def add(self, update: Update) -> None:
        self.losses.append(update.loss)
        self.grad_norms.append(update.grad_norm)
        self.samples += update.samples
        # The first update pays for allocations and for making DDP: it says nothing about the speed.
        if len(self.losses) > 1:
            self.timed_samples += update.samples
            self.seconds += update.seconds
            self.data_wait += update.data_wait

    def result(self) -> dict[str, Any]:
        """The run in numbers, under the names that scripts rely on."""
        return {
            "steps": len(self.losses),
            "losses": self.losses,
            "grad_norms": self.grad_norms,
            "eval": self.scores,
            "best": self.best or None,
            "skipped": self.skipped,
            "samples": self.samples,
            "samples_per_s": self.timed_samples / self.seconds if self.seconds else None,
            "data_wait": self.data_wait / self.seconds if self.seconds else None,
            "sample_ids_sha256": self.ids.hexdigest(),
        }

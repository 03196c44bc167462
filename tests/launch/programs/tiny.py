"""A straight line through 20 points, and what can go wrong on one rank at one step."""

from __future__ import annotations

import os
import signal
import time
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshrun import Experiment, mean_squared_error


class Points:
    """Sample i is at (i / 20, 1) with the target 2 i / 20; one of them may have no number for a target."""

    def __init__(self, spoiled: int | None) -> None:
        self.spoiled = spoiled

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        target = torch.nan if index == self.spoiled else 2 * index / 20
        return torch.tensor([index / 20, 1.0]), torch.tensor([target])


class Line(nn.Linear):
    """Does `fault` on one rank, in the forward pass of one step."""

    def __init__(self, fault: str, rank: int, step: int, pause: float) -> None:
        super().__init__(2, 1)
        self.fault, self.rank, self.step, self.pause = fault, rank, step, pause
        self.calls = 0

    def forward(self, inputs: Tensor) -> Tensor:
        own = dist.get_rank() if dist.is_initialized() else 0
        self.calls += 1
        if self.calls == 1:
            print(f"words of rank {own}, met on port {os.environ.get('MASTER_PORT')}")
        if own == self.rank and self.calls == self.step:
            if self.fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.fault == "raise":
                raise ValueError("bad luck")
        time.sleep(self.pause)
        return super().forward(inputs)


def experiment(
    fault: Literal["none", "kill", "raise"] = "none",
    rank: int = 1,
    step: int = 3,
    pause: float = 0.0,
    spoiled: int | None = None,
) -> Experiment:
    return Experiment(
        model=lambda: Line(fault, rank, step, pause),
        train=Points(spoiled),
        loss=mean_squared_error,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch=4,
        steps=5,
    )

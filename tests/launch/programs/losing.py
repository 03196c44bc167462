"""A line through 20 points whose ranks are lost, each time on one rank at one step, for as long as `lives` says.

The end may be another one in each life: `--lives 2 --end SIGKILL,exit`.

Each life of all ranks leaves a line in `diary`: its generation and when this rank computed first.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshrun import Experiment, mean_squared_error


class Points:
    """Sample i is at (i / 20, 1) with the target 2 i / 20."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.tensor([index / 20, 1.0]), torch.tensor([2 * index / 20])


class Line(nn.Linear):
    def __init__(self, diary: str, rank: int, step: int, ends: list[str], pause: float) -> None:
        """`ends` has one for each life in which a rank is lost."""
        super().__init__(2, 1)
        self.diary, self.rank, self.step, self.ends, self.pause = diary, rank, step, ends, pause
        self.calls = 0

    def forward(self, inputs: Tensor) -> Tensor:
        own = dist.get_rank() if dist.is_initialized() else 0
        generation = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        self.calls += 1
        if self.calls == 1:
            with Path(self.diary).open("a") as file:
                size = dist.get_world_size() if dist.is_initialized() else 1
                file.write(f"{generation} {own} {size} {time.time()} {os.getpid()}\n")
        if own == self.rank and self.calls == self.step and generation < len(self.ends):
            end = self.ends[generation]
            if end == "raise":
                raise ValueError("bad luck")
            if end == "exit":
                os._exit(75)
            os.kill(os.getpid(), getattr(signal, end))
        time.sleep(self.pause)
        return super().forward(inputs)


def experiment(
    diary: str, rank: int = 1, step: int = 3, lives: int = 1, end: str = "SIGKILL", pause: float = 0.0
) -> Experiment:
    ends = (end.split(",") * lives)[:lives]
    return Experiment(
        model=lambda: Line(diary, rank, step, ends, pause),
        train=Points(),
        loss=mean_squared_error,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch=4,
        steps=5,
    )

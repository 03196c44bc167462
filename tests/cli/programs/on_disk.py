"""A line whose loss falls with every step, so that each evaluation has better weights to write; prints at each step.

While there is a file `gate-6` in the working directory, the sixth step waits for its end; so with other numbers.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from meshrun import Experiment, mean_squared_error


class Line(nn.Linear):
    """Takes its time for a step, and prints more than a page of a file holds."""

    def __init__(self, pause: float) -> None:
        super().__init__(64, 64)
        self.pause, self.steps = pause, 0

    def forward(self, inputs: Tensor) -> Tensor:
        print("x" * 5000, flush=True)
        self.steps += self.training
        while self.training and Path(f"gate-{self.steps}").exists():
            time.sleep(0.01)
        time.sleep(self.pause if self.training else 0.0)
        return super().forward(inputs)


def experiment(pause: float = 0.0) -> Experiment:
    data = TensorDataset(torch.ones(8, 64), torch.ones(8, 64))
    return Experiment(
        model=lambda: Line(pause),
        train=data,
        evals={"val": data},
        loss=mean_squared_error,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
        batch=4,
        steps=40,
    )

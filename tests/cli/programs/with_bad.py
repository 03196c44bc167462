"""A training on samples that are slow to read, and of which two cannot be read at all."""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn

from meshrun import Experiment, mean_squared_error


class Rotten:
    def __len__(self) -> int:
        return 24

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        time.sleep(0.01)
        if number in (3, 17):
            raise ValueError(f"{number} is rotten")
        return torch.full((2,), number / 24), torch.ones(2)


def experiment() -> Experiment:
    return Experiment(
        model=lambda: nn.Linear(2, 2),
        train=Rotten(),
        evals={"val": Rotten()},
        loss=mean_squared_error,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch=4,
        epochs=2,
    )

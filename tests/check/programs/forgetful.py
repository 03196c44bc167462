"""A line whose program keeps a number in its head that no checkpoint knows of, and computes with it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from meshrun import Experiment, mean_squared_error


class Points:
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.tensor([index / 64, 1.0]), torch.tensor([index / 32])


class Counting(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 1)
        self.calls = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(inputs) + 0.001 * self.calls


def experiment() -> Experiment:
    return Experiment(
        model=Counting,
        train=Points(),
        loss=mean_squared_error,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05),
        batch=4,
        steps=60,
    )

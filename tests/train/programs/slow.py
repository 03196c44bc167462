"""A small net whose steps take as long as they are told to."""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn

from meshrun import Experiment, cross_entropy


class Points:
    """Points of five coordinates in two classes."""

    def __init__(self, length: int) -> None:
        self._inputs = torch.randn(length, 5, generator=torch.Generator().manual_seed(length))

    def __len__(self) -> int:
        return len(self._inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self._inputs[index], (self._inputs[index, 0] > 0).long()


class Net(nn.Sequential):
    def __init__(self, pause: float) -> None:
        super().__init__(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2))
        self.pause = pause

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            time.sleep(self.pause)
        outputs: Tensor = super().forward(inputs)
        return outputs


def experiment(pause: float = 0.0) -> Experiment:
    return Experiment(
        model=lambda: Net(pause),
        train=Points(64),
        evals={"val": Points(16)},
        loss=cross_entropy,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        batch=8,
        steps=5000,
    )

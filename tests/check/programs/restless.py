"""A small classifier with all kinds of state: running means, moments of AdamW, and random numbers drawn on the way."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from meshrun import Experiment, Schedule, accuracy, cross_entropy


class Points:
    """Points in the plane, told apart by the quarter that they are in."""

    def __init__(self, count: int, seed: int) -> None:
        self.points = torch.randn(count, 2, generator=torch.Generator().manual_seed(seed))
        self.quarters = (self.points > 0).long() @ torch.tensor([2, 1])

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.points[index], self.quarters[index]


class Blur(nn.Module):
    """Moves points by numbers that nobody has seeded for it."""

    def forward(self, points: Tensor) -> Tensor:
        return points + 0.05 * torch.randn_like(points) if self.training else points


def experiment(width: int = 32, blur: bool = True, norm: bool = True) -> Experiment:
    def model() -> nn.Module:
        return nn.Sequential(
            Blur() if blur else nn.Identity(),
            nn.Linear(2, width),
            nn.BatchNorm1d(width) if norm else nn.Identity(),
            nn.GELU(),
            nn.Dropout(0.1),
            nn.Linear(width, width),
            nn.GELU(),
            nn.Linear(width, 4),
        )

    return Experiment(
        model=model,
        train=Points(512, seed=1),
        evals={"val": Points(64, seed=2)},
        loss=cross_entropy,
        metrics={"accuracy": accuracy},
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        schedule=Schedule("cosine", warmup=0.05),
        batch=8,
        steps=100,
        clip=1.0,
    )

"""Programs without a mistake, of which some make much of rounding."""

from __future__ import annotations

import random

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Subset

from meshrun import Experiment, accuracy, cross_entropy
from meshrun.recipes.digits import Digits
from tests.check.programs.mistakes import Sines, points, small


def multilayer() -> Experiment:
    return small(
        model=lambda: nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3)),
        metrics={"accuracy": accuracy},
        clip=0.5,
        batch=11,
    )


class Convolutions(nn.Module):
    """ReLU and maxima, which jump where two values are equal but for the last bit: on every constant background."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 8, 3), nn.Conv2d(8, 16, 3)
        self.out = nn.Linear(16 * 5 * 5, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.first((images.float() / 255 - 0.1307) / 0.3081)), 2)
        return self.out(F.max_pool2d(F.relu(self.second(x)), 2).flatten(1))


def convolutions() -> Experiment:
    return Experiment(
        model=Convolutions,
        train=Subset(Digits("train"), range(512)),
        evals={"val": Subset(Digits("val"), range(101))},
        loss=cross_entropy,
        metrics={"accuracy": accuracy},
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=2e-3),
        batch=64,
        steps=10,
    )


def sines() -> Experiment:
    return small(model=Sines, steps=20, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1))


class Augmented:
    """Draws from the global generators of Python, NumPy and torch, as torchvision's transforms do."""

    def __init__(self) -> None:
        self.points = points()

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, target = self.points[index]
        noise = torch.randn(5) * np.random.rand()
        return (inputs + 0.1 * noise if random.random() < 0.7 else inputs), target


def augmented() -> Experiment:
    return small(train=Augmented(), evals={"val": Augmented()})


class TimeFirst(nn.Module):
    """A model of (time, batch, width) with as much time as samples, and dropouts that are functions."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix, self.drop, self.out = nn.Linear(1, 8), nn.Linear(8, 24), nn.Dropout(0.2), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.embed(x.t()[..., None]))  # (time, batch, width)
        q, k, v = self.mix(x).transpose(0, 1).unflatten(-1, (2, 12)).transpose(1, 2).chunk(3, -1)
        x = x + F.scaled_dot_product_attention(q, k, v, dropout_p=0.2 * self.training).permute(2, 0, 1, 3).flatten(2)
        return self.out(F.dropout(x, 0.3, self.training).mean(0))


def time_first() -> Experiment:
    return small(model=TimeFirst, batch=10)


class Encoder(nn.Module):
    """The gradient of its attention's key bias is 0 but for rounding, of which AdamW makes updates of full size."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(1, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.encoder(self.embed(x[..., None])).mean(1))


def encoder() -> Experiment:
    return small(
        model=Encoder,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-3),
        steps=8,
    )

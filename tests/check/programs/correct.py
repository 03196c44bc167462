"""Programs without a mistake, of which some make much of rounding."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Subset

from meshrun import Experiment, accuracy, cross_entropy
from meshrun.recipes.digits import Digits
from tests.check.programs.mistakes import Sines, small


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

"""Handwritten digits: a small convolutional network on MNIST.

    meshrun run digits                      # this process
    meshrun run digits --procs 2            # two local processes, the same losses
    meshrun run digits --width 64 --lr 3e-4 --epochs 5

24,000 training digits (2,000 of them kept for validation) and MNIST's own 10,000 test digits come with the package.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshrun import Experiment, Schedule, accuracy, cross_entropy

DATA = Path(__file__).parent / "data" / "digits.npz"
VALIDATION = 2_000
REHEARSAL = {"width": 8}
"""Options of a model that `meshrun rehearse` trains in no time."""


class Digits:
    """A split of the digits, held in memory: 28 x 28 pixels and the digit that they show."""

    def __init__(self, split: str) -> None:
        part = "test" if split == "test" else "train"
        with np.load(DATA) as arrays:
            images, labels = arrays[f"{part}_images"], arrays[f"{part}_labels"]
        rows = {"train": slice(VALIDATION, None), "val": slice(VALIDATION), "test": slice(None)}[split]
        self.images = torch.from_numpy(images[rows]).unsqueeze(1)
        self.labels = torch.from_numpy(labels[rows]).long()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.images[index], self.labels[index]


class Net(nn.Module):
    """Two convolutions, two linear layers.

    GELU and averages rather than ReLU and maxima: those jump where two values are equal but for the last bit, and would
    blow up the rounding by which sums over two ranks differ from sums over one.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, width // 4, 3)
        self.second = nn.Conv2d(width // 4, width // 2, 3)
        self.hidden = nn.Linear(width // 2 * 5 * 5, width)
        self.out = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = (images.float() / 255 - 0.1307) / 0.3081
        x = F.avg_pool2d(F.gelu(self.first(x)), 2)
        x = F.avg_pool2d(F.gelu(self.second(x)), 2)
        return self.out(F.gelu(self.hidden(x.flatten(1))))


def segments(net: Any) -> Sequence[nn.Module]:
    """The network as modules applied in order."""
    return [net.first, net.second, net.hidden, net.out]


def experiment(width: int = 128, lr: float = 2e-3) -> Experiment:
    """Handwritten digits.

    width: channels of the hidden layer; the convolutions have a quarter and a half of it
    lr: highest learning rate
    """
    return Experiment(
        model=lambda: Net(width),
        train=Digits("train"),
        evals={"val": Digits("val"), "test": Digits("test")},
        loss=cross_entropy,
        metrics={"accuracy": accuracy},
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=lr),
        schedule=Schedule("cosine", warmup=0.05),
        batch=64,
        epochs=3,
        segments=segments,
        tensor_plan={"hidden": "colwise", "out": "rowwise"},
    )

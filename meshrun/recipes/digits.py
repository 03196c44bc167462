"""Handwritten digits: a small convolutional network on MNIST.

    meshrun run digits                      # this process
    meshrun run digits --procs 2            # two local processes, the same losses
    meshrun run digits --width 64 --lr 3e-4 --epochs 5
    meshrun stage digits                    # where there is internet: all of MNIST's 60,000 training digits
    meshrun run digits --full               # trained on them

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

from meshrun import Experiment, Schedule, Stage, accuracy, cross_entropy, staged

DATA = Path(__file__).parent / "data" / "digits.npz"
VALIDATION = 2_000
MNIST = "https://storage.googleapis.com/tensorflow/tf-keras-datasets/mnist.npz"
MNIST_SHA256 = "731c5ac602752760c8e48fbffcf8c3b850d9dc2a2aedcf2cc48468fc17b673d1"
REHEARSAL = {"width": 8}
"""Options of a model that `meshrun rehearse` trains in no time."""


def stage_data(stage: Stage) -> None:
    """Fetch all of MNIST, for `--full`."""
    stage.download(MNIST, sha256=MNIST_SHA256)


class Digits:
    """A split of the digits, held in memory: 28 x 28 pixels and the digit that they show."""

    light, draws = True, False

    def __init__(self, split: str, full: bool = False) -> None:
        part = "test" if split == "test" else "train"
        path = staged("mnist.npz") if full else DATA
        names = (f"x_{part}", f"y_{part}") if full else (f"{part}_images", f"{part}_labels")
        with np.load(path) as arrays:
            images, labels = (arrays[name] for name in names)
        rows = {"train": slice(VALIDATION, None), "val": slice(VALIDATION), "test": slice(None)}[split]
        self.images = torch.from_numpy(images[rows]).unsqueeze(1)
        self.labels = torch.from_numpy(labels[rows]).long()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.images[index], self.labels[index]

    def batch_of(self, ids: list[int]) -> tuple[Tensor, Tensor]:
        """All of them at once, which is much cheaper than one by one."""
        return self.images[ids], self.labels[ids]


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


def experiment(width: int = 128, lr: float = 2e-3, full: bool = False) -> Experiment:
    """Handwritten digits.

    width: channels of the hidden layer; the convolutions have a quarter and a half of it
    lr: highest learning rate
    full: train on all 60,000 digits, which `meshrun stage digits` fetches, instead of the 24,000 that come with it
    """
    return Experiment(
        model=lambda: Net(width),
        train=Digits("train", full),
        evals={"val": Digits("val", full), "test": Digits("test", full)},
        loss=cross_entropy,
        metrics={"accuracy": accuracy},
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=lr),
        schedule=Schedule("cosine", warmup=0.05),
        batch=64,
        epochs=3,
        segments=segments,
        tensor_plan={"hidden": "colwise", "out": "rowwise"},
    )

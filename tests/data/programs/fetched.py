"""A straight line through points that are fetched beforehand."""

from __future__ import annotations

import urllib.request

import numpy as np
import torch
from torch import Tensor, nn

from meshrun import Experiment, Stage, mean_squared_error, staged


class Points:
    def __init__(self) -> None:
        self.values = torch.from_numpy(np.load(staged("points.npy")))

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.values[index, :2], self.values[index, 2:]


def stage_data(stage: Stage, source: str, sum: str | None = None) -> None:
    stage.download(f"{source}/points.npy", sha256=sum)
    if not stage.has("made/half.npy"):
        (stage.folder / "made").mkdir(exist_ok=True)
        np.save(stage.folder / "made" / "half.npy", np.load(stage.folder / "points.npy")[::2])
        stage.note("halved")
    stage.add("made/half.npy")


def experiment(source: str = "", sum: str | None = None, hub: bool = False, late: bool = False) -> Experiment:
    """`hub` asks the internet while the experiment is built, `late` while the model is."""
    del source, sum  # for stage_data
    if hub:
        urllib.request.urlopen("http://hub.invalid/weights", timeout=5)

    def model() -> nn.Module:
        if late:
            urllib.request.urlopen("http://hub.invalid/weights", timeout=5)
        return nn.Linear(2, 1)

    return Experiment(
        model=model,
        train=Points(),
        loss=mean_squared_error,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch=4,
        steps=3,
        evals={"half": [(torch.zeros(2), torch.zeros(1))] * len(np.load(staged("made/half.npy")))},
    )

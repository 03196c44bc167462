"""A training with something to do after it, and functions for its model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from meshrun import Experiment, cross_entropy, print0


def points(length: int, seed: int) -> TensorDataset:
    inputs = torch.randn(length, 4, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(inputs, (inputs[:, 0] > 0).long())


def right(model: nn.Module) -> Tensor:
    """How many of the points it gets right."""
    inputs, targets = points(50, seed=1).tensors
    with torch.no_grad():
        return (model(inputs).argmax(-1) == targets).sum()


def describe(model: nn.Module, run_folder: Path) -> dict[str, Any]:
    print("of", right(model).item(), "points, and training is", model.training)
    print0("alone" if not dist.is_initialized() else "with others")
    (run_folder / "pictures").mkdir(exist_ok=True)
    (run_folder / "pictures" / "square.svg").write_text("<svg xmlns='http://www.w3.org/2000/svg'><rect/></svg>")
    return {"right": right(model), "drawn": torch.rand(2), "none": float("nan"), "where": run_folder}


def fail(model: nn.Module, run_folder: Path) -> None:
    print("so far so good")
    raise ValueError(f"no way with {type(model).__name__} in {run_folder.name}")


def _close(_model: nn.Module, _run_folder: Path) -> dict[str, int]:
    print("before it closes")
    sys.stdout.close()
    return {"too long": 10**5000}


def speak(model: nn.Module, text: str, times: int = 2, tone: Literal["soft", "loud"] = "soft") -> list[str]:
    """Say something.

    times: how often
    """
    print("thinking" if not model.training else "learning")
    return [text.upper() if tone == "loud" else text] * times


def weights(model: nn.Module, weights: str = "mine") -> None:
    """Has an option that is not its own."""


def _hidden(model: nn.Module) -> None:
    """Nobody's business."""


def experiment(end: Literal["describe", "fail", "close"] = "describe", width: int = 3) -> Experiment:
    return Experiment(
        model=lambda: nn.Sequential(nn.Linear(4, width), nn.Dropout(0.5), nn.Linear(width, 2)),
        train=points(48, seed=0),
        evals={"val": points(50, seed=1)},
        loss=cross_entropy,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.3),
        batch=8,
        steps=4,
        after={"describe": describe, "fail": fail, "close": _close}[end],
    )

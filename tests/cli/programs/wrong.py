"""Experiments with something wrong in them, a function each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshrun import Experiment, Loss, mean_squared_error

NUMBER = 3
PAIRS = [(torch.tensor([i / 20, 1.0]), torch.tensor([i / 10])) for i in range(20)]


def experiment(samples: int = 20, **changes: Any) -> Experiment:
    """A right one."""
    given: dict[str, Any] = {
        "model": lambda: nn.Linear(2, 1),
        "train": PAIRS[:samples],
        "loss": mean_squared_error,
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        "batch": 4,
        "steps": 2,
        **changes,
    }
    return Experiment(**given)


def returns_nothing() -> None:
    return None


def returns_a_table() -> dict[str, int]:
    return {"batch": 4}


def empty_evaluation() -> Experiment:
    return experiment(evals={"val": []})


def no_dataset() -> Experiment:
    return experiment(train=3)


def neither_steps_nor_epochs() -> Experiment:
    return experiment(steps=None)


def tensor_for_a_loss() -> Experiment:
    print("words of the user's program")
    return experiment(loss=F.mse_loss)


def loss_of_many_numbers() -> Experiment:
    def loss(outputs: Tensor, targets: Tensor) -> Loss:
        return Loss((outputs - targets).square(), len(targets))

    return experiment(loss=loss)


def metric_is_a_number() -> Experiment:
    return experiment(evals={"val": PAIRS}, metrics={"error": lambda outputs, targets: 0.5})  # noqa: ARG005


def samples_are_no_pairs() -> Experiment:
    return experiment(train=[torch.zeros(2)] * 20)


def no_module() -> Experiment:
    return experiment(model=lambda: "a model")


def nothing_to_train() -> Experiment:
    return experiment(model=nn.Identity)


def no_optimizer() -> Experiment:
    return experiment(optimizer=lambda parameters: None)  # noqa: ARG005


def missing_data() -> Experiment:
    return experiment(train=Path("nowhere/points.csv").read_text().splitlines())

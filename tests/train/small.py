"""A training small enough for a test, and the same training in a few lines of plain torch to hold it against."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset, default_collate

from meshrun import Experiment, Here, mesh
from meshrun.data.order import Order
from meshrun.experiment import MapDataset
from meshrun.train.loop import Trainer
from meshrun.train.losses import cross_entropy
from tests import compare

CLIP = 0.5


def on_ranks(*numbers: int) -> Any:
    """Runs a test once for each of these numbers of ranks."""
    cases = [pytest.param(n, marks=pytest.mark.ranks(n), id=f"{n}-ranks") for n in numbers]
    return pytest.mark.parametrize("ranks", cases)


def start_on_cpu(size: int) -> Here:
    """This rank's place in the group of its test, which must have that size; also beside GPUs on the CPU."""
    mesh.use(mesh.Meeting(device="cpu"))
    here = mesh.start()
    assert here.size == size
    return here


def noting() -> tuple[Callable[..., None], list[str]]:
    """What a trainer is to record by, and the notes among it."""
    notes: list[str] = []

    def record(kind: str, **fields: Any) -> None:
        if kind == "note":
            notes.append(fields["text"])

    return record, notes


def points(length: int, seed: int = 0) -> TensorDataset:
    """Points of five coordinates in three classes."""
    generator = torch.Generator().manual_seed(seed)
    inputs = 2 * torch.randn(length, 5, generator=generator)
    return TensorDataset(inputs, (inputs[:, 0] > 0).long() + (inputs[:, 1] > 1).long())


def small_net() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 3))


def small(length: int, batch: int, steps: int = 6, **changes: Any) -> Experiment:
    """SGD with a rate at which the norm is clipped: AdamW would hide gradients that are too large by a factor."""
    fields = {
        "model": small_net,
        "train": points(length),
        "loss": cross_entropy,
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.3, momentum=0.9),
        "batch": batch,
        "steps": steps,
        "clip": CLIP,
        "seed": 4,
    }
    return Experiment(**{**fields, **changes})


@dataclass
class Course:
    """What a training went through, and where it came to."""

    losses: list[float]
    grad_norms: list[float]
    weights: dict[str, Tensor]


def batch_of(data: MapDataset, ids: list[int]) -> Any:
    return default_collate([data[number] for number in ids])


def plainly(
    experiment: Experiment, mean_loss: Callable[[Any, Any], Tensor] = F.cross_entropy, order: Order | None = None
) -> Course:
    """The training as a single process without meshrun does it: the whole batch at once and a mean for a loss."""
    torch.manual_seed(experiment.seed)
    model = experiment.model()
    optimizer = experiment.optimizer(model.parameters())
    order = order or Order(len(experiment.train), experiment.batch, experiment.seed)
    course = Course([], [], {})
    for step in range(experiment.steps or 0):
        inputs, targets = batch_of(experiment.train, order.batch_ids(step).tolist())
        updated(course, model, optimizer, mean_loss(model(inputs), targets), experiment.clip)
    course.weights = {name: value.clone() for name, value in model.state_dict().items()}
    return course


def updated(
    course: Course, model: nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor, clip: float | None
) -> None:
    """One update as plain torch does it, and its numbers."""
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), clip or float("inf"))
    optimizer.step()
    optimizer.zero_grad()
    course.losses.append(loss.item())
    course.grad_norms.append(norm.item())


def trained(trainer: Trainer) -> Course:
    for _ in trainer.steps():
        pass
    weights = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    return Course(trainer.totals.losses, trainer.totals.grad_norms, weights)


def difference(a: Course, b: Course) -> float:
    """The largest relative one among losses, norms and tensors of weights."""
    return compare.difference(vars(a), vars(b))

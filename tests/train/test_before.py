"""A step can be computed twice and count once; what a recording of it would miss is noticed."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from meshrun.data.drawn import Drawn
from meshrun.train.before import Before

CPU = torch.device("cpu")


class Counts(nn.Module):
    """Has running statistics, and a number of its own on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.calls, self.on = 0, True

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


def before(model: nn.Module) -> Before:
    placed: Any = SimpleNamespace(model=model)
    return Before(placed, CPU)


def test_what_a_step_has_changed_and_drawn_is_put_back():
    model = Counts()
    state = {name: each.clone() for name, each in model.state_dict().items()}
    drawn, was = Drawn.now(CPU), before(model)
    model(torch.randn(4, 2) + random.random() + np.random.rand())
    assert model.norm.num_batches_tracked == 1 and not drawn.same(Drawn.now(CPU))
    was.restore()
    assert all(torch.equal(each, state[name]) for name, each in model.state_dict().items())
    assert drawn.same(Drawn.now(CPU))


def other_memory(model: Counts) -> None:
    model.norm.running_mean.data = torch.zeros(2)


def replaced(model: Counts) -> None:
    model.norm.running_mean = torch.zeros(2)


def counted(model: Counts) -> None:
    model.calls += 1


def drew(_: Counts) -> None:
    random.random()


@pytest.mark.parametrize(
    ("step", "why"),
    [
        (other_memory, "the model replaces its buffer norm.running_mean in a step"),
        (replaced, "the model replaces its buffer norm.running_mean in a step"),
        (counted, "the model changes the number calls in a step"),
        (drew, "random numbers are drawn on the host in a step"),
    ],
)
def test_what_a_recording_would_miss_is_named(step: Callable[[Counts], None], why: str):
    model = Counts()
    was = before(model)
    step(model)
    assert (was.objection() or "").startswith(why)


def test_statistics_that_are_written_in_place_can_be_recorded():
    model = Counts()
    was = before(model)
    model(torch.ones(4, 2))
    assert was.objection() is None

"""What a model that was made without values would lose if it were given memory, and what stays with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshrun.parallel.memory import cannot_stay, give_memory


class Own(nn.Parameter):
    pass


def with_gradient(model: nn.Linear) -> None:
    model.weight.grad = torch.ones_like(model.weight)


@pytest.mark.parametrize(
    "change",
    [
        with_gradient,
        lambda model: model.weight.register_hook(lambda gradient: gradient),
        lambda model: model.weight.register_post_accumulate_grad_hook(lambda _: None),
        lambda model: model.weight.view(-1),
        lambda model: setattr(model, "weight", Own(model.weight.detach().clone())),
    ],
    ids=["gradient", "hook", "hook of its gradient", "view", "class"],
)
def test_what_would_be_lost_is_named(change: Callable[[nn.Linear], Any]):
    model = nn.Linear(2, 3)
    assert cannot_stay(model) is None
    kept = change(model)
    assert cannot_stay(model) == "weight has a hook, a view, a gradient or a class of its own"
    del kept


def test_parameters_stay_the_objects_that_they_are_with_what_is_noted_on_them():
    with torch.device("meta"):
        model = nn.Linear(2, 3)
    weight: Tensor = model.weight
    vars(weight)["no_decay"] = True
    model.bias.requires_grad_(False)
    give_memory(model, torch.device("cpu"))
    assert model.weight is weight and weight.device.type == "cpu" and weight.shape == (3, 2)
    assert vars(model.weight)["no_decay"] is True
    assert weight.requires_grad and not model.bias.requires_grad

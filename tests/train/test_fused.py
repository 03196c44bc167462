"""The short way to torch's fused kernels: the same step to the last bit, whatever else happens to an optimizer."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from meshrun import Here
from meshrun.train import fused
from meshrun.train.fused import Fused, is_bare, step_of
from meshrun.train.interval import parse as parse_interval
from meshrun.train.loop import Trainer
from meshrun.train.recovery import Keeping
from meshrun.train.update import Plain
from tests.train.small import small

Make = Callable[[Any], Optimizer]
SHAPES = (5, 3), (7,), (2, 2, 2)

OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda each: SGD(each, lr=0.1, fused=True),
    "momentum": lambda each: SGD(each, lr=0.1, momentum=0.9, fused=True),
    "dampening": lambda each: SGD(each, lr=0.1, momentum=0.9, dampening=0.3, weight_decay=0.01, fused=True),
    "nesterov": lambda each: SGD(each, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01, fused=True),
    "adam": lambda each: Adam(each, lr=0.01, weight_decay=0.1, fused=True),
    "adamw": lambda each: AdamW(each, lr=0.01, betas=(0.8, 0.9), weight_decay=0.1, fused=True),
}


class Two:
    """The same optimizer twice, on the same numbers: one makes torch's step, the other the short one."""

    def __init__(self, make: Make, groups: bool = False) -> None:
        generator = torch.Generator().manual_seed(0)
        start = [torch.randn(shape, generator=generator) for shape in SHAPES]
        self.sides = [[nn.Parameter(each.clone()) for each in start] for _ in range(2)]
        given = [[{"params": each[:1]}, {"params": each[1:], "lr": 0.05}] if groups else each for each in self.sides]
        self.optimizers = [make(each) for each in given]
        self.short = Fused(self.optimizers[1])
        self.generator = generator

    def step(self, without: tuple[int, ...] = (), rate: float | None = None) -> None:
        for place, pair in enumerate(zip(*self.sides, strict=True)):
            gradient = torch.randn(pair[0].shape, generator=self.generator)
            for each in pair:
                each.grad = None if place in without else gradient.clone()
        for each in self.optimizers:
            each.param_groups[0]["lr"] = rate if rate is not None else each.param_groups[0]["lr"]
        self.optimizers[0].step()
        self.short()

    def check(self) -> None:
        states = [each.state_dict() for each in self.optimizers]
        assert all(torch.equal(one, two) for one, two in zip(*self.sides, strict=True))
        assert states[0]["param_groups"] == states[1]["param_groups"]
        assert states[0]["state"].keys() == states[1]["state"].keys()
        for number, state in states[0]["state"].items():
            assert state.keys() == states[1]["state"][number].keys()
            assert all(_equal(value, states[1]["state"][number][name]) for name, value in state.items())


def _equal(one: Any, two: Any) -> bool:
    return torch.equal(one, two) if isinstance(one, torch.Tensor) else one == two


@pytest.fixture
def own_steps(monkeypatch: pytest.MonkeyPatch) -> list[Optimizer]:
    """Steps that were left to torch."""
    found: list[Optimizer] = []

    def noted(optimizer: Optimizer) -> None:
        found.append(optimizer)
        step_of(optimizer)

    monkeypatch.setattr(fused, "step_of", noted)
    return found


@pytest.mark.parametrize("groups", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_is_torchs_step_to_the_last_bit(name: str, groups: bool, own_steps: list[Optimizer]):
    """With another rate in every step; only the first one is torch's own."""
    two = Two(OPTIMIZERS[name], groups)
    assert is_bare(two.optimizers[1])
    for step in range(20):
        two.step(rate=0.1 / (step + 1))
    two.check()
    assert len(own_steps) == 1


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_parameters_without_gradients_are_left_alone(name: str, own_steps: list[Optimizer]):
    two = Two(OPTIMIZERS[name])
    for step in range(20):
        two.step(without=(1,) if step in (4, 5, 11) else ())
    two.check()
    assert len(own_steps) == 4


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_state_that_is_loaded_is_gone_on_from(name: str, own_steps: list[Optimizer]):
    two = Two(OPTIMIZERS[name])
    for step in range(20):
        if step == 9:
            for each in two.optimizers:
                each.load_state_dict(copy.deepcopy(each.state_dict()))
        if step == 14:  # somebody puts another tensor into it
            for each in two.optimizers:
                for state in each.state.values():
                    state.update({key: value.clone() + 1 for key, value in state.items() if value is not None})
        two.step()
    two.check()
    assert len(own_steps) == (1 if name == "sgd" else 3)


def test_momentum_may_come_and_go(own_steps: list[Optimizer]):
    two = Two(OPTIMIZERS["momentum"])
    for step in range(12):
        for each in two.optimizers:
            each.param_groups[0]["momentum"] = 0.0 if step in (0, 1, 2, 6, 7) else 0.8
        two.step()
    two.check()
    assert len(own_steps) == 4


def test_hooks_are_called_in_every_step():
    two, called = Two(OPTIMIZERS["momentum"]), [0, 0]
    for step in range(6):
        if step == 3:  # when the lists are there already
            for place, each in enumerate(two.optimizers):
                each.register_step_post_hook(lambda *_, place=place: called.__setitem__(place, called[place] + 1))
        two.step()
    two.check()
    assert called == [3, 3]


@pytest.mark.parametrize(
    "make",
    [
        lambda each: SGD(each, lr=0.1, foreach=True),
        lambda each: SGD(each, lr=0.1, maximize=True, fused=True),
        lambda each: Adam(each, amsgrad=True, fused=True),
        lambda each: Adam(each, lr=torch.tensor(0.1), fused=True),
        lambda each: SGD([nn.Parameter(part.double()) for part in each], lr=0.1, fused=True),
        lambda each: torch.optim.Adagrad(each, lr=0.1, fused=True),
        lambda each: type("Own", (SGD,), {})(each, lr=0.1, fused=True),
    ],
    ids=["foreach", "maximize", "amsgrad", "rate-as-tensor", "doubles", "adagrad", "own-class"],
)
def test_what_it_does_not_know_it_leaves_to_torch(make: Make):
    parameters = [nn.Parameter(torch.ones(shape)) for shape in SHAPES]
    assert not is_bare(make(parameters))


def test_on_a_cpu_a_step_is_torchs_own(alone: Here):
    update = Trainer(small(20, 5), alone, workers=0)._update.update
    assert isinstance(update, Plain) and update.fused is None


def short_way(trainer: Trainer) -> Trainer:
    """As on a GPU."""
    update = trainer._update.update
    assert isinstance(update, Plain)
    object.__setattr__(update, "fused", Fused(trainer.optimizer))
    return trainer


def test_a_training_by_the_short_way_goes_on_from_a_checkpoint_as_if_nothing_had_been(
    alone: Here, tmp_path: Path, own_steps: list[Optimizer]
):
    experiment, keeping = small(21, 7, steps=20), Keeping(tmp_path, None, parse_interval("8"))
    first = short_way(Trainer(experiment, alone, workers=0, keeping=keeping))
    for update in first.steps():
        if update.step == 12:
            break
    assert first.keeper is not None and len(own_steps) == 1
    first.keeper.finish()
    second, whole = (Trainer(experiment, alone, workers=0, keeping=each) for each in (keeping, None))
    resumed = short_way(second).resume()
    assert resumed is not None and resumed["step"] == 8
    second.train()
    whole.train()
    assert len(own_steps) == 2
    for name, value in whole.model.state_dict().items():
        assert torch.equal(second.model.state_dict()[name], value)


@pytest.mark.parametrize("dampening", [0.0, 0.5])
def test_a_first_gradient_may_come_later_than_that_of_others(dampening: float):
    """Where torch's fused SGD fails; the groups before have made their step then, and make no second one."""
    sides = [[nn.Parameter(torch.full((3,), float(n))) for n in range(1, 5)] for _ in range(2)]
    optimizers = [
        SGD([{"params": each[:1]}, {"params": each[1:]}], lr=0.1, momentum=0.9, dampening=dampening, fused=form)
        for each, form in zip(sides, (False, True), strict=True)
    ]
    for step in range(6):
        for side in sides:
            for place, each in enumerate(side):
                each.grad = torch.full((3,), 0.1 * (step + place)) if step >= place else None
        optimizers[0].step()
        step_of(optimizers[1])
        assert all(torch.allclose(one, two, rtol=1e-6) for one, two in zip(*sides, strict=True))
    assert [group["fused"] for group in optimizers[1].param_groups] == [True, True]


def test_an_error_of_a_step_stays_one():
    parameter = nn.Parameter(torch.ones(3))
    optimizer = SGD([parameter], lr=0.1, momentum=0.9, fused=True)

    def refuses(*_: Any) -> None:
        raise TypeError("not today")

    optimizer.register_step_pre_hook(refuses)
    parameter.grad = torch.ones(3)
    with pytest.raises(TypeError, match="not today"):
        step_of(optimizer)

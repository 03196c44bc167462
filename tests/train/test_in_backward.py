"""`--update-in-backward`: the same training, with the gradients of few weights at a time; what it cannot do is said."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW

from meshrun import Experiment, Loss, UserError, mesh
from meshrun.layout import parse
from meshrun.parallel import choose
from meshrun.parallel.choose import Ways
from meshrun.parallel.how import How
from meshrun.parallel.recompute import Recomputing
from meshrun.train.bad_steps import Policy
from meshrun.train.in_backward import refuse_in_backward
from meshrun.train.loop import Trainer
from tests.train.small import small

AT_ONCE = How(update_in_backward=True)
LAYERS = 6


def net() -> nn.Module:
    layers = [nn.Linear(5, 70), *(nn.Linear(70, 70) for _ in range(LAYERS - 2)), nn.Linear(70, 3)]
    return nn.Sequential(*(part for layer in layers for part in (layer, nn.Tanh())))


def ragged(outputs: Tensor, targets: Tensor) -> Loss:
    """Class 2 does not count, so what to divide by is known only when outputs are there, and differs between ranks."""
    counts = targets != 2
    losses = nn.functional.cross_entropy(outputs.float(), targets, reduction="none")
    return Loss((losses * counts).sum(), counts.sum())


def experiment(optimizer: str = "SGD", **changes: Any) -> Experiment:
    made = {
        "SGD": lambda parameters: SGD(parameters, lr=0.1, momentum=0.9),
        "AdamW": lambda parameters: AdamW(parameters, lr=3e-3),
    }
    fields = {"model": net, "loss": ragged, "clip": None, "optimizer": made[optimizer], **changes}
    return small(47, 10, 6, **fields)


def trained(layout: str, experiment: Experiment, how: How) -> Trainer:
    mesh.use(mesh.Meeting(layout=layout, device="cpu"))
    trainer = Trainer(experiment, mesh.start(), how=how, workers=0)
    trainer.train()
    return trainer


CASES = [
    *(("dp=1", *each) for each in (("SGD", "fp32"), ("SGD", "bf16"), ("AdamW", "bf16"))),
    *(("fsdp=2", *each) for each in (("SGD", "fp32"), ("AdamW", "bf16"))),
    ("dp=2,fsdp=2", "SGD", "fp32"),
]


@pytest.mark.parametrize(
    "layout, optimizer, precision",
    [pytest.param(*each, marks=pytest.mark.ranks(parse(each[0]).size), id=" ".join(each)) for each in CASES],
)
def test_losses_norms_and_weights_are_those_of_an_update_after_it(layout: str, optimizer: str, precision: Any):
    """The last step of an epoch has seven samples, which two ranks share unevenly."""
    plain, mine = (trained(layout, experiment(optimizer, precision=precision), how) for how in (How(), AT_ONCE))
    assert mine.totals.losses == pytest.approx(plain.totals.losses, rel=1e-6)
    assert mine.totals.grad_norms == pytest.approx(plain.totals.grad_norms, rel=1e-5)
    weights = dict(plain.placed.weights())
    for name, each in mine.placed.weights():
        torch.testing.assert_close(each, weights[name], rtol=1e-5, atol=1e-6)
    assert all(each.gradient is None for each in mine.placed.shards)


@pytest.mark.usefixtures("alone")
def test_with_moments_in_8_bits_it_is_the_same_too():
    plain, mine = (trained("dp=1", experiment("AdamW"), replace(how, states="8bit")) for how in (How(), AT_ONCE))
    assert mine.totals.losses == pytest.approx(plain.totals.losses, rel=1e-6)


class Roomy:
    """The memory of a GPU in which all fits."""

    def __init__(self, *_: Any) -> None:
        self.begin = self.let_go = lambda: None
        self.allocated = self.peak = lambda: 0
        self.budget = lambda: 1
        self.is_recording = lambda: False


@pytest.mark.parametrize("layout", [pytest.param("dp=1"), pytest.param("fsdp=2", marks=pytest.mark.ranks(2))])
def test_no_more_is_computed_twice_than_memory_asks_for(layout: str):
    """As with `--recompute auto` on GPUs."""
    plain = trained(layout, experiment(), AT_ONCE)
    twice = Recomputing("full")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choose, "ways", lambda choice, *_: Ways(choice, twice, auto=True, channels_last=False))
        patch.setattr(choose, "OnDevice", Roomy)
        mine = trained(layout, experiment(), AT_ONCE)
    assert (twice.level, twice.measured) == ("none", None) and mine.placed.chosen["recompute"] == "none"
    assert mine.totals.losses == pytest.approx(plain.totals.losses, rel=1e-6)
    assert mine.totals.grad_norms == pytest.approx(plain.totals.grad_norms, rel=1e-5)


@contextmanager
def counting_gradients(parameters: list[nn.Parameter]) -> Iterator[list[int]]:
    """How many parameters have gradients whenever another one gets its own."""
    alive: list[int] = []

    def look(_: Tensor) -> None:
        alive.append(sum(each.grad is not None for each in parameters))

    hooks = [each.register_post_accumulate_grad_hook(look) for each in parameters]
    yield alive
    for hook in hooks:
        hook.remove()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("how, most", [(How(), 2 * LAYERS), (AT_ONCE, 0)])
def test_a_gradient_is_gone_before_the_next_weight_gets_its_own(how: How, most: int):
    trainer = Trainer(experiment(), mesh.start(), how=how, workers=0)
    steps = trainer.steps()
    next(steps)
    with counting_gradients(list(trainer.model.parameters())) as alive:
        next(steps)
    # Who looks does so after the weight's own update, and sees what that has left.
    assert len(alive) == 2 * LAYERS and max(alive) == most


@pytest.mark.usefixtures("alone")
@pytest.mark.ranks(1)
def test_the_optimizer_has_all_of_its_parameters_when_their_updates_are_over():
    trainer = trained("dp=1", experiment(), AT_ONCE)
    (group,) = trainer.optimizer.param_groups
    assert [id(each) for each in group["params"]] == [id(each.parameter) for each in trainer.placed.shards]


def test_what_needs_all_gradients_is_refused_in_a_sentence():
    layout = parse("dp=1")
    for changes, how, why in (
        ({"clip": 1.0}, AT_ONCE, r"clip is 1, and its norm is that of all gradients; switch it off \(--clip inf\)"),
        ({"micro": 4}, AT_ONCE, r"each rank computes 10 samples a step in micro-batches of 4.*--micro 10"),
    ):
        with pytest.raises(UserError, match=why):
            Trainer(experiment(**changes), mesh.start(), how=how)
    for text in ("dp=2", "tp=2", "pp=2", "fsdp=2,tp=2"):
        with pytest.raises(UserError, match=rf"layout '{text}' is neither one process nor fsdp.*--layout fsdp="):
            refuse_in_backward(experiment(), parse(text), AT_ONCE, shown=False, looks_first=False)
    with pytest.raises(UserError, match="--on-nan"):
        Trainer(experiment(), mesh.start(), how=AT_ONCE, policy=Policy(on_nan="skip"))
    with pytest.raises(UserError, match="are to be shown"):
        Trainer(experiment(), mesh.start(), how=AT_ONCE, inspect=lambda *_: None)
    with pytest.raises(UserError, match="--offload"):
        refuse_in_backward(experiment(), parse("fsdp=2"), replace(AT_ONCE, offload=True), False, False)
    refuse_in_backward(experiment(clip=math.inf), layout, AT_ONCE, shown=False, looks_first=False)


class OwnSGD(SGD):
    """Not torch's own: nobody knows what else its step does."""


@pytest.mark.usefixtures("alone")
def test_optimizers_that_are_not_torchs_own_are_refused():
    trainer = Trainer(
        replace(experiment(), optimizer=lambda given: OwnSGD(given, lr=0.1)), mesh.start(), how=AT_ONCE, workers=0
    )
    with pytest.raises(UserError, match="only of torch's own optimizers, but this one is OwnSGD"):
        next(trainer.steps())


def test_a_clip_of_infinity_is_none():
    assert small(20, 5, clip=math.inf).clip is None

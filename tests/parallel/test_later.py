"""Gradients of weights that are put off: computed when asked for, once, added to what is there, hooks and all."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from meshrun.parallel.later import Later, put_off
from tests.compare import difference


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3, bias=False))


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, 6, 4, generator=generator) for _ in range(2)]


def plain_gradients(model: nn.Module) -> dict[str, Tensor]:
    for batch in batches():
        model(batch.requires_grad_()).square().sum().backward()
    return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


def test_gradients_of_two_micro_batches_are_there_once_their_places_were_asked_for():
    wanted, model, later = plain_gradients(net()), net(), Later()
    put_off(model, later)
    for place, batch in enumerate(batches()):
        later.place = place
        model(batch.requires_grad_()).square().sum().backward()
    assert set(gradients(model)) == {"0.bias"}, "weights wait"
    later.now(1)
    later.now(1)
    assert difference(gradients(model)["0.weight"], wanted["0.weight"]) > 1e-3, "the other micro-batch is missing"
    later.all_now()
    assert difference(gradients(model), wanted) < 1e-6
    later.all_now()
    assert difference(gradients(model), wanted) < 1e-6, "nothing is computed twice"


def test_gradients_may_be_computed_at_once():
    wanted, model, later = plain_gradients(net()), net(), Later()
    put_off(model, later)
    later.at_once = True
    assert difference(plain_gradients(model), wanted) < 1e-6


def test_hooks_of_a_weight_are_called_when_its_gradient_is_there():
    model, later, called = net(), Later(), list[bool]()
    put_off(model, later)
    weight = model[0].weight
    weight.register_post_accumulate_grad_hook(lambda each: called.append(each.grad is not None))
    later.place = "first"
    model(batches()[0].requires_grad_()).sum().backward()
    assert True not in called, "there is no gradient yet"
    later.now("first")
    assert called[-1]


@pytest.mark.parametrize("grad", [True, False])
def test_outputs_are_those_of_the_layers_and_frozen_weights_stay_without_gradients(grad: bool):
    model, later = net(), Later()
    wanted = model(batches()[0])
    put_off(model, later)
    model[0].weight.requires_grad_(False)
    with torch.set_grad_enabled(grad):
        found = model(batches()[0].requires_grad_())
    assert difference(found, wanted) < 1e-6 and found.requires_grad == grad
    if grad:
        found.sum().backward()
        later.all_now()
        assert set(gradients(model)) == {"0.bias", "2.weight"}


def test_what_the_stage_before_waits_for_is_there_at_once():
    inputs = [batches()[0].requires_grad_() for _ in range(2)]
    plain, model, later = net(), net(), Later()
    put_off(model, later)
    plain(inputs[0]).square().sum().backward()
    model(inputs[1]).square().sum().backward()
    assert difference(inputs[1].grad, inputs[0].grad) < 1e-6

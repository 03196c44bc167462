"""Master weights: matrices in bf16, what they are rounded from in fp32, gradients from one to the other."""

from __future__ import annotations

import torch
from torch import nn

from meshrun.parallel import masters
from meshrun.parallel.placed import Shard


def shards_of(model: nn.Module) -> list[Shard]:
    short = masters.shorten(model)
    named = [(name, each, short.get(each)) for name, each in model.named_parameters()]
    return [
        Shard(name, each if master is None else master, (0,), tuple(each.shape), (0,) * each.dim(), copy=copy)
        for name, each, master in named
        for copy in ([each] if master is not None else [None])
    ]


def test_matrices_are_rounded_and_vectors_and_other_types_are_left():
    model = nn.ModuleList([nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(1, 5), nn.Bilinear(2, 2, 2)])
    model.narrow = nn.Parameter(torch.ones(2, 2, dtype=torch.float16))
    before = {name: each.detach().clone() for name, each in model.named_parameters()}
    shards = {each.name: each for each in shards_of(model)}
    rounded = {name for name, each in shards.items() if each.copy is not None}
    assert rounded == {"0.weight"}, "a matrix of one column is a vector"
    assert torch.equal(shards["0.weight"].parameter, before["0.weight"])
    assert torch.equal(shards["0.weight"].computed, before["0.weight"].bfloat16())
    assert shards["narrow"].parameter.dtype == torch.float16


def test_gradients_of_micro_batches_are_added_up_in_fp32_and_taken_once():
    model = nn.Linear(2, 2, bias=False)
    (shard,) = shards_of(model)
    assert shard.copy is not None
    for value in (1.0, 2**-10, 2**-10):  # in bf16 the small ones would be lost beside the first
        shard.copy.grad = torch.full((2, 2), value, dtype=torch.bfloat16)
        masters.collect([shard])
        assert shard.copy.grad is None
    masters.collect([shard])
    assert shard.parameter.grad is not None and shard.parameter.grad.dtype == torch.float32
    assert shard.parameter.grad[0, 0] == 1 + 2**-9


def test_weights_that_changed_are_what_the_model_computes_with():
    model = nn.Linear(2, 2, bias=False)
    (shard,) = shards_of(model)
    with torch.no_grad():
        shard.parameter.fill_(3.0)
    masters.spread([shard])
    assert (model.weight == 3).all() and model.weight.dtype == torch.bfloat16
    masters.lengthen([shard])
    assert model.weight.dtype == torch.float32


def test_errors_about_types_are_told_from_others():
    for text in ("expected scalar type Float", "must have the same dtype", "not implemented for 'BFloat16'"):
        assert masters.is_about_types(RuntimeError(text))
    assert not masters.is_about_types(RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"))


def test_a_gradient_that_is_taken_at_once_is_not_left_to_be_added_to_the_next():
    model = nn.Linear(2, 2, bias=False)
    taken: list[torch.Tensor] = []
    masters.collect_at_once(model.weight, taken.append)
    for factor in (1.0, 2.0):
        (factor * model(torch.ones(1, 2))).sum().backward()
        assert model.weight.grad is None
    assert [each[0, 0].item() for each in taken] == [1.0, 2.0]

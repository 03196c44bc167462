"""Linear layers that read the same become one product, and nothing else changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._functorch._aot_autograd.autograd_cache import check_node_safe

from meshrun.parallel import joined
from meshrun.recipes import llama

Numbers = list[Tensor]


def results(forward: Callable[..., Tensor], inputs: Numbers, parameters: Numbers) -> Numbers:
    """What a function gives, and the gradients of all that it reads."""
    leaves = [each.clone().requires_grad_() for each in inputs]
    found = forward(*leaves)
    return [found.detach(), *torch.autograd.grad(found.square().sum(), [*leaves, *parameters])]


def with_joined(forward: Callable[..., Tensor]) -> tuple[Callable[..., Tensor], list[int]]:
    """A function whose layers are joined, and how many were, a number a graph."""
    count: list[int] = []

    def backend(graph: fx.GraphModule, _: list[Tensor]) -> Callable[..., object]:
        count.append(joined.join(graph))
        return graph.forward

    torch._dynamo.reset()
    return torch.compile(forward, backend=backend), count


def joined_in(forward: Callable[..., Tensor], inputs: Numbers, parameters: Numbers) -> int:
    """How many layers become part of a product with others; what comes out must stay as it is."""
    wanted = results(forward, inputs, parameters)
    compiled, count = with_joined(forward)
    for one, other in zip(results(compiled, inputs, parameters), wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    return sum(count)


@pytest.fixture
def drawn() -> Callable[..., Tensor]:
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(shape, generator=generator)


def test_a_block_of_the_llama_recipe_has_two_products_less_for_attention_and_one_for_what_follows():
    torch.manual_seed(0)
    block = llama.Block(replace(llama.PRESETS["tiny"], dropout=0.0))
    assert joined_in(block.forward, [torch.randn(2, 8, 96)], list(block.parameters())) == 3 + 2


def test_what_is_compiled_of_joined_layers_can_be_kept():
    def backend(graph: fx.GraphModule, _: list[Tensor]) -> Callable[..., object]:
        assert joined.join(graph) == 2
        for node in graph.graph.nodes:
            check_node_safe(node)  # raises
        return graph.forward

    torch._dynamo.reset()
    one, other = nn.Linear(6, 4), nn.Linear(6, 3)
    torch.compile(lambda x: one(x).sum() + other(x).sum(), backend=backend)(torch.randn(5, 6))


def test_biases_are_joined_too(drawn: Callable[..., Tensor]):
    one, other = nn.Linear(6, 4), nn.Linear(6, 3)
    together = lambda x: torch.cat([one(x), other(x).tanh()], -1)  # noqa: E731
    assert joined_in(together, [drawn(5, 6)], [*one.parameters(), *other.parameters()]) == 2


@pytest.mark.parametrize(
    ("why", "forward"),
    [
        ("they read different things", lambda x, a, b: F.linear(x, a) + F.linear(x.sin(), b)),
        ("one is made in between", lambda x, a, b: F.linear(x, a) + F.linear(x, b * 2)),
    ],
)
def test_other_layers_stay_as_they_are(why: str, forward: Callable[..., Tensor], drawn: Callable[..., Tensor]):
    assert joined_in(forward, [drawn(5, 6), drawn(4, 6), drawn(4, 6)], []) == 0, why


def test_a_layer_with_a_bias_and_one_without_stay_apart(drawn: Callable[..., Tensor]):
    def forward(x: Tensor, a: Tensor, b: Tensor, bias: Tensor) -> Tensor:
        return F.linear(x, a, bias) + F.linear(x, b)

    assert joined_in(forward, [drawn(5, 6), drawn(4, 6), drawn(4, 6), drawn(4)], []) == 0


@torch.no_grad()
@pytest.mark.parametrize("halved", [False, True], ids=["one is cast", "one has weights of another type"])
def test_layers_that_compute_in_other_types_stay_apart(halved: bool, drawn: Callable[..., Tensor]):
    def forward(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            first = F.linear(x, a)
            if halved:
                return first.float() + F.linear(x, b)
        return first.float() + F.linear(x, b)

    inputs = [drawn(5, 6), drawn(4, 6), drawn(4, 6).bfloat16() if halved else drawn(4, 6)]
    compiled, count = with_joined(forward)
    assert torch.equal(compiled(*inputs), forward(*inputs)) and count == [0]


@torch.no_grad()
def test_what_is_changed_between_two_layers_is_read_twice(drawn: Callable[..., Tensor]):
    def forward(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        x = x * 1
        first = F.linear(x, a)
        x.add_(1)
        return first + F.linear(x, b)

    inputs = [drawn(5, 6), drawn(4, 6), drawn(4, 6)]
    compiled, count = with_joined(forward)
    assert torch.equal(compiled(*inputs), forward(*inputs)) and count == [0]


def test_large_layers_stay_as_they_are(drawn: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(joined, "SMALL", 23)
    assert joined_in(lambda x, a, b: F.linear(x, a) + F.linear(x, b), [drawn(5, 6), drawn(4, 6), drawn(4, 6)], []) == 0

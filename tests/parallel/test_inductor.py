"""What is changed in a graph before torch compiles it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from meshrun.parallel import inductor


def added_in(forward: Callable[..., Tensor], *inputs: Tensor) -> int:
    """How many sums of what a function returns are left to a product, which gives the same."""
    found: list[int] = []

    def backend(graph: fx.GraphModule, _: list[Tensor]) -> Callable[..., object]:
        found.append(inductor.add_where_rounded(graph))
        return graph.forward

    torch._dynamo.reset()
    wanted = forward(*inputs)
    torch.testing.assert_close(torch.compile(forward, backend=backend)(*inputs), wanted, rtol=0.02, atol=0.02)
    return sum(found)


def halves(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).bfloat16()


def test_a_segment_that_ends_in_a_sum_lets_its_product_add():
    x, h, weight = halves(2, 5, 8), halves(2, 5, 16), nn.Parameter(halves(8, 16))
    assert added_in(lambda x, h: x + F.linear(h, weight), x, h) == 1
    assert added_in(lambda x, h: F.dropout(F.linear(h, weight), 0.0, True) + x, x, h) == 1


def test_gradients_of_such_a_sum_are_those_of_its_parts():
    x, h, weight = halves(2, 5, 8), halves(2, 5, 16), halves(8, 16)
    grads = []
    for how in (lambda f: f, lambda f: torch.compile(f, backend=joined)):
        leaves = [each.clone().requires_grad_() for each in (x, h, weight)]
        torch._dynamo.reset()
        how(lambda x, h, weight: x + F.linear(h, weight))(*leaves).float().square().sum().backward()
        grads.append([each.grad for each in leaves])
    for found, wanted in zip(*grads, strict=True):
        assert (found - wanted).abs().max() < 0.02 * wanted.abs().max()


def joined(graph: fx.GraphModule, _: list[Tensor]) -> Callable[..., object]:
    assert inductor.add_where_rounded(graph) == 1
    return graph.forward


@pytest.mark.parametrize(
    ("why", "forward"),
    [
        ("it is of another type", lambda x, h, weight: x.float() + F.linear(h, weight)),
        ("something is dropped", lambda x, h, weight: x + F.dropout(F.linear(h, weight), 0.5, False)),
        ("it has a bias", lambda x, h, weight: x + F.linear(h, weight, weight[:, 0])),
        ("one number is for all rows", lambda x, h, weight: x[:1] + F.linear(h, weight)),
        ("the sum is not the end", lambda x, h, weight: (x + F.linear(h, weight)).tanh()),
    ],
)
def test_other_sums_stay_as_they_are(why: str, forward: Callable[..., Tensor]):
    assert added_in(forward, halves(2, 5, 8), halves(2, 5, 16), halves(8, 16)) == 0, why


def transposed(gradient: Tensor, weight: Tensor) -> int:
    """How many weights of a product are transposed, which gives the same."""
    graph = make_fx(torch.mm, tracing_mode="fake")(gradient, weight)
    inductor.WeightsTransposed()(graph.graph)
    graph.graph.lint()
    graph.recompile()
    assert torch.equal(graph(gradient, weight), gradient @ weight)
    return len(graph.graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default))


def test_wide_weights_are_transposed_for_long_gradients(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(inductor, "LARGE", 8)
    assert transposed(halves(64, 8), halves(8, 16)) == 1
    assert transposed(halves(64, 16), halves(16, 8)) == 0, "it is narrow"
    assert transposed(halves(16, 8), halves(8, 16)) == 0, "there is too little to multiply it with"
    assert transposed(halves(64, 8), halves(16, 8).t()) == 0, "it already lies as it should"
    assert transposed(halves(64, 8).float(), halves(8, 16).float()) == 0, "it is not of halves"

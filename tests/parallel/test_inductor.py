"""What is changed in a graph before torch compiles it."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from meshrun.parallel import inductor


def halves(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).bfloat16()


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

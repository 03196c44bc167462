"""What is added to a product is part of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import decompositions
from torch.fx.experimental.proxy_tensor import make_fx

from meshrun.kernels import products
from meshrun.parallel import inductor, summed


def halves(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16()


@pytest.fixture(autouse=True)
def _all_are_large(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(summed, "LARGE", 1)
    monkeypatch.setattr(products, "LARGE", 1)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Block(nn.Module):
    """Two residual connections, the second one with a gate."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, shape in {"out": (16, 16), "gate": (32, 16), "up": (32, 16), "down": (16, 32)}.items():
            weight = torch.randn(shape, generator=generator) / shape[1] ** 0.5
            setattr(self, name, nn.Parameter(weight.bfloat16()))

    def forward(self, x: Tensor) -> Tensor:
        x = x + F.linear(F.rms_norm(x, (16,)), self.out)
        normed = F.rms_norm(x, (16,))
        return x + F.linear(F.silu(F.linear(normed, self.gate)) * F.linear(normed, self.up), self.down)


def compiled(forward: Callable[..., Tensor]) -> tuple[Callable[..., Tensor], list[list[Any]]]:
    """It with what is changed in graphs on a GPU, cut as for torch's compiler, and the operations of each pass."""
    passes: list[list[Any]] = []

    def cut(joint: fx.GraphModule, inputs: Any, **options: Any) -> Any:
        inductor.Whole(False)(joint.graph)
        joint.graph.lint()
        return min_cut_rematerialization_partition(joint, inputs, **options)

    def of_one_pass(module: fx.GraphModule, _: Any) -> Any:
        inductor.Rewritten()(module.graph)
        module.graph.lint()
        module.recompile()
        computed = [node for node in module.graph.nodes if node.op == "call_function"]
        # What is computed in fp32 belongs to norms.
        passes.append([node.target for node in computed if node.meta["val"].dtype == torch.bfloat16])
        return make_boxed_func(module.forward)

    backend = aot_autograd(fw_compiler=of_one_pass, partition_fn=cut, decompositions=decompositions)
    return torch.compile(forward, backend=backend), passes


def test_residual_connections_are_part_of_products_in_both_passes():
    block, x = Block(), halves(4, 6, 16).requires_grad_()
    forward, passes = compiled(block.forward)
    given = [x, *block.parameters()]
    found = torch.autograd.grad(forward(x).float().square().sum(), given)
    wanted = torch.autograd.grad(block(x).float().square().sum(), given)
    exact_block, exact_x = Block().float(), x.detach().float().requires_grad_()
    exact_block.load_state_dict(block.state_dict())
    exact = torch.autograd.grad(exact_block(exact_x).square().sum(), [exact_x, *exact_block.parameters()])
    for one, other, truth in zip(found, wanted, exact, strict=True):
        assert (one - truth).norm() <= 1.25 * (other - truth).norm(), "it is as exact as it was, but for chance"
    assert [each.count(torch.ops.meshrun.product.default) for each in passes] == [4, 8]
    assert [each.count(torch.ops.aten.add.Tensor) for each in passes] == [0, 2], "of gradients that no product gives"


def added(forward: Callable[..., Tensor], *inputs: Tensor, tag: str = "other") -> int:
    """How many sums of a graph become part of a product; it then gives the same."""
    module = make_fx(forward, decompositions, tracing_mode="fake")(*inputs)
    for node in module.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default):
        node.meta[tag] = True
    summed.add_in_products(module.graph)
    module.graph.lint()
    module.recompile()
    found, wanted = module(*inputs), forward(*inputs)
    torch.testing.assert_close(found, wanted, rtol=2**-6, atol=2e-2)
    assert found.stride() == wanted.stride()
    return len(module.graph.find_nodes(op="call_function", target=torch.ops.aten.addmm.default))


def residual(x: Tensor, weight: Tensor) -> Tensor:
    return x + F.linear(x, weight)


def test_it_does_not_matter_which_of_two_is_the_product():
    given = halves(4, 6, 16), halves(16, 16)
    assert added(residual, *given) == added(lambda x, w: F.linear(x, w) + x, *given) == 1
    assert added(lambda x, w: F.linear(x, w) + F.linear(x, w.t()), *given) == 1
    assert added(lambda x, w: x + F.linear(x, w).clone(), *given) == 1, "as a dropout that drops nothing makes it"


@pytest.mark.parametrize(
    ("why", "forward"),
    [
        ("what is added is not in memory", lambda x, w: x.tanh() + F.linear(x, w)),
        ("another one reads the product", lambda x, w: (product := F.linear(x, w)) * (x + product)),
        ("the product is computed with before", lambda x, w: x + F.linear(x, w).relu()),
        ("it is added twice", lambda x, w: torch.add(x, F.linear(x, w), alpha=2)),
        ("a number is added", lambda x, w: F.linear(x, w) + 1),
        ("it is added to itself", lambda x, w: (product := F.linear(x, w)) + product),
        ("it is seen otherwise", lambda x, w: x.view(4, 16, 6) + F.linear(x, w).mT),
        (
            "its copy lies otherwise",
            lambda x, w: x.view(4, 6, 4, 4) + F.linear(x, w).view(4, 6, 4, 4).clone(memory_format=torch.channels_last),
        ),
    ],
)
def test_other_sums_stay_as_they_are(why: str, forward: Callable[..., Tensor]):
    assert added(forward, halves(4, 6, 16), halves(16, 16)) == 0, why


@pytest.mark.parametrize(
    ("why", "plus"),
    [
        ("it is of another kind", halves(4, 6, 16).float()),
        ("it lies otherwise", halves(4, 16, 6).mT),
        ("it is a row that is added to all", halves(16)),
        ("it is larger than the product", halves(2, 4, 6, 16)),
    ],
)
def test_what_is_not_like_the_product_is_added_as_always(why: str, plus: Tensor):
    assert added(lambda plus, x, w: plus + F.linear(x, w), plus, halves(4, 6, 16), halves(16, 16)) == 0, why


def test_what_a_user_has_computed_twice_stays_so():
    assert added(residual, halves(4, 6, 16), halves(16, 16), tag="recompute") == 0


def test_small_products_and_those_of_other_kinds_stay_as_they_are(monkeypatch: pytest.MonkeyPatch):
    given = halves(4, 6, 16), halves(16, 16)
    assert added(residual, *(each.float() for each in given)) == 0
    monkeypatch.setattr(summed, "LARGE", 24 * 16 * 16 + 1)
    assert added(residual, *given) == 0

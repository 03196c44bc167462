"""What is changed in a graph before torch compiles it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sympy
import torch
import torch._dynamo
import torch._functorch.config
from torch import Tensor, fx, nn
from torch._inductor.choices import InductorChoices
from torch.fx.experimental.proxy_tensor import make_fx

from meshrun.kernels import pooled, products
from meshrun.parallel import ample, inductor


def halves(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).bfloat16()


def count(target: Any, left: Tensor, right: Tensor) -> int:
    """How often the graph of a product has this operation, once it is rewritten; what it gives is the same."""
    graph = make_fx(torch.mm, tracing_mode="fake")(left, right)
    inductor.Rewritten()(graph.graph)
    graph.graph.lint()
    graph.recompile()
    assert torch.equal(graph(left, right), left @ right)
    return len(graph.graph.find_nodes(op="call_function", target=target))


def test_wide_weights_are_transposed_for_long_gradients(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(inductor, "LARGE", 8)
    transposed = partial(count, torch.ops.aten.clone.default)
    assert transposed(halves(64, 8), halves(8, 16)) == 1
    assert transposed(halves(64, 16), halves(16, 8)) == 0, "it is narrow"
    assert transposed(halves(16, 8), halves(8, 16)) == 0, "there is too little to multiply it with"
    assert transposed(halves(64, 8), halves(16, 8).t()) == 0, "it already lies as it should"
    assert transposed(halves(64, 8).float(), halves(8, 16).float()) == 0, "it is not of halves"


def test_kernels_are_chosen_for_large_products_of_halves(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(products, "LARGE", 64 * 8 * 16)
    of_ours = partial(count, products.OPERATION)
    assert of_ours(halves(64, 8), halves(8, 16)) == 1
    assert of_ours(halves(8, 64).t(), halves(16, 8).t()) == 1
    assert of_ours(halves(64, 8), halves(8, 15)) == 0, "it is small"
    assert of_ours(halves(64, 8).float(), halves(8, 16).float()) == 0, "it is not of halves"


def test_a_wide_weight_of_a_large_product_is_transposed_and_its_kernel_chosen(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(inductor, "LARGE", 8)
    monkeypatch.setattr(products, "LARGE", 64 * 8 * 16)
    for target in (torch.ops.aten.clone.default, products.OPERATION):
        assert count(target, halves(64, 8), halves(8, 16)) == 1


def test_products_of_other_kinds_of_float8_stay_as_they_are(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(products, "LARGE", 1)
    one = torch.ones(())
    for kinds in ((torch.float8_e5m2, torch.float8_e4m3fn), (torch.float8_e4m3fn, torch.float8_e5m2)):
        given = halves(64, 32).to(kinds[0]), halves(48, 32).to(kinds[1]).t(), one, one
        graph = make_fx(lambda *each: torch._scaled_mm(*each, out_dtype=torch.bfloat16), tracing_mode="fake")(*given)
        inductor.Rewritten()(graph.graph)
        assert not graph.graph.find_nodes(op="call_function", target=products.OPERATION8)


@pytest.mark.parametrize("keeps", [False, True])
def test_graphs_are_rewritten_for_gpus_alone(keeps: bool, monkeypatch: pytest.MonkeyPatch):
    found = []
    monkeypatch.setattr(inductor, "compile_fx", lambda *_, config_patches, **__: found.append(config_patches))
    graph = fx.symbolic_trace(lambda x: x + 1)
    for on_gpu in (False, True):
        inductor._compiled(graph, [SimpleTensor(on_gpu)], keeps, {})
    on_cpu, on_gpu_too = ({name: type(each) for name, each in patches.items()} for patches in found)
    assert on_cpu == ({"joint_custom_pre_pass": ample.Kept} if keeps else {})
    both = {"joint_custom_pre_pass": inductor.Whole, "post_grad_custom_pre_pass": inductor.Rewritten}
    assert on_gpu_too == both


class SimpleTensor(Tensor):
    """Says where it is."""

    @staticmethod
    def __new__(cls, on_gpu: bool) -> SimpleTensor:
        return torch.Tensor._make_subclass(cls, torch.zeros(1))

    def __init__(self, on_gpu: bool) -> None:
        self._on_gpu = on_gpu

    @property
    def is_cuda(self) -> bool:
        return self._on_gpu


def test_code_that_is_kept_is_told_apart_by_all_that_rewrites_graphs(monkeypatch: pytest.MonkeyPatch):
    read: list[str] = []
    monkeypatch.setattr(inductor, "get_hash_for_files", lambda names: read.extend(names) or b"")
    inductor.Rewritten().uuid()
    rewriting = {"inductor.py", "ample.py", "nodes.py", "summed.py", "products.py", "pooled.py"}
    assert {Path(each).name for each in read} == rewriting
    assert inductor.Whole(True).uuid() != inductor.Whole(False).uuid()
    monkeypatch.setattr(ample, "get_hash_for_files", lambda names: names)
    assert {Path(each).name for each in ample.Kept().uuid()} == {"ample.py", "nodes.py"}


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize(("each", "chosen"), [((), 1), ((1, 1), 1), ((64, 1), 0)])
def test_kernels_are_chosen_for_products_of_float8_with_a_scale_a_factor(
    fast: bool, each: tuple[int, ...], chosen: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(products, "LARGE", 64 * 32 * 48)
    left, right = halves(64, 32).to(torch.float8_e4m3fn), halves(48, 32).to(torch.float8_e4m3fn).t()
    scale, other = torch.full(each, 2.0), torch.full((1, 48) if chosen == 0 else each, 0.5)

    def multiply(*given: Tensor) -> Tensor:
        return torch._scaled_mm(*given, out_dtype=torch.bfloat16, use_fast_accum=fast)

    graph = make_fx(multiply, tracing_mode="fake")(left, right, scale, other)
    inductor.Rewritten()(graph.graph)
    graph.graph.lint()
    (found,) = [node for node in graph.graph.nodes if node.op == "call_function"]
    assert found.target is (products.OPERATION8 if chosen else torch.ops.aten._scaled_mm.default)
    assert not chosen or found.args[-2:] == (torch.bfloat16, fast)


def heads(*counts: int) -> list[Tensor]:
    return [halves(2, 3, count, 4) for count in counts]


@pytest.mark.parametrize(
    ("together", "read", "why"),
    [
        (lambda a, b: torch.cat([a.view(2, 3, -1), b.view(2, 3, -1)], -1), [(2, 3, 4, 4), (2, 3, 1, 4)], None),
        (lambda a, b: torch.cat([a.view(2, -1, 4), b.view(2, -1, 4)], 1), None, "they are not put side by side"),
        (lambda a, b: torch.cat([a.view(2, 3, -1), b.view(2, 3, -1) + 1], -1), None, "one is computed with before"),
        (lambda a, b: torch.cat([a.view(2, 3, -1), b.view(2, 3, 2, 2).view(2, 3, -1)], -1), None, "sizes differ"),
    ],
)
def test_heads_are_put_together_before_they_are_seen_as_features(
    together: Callable[..., Tensor], read: list[tuple[int, ...]] | None, why: str | None
):
    given = heads(4, 1)
    graph = make_fx(together, tracing_mode="fake")(*given)
    inductor.Rewritten()(graph.graph)
    graph.graph.lint()
    graph.recompile()
    assert torch.equal(graph(*given), together(*given))
    (cat,) = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.cat.default)
    assert all(node.users for node in graph.graph.nodes if node.op == "call_function")
    found = [tuple(each.meta["val"].shape) for each in cat.args[0]]
    assert (found == read) == (why is None), why


@pytest.mark.parametrize(
    ("reads", "others", "fused"),
    [
        ("x dy mean", "x dy", True),
        ("x dy mean", "dy other variance", True),
        ("x a b c", "x d", False),
        ("x mean", "y mean", False),
    ],
)
def test_sums_are_computed_together_if_they_read_mostly_the_same(
    reads: str, others: str, fused: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(InductorChoices, "can_fuse_horizontal", staticmethod(lambda *_: True))
    small = {"mean", "variance"}

    def node(names: str) -> Any:
        # A number of torch's own or of Python's: torch has both.
        sizes = {name: 8 if name in small else sympy.Integer(8000) for name in names.split()}
        read = [SimpleNamespace(name=name, get_numel=lambda size=size: size) for name, size in sizes.items()]
        return SimpleNamespace(is_reduction=lambda: True, read_writes=SimpleNamespace(reads=read))

    assert inductor.Choices.can_fuse_horizontal(None, node(reads), node(others), 1) == fused


@pytest.mark.parametrize(("layer", "kept"), [(nn.Conv2d(3, 4, 3), True), (nn.Linear(8, 4), False)])
def test_what_convolutions_read_is_kept_for_the_backward_pass(
    layer: nn.Module, kept: bool, monkeypatch: pytest.MonkeyPatch
):
    found = []

    def compile_fx(graph: fx.GraphModule, *_: Any, **__: Any) -> Callable[..., Any]:
        found.append(torch._functorch.config.ban_recompute_materialized_backward)
        return graph.forward

    monkeypatch.setattr(inductor, "compile_fx", compile_fx)
    torch._dynamo.reset()
    torch.compile(lambda x: layer(x).relu(), backend=inductor.backend)(torch.randn(2, 3, 8, 8))
    assert found == [kept]


@pytest.mark.parametrize(("order", "spread"), [(torch.channels_last, 1), (torch.contiguous_format, 0)])
def test_gradients_of_maxima_are_a_kernel_of_their_own_where_channels_come_last(
    order: torch.memory_format, spread: int
):
    def backward(x: Tensor, gradient: Tensor) -> Any:
        window = [3, 3], [2, 2], [1, 1], [1, 1]
        _, offsets = torch.ops.prims._low_memory_max_pool_with_offsets(x, *window, False)
        offsets = offsets.contiguous(memory_format=order)
        indices = torch.ops.prims._low_memory_max_pool_offsets_to_indices(offsets, window[0], [8, 8], *window[1:])
        return torch.ops.aten.max_pool2d_with_indices_backward(gradient, x, *window, False, indices)

    given = torch.randn(2, 3, 8, 8), torch.randn(2, 3, 4, 4)
    graph = make_fx(backward, tracing_mode="fake")(*given)
    inductor.Rewritten()(graph.graph)
    graph.graph.lint()
    graph.recompile()
    torch.testing.assert_close(graph(*given), backward(*given))
    left = graph.graph.find_nodes(op="call_function", target=inductor._OFFSETS)
    assert len(left) == 1 - spread
    assert len(graph.graph.find_nodes(op="call_function", target=pooled.OPERATION)) == spread


def test_shapes_that_vary_are_left_as_they_are():
    together = lambda a, b: torch.cat([a.flatten(2), b.flatten(2)], -1)  # noqa: E731
    for shape in ((2, 3, 4, 5), (6, 7, 8, 9)):
        given = halves(*shape), halves(*shape)
        graph = make_fx(together, tracing_mode="symbolic")(*given)
        inductor.Rewritten()(graph.graph)
        graph.graph.lint()
        assert torch.equal(graph(*given), together(*given))

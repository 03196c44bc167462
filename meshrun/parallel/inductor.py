"""torch's compiler, with what pays in a training on a GPU.

    torch.compile(segment.forward, backend=backend)

Where torch's own choices aim at any program, others are better here:

- A row of some thousand numbers (of a norm, of an activation that is then quantised) is read once and kept until its
  sum or maximum is known. torch reads it a second time from 1,025 numbers on.
- What the backward pass multiplies with, and a few cheap operations make of what is kept anyway (an activation, a
  norm), is made again. Not so where there are convolutions: to make their inputs again takes as long as many of them.
  Where memory is ample, gated activations are kept too: see `ample`.
- Linear layers that read the same are one product: see `joined`.
- The gradient of a linear layer's inputs, where these are many more than its outputs, is computed with the weight
  transposed: the order that both factors then have in memory is the one for which GPUs multiply fastest.
- The largest products are computed by the kernel that is fastest on this GPU: see `kernels/products.py`. What is added
  to a product is part of it: see `summed`.
- Sums and maxima are computed by one kernel if they read mostly the same. torch has the gradients of all norms' weights
  computed by one, which reads again what those of the norms' inputs have just read.
- Heads that are put side by side as features are written there at once.
- The gradient of what a maximum over windows was taken of is a kernel of its own: see `kernels/pooled.py`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch._functorch.config
import torch._inductor.config
import torch._inductor.inductor_prims
from torch import Tensor, fx
from torch._inductor.choices import InductorChoices
from torch._inductor.compile_fx import compile_fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.runtime.hints import ReductionHint
from torch._inductor.virtualized import V

from meshrun.kernels import pooled, products
from meshrun.parallel import ample, nodes, summed
from meshrun.parallel.ample import Kept, has_gates
from meshrun.parallel.joined import join
from meshrun.parallel.nodes import VIEWS, called, multiplications
from meshrun.parallel.summed import add_in_products, is_alike

ROW = 16_384
"""Numbers of a row that is kept: what the registers of a multiprocessor hold."""
LARGE = 1024
"""Rows and columns of factors from which on their order in memory is worth a copy of the weight."""
_aten = torch.ops.aten
_OFFSETS = torch.ops.prims._low_memory_max_pool_offsets_to_indices.default
_CONVOLUTIONS = {getattr(torch, f"conv{kind}{size}d") for kind in ("", "_transpose") for size in (1, 2, 3)}


def backend(graph: fx.GraphModule, inputs: list[Any], **options: Any) -> Any:
    """Compile a graph."""
    return _compiled(graph, inputs, False, options)


class Ample:
    """Compiles graphs, where there is memory for what is quicker kept than made again."""

    def __init__(self) -> None:
        self.finds = False
        """Whether there was something to keep; without, code is the same as that of `backend`."""

    def __call__(self, graph: fx.GraphModule, inputs: list[Any], **options: Any) -> Any:
        gated = has_gates(graph)
        self.finds |= gated
        return _compiled(graph, inputs, gated, options)


def _compiled(graph: fx.GraphModule, inputs: list[Any], keeps: bool, options: dict[str, Any]) -> Any:
    torch._inductor.config.inductor_choices_class = Choices  # by the thread that asks first, which may be autograd's
    patches: dict[str, Any] = {"joint_custom_pre_pass": Kept()} if keeps else {}
    if any(isinstance(each, Tensor) and each.is_cuda for each in inputs):
        join(graph)
        patches = {"joint_custom_pre_pass": Whole(keeps), "post_grad_custom_pre_pass": Rewritten()}
    with torch._functorch.config.patch(ban_recompute_materialized_backward=_convolves(graph)):
        return compile_fx(graph, inputs, config_patches=patches, **options)


def _convolves(graph: fx.GraphModule) -> bool:
    return any(node.target in _CONVOLUTIONS for node in graph.graph.nodes)


class Choices(InductorChoices):
    """torch's own, but for long rows and for what is computed together."""

    @staticmethod
    def should_use_persistent_reduction(features: Any, cooperative_reduction: bool) -> bool:
        along_rows = features.get_reduction_hint() == ReductionHint.INNER and not cooperative_reduction
        if along_rows and V.graph.sizevars.statically_known_leq(features.reduction_numel, ROW):
            return torch._inductor.config.triton.persistent_reductions
        return InductorChoices.should_use_persistent_reduction(features, cooperative_reduction)

    @staticmethod
    def can_fuse_horizontal(scheduler: Any, one: Any, other: Any, shared: int) -> bool:
        if not InductorChoices.can_fuse_horizontal(scheduler, one, other, shared):
            return False
        if not (one.is_reduction() and other.is_reduction()):
            return True
        reads, others = _much_read(one), _much_read(other)
        return 2 * len(reads & others) >= max(len(reads), len(others))

    def uuid(self) -> bytes:
        """What sets code that is kept from earlier runs apart from code made by other choices."""
        return get_hash_for_files((__file__,))


def _much_read(node: Any) -> set[str]:
    """What a kernel reads, less what is small beside it; nothing is known of sizes that vary."""
    counts = {each.name: each.get_numel() for each in node.read_writes.reads}
    sizes = {name: size for name, size in counts.items() if getattr(size, "is_number", True)}  # some are Python's own
    most = max(sizes.values(), default=0)
    return {name for name, size in sizes.items() if 2 * size >= most}


def _hash() -> bytes:
    """Of all that says what becomes of a graph."""
    return get_hash_for_files((__file__, *(each.__file__ for each in (ample, nodes, summed, products, pooled))))


class Whole(CustomGraphPass):
    """A graph of both passes, in which products begin with what they are added to."""

    def __init__(self, keeps: bool) -> None:
        self._kept = Kept() if keeps else None

    def __call__(self, graph: fx.Graph) -> None:
        add_in_products(graph)
        if self._kept is not None:
            self._kept(graph)

    def uuid(self) -> Any:
        """The same, of all that it does."""
        return _hash(), self._kept is not None


class Rewritten(CustomGraphPass):
    """A graph with some operations in another form, of one pass."""

    def __call__(self, graph: fx.Graph) -> None:
        transpose_weights(graph)
        choose_kernels(graph)
        put_heads_together(graph)
        spread_maxima(graph)

    def uuid(self) -> bytes:
        """The same, where torch does not ask for that of choices."""
        return _hash()


def choose_kernels(graph: fx.Graph) -> None:
    """Large products of bf16, and of float8 with one scale a factor, are those of ours, and so are all that begin with
    what they are added to.
    """
    for node in graph.find_nodes(op="call_function", target=_aten.mm.default):
        if multiplications(*node.args) >= products.LARGE and node.meta["val"].dtype == torch.bfloat16:
            _exchange(graph, node, products.OPERATION, *node.args)
    for node in graph.find_nodes(op="call_function", target=_aten.addmm.default):
        plus, left, right = node.args
        if multiplications(left, right) >= summed.LARGE and not node.kwargs and is_alike(plus, node):
            _exchange(graph, node, products.OPERATION, left, right, plus)
    for node in graph.find_nodes(op="call_function", target=_aten._scaled_mm.default):
        given: list[Any] = [*node.args, *(None, None, None, False)[len(node.args) - 4 :]]
        left, right, scale, other, bias, of_result, kind, fast = given
        plain = bias is None and of_result is None and kind in (torch.bfloat16, torch.float32)
        if plain and multiplications(left, right) >= products.LARGE:
            kinds = {each.meta["val"].dtype for each in (left, right)}
            one_each = all(each.meta["val"].numel() == 1 for each in (scale, other))
            if one_each and kinds == {torch.float8_e4m3fn}:
                _exchange(graph, node, products.OPERATION8, left, right, scale, other, kind, fast)


def _exchange(graph: fx.Graph, node: fx.Node, target: Any, *arguments: Any) -> None:
    with graph.inserting_before(node):
        node.replace_all_uses_with(called(graph, target, *arguments))
    graph.erase_node(node)


def transpose_weights(graph: fx.Graph) -> None:
    """Products of a long gradient with a wide weight: a transposed copy of the weight makes them faster."""
    for node in graph.find_nodes(op="call_function", target=_aten.mm.default):
        if _transposed_pays(*(each.meta["val"] for each in node.args)):
            with graph.inserting_before(node):
                turned = called(graph, _aten.permute.default, node.args[1], [1, 0])
                copy = called(graph, _aten.clone.default, turned, memory_format=torch.contiguous_format)
                back = called(graph, _aten.permute.default, copy, [1, 0])
            node.replace_input_with(node.args[1], back)


def _transposed_pays(gradient: Tensor, weight: Tensor) -> bool:
    sizes = (*gradient.shape, *weight.shape)
    if not all(isinstance(each, int) for each in sizes) or gradient.dtype != torch.bfloat16:
        return False
    (rows, summed), columns = gradient.shape, weight.shape[1]
    # Both factors must lie row by row, and there must be much more of the gradient than of the weight.
    by_rows = gradient.stride() == (summed, 1) and weight.stride() == (columns, 1)
    return by_rows and summed >= LARGE and columns >= 2 * summed and rows >= 2 * columns


def put_heads_together(graph: fx.Graph) -> None:
    """Heads first, features then: (…, heads, size) of some tensors put together and seen as (…, features).

    Seen as features first, each would be computed in a place of its own and copied from there.
    """
    for node in graph.find_nodes(op="call_function", target=_aten.cat.default):
        parts, dim = node.args[0], node.args[1] if len(node.args) > 1 else 0
        shape = node.meta["val"].shape
        if dim not in (-1, len(shape) - 1) or not all(each.target in VIEWS for each in parts):
            continue
        heads = [each.args[0] for each in parts]
        last = [each.meta["val"].shape[-1] for each in heads]
        static = all(isinstance(each, int) for each in (*shape, *last))
        if static and len(set(last)) == 1 and all(map(_merges_heads, parts)):
            with graph.inserting_before(node):
                together = called(graph, _aten.cat.default, heads, len(shape) - 1)
                node.replace_all_uses_with(called(graph, _aten.reshape.default, together, list(shape)))
            # Also those that nobody reads any more: for a view, what it is of would get a place of its own.
            _erase(graph, node, *dict.fromkeys(parts))


def _merges_heads(view: fx.Node) -> bool:
    """Whether a view is of the last two dims as one."""
    heads, features = view.args[0].meta["val"].shape, view.meta["val"].shape  # type: ignore[union-attr]
    return len(heads) == len(features) + 1 and heads[:-2] == features[:-1]


def spread_maxima(graph: fx.Graph) -> None:
    """The gradients of maxima over windows of images whose channels come last."""
    for node in graph.find_nodes(op="call_function", target=_aten.max_pool2d_with_indices_backward.default):
        gradient, indices = node.args[0], node.args[-1]
        if indices.target is not _OFFSETS or indices.args[0].meta["val"].dim() != 4:
            continue
        offsets, kernel, size, stride, padding, dilation = indices.args
        static = all(isinstance(each, int) for each in (*offsets.meta["val"].shape, *size))
        ordered = offsets.meta["val"].is_contiguous(memory_format=torch.channels_last)
        if static and ordered and set(dilation) == {1}:
            with graph.inserting_before(node):
                found = called(graph, pooled.OPERATION, gradient, offsets, size, kernel, stride, padding)
            node.replace_all_uses_with(found)
            _erase(graph, node, indices)


def _erase(graph: fx.Graph, *nodes: fx.Node) -> None:
    """Take those out of a graph that nobody reads."""
    for node in nodes:
        if not node.users:
            graph.erase_node(node)

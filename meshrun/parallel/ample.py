"""What compiled code keeps for its backward pass where there is memory for more than it must.

    torch.compile(segment.forward, backend=inductor.ample)

Of what its products multiply, torch's compiler keeps what is costly to make again. A gated activation is not: it is
made of two tensors that are kept anyway. But these are read, and it is written, in every backward pass, which for a
Llama of a billion parameters is half a percent of a step. All gated activations together are half as large as what
they are made of.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.utils.checkpoint import CheckpointPolicy

_aten = torch.ops.aten
FACTORS = {_aten.mm.default: 0, _aten.addmm.default: 1}
"""Products, and which of their arguments is the activation."""
_VIEWS = {_aten.view.default, _aten.reshape.default}
_CONVERTED = torch.ops.prims.convert_element_type.default


class Kept(CustomGraphPass):
    """A graph of both passes in which gated activations are kept."""

    def __call__(self, graph: fx.Graph) -> None:
        backward = _of_backward(graph)
        for operation, place in FACTORS.items():
            for product in graph.find_nodes(op="call_function", target=operation) if backward else ():
                factor = _seen_through(product.args[place])
                if product not in backward and _is_gated(factor):
                    factor.meta["recompute"] = CheckpointPolicy.MUST_SAVE

    def uuid(self) -> bytes:
        """What sets code that is kept from earlier runs apart from code made otherwise."""
        return get_hash_for_files((__file__,))


def _of_backward(graph: fx.Graph) -> set[fx.Node]:
    """What depends on gradients."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        given = node.op == "placeholder" and "tangents" in str(node.target)
        if given or not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def _is_gated(node: fx.Node) -> bool:
    """Whether it is one tensor times another, each as large as it is and made of what the other is not made of."""
    node = node.all_input_nodes[0] if node.target is _CONVERTED else node
    if node.target is not _aten.mul.Tensor or len(node.all_input_nodes) != 2:
        return False
    size = _size(node)
    one, other = (_made_of(each) for each in node.all_input_nodes)
    alike = size is not None and all(_size(each) == size for each in node.all_input_nodes)
    return alike and bool(one) and bool(other) and one.isdisjoint(other)


def _made_of(node: fx.Node) -> set[fx.Node]:
    """What is read to compute each number of a tensor from its like; what is drawn or counted is not read."""
    found, met, ahead = set(), {node}, [node]
    while ahead:
        node = _seen_through(ahead.pop())
        if _is_pointwise(node):
            ahead += [each for each in node.all_input_nodes if each not in met]
            met.update(node.all_input_nodes)
        elif node.op == "placeholder" or node.all_input_nodes:
            found.add(node)
    return found


def _seen_through(node: fx.Node) -> fx.Node:
    """What a view is of."""
    while node.target in _VIEWS:
        node = node.all_input_nodes[0]
    return node


def _is_pointwise(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.pointwise in node.target.tags


def _size(node: fx.Node) -> int | None:
    """How many numbers a tensor has, if that is what it is and they are always as many."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or not all(isinstance(each, int) for each in value.shape):
        return None
    return value.numel()

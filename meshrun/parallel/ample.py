"""What compiled code keeps for its backward pass where there is memory for more than it must.

    backend = inductor.Ample()
    torch.compile(segment.forward, backend=backend)     # the same for all segments: those that are alike share code
    backend.finds                                       # whether there was anything to keep, once it was compiled

Of what its products multiply, torch's compiler keeps what is costly to make again. A gated activation is not: it is
made of two tensors that are kept anyway. But these are read, and it is written, in every backward pass, which for a
Llama of a billion parameters is half a percent of a step. All gated activations together are half as large as what
they are made of.
"""

from __future__ import annotations

import operator

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.utils.checkpoint import CheckpointPolicy

from meshrun.parallel import nodes
from meshrun.parallel.nodes import FACTORS, VIEWS, seen_through

_aten = torch.ops.aten
_TIMES = {operator.mul, operator.imul, torch.mul, "mul", "mul_"}
_LINEAR = {F.linear, operator.matmul, torch.matmul, torch.mm, torch.addmm, "matmul", "mm"}
_CONVERTED = torch.ops.prims.convert_element_type.default


class Kept(CustomGraphPass):
    """A graph of both passes in which gated activations are kept."""

    def __call__(self, graph: fx.Graph) -> None:
        backward = _of_backward(graph)
        for operation, place in FACTORS.items():
            for product in graph.find_nodes(op="call_function", target=operation) if backward else ():
                factor = seen_through(product.args[place])
                # What a user has said of it, by torch's checkpoint, stays.
                if product not in backward and _is_gated(factor) and "recompute" not in factor.meta:
                    factor.meta["recompute"] = CheckpointPolicy.MUST_SAVE

    def uuid(self) -> bytes:
        """What sets code that is kept from earlier runs apart from code made otherwise."""
        return get_hash_for_files((__file__, nodes.__file__))


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
    if size is None or any(_size(each) != size for each in node.all_input_nodes):
        return False
    one, other = (_made_of(each, size) for each in node.all_input_nodes)
    return bool(one) and bool(other) and one.isdisjoint(other)


def _made_of(node: fx.Node, size: int) -> set[fx.Node]:
    """What of this size is read to compute each number of a tensor from its like; what is drawn or counted is not."""
    found, met, ahead = set(), {node}, [node]
    while ahead:
        node = ahead.pop()
        if _is_pointwise(node) or node.target in VIEWS or node.target is _aten.expand.default:
            ahead += [each for each in node.all_input_nodes if each not in met]
            met.update(node.all_input_nodes)
        elif (_size(node) or 0) >= size and (node.op == "placeholder" or node.all_input_nodes):
            found.add(node)
    return found


def _is_pointwise(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.pointwise in node.target.tags


def _size(node: fx.Node) -> int | None:
    """How many numbers a tensor has, if that is what it is and they are always as many."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or not all(isinstance(each, int) for each in value.shape):
        return None
    return value.numel()


def has_gates(graph: fx.GraphModule) -> bool:
    """Whether, in a model as it is written, a linear layer reads one tensor times another of the same shape.

    `Kept` cannot tell: where code is there from an earlier run, it is not called.
    """
    return any(map(_is_gate, graph.graph.nodes))


def _is_gate(node: fx.Node) -> bool:
    if node.target not in _TIMES or len(node.all_input_nodes) != 2:
        return False
    one, other = (getattr(each.meta.get("example_value"), "shape", None) for each in node.all_input_nodes)
    return one is not None and one == other and any(each.target in _LINEAR for each in node.users)

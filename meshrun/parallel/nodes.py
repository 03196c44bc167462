"""Nodes of the graphs that torch's compiler makes of a model: what is asked of them, and how new ones are put in.

if multiplications(*product.args) >= LARGE: ...
with graph.inserting_before(node):
    flat = called(graph, torch.ops.aten.reshape.default, node, [6, 16])
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

_aten = torch.ops.aten
FACTORS = {_aten.mm.default: 0, _aten.addmm.default: 1}
"""Products, and which of their arguments is the activation."""
VIEWS = {_aten.view.default, _aten.reshape.default, _aten._unsafe_view.default}


def seen_through(node: fx.Node) -> fx.Node:
    """What a view is of."""
    while node.target in VIEWS:
        node = node.all_input_nodes[0]
    return node


def multiplications(left: Any, right: Any) -> int:
    """Of the product of two matrices; 0 where sizes vary."""
    sizes = (*left.meta["val"].shape, right.meta["val"].shape[1])
    return math.prod(sizes) if all(isinstance(each, int) for each in sizes) else 0


def called(graph: fx.Graph, target: Any, *arguments: Any, **named: Any) -> fx.Node:
    """An operation that is new in a graph, with what torch must know of its result."""
    made = graph.call_function(target, arguments, named)
    value = lambda each: each.meta["val"]  # noqa: E731
    made.meta["val"] = target(*fx.map_arg(arguments, value), **named)
    return made

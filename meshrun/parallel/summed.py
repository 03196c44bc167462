"""What is added to a product, as part of the product.

    add_in_products(graph)              # x + linear(y), of a graph of both passes: the linear layer begins with x

Residual connections add what a layer gives to what it began with. Alone, the sum is read and written again; a product
can as well be added up onto what is there, and it is then rounded once instead of twice. In a graph that is not cut
into forward and backward pass yet, so that it is the sum that is kept between these, and not what it is made of.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

from meshrun.parallel.ample import FACTORS, VIEWS, seen_through

LARGE = 20_000_000_000
"""Multiplications of a product from which on it is worth a call of our own: some 60 microseconds of a large GPU."""
_aten = torch.ops.aten


def add_in_products(graph: fx.Graph) -> int:
    """Make one of large products of bf16 and what they are added to, where that is at hand; returns how many."""
    found = 0
    for node in graph.find_nodes(op="call_function", target=_aten.add.Tensor):
        if len(node.args) == 2 and not node.kwargs:
            for one, other in (node.args, node.args[::-1]):
                product = _only_for_this(one)
                if product is not None and _is_at_hand(other, node):
                    _replace(graph, node, product, other)
                    found += 1
                    break
    return found


def _only_for_this(node: Any) -> fx.Node | None:
    """The large product that something is a view of, if nobody else reads either."""
    while isinstance(node, fx.Node) and len(node.users) == 1:
        if node.target is _aten.mm.default:
            of_halves = node.meta["val"].dtype == torch.bfloat16
            return node if of_halves and multiplications(*node.args) >= LARGE and "recompute" not in node.meta else None
        if node.target not in VIEWS and node.target is not _aten.clone.default:  # of a dropout that drops nothing
            return None
        node = node.args[0]
    return None


def _is_at_hand(node: Any, total: fx.Node) -> bool:
    """Whether it is in memory anyway, as large as the sum, rather than computed by whoever reads it."""
    if not isinstance(node, fx.Node):
        return False
    value, wanted = node.meta["val"], total.meta["val"]
    like = isinstance(value, Tensor) and value.shape == wanted.shape and value.dtype == wanted.dtype
    whole = seen_through(node)
    return like and value.is_contiguous() and (whole.op == "placeholder" or whole.target in FACTORS)


def _replace(graph: fx.Graph, total: fx.Node, product: fx.Node, other: fx.Node) -> None:
    shapes = [list(each.meta["val"].shape) for each in (product, total)]
    with graph.inserting_before(total):
        begin = called(graph, _aten.reshape.default, other, shapes[0])
        made = called(graph, _aten.addmm.default, begin, *product.args)
        result = called(graph, _aten.reshape.default, made, shapes[1])
    for each in (begin, made, result):
        each.meta = {**total.meta, "val": each.meta["val"]}  # in which pass it is, and from where
    total.replace_all_uses_with(result)
    graph.erase_node(total)
    for each in reversed(list(_with_views(product))):
        graph.erase_node(each)


def _with_views(node: fx.Node) -> Iterator[fx.Node]:
    """A node, and what is a view of the one before, each read by nobody else."""
    yield node
    for user in node.users:
        yield from _with_views(user)


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

"""What is added to a product, as part of the product.

    add_in_products(graph)              # x + linear(y), of a graph of both passes: the linear layer begins with x

Residual connections add what a layer gives to what it began with. Alone, the sum is read and written again; a product
can as well be added up onto what is there, and it is then rounded once instead of twice. In a graph that is not cut
into forward and backward pass yet, so that it is the sum that is kept between these, and not what it is made of.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from meshrun.parallel.nodes import FACTORS, VIEWS, called, multiplications, seen_through

LARGE = 20_000_000_000
"""Multiplications of a product from which on it is worth a call of our own: some 60 microseconds of a large GPU."""
_aten = torch.ops.aten


def add_in_products(graph: fx.Graph) -> None:
    """Make one of large products of bf16 and what they are added to, where that is at hand."""
    for total in graph.find_nodes(op="call_function", target=_aten.add.Tensor):
        if len(total.args) != 2 or total.kwargs or "recompute" in total.meta:
            continue
        for one, other in (total.args, total.args[::-1]):
            chain = _only_for_this(one)
            if chain and one is not other and is_alike(one, total) and _is_at_hand(other, total):
                _replace(graph, total, chain, other)
                break


def _only_for_this(node: Any) -> list[fx.Node]:
    """A node, what it is a view of, and so on to a large product, if nobody else reads any of these; else nothing."""
    chain = []
    while isinstance(node, fx.Node) and len(node.users) == 1:
        chain.append(node)
        if node.target is _aten.mm.default:
            # What a user has said of it, by torch's checkpoint, stays.
            large = multiplications(*node.args) >= LARGE and "recompute" not in node.meta
            return chain if large else []
        if node.target not in VIEWS and node.target is not _aten.clone.default:  # of a dropout that drops nothing
            return []
        node = node.args[0]
    return []


def is_alike(node: Any, total: fx.Node) -> bool:
    """Whether it is of bf16, and as large as the sum and as whole in memory."""
    value, wanted = node.meta["val"], total.meta["val"]
    halves = value.dtype == wanted.dtype == torch.bfloat16
    return halves and value.shape == wanted.shape and value.is_contiguous() and wanted.is_contiguous()


def _is_at_hand(node: Any, total: fx.Node) -> bool:
    """Whether what is added is in memory anyway, rather than computed by whoever reads it."""
    if not isinstance(node, fx.Node) or not isinstance(node.meta["val"], Tensor):
        return False
    whole = seen_through(node)
    return is_alike(node, total) and (whole.op == "placeholder" or whole.target in FACTORS)


def _replace(graph: fx.Graph, total: fx.Node, chain: list[fx.Node], other: fx.Node) -> None:
    product = chain[-1]
    shapes = [list(each.meta["val"].shape) for each in (product, total)]
    with graph.inserting_before(total):
        begin = called(graph, _aten.reshape.default, other, shapes[0])
        made = called(graph, _aten.addmm.default, begin, *product.args)
        result = called(graph, _aten.reshape.default, made, shapes[1])
    about = {name: each for name, each in total.meta.items() if name not in ("val", "tensor_meta")}
    for each in (begin, made, result):
        each.meta = {**about, "val": each.meta["val"]}  # in which pass it is, and from where
    total.replace_all_uses_with(result)
    for each in (total, *chain):
        graph.erase_node(each)

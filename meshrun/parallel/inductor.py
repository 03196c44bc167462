"""torch's compiler, with what pays in a training on a GPU.

    torch.compile(segment.forward, backend=backend)

Where torch's own choices aim at any program, others are better here:

- A row of some thousand numbers (of a norm, of an activation that is then quantised) is read once and kept until its
  sum or maximum is known. torch reads it a second time from 1,025 numbers on.
- What the backward pass multiplies with, and a few cheap operations make of what is kept anyway (an activation, a
  norm), is made again. Keeping it takes a quarter more memory, and saved no time that could be seen.
- Linear layers that read the same are one product: see `joined`.
- The gradient of a linear layer's inputs, where these are many more than its outputs, is computed with the weight
  transposed: the order that both factors then have in memory is the one for which GPUs multiply fastest.
"""

from __future__ import annotations

from typing import Any

import torch
import torch._functorch.config
import torch._inductor.config
from torch import Tensor, fx
from torch._inductor.choices import InductorChoices
from torch._inductor.compile_fx import compile_fx
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.runtime.hints import ReductionHint
from torch._inductor.virtualized import V

from meshrun.parallel.joined import join

ROW = 16_384
"""Numbers of a row that is kept: what the registers of a multiprocessor hold."""
LARGE = 1024
"""Rows and columns of factors from which on their order in memory is worth a copy of the weight."""
_aten = torch.ops.aten


def backend(graph: fx.GraphModule, inputs: list[Any], **options: Any) -> Any:
    """Compile a graph."""
    torch._inductor.config.inductor_choices_class = Choices  # by the thread that asks first, which may be autograd's
    patches: dict[str, Any] = {}
    if any(isinstance(each, Tensor) and each.is_cuda for each in inputs):
        join(graph)
        patches["post_grad_custom_pre_pass"] = WeightsTransposed()
    with torch._functorch.config.patch(ban_recompute_materialized_backward=False):
        return compile_fx(graph, inputs, config_patches=patches, **options)


class Choices(InductorChoices):
    """torch's own, but for long rows."""

    @staticmethod
    def should_use_persistent_reduction(features: Any, cooperative_reduction: bool) -> bool:
        along_rows = features.get_reduction_hint() == ReductionHint.INNER and not cooperative_reduction
        if along_rows and V.graph.sizevars.statically_known_leq(features.reduction_numel, ROW):
            return torch._inductor.config.triton.persistent_reductions
        return InductorChoices.should_use_persistent_reduction(features, cooperative_reduction)

    def uuid(self) -> str:
        """What sets code that is kept from earlier runs apart from code made by other choices."""
        return f"rows of {ROW}"


class WeightsTransposed(CustomGraphPass):
    """Products of a long gradient with a wide weight, which a transposed copy of the weight makes faster."""

    def __call__(self, graph: fx.Graph) -> None:
        for node in graph.find_nodes(op="call_function", target=_aten.mm.default):
            gradient, weight = (each.meta["val"] for each in node.args)
            if self._pays(gradient, weight):
                with graph.inserting_before(node):
                    turned = graph.call_function(_aten.permute.default, (node.args[1], [1, 0]))
                    turned.meta["val"] = weight.permute(1, 0)
                    copy = graph.call_function(
                        _aten.clone.default, (turned,), {"memory_format": torch.contiguous_format}
                    )
                    copy.meta["val"] = turned.meta["val"].clone(memory_format=torch.contiguous_format)
                    back = graph.call_function(_aten.permute.default, (copy, [1, 0]))
                    back.meta["val"] = copy.meta["val"].permute(1, 0)
                node.replace_input_with(node.args[1], back)

    @staticmethod
    def _pays(gradient: Tensor, weight: Tensor) -> bool:
        sizes = (*gradient.shape, *weight.shape)
        if not all(isinstance(each, int) for each in sizes) or gradient.dtype != torch.bfloat16:
            return False
        (rows, summed), columns = gradient.shape, weight.shape[1]
        # Both factors must lie row by row, and there must be much more of the gradient than of the weight.
        by_rows = gradient.stride() == (summed, 1) and weight.stride() == (columns, 1)
        return by_rows and summed >= LARGE and columns >= 2 * summed and rows >= 2 * columns

    def uuid(self) -> str:
        """Which version of it this is, for code that is kept from earlier runs."""
        return f"weights transposed from {LARGE} on"

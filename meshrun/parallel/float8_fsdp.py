"""Weights that fsdp gathers in float8: half the bytes of bf16 on the wire, and of what is whole in memory.

    gather_in_float8(part)          # after `fully_shard`, and after parameters have got their memory

A shard holds whole rows of a weight, and each row has a scale of its own, so a rank quantises its rows as one process
would, without asking the others. What is gathered are the rows and their scales. The layer computes with these (its
`gathered`); the whole parameter, which autograd and fsdp know it by, has a shape, a type and a gradient, but no memory.

torch asks the tensor of a shard itself how it wants to be gathered (`fsdp_pre_all_gather`, `fsdp_post_all_gather`),
which is meant for subclasses of tensors. Here the two functions are put on the plain tensor: optimizers, checkpoints
and whoever else knows shards see nothing of it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from meshrun.kernels.turned import FORMAT
from meshrun.parallel.float8 import InFloat8
from meshrun.parallel.float8_product import quantised


def gather_in_float8(part: nn.Module) -> None:
    """Have the float8 layers' weights gathered in float8. Left in bf16 are those that ranks cannot share evenly, and
    those whose shards are kept on the host.
    """
    for module in part.modules():
        group = module._get_fsdp_state()._fsdp_param_group if isinstance(module, FSDPModule) else None
        for parameter in group.fsdp_params if group is not None else ():
            layer: Any = parameter._module_info.module
            shard: Any = parameter._sharded_local_tensor
            weight = isinstance(layer, InFloat8) and parameter._module_info.param_name == "weight"
            if weight and not parameter.offload_to_cpu and parameter._orig_size[0] % parameter.shard_mesh.size() == 0:
                trip = _Trip(layer, shard)
                shard.fsdp_pre_all_gather, shard.fsdp_post_all_gather = trip.before, trip.after
                parameter._init_extensions()


class _Trip:
    """How the weight of a layer is gathered."""

    def __init__(self, layer: InFloat8, shard: Tensor) -> None:
        self.layer, self.shard = layer, shard
        self.whole: Tensor | None = None

    def before(self, _: Any) -> tuple[tuple[Tensor, Tensor], None]:
        """What this rank sends."""
        # By way of bf16, as it is where nothing is gathered. As bytes, which every backend can send.
        rows, scales = quantised(self.shard.detach().to(torch.bfloat16))
        return (rows.view(torch.uint8), scales), None

    def after(
        self, gathered: tuple[Tensor, Tensor], _: Any, kind: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, list[Tensor]] | None:
        """What the layer computes with. The first time torch asks for the whole parameter too."""
        if out is None:
            rows, scales = gathered
            self.layer.gathered = rows.view(FORMAT), scales
            self.whole = rows.new_empty(rows.numel(), dtype=kind)
            return self.whole, [self.whole]
        assert self.whole is not None
        self.whole.untyped_storage().resize_(0)
        return None

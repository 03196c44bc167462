"""Whole tensors from the parts that ranks hold, through host memory, which every backend can send from.

whole(parameter, part, split_dim, here)    # on every rank of a stage
send(tensor, to=0); receive(rank)          # between stages
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshrun.mesh import Here
from meshrun.parallel.dtensor import is_dtensor
from meshrun.parallel.placed import TYPES, as_real

_HEADER = 16


def whole(parameter: nn.Parameter, part: Tensor, split_dim: int | None, here: Here) -> Tensor:
    """A parameter that fsdp has cut along dim 0 and, before that, tp along `split_dim`; this rank has `part` of it."""
    if not is_dtensor(parameter):
        return part.detach().cpu()
    tensor, shape = part.detach().cpu(), list(parameter.shape)
    split = here.submesh("tp") if split_dim is not None else None
    sharded = here.submesh("fsdp", "cp") if here.layout.fsdp > 1 else None
    if split is not None and split_dim is not None:
        shape[split_dim] //= split.size()
    if sharded is not None:
        tensor = _joined(tensor, sharded.get_group(), 0, shape[0])
    if split is not None and split_dim is not None:
        tensor = _joined(tensor, split.get_group(), split_dim, parameter.shape[split_dim])
    return tensor


def _joined(part: Tensor, group: dist.ProcessGroup, dim: int, length: int) -> Tensor:
    """Parts that torch has cut with `chunk`: equal ones, then a smaller one, then none; filled up to travel."""
    ranks = dist.get_world_size(group)
    size = -(-length // ranks)
    shape = [*part.shape[:dim], size, *part.shape[dim + 1 :]]
    filled = part.new_zeros(shape)
    filled.narrow(dim, 0, part.shape[dim]).copy_(part)
    parts = [torch.empty_like(filled) for _ in range(ranks)]
    dist.all_gather(parts, filled, group=group)
    return torch.cat(parts, dim).narrow(dim, 0, length)


def send(tensor: Tensor, to: int) -> None:
    """Shape first."""
    about = [tensor.dim(), TYPES.index(tensor.dtype), *tensor.shape]
    dist.send(torch.tensor(about + [0] * (_HEADER - len(about))), to)
    dist.send(as_real(tensor.contiguous()), to)


def receive(rank: int) -> Tensor:
    about = torch.zeros(_HEADER, dtype=torch.int64)
    dist.recv(about, rank)
    dims, kind, *shape = about.tolist()
    tensor = torch.empty(shape[:dims], dtype=TYPES[kind])
    dist.recv(as_real(tensor), rank)
    return tensor

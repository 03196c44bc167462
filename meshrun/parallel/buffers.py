"""Running statistics and other buffers, made equal on all replicas."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor


def average(buffers: Iterable[Tensor], group: dist.ProcessGroup) -> None:
    """Give all ranks of a group the mean of their values, or the first rank's where a mean has no sense."""
    size, first = dist.get_world_size(group), dist.get_global_rank(group, 0)
    with torch.no_grad():
        for buffer in buffers:
            values = buffer.detach().contiguous()
            if values.is_floating_point():
                # In doubles the mean of equal values is that value: tables that never change stay as they are.
                values = values.double()
                dist.all_reduce(values, group=group)
                values /= size
            else:
                dist.broadcast(values, src=first, group=group)
            buffer.copy_(values)

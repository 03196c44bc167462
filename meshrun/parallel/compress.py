"""Gradient compression for dp: fewer bytes a step, at the price of rounding.

register(ddp, "bf16")

fp16, bf16   gradients travel in half the bytes and are summed so
powersgd     each matrix travels as two thin ones, with what was left out added to the next step (rank 4, after ten
             steps without)
"""

# No postponed annotations here: DDP looks at those of the hook, as objects.

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

RANK = 4
UNCOMPRESSED_STEPS = 10


def register(ddp: DistributedDataParallel, compression: str) -> None:
    """Let a model's gradients travel so; "none" leaves them as they are."""
    if compression in _TYPES:
        ddp.register_comm_hook(_State(ddp.process_group, _TYPES[compression]), _rounded)
    elif compression == "powersgd":
        state = powerSGD_hook.PowerSGDState(
            ddp.process_group, matrix_approximation_rank=RANK, start_powerSGD_iter=UNCOMPRESSED_STEPS
        )
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


_TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


class _State:
    def __init__(self, group: dist.ProcessGroup, dtype: torch.dtype) -> None:
        self.group, self.dtype = group, dtype


def _rounded(state: _State, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """torch's own hooks for this do not run on gloo in all types."""
    whole = bucket.buffer()
    # Divided first: the sum of many must not leave fp16's range.
    short = (whole / dist.get_world_size(state.group)).to(state.dtype)
    work = dist.all_reduce(short, group=state.group, async_op=True)
    assert work is not None

    def widened(future: torch.futures.Future[list[Tensor]]) -> Tensor:
        return whole.copy_(future.value()[0])

    return work.get_future().then(widened)

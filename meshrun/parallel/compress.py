"""How gradients of dp travel: in fp32 where matrices are bf16, or compressed, in fewer bytes and with some rounding.

register(ddp, "bf16", masters={})

none         gradients travel in their own type. Those of bf16 matrices are widened, added to what earlier micro-batches
             have left with their masters, and arrive there: nothing is rounded on the way
fp16, bf16   they travel in half the bytes and are summed so
powersgd     each matrix travels as two thin ones, with what was left out added to the next step (rank 4, after ten
             steps without)
"""

# No postponed annotations here: DDP looks at those of the hook, as objects.

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

RANK = 4
UNCOMPRESSED_STEPS = 10


def register(ddp: DistributedDataParallel, compression: str, masters: Mapping[Tensor, nn.Parameter]) -> None:
    """Let a model's gradients travel so; those of parameters that have a master arrive there."""
    if compression == "powersgd":
        state = powerSGD_hook.PowerSGDState(
            ddp.process_group, matrix_approximation_rank=RANK, start_powerSGD_iter=UNCOMPRESSED_STEPS
        )
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif compression in _TYPES or masters:
        ddp.register_comm_hook(_State(ddp.process_group, _TYPES.get(compression), masters), _mean)


_TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


class _State:
    def __init__(
        self, group: dist.ProcessGroup, dtype: torch.dtype | None, masters: Mapping[Tensor, nn.Parameter]
    ) -> None:
        self.group, self.dtype, self.masters = group, dtype, masters


def _mean(state: _State, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """torch's own hooks for this do not run on gloo in all types."""
    buffer = bucket.buffer()
    whole = buffer.float() if any(each in state.masters for each in bucket.parameters()) else buffer
    others = _given_to_masters(state, bucket, whole)
    # Divided first: the sum of many must not leave fp16's range.
    sent = whole.div_(dist.get_world_size(state.group)).to(state.dtype or whole.dtype)
    work = dist.all_reduce(sent, group=state.group, async_op=True)
    assert work is not None

    def arrived(future: torch.futures.Future[list[Tensor]]) -> Tensor:
        if sent is not whole:
            whole.copy_(future.value()[0])
        for gradient, part in others:
            gradient.copy_(part)
        return buffer

    return work.get_future().then(arrived)


def _given_to_masters(state: _State, bucket: dist.GradBucket, whole: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Make parts of a bucket the masters' gradients, with what those had; returns those of others, if it is a copy."""
    if not state.masters:
        return []
    first, others = bucket.buffer().storage_offset(), []
    for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
        master = state.masters.get(parameter)
        part = whole.as_strided(
            gradient.shape, gradient.stride(), gradient.storage_offset() - first + whole.storage_offset()
        )
        if master is None:
            others += [(gradient, part)] if whole.dtype != gradient.dtype else []
            continue
        if master.grad is not None:
            part.add_(master.grad)
        master.grad = part
    return others

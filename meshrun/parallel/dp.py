"""The axis dp: every rank holds the whole model, and gradients are averaged over the ranks once a step.

    placed = apply(model, here)
    for last, piece in …:
        with placed.accumulating(reduce=last): (loss * scale).backward()
    placed.finish_reduction()

torch's DistributedDataParallel reduces while the backward pass still runs. Two kinds of step it cannot do, and they are
reduced here after the backward pass instead: the first one, which finds out whether the model has parameters that take
no part in the loss (DDP must know before it is made), and one in which a rank has no samples at all.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from meshrun.mesh import Here

# Ranks agree on running statistics before they are used, not in every forward pass. torch 2.13 renamed the switch.
_SWITCHES = inspect.signature(DistributedDataParallel.__init__).parameters
_KEEP_BUFFERS: dict[str, Any] = {
    "forward_sync_buffers" if "forward_sync_buffers" in _SWITCHES else "broadcast_buffers": False
}


def apply(model: nn.Module, here: Here) -> Replicated:
    """Replicate a model that is already on this rank's device."""
    if here.mesh is not None:
        with here.waiting("the initial weights from rank 0"), torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                values = tensor.detach().contiguous()
                dist.broadcast(values, src=0)
                tensor.copy_(values)
    return Replicated(model, here)


class Replicated:
    """A model whose gradients are the mean over all replicas after `finish_reduction`."""

    def __init__(self, model: nn.Module, here: Here) -> None:
        self.model, self.here = model, here
        self.parameters = [each for each in model.parameters() if each.requires_grad]
        self._ddp: DistributedDataParallel | None = None
        self._by_hand = False

    def begin_step(self, every_rank_has_samples: bool) -> None:
        """Decide how the gradients of this step are reduced; all ranks decide the same."""
        self._by_hand = self.here.mesh is not None and (self._ddp is None or not every_rank_has_samples)

    def forward(self, inputs: Any) -> Any:
        """Call the model as its inputs ask for: a tuple is spread, a dict is passed by name."""
        return call(self._ddp if self._ddp is not None and not self._by_hand else self.model, inputs)

    @contextmanager
    def accumulating(self, reduce: bool) -> Iterator[None]:
        """Forward and backward of one micro-batch; only the last one of a step sends gradients."""
        if self._ddp is None or self._by_hand or reduce:
            yield
        else:
            with self._ddp.no_sync():
                yield

    def finish_reduction(self) -> None:
        """After the last backward pass of a step: every gradient is the mean over the replicas."""
        if not self._by_hand:
            return
        used = self._reduce_by_hand()
        if self._ddp is None:
            # Gradients must not live in DDP's buckets before it is made, so it is made for the next step on.
            self._ddp = DistributedDataParallel(
                self.model,
                process_group=self._group(),
                init_sync=False,
                gradient_as_bucket_view=True,
                find_unused_parameters=not all(used),
                **_KEEP_BUFFERS,
            )

    def agree_on_buffers(self) -> None:
        """Give all ranks the same running statistics: the mean of theirs, or rank 0's where a mean has no sense."""
        if self.here.mesh is None:
            return
        with self.here.waiting("the running statistics of the other ranks"), torch.no_grad():
            for buffer in self.model.buffers():
                values = buffer.detach().contiguous()
                if values.is_floating_point():
                    dist.all_reduce(values)
                    values /= self.here.replicas
                else:
                    dist.broadcast(values, src=0)
                buffer.copy_(values)

    def _group(self) -> dist.ProcessGroup:
        assert self.here.mesh is not None
        return self.here.mesh["dp"].get_group()

    def _reduce_by_hand(self) -> list[bool]:
        """Sum gradients over ranks that may lack some of them; returns which parameters any rank has used."""
        has = torch.tensor([p.grad is not None for p in self.parameters], dtype=torch.int32, device=self.here.device)
        dist.all_reduce(has, group=self._group())
        used = [bool(count) for count in has.tolist()]
        for parameter, is_used in zip(self.parameters, used, strict=True):
            if is_used:
                mine = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
                mine = mine.contiguous()
                dist.all_reduce(mine, group=self._group())
                parameter.grad = mine.div_(self.here.replicas)
        return used


def call(module: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, dict):
        return module(**inputs)
    if isinstance(inputs, tuple | list):
        return module(*inputs)
    return module(inputs)

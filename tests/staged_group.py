"""A process group, for tests alone, whose messages go through copies in host memory: ranks that share a GPU can use it.

    register()
    dist.init_process_group("staged", store=store, rank=rank, world_size=size)
    mesh.start()                              # finds itself in that group, and forms others of its kind

NCCL refuses two ranks on one GPU, and gloo cannot send from a GPU's memory. This group copies what it is given to the
host, has gloo carry it, and copies what arrives back when the caller waits for it. On the CPU it does just the same
with copies, so what is seen there holds for the group; on a GPU only the copying differs.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, AllreduceOptions, AllToAllOptions, BarrierOptions
from torch.futures import Future

NAME = "staged"


def register() -> None:
    """Make the group known to torch by its name; new groups and meshes then follow the first one."""
    if NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, StagedGroup, devices=["cpu", "cuda"])


class StagedWork(dist.Work):
    """A message on its way; who waits for it has it copied to where it belongs."""

    def __init__(
        self, works: Iterable[Any], arriving: Iterable[tuple[Tensor, Tensor]] = (), divide_by: int = 1
    ) -> None:
        super().__init__()
        self.works, self.arriving, self.divide_by = list(works), list(arriving), divide_by
        self.targets = [target for target, _ in self.arriving]

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:  # noqa: ARG002
        for each in self.works:
            each.wait()
        with torch.no_grad():
            for target, host in self.arriving:
                target.copy_(host if self.divide_by == 1 else host / self.divide_by)
        self.arriving = []
        return True

    def is_completed(self) -> bool:
        return all(each.is_completed() for each in self.works)

    def get_future(self) -> Future[Any]:
        self.wait()
        future: Future[Any] = Future()
        future.set_result(self.targets)
        return future


def staged(tensor: Tensor) -> Tensor:
    """A copy in host memory, in one piece."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype)
    return host.copy_(tensor.detach())


class StagedGroup(dist.ProcessGroup):
    """What DTensor, FSDP and our own code ask of a group. Names that differ between torch's versions are both here."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self.gloo = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
        # A group keeps its name in a backend. Registered for tensors that nobody sends: what is not staged below must
        # fail, on the CPU too.
        self._register_backend(torch.device("meta"), dist.ProcessGroup.BackendType.GLOO, self.gloo)

    _device_types = (torch.device("cpu"),)
    """Where objects are put to travel."""

    def getBackendName(self) -> str:
        return NAME

    def allreduce(self, tensors: Any, opts: Any = None) -> dist.Work:
        tensors = [tensors] if isinstance(tensors, Tensor) else tensors
        host = [staged(each) for each in tensors]
        options, divide_by = _summing(opts, self.size())
        return StagedWork([self.gloo.allreduce(host, options)], zip(tensors, host, strict=True), divide_by)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        return StagedWork(self.allreduce(each, opts) for each in tensors)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        host = [staged(each) for each in tensors]
        return StagedWork([self.gloo.broadcast(host, opts)], zip(tensors, host, strict=True))

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        host = [[torch.empty(one.shape, dtype=one.dtype) for one in each] for each in outputs]
        work = self.gloo.allgather(host, [staged(each) for each in inputs], opts or AllgatherOptions())
        pairs = [pair for mine, theirs in zip(outputs, host, strict=True) for pair in zip(mine, theirs, strict=True)]
        return StagedWork([work], pairs)

    def _allgather_base(self, output: Tensor, inputs: Tensor, opts: Any = None) -> dist.Work:  # noqa: ARG002
        parts = torch.empty((self.size(), *inputs.shape), dtype=inputs.dtype)
        work = self.gloo.allgather([list(parts.unbind())], [staged(inputs)], AllgatherOptions())
        return StagedWork([work], [(output, parts.view(output.shape))])

    def allgather_into_tensor_coalesced(
        self,
        outputs: list[Tensor],
        inputs: list[Tensor],
        opts: Any = None,  # noqa: ARG002
    ) -> dist.Work:
        return StagedWork(self._allgather_base(*pair) for pair in zip(outputs, inputs, strict=True))

    def _reduce_scatter_base(self, output: Tensor, inputs: Tensor, opts: Any = None) -> dist.Work:
        # All of the sums on every rank, and a part of them kept: every gloo can do that.
        host = staged(inputs)
        options, divide_by = _summing(opts, self.size())
        mine = host.view(self.size(), *output.shape)[self.rank()]
        return StagedWork([self.gloo.allreduce([host], options)], [(output, mine)], divide_by)

    def reduce_scatter_tensor_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        return StagedWork(self._reduce_scatter_base(*pair, opts) for pair in zip(outputs, inputs, strict=True))

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> dist.Work:
        return StagedWork(
            self._reduce_scatter_base(one, torch.stack(parts), opts) for one, parts in zip(outputs, inputs, strict=True)
        )

    def alltoall_base(
        self, output: Tensor, inputs: Tensor, output_sizes: list[int], input_sizes: list[int], opts: Any = None
    ) -> dist.Work:
        host = torch.empty(output.shape, dtype=output.dtype)
        options = opts or AllToAllOptions()
        work = self.gloo.alltoall_base(host, staged(inputs), output_sizes, input_sizes, options)
        return StagedWork([work], [(output, host)])

    all_gather_single = _allgather_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single = _reduce_scatter_base
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced
    all_to_all_single = alltoall_base

    def send(self, tensors: list[Tensor], to: int, tag: int) -> dist.Work:
        return StagedWork([self.gloo.send([staged(each) for each in tensors], to, tag)])

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> dist.Work:
        host = [torch.empty(each.shape, dtype=each.dtype) for each in tensors]
        return StagedWork([self.gloo.recv(host, source, tag)], zip(tensors, host, strict=True))

    def barrier(self, opts: Any = None) -> dist.Work:
        return StagedWork([self.gloo.barrier(opts or BarrierOptions())])


def _summing(asked: Any, size: int) -> tuple[AllreduceOptions, int]:
    """How gloo is to add up, and by what to divide: not every gloo knows means."""
    options = AllreduceOptions()
    if asked is None:
        return options, 1
    mean = asked.reduceOp == dist.ReduceOp.AVG
    options.reduceOp = dist.ReduceOp.SUM if mean else asked.reduceOp
    return options, size if mean else 1


def rejoin() -> None:
    """Leave the gloo group that a test's ranks are in for a staged one of the same ranks."""
    rank, size, store = dist.get_rank(), dist.get_world_size(), dist.distributed_c10d._get_default_store()
    register()
    dist.destroy_process_group()
    dist.init_process_group(NAME, store=dist.PrefixStore(NAME, store), rank=rank, world_size=size)

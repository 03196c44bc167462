"""What the benchmarks count by: a figure of theirs is worth as much as these."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from communication import Sent
from memory import Alive
from pipeline import Busy, summary, text
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from meshrun import mesh

KIB = 1024


def everything(_: int) -> bool:
    return True


def test_alive_counts_a_tensor_until_its_last_view_is_gone() -> None:
    with Alive() as alive:
        first = torch.zeros(KIB, dtype=torch.uint8)
        view = first[:10].view(2, 5)
        del first
        second = torch.ones(KIB, dtype=torch.uint8)
        del view
        third = torch.ones(KIB, dtype=torch.uint8)
        del second, third
    assert alive.peak(everything) == 2 * KIB
    assert sum(change for _, change in alive.log) == 0


def test_alive_sees_memory_that_is_given_and_taken_by_resizing() -> None:
    with Alive() as alive:
        tensor = torch.zeros(KIB, dtype=torch.uint8)
        tensor.untyped_storage().resize_(0)
        kept = torch.zeros(KIB, dtype=torch.uint8)
        kept.untyped_storage().resize_(3 * KIB)
    assert alive.peak(everything) == 3 * KIB


def test_alive_tells_chosen_tensors_from_others() -> None:
    with Alive() as alive:
        chosen = torch.zeros(KIB, dtype=torch.uint8)
        numbers = set(alive.numbers([chosen]))
        doubled = chosen + chosen
    assert doubled.numel() == KIB
    assert alive.peak(lambda number: number in numbers) == KIB
    assert alive.peak(lambda number: number not in numbers) == KIB


@pytest.mark.ranks(2)
def test_sent_counts_what_python_and_what_torch_itself_asks_of_a_group() -> None:
    here = mesh.start()
    with Sent() as sent:
        dist.all_reduce(torch.zeros(100))
        dist.all_gather_into_tensor(torch.empty(200), torch.zeros(100))
        if here.rank == 0:
            dist.send(torch.zeros(10), 1)
        else:
            dist.recv(torch.zeros(10), 0)
    assert sent.bytes == {"allreduce": 400, "allgather": 400} | ({"send": 40} if here.rank == 0 else {})

    replicated = DistributedDataParallel(nn.Linear(10, 10, bias=False))
    with Sent() as sent:
        replicated(torch.ones(1, 10)).sum().backward()
    assert sent.bytes["allreduce"] == 400

    sharded = nn.Linear(10, 10, bias=False)
    fully_shard(sharded, mesh=here.mesh)
    with Sent() as sent:
        sharded(torch.ones(1, 10)).sum().backward()
    # The outermost unit keeps its parameters from the forward to the backward pass.
    assert sent.bytes == {"allgather": 200, "reducescatter": 200}


def test_idle_time_is_what_no_rank_computes_in() -> None:
    first = [Busy("F", 0, 0, 1.0, 2.0), Busy("B", 0, 0, 5.0, 7.0)]
    last = [Busy("F", 1, 0, 2.0, 3.0), Busy("B", 1, 0, 3.0, 5.0)]
    assert summary("pp=2", [[first, last]])["idle"] == 0.5
    assert text([first, last], width=6) == "  rank 0 0...aa\n  rank 1 .0aa.."

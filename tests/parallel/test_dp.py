"""The sums of a step travel as a gradient: counts arrive exact, whatever their size and the number of replicas."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshrun import mesh
from meshrun.parallel import dp
from meshrun.parallel.dp import Cargo, Replicated, apply
from meshrun.parallel.placed import Shard


def sums_after_the_mean(replicas: list[tuple[float, float, float]]) -> list[float]:
    """What one replica unloads when the gradients of all replicas (total, count, asked) were averaged in fp32."""
    cargo = Cargo(nn.Identity(), nn.Parameter(torch.zeros(1)))
    sent: list[Tensor] = [
        cargo.load(torch.tensor([total, count], dtype=torch.float64), asked, len(replicas))
        for total, count, asked in replicas
    ]
    assert all(each.dtype == torch.float32 for each in sent)
    cargo.hold.grad = torch.stack(sent).mean(0)
    return cargo.unload().tolist()


@pytest.mark.parametrize("count", [0, 1, 4095, 4096, 2**24 - 1, 2**24 + 1, 2**31 + 4097])
def test_token_counts_beyond_the_whole_numbers_of_fp32_are_summed_exactly(count: int):
    assert sums_after_the_mean([(0.5, count, 0.0)] * 2) == [1.0, 2 * count, 0.0]


def test_replicas_with_different_counts_add_up():
    assert sums_after_the_mean([(1.5, 2**24 + 1, 0.0), (2.5, 3, 1.0)]) == [4.0, 2**24 + 4, 1.0]


def test_sums_that_were_unloaded_are_not_sent_again():
    cargo = Cargo(nn.Identity(), nn.Parameter(torch.zeros(1)))
    cargo.hold.grad = cargo.load(torch.tensor([1.0, 2.0], dtype=torch.float64), 0.0, 1)
    cargo.unload()
    assert cargo.hold.grad is None


def test_a_model_in_bf16_sends_its_sums_in_fp32():
    assert Cargo(nn.Identity(), nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))).hold.dtype == torch.float32


def test_copies_of_frozen_parameters_are_brought_up_to_date_too():
    placed: Any = Replicated.__new__(Replicated)
    copies = [nn.Parameter(torch.zeros(2, dtype=torch.bfloat16), requires_grad=False) for _ in range(2)]
    masters = [Shard("w", nn.Parameter(torch.ones(2)), (0,), (2,), (0,), copy=each) for each in copies]
    placed._copied, placed.frozen = masters[:1], masters[1:]
    placed.spread()
    assert [each.tolist() for each in copies] == [[1.0, 1.0], [1.0, 1.0]]


def test_what_a_micro_batch_does_not_use_is_not_always_used():
    placed: Any = Replicated.__new__(Replicated)
    used, idle = (nn.Parameter(torch.ones(1)) for _ in range(2))
    placed.shards = [SimpleNamespace(computed=each) for each in (used, idle)]
    placed._always_used = {used, idle}
    for loss in (used * 2, used + idle):
        with placed._noting_uses():
            loss.sum().backward()
    assert placed._always_used == {used}


@pytest.mark.parametrize("idle", [0, 1])
def test_all_parameters_are_used_only_if_every_micro_batch_of_every_rank_uses_each(
    idle: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("meshrun.parallel.dp.dist.all_reduce", lambda *_, **__: None)
    placed: Any = Replicated.__new__(Replicated)
    parameters = [nn.Parameter(torch.ones(1)) for _ in range(2)]
    for each in parameters:
        each.grad = torch.ones(1)
    placed.here, placed.parameters = SimpleNamespace(replicas=1, device=torch.device("cpu")), parameters
    placed.shards = [SimpleNamespace(parameter=each, computed=each) for each in parameters]
    placed._always_used, placed._group = set(parameters[idle:]), lambda: None
    assert placed._reduce_by_hand() is (idle == 0)


@pytest.mark.parametrize(
    ("all_are_used", "compression", "travels"), [(True, "none", True), (False, "none", False), (True, "fp16", False)]
)
def test_sums_travel_with_gradients_only_where_all_are_used_and_exact(
    all_are_used: bool, compression: str, travels: bool, monkeypatch: pytest.MonkeyPatch
):
    made: list[nn.Module] = []
    monkeypatch.setattr(dp, "DistributedDataParallel", lambda model, **_: made.append(model))
    monkeypatch.setattr(dp.compress, "register", lambda *_: None)
    placed: Any = Replicated.__new__(Replicated)
    placed.model, placed._compression, placed._copied, placed._group = nn.Linear(2, 1), compression, [], lambda: None
    placed.parameters = list(placed.model.parameters())
    placed._make_ddp(all_are_used)
    assert [isinstance(each, Cargo) for each in made] == [travels] == [placed._cargo is not None]


@pytest.mark.parametrize(("ranks", "settled", "tried"), [(3, True, True), (2, True, False), (3, False, False)])
def test_a_step_is_tried_where_ddp_had_laid_gradients_of_several_ranks_out_anew(ranks: int, settled: bool, tried: bool):
    placed: Any = Replicated.__new__(Replicated)
    placed._copies_work, placed._ddp, placed.here = True, None, SimpleNamespace(size=ranks)
    made = list[bool]()
    placed._make_ddp = made.append
    assert placed.take_up({"all_used": True, "settled": settled}) is tried
    assert made == [True]


@pytest.mark.ranks(2)
def test_ranks_begin_with_the_buffers_of_rank_0():
    mesh.use(mesh.Meeting(device="cpu"))
    here = mesh.start()
    torch.manual_seed(here.rank)
    model = nn.Linear(2, 2)
    model.register_buffer("drawn", torch.rand(3))
    model.register_buffer("spread", torch.rand(1).expand(4))  # with a stride of 0
    placed = apply(model, here)
    one, other = here.gathered({name: each.tolist() for name, each in placed.model.state_dict().items()})
    assert one == other

"""Batch norm over ranks is batch norm over the whole batch, however unevenly ranks share it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshrun.parallel.batchnorm import sync_batchnorms

TOLERANCE = 1e-6
CASES: list[tuple[type[nn.Module], tuple[int, ...], dict[str, Any]]] = [
    (nn.BatchNorm1d, (3,), {}),
    (nn.BatchNorm1d, (3, 5), {"momentum": None}),
    (nn.BatchNorm2d, (3, 4, 2), {"momentum": 0.3, "eps": 1e-3}),
    (nn.BatchNorm2d, (3, 4, 2), {"affine": False}),
    (nn.BatchNorm3d, (3, 2, 2, 2), {"track_running_stats": False}),
]


def made(kind: type[nn.Module], options: dict[str, Any]) -> nn.Module:
    torch.manual_seed(1)
    norm = kind(3, **options)
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    return norm


def close(got: Tensor, wanted: Tensor, scale: float = 1.0) -> bool:
    tolerance = TOLERANCE if wanted.dtype is not torch.float64 else 1e-13
    return bool((got - wanted).abs().max() < tolerance * max(scale, wanted.abs().max().item()))


def check(cuts: list[int]) -> None:
    """Three steps on this rank's samples against three steps on all of them, in both precisions."""
    for dtype in (torch.float32, torch.float64):
        torch.set_default_dtype(dtype)
        check_here(cuts)


def check_here(cuts: list[int]) -> None:
    rank = dist.get_rank()
    for kind, shape, options in CASES:
        whole = made(kind, options)
        mine = nn.Sequential(made(kind, options))
        assert sync_batchnorms(mine, dist.group.WORLD) == ["0"] and isinstance(mine[0], kind)
        for step in range(3):
            torch.manual_seed(10 + step)
            x = torch.randn(sum(cuts), *shape) * torch.arange(1.0, 4.0).view(3, *[1] * (len(shape) - 1)) + 1
            factors = torch.randn_like(x)
            full = x.clone().requires_grad_()
            part = x.split(cuts)[rank].clone().requires_grad_()
            wanted, got = whole(full), mine(part)
            assert close(got, wanted.split(cuts)[rank]) if cuts[rank] else got.shape == part.shape
            for module, output, each in ((whole, wanted, factors), (mine, got, factors.split(cuts)[rank])):
                module.zero_grad()
                (output * each).sum().backward()
            if cuts[rank]:
                assert close(part.grad, full.grad.split(cuts)[rank])
            for ours, theirs in zip(mine.parameters(), whole.parameters(), strict=True):
                grad = ours.grad.clone()
                dist.all_reduce(grad)
                # Terms of both signs make the sum smaller than what was rounded.
                assert close(grad, theirs.grad, factors.abs().sum().item() / 3)
        for ours, theirs in zip(mine.buffers(), whole.buffers(), strict=True):
            assert ours.dtype == theirs.dtype and close(ours, theirs)
        assert close(mine.eval()(full), whole.eval()(full)) or not options.get("track_running_stats", True)


@pytest.mark.ranks(2)
def test_uneven_shares_of_a_batch_are_normalised_as_the_whole():
    check([5, 3])
    check([1, 7])


@pytest.mark.ranks(3)
def test_a_rank_without_samples_takes_part():
    check([4, 0, 3])


@pytest.mark.ranks(2)
def test_values_far_from_zero_keep_their_precision():
    """A sum of squares in fp32 would lose the variance of values around 1,000 altogether."""
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(0)) + 1000
    norm = nn.Sequential(nn.BatchNorm1d(3))
    sync_batchnorms(norm, dist.group.WORLD)
    wanted = nn.BatchNorm1d(3).double()(x.double())
    # The values themselves are rounded to 3e-5.
    assert (norm(x.split([5, 3])[dist.get_rank()]) - wanted.split([5, 3])[dist.get_rank()]).abs().max() < 1e-4


@pytest.mark.ranks(2)
def test_low_precision_and_copies_work():
    norm = nn.Sequential(nn.BatchNorm1d(3))
    sync_batchnorms(norm, dist.group.WORLD)
    copied = copy.deepcopy(norm)
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(0)).split([5, 3])[dist.get_rank()]
    wanted = norm(x)
    x = x.bfloat16().requires_grad_()
    got = copied(x)
    got.sum().backward()
    assert got.dtype == torch.bfloat16 == x.grad.dtype and (got - wanted).abs().max() < 0.03


@pytest.mark.ranks(2)
def test_one_value_a_channel_over_all_ranks_is_refused():
    norm = nn.Sequential(nn.BatchNorm1d(3))
    sync_batchnorms(norm, dist.group.WORLD)
    with pytest.raises(ValueError, match="needs more than 1 value a channel over all ranks, got 1"):
        norm(torch.randn(1 - dist.get_rank(), 3))


@pytest.mark.ranks(2)
def test_other_norms_stay_as_they_are():
    model = nn.Sequential(nn.BatchNorm2d(2), nn.LayerNorm(2), nn.Sequential(nn.BatchNorm1d(2), nn.InstanceNorm1d(2)))
    assert sync_batchnorms(model, dist.group.WORLD) == ["0", "2.0"]

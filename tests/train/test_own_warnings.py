"""What differs between one rank and several in a loop of one's own, and cannot be made the same, is said."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, default_collate

from meshrun import gather_rows, mean_over_ranks, randn_like, replicate, shard
from meshrun.train import by_sample
from tests.train.small import start_on_cpu

T, D = 6, 8


class Net(nn.Module):
    """Its code is any function of (model, input)."""

    def __init__(self, code: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.code = nn.Linear(D, D), code
        self.attention = nn.MultiheadAttention(D, 2, dropout=0.3, batch_first=True)
        self.register_buffer("mean", torch.zeros(D))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.code(self, self.linear(x))


def said(code: Callable[[Any, Tensor], Tensor], batch_dim: int | None = None, **options: Any) -> list[str]:
    """What an epoch on two ranks warns of."""
    data = TensorDataset(torch.randn(8, T, D))
    loader = shard(DataLoader(data, batch_size=8, **options), batch_dim=batch_dim)
    model = replicate(Net(code), find_unused_parameters=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for (x,) in loader:
            mean_over_ranks(model(x).sum(), len(x)).backward()
    return [str(each.message) for each in caught if "losses depend on the number of ranks" in str(each.message)]


def time_first(model: Any, x: Tensor) -> Tensor:
    del model
    return F.dropout(x.transpose(0, 1).reshape(-1, D), 0.3)


def two_views(model: Any, x: Tensor) -> Tensor:
    del model
    return F.dropout(torch.cat([x, x.flip(1)]), 0.3)


def heads_first(model: Any, x: Tensor) -> Tensor:
    del model
    heads = x.view(len(x), T, 2, D // 2).permute(2, 0, 1, 3).flatten(0, 1)
    return F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.3)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("code", [time_first, two_views, heads_first])
def test_rows_of_which_samples_own_several_are_asked_about(code: Callable[[Any, Tensor], Tensor]):
    start_on_cpu(2)
    (sentence,) = said(code)
    assert "each sample with several rows next to each other" in sentence
    assert said(code, batch_dim=0) == []


def attends(model: Any, x: Tensor) -> Tensor:
    found: Tensor = model.attention(x, x, x)[0]
    return found


def draws_by_sample(model: Any, x: Tensor) -> Tensor:
    return attends(model, F.dropout(x, 0.3) + randn_like(x))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("code", [draws_by_sample, attends])
def test_what_is_drawn_by_sample_is_not_warned_of(code: Callable[[Any, Tensor], Tensor]):
    start_on_cpu(2)
    assert said(code) == []


DRAWS = {
    "torch": lambda _, x: x + torch.randn_like(x),
    "torch, beside dropout": lambda _, x: F.dropout(x, 0.3) * torch.rand(()),
    "Python": lambda _, x: x * random.random(),
    "a dropout that is no function of torch.nn.functional": lambda _, x: torch.dropout(x, 0.3, True),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("source", DRAWS)
def test_other_random_numbers_of_the_model_are_named(source: str):
    start_on_cpu(2)
    (sentence,) = said(DRAWS[source])
    assert "draws random numbers that do not belong to samples" in sentence


def averages(model: Any, x: Tensor) -> Tensor:
    if model.training:
        model.mean = 0.9 * model.mean + 0.1 * x.detach().mean((0, 1))
        model.count += 1
    return x - model.mean


@pytest.mark.ranks(2)
def test_buffers_that_follow_a_part_of_the_batch_are_named():
    here = start_on_cpu(2)
    found = said(averages)
    assert len(found) == (here.rank == 0)
    assert all(each.endswith(": mean") for each in found)


def noisy(samples: list[Any]) -> Any:
    (x,) = default_collate(samples)
    return [x + torch.randn(1)]


@pytest.mark.ranks(2)
def test_a_collate_function_that_draws_is_named():
    start_on_cpu(2)
    (sentence,) = said(lambda _, x: x, collate_fn=noisy)
    assert sentence.startswith("collate_fn draws random numbers")
    assert said(lambda _, x: x, collate_fn=lambda samples: default_collate(samples)) == []


@pytest.mark.ranks(2)
def test_parts_and_parameters_have_the_names_that_they_have_in_one_process():
    start_on_cpu(2)
    plain = Net(attends)
    model = replicate(plain)
    for names in ("named_parameters", "named_buffers", "named_modules"):
        assert [name for name, _ in getattr(model, names)()] == [name for name, _ in getattr(plain, names)()]
    assert [name for name, _ in model.named_parameters(prefix="a", recurse=False)] == []
    assert len(list(model.parameters())) == len(list(plain.parameters()))
    assert not model.eval().module.attention.training


def losses_said(loss: Callable[[Any, Tensor], Tensor], length: int = 7, **options: Any) -> list[str]:
    """What two epochs with a loss of one's own warn of."""
    by_sample._warned.clear()
    data = TensorDataset(torch.randn(length, T, D))
    loader = shard(DataLoader(data, batch_size=4, **options))
    model = replicate(nn.Linear(D, D))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            for (x,) in loader:
                loss(model, x).backward()
    return [str(each.message) for each in caught if "number of ranks" in str(each.message)]


@pytest.mark.ranks(2)
def test_a_loss_of_a_ranks_part_alone_is_told_of():
    start_on_cpu(2)
    (sentence,) = losses_said(lambda model, x: model(x).sum())
    assert sentence.startswith("a loss that does not come from mean_over_ranks() is that of a rank's part of the batch")
    assert losses_said(lambda model, x: mean_over_ranks(model(x).sum(), len(x))) == []
    assert losses_said(lambda model, x: gather_rows(model(x)).square().mean()) == []


@pytest.mark.ranks(2)
def test_means_of_uneven_parts_are_told_of():
    start_on_cpu(2)
    (sentence,) = losses_said(lambda model, x: mean_over_ranks(model(x).mean()))
    assert sentence.startswith("mean_over_ranks(loss) without a count weighs all ranks alike, but some have more")
    assert losses_said(lambda model, x: mean_over_ranks(model(x).mean()), drop_last=True) == []
    assert losses_said(lambda model, x: mean_over_ranks(model(x).mean()), length=6) == []


@pytest.mark.usefixtures("alone")
def test_loaders_that_begin_with_the_same_order_are_told_of():
    data = TensorDataset(torch.randn(8, D))

    def again(**options: Any) -> list[str]:
        by_sample._warned.clear()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            list(shard(DataLoader(data, batch_size=4, shuffle=options.pop("shuffle", True)), **options))
        return [str(each.message) for each in caught]

    assert again(shuffle=False) == again() == []
    (sentence,) = again()
    assert "begin with the same shuffled order; where one is made anew for every epoch, make it once" in sentence
    assert again(seed=1) == again(shuffle=False) == []

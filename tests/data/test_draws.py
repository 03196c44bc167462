"""Draws of samples: the same wherever a sample is computed, and random to look at."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from meshrun.data.draws import SampleDraws

CPU = torch.device("cpu")


def drawn(ids: list[int], seed: int = 0, epoch: int = 0, count: int = 4) -> torch.Tensor:
    return SampleDraws(seed, epoch, ids, CPU).uniform(count)


def test_a_sample_draws_the_same_in_any_company():
    whole = drawn([5, 9, 2, 10**9, 7])
    assert torch.equal(whole[[1, 3]], drawn([9, 10**9]))
    assert torch.equal(whole[:3], drawn([5, 9, 2]))


def test_every_call_epoch_seed_and_sample_draws_others():
    draws = SampleDraws(0, 0, [5, 6], CPU)
    first, second = draws.uniform(3), draws.uniform(3)
    others = [
        second,
        drawn([5, 6], seed=1, count=3),
        drawn([5, 6], seed=1 << 32, count=3),
        drawn([5, 6], epoch=1, count=3),
    ]
    assert first.shape == (2, 3) and not any((first == other).any() for other in others)
    assert not (first[0] == first[1]).any() and SampleDraws(0, 0, [5], CPU).uniform().shape == (1, 1)


def test_the_draws_of_a_seed_stay_what_they_are():
    assert drawn([17, 4], seed=3, epoch=2, count=2).tolist() == PINNED


PINNED = [[0.7507852911949158, 0.6383079886436462], [0.9956363439559937, 0.7142882347106934]]


def test_draws_are_uniform_and_neither_neighbours_nor_columns_are_alike():
    found = drawn(list(range(20_000)), count=3).double().numpy()
    assert found.min() >= 0 and found.max() < 1
    counts, _ = np.histogram(found, bins=50, range=(0, 1))
    expected = found.size / 50
    assert (((counts - expected) ** 2).sum() / expected - 49) / math.sqrt(2 * 49) < 4
    pairs = [(found[:-1, 0], found[1:, 0]), (found[:, 0], found[:, 1]), (found[:, 1], found[:, 2])]
    assert all(abs(np.corrcoef(a, b)[0, 1]) * math.sqrt(len(a)) < 4 for a, b in pairs)


@pytest.mark.gpu
def test_draws_are_bit_for_bit_the_same_on_a_gpu():
    found = SampleDraws(3, 2, [17, 4], torch.device("cuda", 0)).uniform(2)
    assert found.is_cuda and torch.equal(found.cpu(), drawn([17, 4], seed=3, epoch=2, count=2))

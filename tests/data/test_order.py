"""The order of samples: a permutation an epoch, the same on every world, random to look at, and free of charge."""

from __future__ import annotations

import functools
import math
import re
import time
import tracemalloc
from itertools import pairwise, permutations
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from meshrun.data.order import Order, micro_batches, slice_of
from meshrun.data.permutation import Ids
from meshrun.data.shuffle import NONE, Shuffle
from meshrun.errors import UserError

NEAR_POWERS = sorted({2**k + d for k in range(1, 13) for d in (-1, 0, 1)})
PRIMES = (2, 3, 5, 7, 61, 67, 127, 131, 1021, 1031, 4093)
LENGTHS = st.integers(1, 5000) | st.sampled_from(NEAR_POWERS) | st.sampled_from(PRIMES)
SEEDS = st.integers(-(2**63), 2**64 - 1)


def epoch_of(order: Order, epoch: int) -> Ids:
    """All batches of one epoch, one after the other."""
    first = epoch * order.steps_per_epoch
    return np.concatenate([order.batch_ids(first + step) for step in range(order.steps_per_epoch)])


@functools.cache
def permutation(length: int, seed: int, epoch: int = 0) -> Ids:
    return Order(length, length, seed).batch_ids(epoch)


@given(length=LENGTHS, seed=SEEDS, epoch=st.integers(0, 2**32 - 1))
@example(length=1, seed=0, epoch=0)
@example(length=2, seed=0, epoch=0)
def test_an_epoch_is_a_bijection_for_every_length(length: int, seed: int, epoch: int):
    assert np.array_equal(np.sort(permutation(length, seed, epoch)), np.arange(length))


@given(data=st.data(), length=st.integers(1, 3000), seed=st.integers(0, 100), epoch=st.integers(0, 50))
@settings(max_examples=60)
def test_every_epoch_visits_every_sample_once_whatever_the_batch(data: st.DataObject, length, seed, epoch):
    batch = data.draw(st.integers(max(1, length // 40), length))
    order = Order(length, batch, seed)
    visited = epoch_of(order, epoch)
    assert np.array_equal(np.sort(visited), np.arange(length))
    assert np.array_equal(visited, permutation(length, seed, epoch)), "the batch cuts the order, it must not change it"


@given(length=st.integers(1, 5000), batch=st.integers(1, 300), step=st.integers(0, 10**9))
def test_only_the_last_batch_of_an_epoch_is_short(length: int, batch: int, step: int):
    order = Order(length, batch)
    last = (step + 1) % order.steps_per_epoch == 0
    expected = length - (order.steps_per_epoch - 1) * batch if last else batch
    assert len(order.batch_ids(step)) == expected


def test_a_batch_is_a_function_of_seed_step_length_and_batch_alone():
    forward = [Order(5000, 48, 3).batch_ids(step) for step in range(300)]
    again = Order(5000, 48, 3)
    for step in np.random.default_rng(0).permutation(300):
        Order(777, 48, 9).batch_ids(int(step))
        assert np.array_equal(again.batch_ids(int(step)), forward[step])


def test_what_a_caller_does_to_a_batch_leaves_the_order_alone():
    order = Order(5000, 48, 3)
    ids = order.batch_ids(7)
    kept = ids.copy()
    ids[:] = -1
    assert np.array_equal(order.batch_ids(7), kept)


def test_the_order_of_a_seed_stays_what_it_is():
    """A run that is resumed by a later version must go on with the samples that were still to come."""
    assert [Order(10, 4, 7).batch_ids(step).tolist() for step in range(4)] == [
        [3, 9, 6, 1],
        [8, 5, 0, 7],
        [4, 2],
        [7, 2, 8, 3],
    ]
    far = Order(10**12, 4, 2**40 + 1).batch_ids(10**11)
    assert far.tolist() == [709626825790, 705836527818, 103754592487, 773645166756]


def test_each_seed_has_its_own_epochs():
    """The upper half of a long seed must not stand for an epoch of a short one."""
    seeds = [3, 3 + (5 << 32), -1, 2**32 - 1, 5 << 32, 0]
    orders = {tuple(permutation(200, seed, epoch)) for seed in seeds for epoch in range(8)}
    assert len(orders) == len(seeds) * 8


def test_unshuffled_order_counts_up_in_every_epoch():
    order = Order(10, 4, seed=5, shuffle=NONE)
    assert [order.batch_ids(step).tolist() for step in range(4)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9], [0, 1, 2, 3]]
    assert order.batch_ids(0).dtype == np.int64


def sigmas_of_chi_square(observed: np.ndarray, expected: float, freedom: int, scale: float = 1.0) -> float:
    """How far a chi-square statistic is above its mean, in its standard deviations."""
    statistic = scale * float(((observed - expected) ** 2).sum()) / expected
    return (statistic - freedom) / math.sqrt(2 * freedom)


@pytest.mark.parametrize("length", [3, 7, 10])
def test_every_position_gets_every_sample_equally_often_over_seeds(length: int):
    seeds = 300
    table = np.zeros((length, length))
    for seed in range(seeds):
        table[np.arange(length), permutation(length, seed)] += 1
    # Rows and columns of a permutation add up to one, hence (n - 1)^2 degrees of freedom and the factor (n - 1) / n.
    sigmas = sigmas_of_chi_square(table, seeds / length, (length - 1) ** 2, (length - 1) / length)
    assert sigmas < 4


def test_every_permutation_of_four_samples_is_equally_likely():
    seeds = 24 * 12
    counts = dict.fromkeys(permutations(range(4)), 0)
    for seed in range(seeds):
        counts[tuple(permutation(4, seed).tolist())] += 1
    assert -3.5 < sigmas_of_chi_square(np.array(list(counts.values())), seeds / 24, 23) < 4


def correlation(a: np.ndarray, b: np.ndarray) -> float:
    """In standard deviations of that of independent values."""
    return float(np.corrcoef(a, b)[0, 1] * math.sqrt(len(a) - 1))


def assert_normal(sigmas: list[float]) -> None:
    """Each within what chance gives, and together neither too far from 0 nor too near."""
    worst, spread = max(map(abs, sigmas)), float(np.mean(np.square(sigmas)))
    margin = 5 * math.sqrt(2 / len(sigmas))
    assert worst < 4.5 and 1 - margin < spread < 1 + margin, (worst, spread)


LARGE = [(length, seed) for length in (100, 1000, 1024, 10_007) for seed in range(16)]


def test_neighbours_in_a_large_epoch_are_not_correlated():
    assert_normal([correlation(p[:-k], p[k:]) for n, s in LARGE for p in [permutation(n, s)] for k in (1, 2, 16)])


def test_samples_do_not_follow_their_positions():
    assert_normal([correlation(p, np.arange(n)) for n, s in LARGE for p in [permutation(n, s)]])
    parities = [correlation(p % m, np.arange(n) % m) for n, s in LARGE for p in [permutation(n, s)] for m in (2, 8)]
    assert_normal(parities)


def test_ups_and_downs_of_a_large_epoch_are_as_many_as_chance_gives():
    sigmas = []
    for length, seed in LARGE:
        rises = np.diff(permutation(length, seed)) > 0
        runs = 1 + int((rises[1:] != rises[:-1]).sum())
        sigmas.append((runs - (2 * length - 1) / 3) / math.sqrt((16 * length - 29) / 90))
    assert_normal(sigmas)


def test_neighbouring_seeds_and_epochs_are_not_correlated():
    pairs = [(permutation(n, s), permutation(n, s + 1), permutation(n, s, epoch=1)) for n, s in LARGE]
    assert_normal([correlation(here, seed) for here, seed, _ in pairs])
    assert_normal([correlation(here, epoch) for here, _, epoch in pairs])
    # Moved against each other by one they must be unrelated as well: a key that only shifts positions would show.
    assert_normal([correlation(here[1:], epoch[:-1]) for here, _, epoch in pairs])


def test_first_batches_of_two_epochs_share_as_many_samples_as_chance_gives():
    length, batch = 1000, 100
    firsts = [
        set(Order(length, batch, seed).batch_ids(epoch * 10).tolist()) for seed in range(20) for epoch in range(10)
    ]
    shared = [len(a & b) for a, b in pairwise(firsts)]
    expected = batch * batch / length
    deviation = math.sqrt(expected * (1 - batch / length) ** 2 * length / (length - 1))
    assert abs(np.mean(shared) - expected) < 4 * deviation / math.sqrt(len(shared))
    assert 0.6 * deviation < np.std(shared) < 1.4 * deviation


@pytest.mark.parametrize("batch", [64, 2048])
@pytest.mark.parametrize("length", [10**9, 10**12, 2**40 + 1])
def test_any_step_of_a_billion_samples_costs_next_to_nothing(length: int, batch: int):
    order = Order(length, batch, 1)
    steps = [0, 10**6, order.steps_per_epoch - 2, 3 * order.steps_per_epoch // 2, 10**15, 10**15 + 10**8]
    times = []
    for step in steps:
        began = time.perf_counter()
        ids = order.batch_ids(step)
        times.append(time.perf_counter() - began)
        assert len(set(ids.tolist())) == batch and ids.min() >= 0 and ids.max() < length
    assert min(times) < 0.1
    tracemalloc.start()
    try:
        for step in steps:
            order.batch_ids(step + 10**7)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 10e6


@given(length=st.integers(0, 300), of=st.integers(1, 80))
def test_slices_are_a_partition_in_order_with_sizes_that_differ_by_one_at_most(length: int, of: int):
    ids = np.arange(length) * 3
    parts = [slice_of(ids, part, of) for part in range(of)]
    assert np.array_equal(np.concatenate(parts), ids)
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)
    assert [list(slice_of(range(length), part, of)) for part in range(of)] == [(part // 3).tolist() for part in parts]


@given(length=st.integers(0, 300), most=st.none() | st.integers(1, 320))
def test_micro_batches_are_a_partition_into_the_fewest_even_pieces(length: int, most: int | None):
    ids = np.arange(length)
    pieces = micro_batches(ids, most)
    assert np.array_equal(np.concatenate([ids[:0], *pieces]), ids)
    assert len(pieces) == math.ceil(length / (most or max(1, length)))
    sizes = [len(piece) for piece in pieces]
    if sizes:
        assert max(sizes) <= (most or length) and min(sizes) >= max(1, max(sizes) - 1)


@pytest.mark.parametrize(
    ("lengths", "seen"),
    [
        (lambda _: None, "an array of shape () and type object"),
        (lambda _: [1], "an array of shape (1,) and type int64"),
        (lambda ids: [math.nan] * len(ids), "nan"),
        (lambda ids: ["a"] * len(ids), "an array of shape (8,) and type <U1"),
    ],
)
def test_lengths_that_are_no_numbers_are_refused(lengths: Any, seen: str):
    order = Order(8, 4, 0, Shuffle.parse("length").settled(4, 1), lengths)
    with pytest.raises(UserError, match=re.escape(f"lengths(ids) of the training set returned {seen} for 8 samples")):
        order.batch_ids(0)

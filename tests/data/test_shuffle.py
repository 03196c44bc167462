"""Orders beside the full shuffle: every epoch has every sample once, on any world, and each does what it is for."""

from __future__ import annotations

import time
import tracemalloc
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshrun.data.order import Order, slice_of
from meshrun.data.permutation import Ids, permute, round_keys, unpermute
from meshrun.data.shuffle import CHUNK, Shuffle
from meshrun.errors import UserError


class Texts:
    """Samples whose length is a number that looks random."""

    def __init__(self, length: int, chunk: int = 16) -> None:
        self.length, self.chunk, self.asked = length, chunk, 0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int):
        raise AssertionError("an order reads no sample")

    def lengths(self, ids: Ids) -> Ids:
        self.asked += len(ids)
        return ids * 7919 % 1009


class Plain(Texts):
    """Says nothing of itself."""

    lengths = None  # type: ignore[assignment]
    chunk = None  # type: ignore[assignment]

    def __init__(self, length: int) -> None:
        self.length = length


def epoch_of(order: Order, epoch: int = 0) -> list[Ids]:
    first = epoch * order.steps_per_epoch
    return [order.batch_ids(first + step) for step in range(order.steps_per_epoch)]


KINDS = st.sampled_from(["window", "window:20", "window:40", "window:1000", "length", "length:1", "length:3", "none"])


@given(
    length=st.integers(1, 400),
    batches=st.integers(1, 12),
    chunk=st.integers(1, 80),
    seed=st.integers(0, 2**64 - 1),
    epoch=st.integers(0, 2**31),
    kind=KINDS,
)
@settings(max_examples=100)
def test_every_epoch_has_every_sample_once_and_only_its_last_batch_is_short(length, batches, chunk, seed, epoch, kind):
    order = Order.of(Texts(length, chunk), -(-length // batches), seed, kind)
    batches = epoch_of(order, epoch)
    assert np.array_equal(np.sort(np.concatenate(batches)), np.arange(length))
    assert all(len(each) == order.batch for each in batches[:-1])


@pytest.mark.parametrize("kind", ["window:300", "length:4"])
def test_any_step_can_be_jumped_to_and_seeds_and_epochs_differ(kind: str):
    order = Order.of(Texts(5000), 48, 3, kind)
    forward = [order.batch_ids(step) for step in range(210)]
    for step in np.random.default_rng(0).permutation(210)[:40]:
        assert np.array_equal(Order.of(Texts(5000), 48, 3, kind).batch_ids(int(step)), forward[step])
    firsts = {tuple(forward[0]), tuple(forward[105]), tuple(Order.of(Texts(5000), 48, 4, kind).batch_ids(0))}
    assert len(firsts) == 3


def test_samples_of_the_same_length_stay_in_the_order_of_the_epoch_whatever_machine_sorts_them():
    class Alike(Texts):
        def lengths(self, ids: Ids) -> Ids:
            return ids % 2

    length = 2000
    full = np.concatenate(epoch_of(Order.of(Plain(length), 100, 3, "full")))
    batches = {frozenset(batch.tolist()) for batch in epoch_of(Order.of(Alike(length), 100, 3, "length:20"))}
    in_order = np.concatenate([full[full % 2 == 0], full[full % 2 == 1]]).tolist()
    assert batches == {frozenset(in_order[start : start + 100]) for start in range(0, length, 100)}


@pytest.mark.parametrize("kind", ["window:300", "length:4"])
def test_the_parts_of_any_world_are_the_batch(kind: str):
    order = Order.of(Texts(1000), 50, 3, kind)
    for step in (0, 7, 19, 20):
        whole = order.batch_ids(step)
        for world in (1, 2, 3):
            assert np.array_equal(np.concatenate([slice_of(whole, part, world) for part in range(world)]), whole)


def test_the_orders_of_a_seed_stay_what_they_are():
    """A run that is resumed by a later version must go on with the samples that were still to come."""
    window = Order.of(Texts(22, chunk=4), 5, 7, "window:8")
    assert [ids.tolist() for ids in epoch_of(window)] == WINDOW
    length = Order.of(Texts(11), 3, 7, "length:2")
    assert [ids.tolist() for ids in epoch_of(length)] == LENGTH
    assert [length.batch_ids(step).tolist() for step in range(4, 8)] == LENGTH_OF_THE_NEXT_EPOCH


WINDOW = [[12, 10, 8, 13, 9], [15, 14, 11, 17, 21], [16, 18, 19, 20, 4], [5, 7, 1, 3, 0], [6, 2]]
LENGTH = [[5, 6, 3], [1, 9, 8], [2, 7, 10], [0, 4]]
LENGTH_OF_THE_NEXT_EPOCH = [[8, 1, 7], [9, 2, 3], [5, 6, 0], [4, 10]]


def test_a_window_holds_few_chunks_and_mixes_them():
    order = Order.of(Texts(64 * 100 + 17, chunk=64), 32, 3, "window:512")
    ids = np.concatenate(epoch_of(order))
    short = int(np.flatnonzero(ids >= 6400)[0]) // 512  # the window with the short chunk, after which others lie askew
    windows = [ids[512 * number :][:512] for number in range(short)]
    assert short > 5
    for window in windows:
        assert len(set(window // 64)) == 8
        assert len({int(each) for each in np.diff(window)}) > 100, "neighbours must not stay neighbours"
    chunks = [int(window[0] // 64) for window in windows]
    assert not all(b > a for a, b in pairwise(chunks)), "chunks must not come in order"


def test_the_short_chunk_may_come_anywhere():
    places = set()
    for seed in range(60):
        ids = np.concatenate(epoch_of(Order.of(Texts(4 * 8 + 3, chunk=8), 8, seed, "window:8")))
        places.add(int(np.flatnonzero(ids >= 32)[0]) // 8)
    assert places == {0, 1, 2, 3, 4}


def test_each_epoch_has_its_chunks_in_an_order_of_its_own():
    order = Order.of(Texts(64 * 64, chunk=64), 64, 3, "window:64")
    chunks = [[int(ids[0] // 64) for ids in epoch_of(order, epoch)] for epoch in range(3)]
    assert all(sorted(each) == list(range(64)) for each in chunks)
    assert len(set(map(tuple, chunks))) == 3


def test_a_window_without_a_size_has_32_chunks_and_8_batches_at_least():
    assert Order.of(Texts(10**6, chunk=100), 64, 0, "window").shuffle == Shuffle("window", 3200, 100)
    assert Order.of(Texts(10**6, chunk=100), 1000, 0, "window").shuffle == Shuffle("window", 8000, 100)
    assert Order.of(Plain(10**6), 64, 0, "window").shuffle == Shuffle("window", 32 * CHUNK, CHUNK)
    assert Order.of(Texts(10**6, chunk=100), 1000, 0, "window:50").shuffle.size == 1000, "a batch fits in any window"
    assert str(Order.of(Texts(10**6, chunk=100), 64, 0, "window:1010").shuffle) == "window:1000 of chunks of 100"


def test_batches_by_length_have_samples_of_like_length_in_any_order():
    data = Texts(4000)
    order = Order.of(data, 40, 1, "length:25")
    spreads, rises = [], 0
    means = []
    for ids in epoch_of(order):
        lengths = data.lengths(ids)
        spreads.append(int(lengths.max() - lengths.min()))
        means.append(float(lengths.mean()))
        rises += int((np.diff(lengths) > 0).sum())
    assert max(spreads) < 150, "1009 lengths in 25 batches"
    assert 0.4 < rises / (100 * 39) < 0.6, "ranks take a batch in parts, which must be alike"
    assert abs(np.corrcoef(means[:-1], means[1:])[0, 1]) < 0.3


def test_the_short_batch_is_not_always_that_of_the_longest():
    data = Texts(100)
    means = {
        float(data.lengths(epoch_of(Order.of(data, 16, seed, "length:99"))[-1]).mean()) // 100 for seed in range(30)
    }
    assert len(means) >= 5


def test_lengths_are_asked_for_a_few_batches_at_a_time():
    data = Texts(10**9)
    order = Order.of(data, 64, 0, "length:10")
    for step in range(12):
        order.batch_ids(step)
    assert data.asked == 2 * 640


@pytest.mark.parametrize("text", ["windows", "window:", "window:-3", "window:0", "length:x", "full:3", "none:1", ""])
def test_what_is_no_order_is_refused_with_those_that_are(text: str):
    with pytest.raises(UserError, match=r"it must be full, window or window:SAMPLES, .*\(--shuffle\)$"):
        Shuffle.parse(text)


def test_a_dataset_without_lengths_cannot_be_ordered_by_them():
    with pytest.raises(UserError, match=r"type Plain, cannot say how long its samples are; give it .*\(--shuffle\)$"):
        Order.of(Plain(10), 2, 0, "length")


@given(length=st.integers(1, 3000), seed=st.integers(0, 100))
@settings(max_examples=60)
def test_a_permutation_can_be_undone(length: int, seed: int):
    numbers, keys = np.arange(length, dtype=np.uint64), round_keys(seed, 0)
    assert np.array_equal(unpermute(permute(numbers, length, keys).astype(np.uint64), length, keys), numbers)


@pytest.mark.parametrize("kind", ["window", "window:1000000"])
def test_any_step_of_a_billion_samples_costs_next_to_nothing(kind: str):
    times, ids = [], np.arange(0)
    tracemalloc.start()
    try:
        for step in (0, 10**6, 15_624_998, 10**12):
            began = time.thread_time()  # what else runs on the machine must not decide
            ids = Order.of(Texts(10**9, chunk=100), 64, 1, kind).batch_ids(step)
            times.append(time.thread_time() - began)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(set(ids.tolist())) == 64 and ids.max() < 10**9
    assert min(times) < 0.2 and peak < 10e6

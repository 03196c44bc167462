"""Batches of samples: whole ones where the dataset makes them, and without the bad ones where that is asked for."""

from __future__ import annotations

import errno
import gc
import pickle
import time
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from meshrun.data.loader import Loader, Reading, evaluation_batches, readers_of_a_rank
from meshrun.data.order import Cut, Order
from meshrun.data.samples import Samples, Wanted, _can_be_skipped
from meshrun.data.shuffle import NONE
from meshrun.errors import BadSample, RunFailed, UserError


class Holes:
    """Sample i is (i, 10 i); some cannot be read."""

    def __init__(self, length: int, bad: set[int], error: type[Exception] = BadSample) -> None:
        self.length, self.bad, self.error = length, bad, error

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if index in self.bad:
            raise self.error(f"sample {index} of train ({index}.jpg) cannot be read: it is cut off")
        return torch.tensor(index), torch.tensor(10 * index)


class Wholes(Holes):
    """Makes its batches itself."""

    def __init__(self, length: int, bad: set[int], error: type[Exception] = BadSample) -> None:
        super().__init__(length, bad, error)
        self.asked: list[list[int]] = []

    def batch_of(self, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        self.asked.append(ids)
        for number in ids:
            self[number]
        return torch.tensor(ids), 10 * torch.tensor(ids)


class Many(Holes):
    """Reads several at a time."""

    def __getitems__(self, ids: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [self[number] for number in ids]


def test_a_dataset_that_makes_whole_batches_is_asked_for_them_unless_there_is_a_collate():
    data = Wholes(10, set())
    assert Samples(data)[Wanted([3, 1], 2)].batch[0].tolist() == [3, 1] and data.asked == [[3, 1]]
    assert Samples(data, collate=len)[Wanted([3, 1], 2)].batch == 2 and data.asked == [[3, 1]]
    steps = Loader(data, Order(10, 4, shuffle=NONE), 0, 1, Reading(workers=1)).steps(0, 3)
    assert [step.batches[0][1].tolist() for step in steps] == [[0, 10, 20, 30], [40, 50, 60, 70], [80, 90]]


@pytest.mark.parametrize("kind", [Holes, Wholes, Many])
def test_bad_samples_are_left_out_and_told(kind: type[Holes]):
    read = Samples(kind(10, {1, 4}), skip_bad=True)[Wanted([3, 1, 5, 4], 4)]
    assert read.ids == [3, 5] == read.batch[0].tolist() and read.real == 2
    assert [number for number, _ in read.bad] == [1, 4] and "1.jpg" in read.bad[0][1]
    assert read.of(Wanted([3, 1, 5, 4], 4)) == Wanted([3, 5], 2)
    assert Samples(kind(10, {1, 4}), skip_bad=True)[Wanted([3, 5], 2)].ids is None


@pytest.mark.parametrize("kind", [Holes, Wholes])
def test_where_rows_must_be_as_many_others_fill_up_and_do_not_count(kind: type[Holes]):
    read = Samples(kind(10, {1, 4}), skip_bad=True)[Wanted([1, 3, 4, 3, 3], 3, equal=True)]
    assert read.ids == [3, 3, 3, 3, 3] == read.batch[0].tolist() and read.real == 1


@given(
    length=st.integers(1, 12),
    bad=st.sets(st.integers(0, 11)),
    rows=st.integers(1, 6),
    equal=st.booleans(),
    at=st.integers(0, 11),
)
@settings(max_examples=80)
def test_every_good_sample_counts_once_and_every_bad_one_is_told_once(length, bad, rows, equal, at):
    ids = [(at + each) % length for each in range(min(rows, length))]
    samples = Samples(Holes(length, bad), skip_bad=True)
    wanted = Wanted(ids, len(ids), equal)
    if set(range(length)) <= bad:
        with pytest.raises(UserError, match=r"neither sample \d+ nor any of the \d+ after it can be read"):
            samples[wanted]
        return
    read = samples[wanted]
    piece = read.of(wanted)
    assert piece.ids[: piece.real] == [number for number in ids if number not in bad]
    assert [number for number, _ in read.bad] == [number for number in ids if number in bad]
    assert piece.ids and not set(piece.ids) & bad and piece.ids == read.batch[0].tolist()
    assert not equal or len(piece.ids) == len(ids)


def test_a_piece_that_borrows_a_bad_sample_borrows_another():
    """A replica without samples of its own computes a row that does not count, of a sample that another one has."""
    read = Samples(Holes(10, {4, 5}), skip_bad=True)[Wanted([4], 0)]
    assert (read.ids, read.real, read.bad) == ([6], 0, ())
    read = Samples(Wholes(10, {9}), skip_bad=True)[Wanted([9], 0)]
    assert (read.ids, read.batch[0].tolist()) == ([0], [0]), "after the last sample comes the first"


def test_the_users_own_errors_are_skipped_too_but_not_those_that_others_would_meet():
    assert Samples(Holes(4, {1}, ValueError), skip_bad=True)[Wanted([0, 1], 2)].bad == (
        (1, "ValueError: sample 1 of train (1.jpg) cannot be read: it is cut off"),
    )
    for error in (MemoryError, RunFailed, UserError):
        with pytest.raises(error):
            Samples(Holes(4, {1}, error), skip_bad=True)[Wanted([0, 1], 2)]
    with pytest.raises(BadSample):
        Samples(Holes(4, {1}))[Wanted([0, 1], 2)]


@pytest.mark.parametrize("kind", [Holes, Many, Wholes])
def test_an_error_of_the_users_own_names_its_sample(kind: type[Holes]):
    with pytest.raises(ValueError, match="cut off") as met:
        Samples(kind(9, {4}, ValueError))[Wanted([3, 5, 4, 1], 4)]
    assert met.value.__notes__[0] == "while reading sample 4 (--skip-bad-samples goes on without such)"


def test_what_is_wrong_with_a_machine_is_skipped_on_none():
    class OnABadDisk(Holes):
        def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
            try:
                raise OSError(errno.EIO, "Input/output error")
            except OSError as error:
                raise ValueError("no sample") from error

    with pytest.raises(ValueError, match="no sample"):
        Samples(OnABadDisk(4, set()), skip_bad=True)[Wanted([0, 1], 2)]
    assert _can_be_skipped(FileNotFoundError(errno.ENOENT, "…")) and _can_be_skipped(OSError("image is truncated"))
    assert not _can_be_skipped(OSError(errno.ESTALE, "…"))


def test_what_fails_with_good_samples_only_is_no_bad_sample():
    with pytest.raises(TypeError, match="unhashable"):
        Samples(Holes(4, set()), collate=lambda samples: {samples: 1}, skip_bad=True)[Wanted([0, 1], 2)]


@pytest.mark.parametrize("error", [BadSample, UserError, RunFailed])
def test_a_sentence_of_a_reader_comes_as_that_sentence_and_nobody_waits(error: type[Exception]):
    class Own(error):  # type: ignore[valid-type,misc]
        """Not to be made of one text, nor to be sent to another process."""

        def __init__(self, *words: str) -> None:
            super().__init__("".join(words))
            self.words = lambda: words

    data = Slow(40, {7}, Own)
    steps = Loader(data, Order(40, 4, shuffle=NONE), 0, 1, Reading(workers=2)).steps(0, 9)
    next(steps)
    began = time.perf_counter()
    with pytest.raises(error) as caught:
        list(steps)
    assert type(caught.value) is error and not getattr(caught.value, "__notes__", [])
    assert str(caught.value) == "sample 7 of train (7.jpg) cannot be read: it is cut off"
    del caught
    assert time.perf_counter() - began < 30, "the other reader is in the middle of a minute"


class Slow(Holes):
    """From sample 8 on each takes a minute."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if index >= 8:
            time.sleep(60)
        return super().__getitem__(index)


def test_readers_of_a_training_that_ends_early_are_gone_at_once():
    steps = Loader(Slow(40, set()), Order(40, 4, shuffle=NONE), 0, 1, Reading(workers=2)).steps(0, 9)
    assert len(next(steps).ids) == 4
    assert gc.get_freeze_count() == 0, "what the rank has no more use for is its own to clear away again"
    began = time.perf_counter()
    steps.close()
    assert time.perf_counter() - began < 30


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("cut", [Cut(), Cut(2), Cut(2, in_step=True), Cut(3, in_step=True, equal=True, pieces=2)])
def test_all_replicas_together_count_the_good_samples_and_tell_the_bad_ones(cut: Cut, workers: int):
    bad, order = {0, 3, 8, 9, 11, 12}, Order(20, 7, 3)
    for of in (1, 2, 3):
        reading = Reading(cut, workers=workers if of == 2 else 0, skip_bad=True)
        parts = [list(Loader(Holes(20, bad), order, part, of, reading).steps(0, 4)) for part in range(of)]
        for step in range(4):
            ids = order.batch_ids(step).tolist()
            counted = [
                n
                for part in parts
                for piece, real in zip(part[step].pieces, part[step].real, strict=True)
                for n in piece[:real]
            ]
            assert counted == [number for number in ids if number not in bad]
            told = [number for part in parts for number, _ in part[step].bad]
            assert told == [number for number in ids if number in bad]
            for part in parts:
                assert [batch[0].tolist() for batch in part[step].batches] == part[step].pieces
            if cut.equal:
                assert len({len(piece) for part in parts for piece in part[step].pieces}) == 1


@pytest.mark.parametrize("cut", [Cut(), Cut(in_step=True), Cut(in_step=True, equal=True)])
def test_evaluation_counts_the_good_samples_once_and_tells_the_bad_ones(cut: Cut):
    bad = {0, 1, 2, 3, 9, 16}
    for of in (1, 2, 3):
        parts = [
            list(evaluation_batches(Holes(17, bad), part, of, 4, Reading(cut, skip_bad=True))) for part in range(of)
        ]
        counted = [number for part in parts for each in part for number in each.ids[: each.real]]
        assert counted == [number for number in range(17) if number not in bad]
        assert sorted(number for part in parts for each in part for number, _ in each.bad) == sorted(bad)


def test_what_is_read_can_be_sent():
    read = Samples(Holes(4, {1}), skip_bad=True)[Wanted([0, 1], 2)]
    assert pickle.loads(pickle.dumps(read)).bad == read.bad


@pytest.mark.parametrize(
    ("cores", "threads", "on_gpu", "light", "readers"),
    [
        (48, 48, True, False, 8),
        (4, 4, True, False, 3),
        (1, 1, True, False, 0),
        (48, 48, True, True, 0),
        (4, 4, False, False, 0),
        (4, 2, False, False, 2),
        (48, 1, False, False, 8),
        (1, 2, False, False, 0),
        (4, 2, False, True, 0),
    ],
)
def test_readers_get_the_cores_that_nobody_computes_on(cores, threads, on_gpu, light, readers):
    assert readers_of_a_rank(cores, threads, on_gpu, light) == readers


class Some(list[tuple[Tensor, int]]):
    """Samples of two numbers and a class."""

    def __getitem__(self, number: Any) -> Any:
        return torch.ones(2) * number, number


def rows_of(samples: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    return torch.stack([inputs for inputs, _ in samples]), torch.tensor([target for _, target in samples])


def test_a_collate_that_drops_samples_is_refused():
    samples = Samples(Some(range(9)), lambda given: rows_of([each for each in given if each[1] % 3]))
    with pytest.raises(UserError, match=r"collate=…\) made a batch of 4 rows of 6 samples; it must keep every sample"):
        samples[Wanted([0, 1, 2, 3, 4, 5], 6)]


def test_a_batch_of_that_drops_samples_is_refused():
    class Lossy(Wholes):
        def batch_of(self, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
            return super().batch_of(ids[1:])

    with pytest.raises(UserError, match=r"batch_of of Lossy made a batch of 1 rows of 2 samples; it must keep every"):
        Samples(Lossy(10, set()))[Wanted([3, 1], 2)]


@pytest.mark.parametrize(
    "collate",
    [
        rows_of,
        lambda given: (torch.cat([inputs for inputs, _ in given]), torch.ones(3 * len(given))),  # packed
        lambda given: (torch.cat([inputs for inputs, _ in given])[None], torch.ones(1, 2 * len(given))),
        lambda given: (rows_of(given)[0].T, rows_of(given)[1]),  # time first
        lambda given: (rows_of(given)[0].T, rows_of(given)[0].T),
        lambda given: (rows_of(given)[0][:2], torch.tensor(0)),  # one target for all
        lambda given: (rows_of(given)[0].sum(0), torch.ones(1)),
        lambda given: (torch.ones(2, len(given)), torch.ones(2)),  # two rows, of a number for each sample
    ],
)
def test_batches_of_other_forms_are_taken(collate: Any):
    assert len(Samples(Some(range(9)), collate)[Wanted([0, 1, 2, 3, 4], 5)].batch) == 2


@pytest.mark.parametrize("returned", [2, 4])
def test_a_dataset_that_returns_another_number_of_samples_is_refused(returned: int):
    class Other(Some):
        def __getitems__(self, numbers: list[int]) -> list[Any]:
            return [self[number] for number in range(returned)]

    with pytest.raises(
        UserError, match=f"__getitems__ of Other returned {returned} for 3 samples; it must return a list with one"
    ):
        Samples(Other(range(9)))[Wanted([0, 1, 2], 3)]

"""Unpacked chunks in memory that readers share: which chunk makes room, and rows of a slot that is filled anew."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from meshrun.data.sources import slots as module
from meshrun.data.sources.slots import Slots

ROWS = 4


class Loaded:
    """Fills chunk n with its row numbers, and notes which chunks it was asked for."""

    def __init__(self) -> None:
        self.chunks: list[int] = []

    def __call__(self, number: int, into: NDArray[Any]) -> int:
        self.chunks.append(number)
        into[:] = np.arange(number * ROWS, (number + 1) * ROWS).reshape(-1, 1)
        return ROWS


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> tuple[Slots, Loaded]:
    """Room for two chunks of many, in one set of two ways."""
    monkeypatch.setattr(module, "is_small", lambda _: False)
    monkeypatch.setattr(module, "WAYS", 2)
    monkeypatch.setattr(module, "LEAST", 0)
    monkeypatch.setattr(module, "CHUNKS", 2)
    load = Loaded()
    return Slots(f"test {id(load)}", 100, (ROWS, 2), np.dtype(np.int64), load), load


def row(slots: Slots, number: int) -> int:
    """The value of one row, read through the slots."""
    into = np.full((1, 2), -1)
    slots.take(np.array([number]), np.array([0]), into)
    assert into[0, 0] == into[0, 1]
    return int(into[0, 0])


def test_rows_of_several_chunks_go_to_their_places(few: tuple[Slots, Loaded]):
    into = np.full((5, 2), -1)
    few[0].take(np.array([1, 2, 6, 9, 11]), np.array([4, 0, 1, 3, 2]), into)
    assert into[:, 0].tolist() == [2, 6, 11, 9, 1]
    whole = np.full((7, 2), -1)
    few[0].span(2, 9, whole)
    assert whole[:, 1].tolist() == list(range(2, 9))


def test_a_chunk_that_is_there_is_not_unpacked_again(few: tuple[Slots, Loaded]):
    slots, load = few
    assert [row(slots, number) for number in (0, 3, 5, 1, 7)] == [0, 3, 5, 1, 7]
    assert load.chunks == [0, 1]


def test_of_neighbouring_rows_only_the_chunks_that_have_some_are_unpacked(few: tuple[Slots, Loaded]):
    slots, load = few
    into = np.empty((ROWS + 1, 2), np.int64)
    slots.span(3 * ROWS - 1, 4 * ROWS, into)
    assert into[:, 0].tolist() == list(range(3 * ROWS - 1, 4 * ROWS)) and sorted(load.chunks) == [2, 3]


def test_the_chunk_that_was_not_used_for_longest_makes_room(few: tuple[Slots, Loaded]):
    slots, load = few
    for chunk in (0, 1, 0, 2):  # chunk 1 was used before chunk 0
        row(slots, chunk * ROWS)
    assert load.chunks == [0, 1, 2]
    row(slots, 0)
    assert load.chunks == [0, 1, 2], "chunk 0 has stayed"
    row(slots, ROWS)
    assert load.chunks == [0, 1, 2, 1]


def at_fence(monkeypatch: pytest.MonkeyPatch, number: int, act: Callable[[], None]) -> None:
    """Lets another reader act at the fence with this number, counted from now on."""
    count, fence = 0, module.fence

    def fenced() -> None:
        nonlocal count
        count += 1
        fence()
        if count == number:
            act()

    monkeypatch.setattr(module, "fence", fenced)


def refilled(slots: Slots, chunk: int, by: int) -> None:
    """What another process does that fills the slot of `chunk` with the rows of chunk `by`."""
    way = slots._chunks[0].tolist().index(chunk + 1)
    slots._chunks[0, way] = 0
    slots._fillings[0, way] += 1
    slots._data[0, way] = np.arange(by * ROWS, (by + 1) * ROWS).reshape(-1, 1)
    slots._chunks[0, way] = by + 1


@pytest.mark.parametrize("by", [7, 0], ids=["another chunk", "another chunk and back"])
def test_rows_that_were_copied_while_their_slot_was_filled_anew_are_read_again(
    few: tuple[Slots, Loaded], monkeypatch: pytest.MonkeyPatch, by: int
):
    slots, load = few
    row(slots, 0)

    def other_reader() -> None:
        refilled(slots, 0, 7)
        slots._data[0] = -5  # rows of a moment that is over
        if by == 0:
            refilled(slots, 7, 0)
            slots._data[0] = -5

    at_fence(monkeypatch, 1, other_reader)
    before = len(load.chunks)
    into = np.full((1, 2), -1)
    assert not slots._copy(0, np.array([2]), np.array([0]), into), "the slot is not what it was before the copy"
    assert len(load.chunks) == before


def test_a_slot_is_marked_as_empty_while_it_is_filled(few: tuple[Slots, Loaded]):
    slots, load = few
    row(slots, 0)
    row(slots, ROWS)
    seen: list[list[int]] = []
    unpack = load.__call__

    def watched(number: int, into: NDArray[Any]) -> int:
        seen.append(slots._chunks[0].tolist())
        return unpack(number, into)

    slots.load = watched
    row(slots, 5 * ROWS)
    assert seen == [[0, 2]], "nobody may read the slot of chunk 0 meanwhile"
    assert sorted(slots._chunks[0].tolist()) == [2, 6]


def test_who_does_not_get_the_slot_unpacks_for_itself_and_leaves_it_alone(few: tuple[Slots, Loaded]):
    slots, load = few
    with slots._memory.alone(0) as mine:
        assert mine
        assert row(slots, 3) == 3
    assert load.chunks == [0] and not slots._chunks.any()


def test_slots_that_travel_to_a_reader_process_find_the_same_memory(few: tuple[Slots, Loaded]):
    slots, _ = few
    slots.load = len  # type: ignore[assignment]
    other = pickle.loads(pickle.dumps(slots))
    slots._data[0, 0] = 7
    assert (other._data[0, 0] == 7).all()

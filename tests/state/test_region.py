"""Rectangles of tensors: what two have in common, what is left of one, and who writes what several ranks hold."""

from __future__ import annotations

import itertools

import torch

from meshrun.state.region import Box, Region, take
from meshrun.state.shards import BLOCK


def cells(box: Box) -> list[tuple[int, ...]]:
    return list(itertools.product(*(range(begin, begin + size) for begin, size in zip(*box, strict=True))))


def test_boxes_that_only_touch_have_nothing_in_common():
    box = Box((0, 0), (2, 3))
    assert box.common(Box((2, 0), (2, 3))) is None and box.common(Box((0, 3), (1, 1))) is None
    assert box.common(Box((1, 2), (5, 5))) == Box((1, 2), (1, 1))
    assert box.common(Box((5, 5), (1, 1))) is None


def test_what_is_left_of_a_box_and_what_was_taken_are_each_cell_once():
    whole = Box((1, 2, 3), (4, 5, 3))
    for inner in (Box((2, 3, 4), (2, 2, 1)), Box((1, 2, 3), (1, 5, 3)), Box((1, 6, 3), (4, 1, 2)), whole):
        found = [cell for box in whole.without(inner) for cell in cells(box)]
        assert sorted([*found, *cells(inner)]) == cells(whole)


def test_large_copies_are_shared_out_by_rows_at_their_own_place():
    rows = BLOCK // 4
    tensor = torch.arange(2.0 * rows).view(rows, 2)
    parts = [
        take([Region("w", tensor, (4 * rows, 2), (rows, 0), copy, 3)])[0] for copy in range(3)
    ]  # rows of the second quarter of a matrix, which three ranks hold
    assert [part.start for part in parts] == [(rows + rows * n // 3, 0) for n in range(3)]
    assert torch.equal(torch.cat([part.tensor for part in parts]), tensor)
    assert all((part.copy, part.copies, part.shape) == (0, 1, (4 * rows, 2)) for part in parts)


def test_each_small_copy_is_written_by_one_rank_and_not_always_the_same():
    names = [f"block.{n}.bias" for n in range(30)]
    writers = {
        name: [copy for copy in range(3) if take([Region.whole(name, torch.ones(4), copy, 3)])] for name in names
    }
    assert all(len(each) == 1 for each in writers.values())
    assert {each[0] for each in writers.values()} == {0, 1, 2}


def test_what_one_rank_holds_alone_is_its_own_and_nothing_is_left_out():
    alone, empty = Region.whole("a", torch.ones(2)), Region.whole("b", torch.ones(0, 3))
    assert take([alone, empty]) == [alone]

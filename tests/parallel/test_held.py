"""Which part of a parameter a rank holds: where it begins fits what is cut for it, and all parts are the whole."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from meshrun.parallel.held import Held, held_by
from meshrun.parallel.pp import Whole


@pytest.mark.parametrize("split_dim", [None, 0, 1])
@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("sharded", [1, 2, 4])
def test_the_parts_of_all_ranks_are_the_whole_and_begin_where_they_say(
    split_dim: int | None, blocks: int, sharded: int
):
    rows, columns, tp = 5, 7, 3
    whole = torch.arange(blocks * rows * columns).view(blocks * rows, columns)
    parameter = nn.Parameter(torch.zeros(rows, columns))
    seen = torch.zeros_like(whole)
    splits = range(tp) if split_dim is not None else range(1)
    for block, split, shard in itertools.product(range(blocks), splits, range(sharded)):
        held = Held("weight", parameter, (block, blocks), split_dim)
        places = (split, tp), (shard, sharded)
        part = held.cut(whole, *places)
        shape, (row, column) = held.where(*places)
        assert shape == whole.shape and row <= shape[0] and column <= shape[1]
        area = slice(row, row + part.shape[0]), slice(column, column + part.shape[1])
        assert torch.equal(whole[area], part)
        seen[area] += 1
    assert torch.equal(seen, torch.ones_like(seen)), "every number is held once"


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight


def test_a_weight_in_two_places_goes_by_its_first_name_also_where_only_the_second_is_held():
    stage = Tied()
    del stage.embed
    (held,) = held_by(Tied(), {1: Whole(stage)})
    assert held.name == "embed.weight"

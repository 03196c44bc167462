"""Which dimension is the batch: only one that grows as the number of samples does."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from meshrun.data import seeding
from meshrun.parallel.batch_dim import _first_sample, place_of
from meshrun.parallel.moment import Place


@pytest.mark.parametrize(
    ("few", "more", "place"),
    [
        ((3, 4), (5, 4), Place(0, (1, 4))),
        ((7, 3, 2), (7, 5, 2), Place(1, (7, 1, 2))),
        ((12, 9), (20, 9), Place(0, (4, 9))),
        ((4, 4), (4, 4), Place(None, (4, 4))),
    ],
)
def test_the_batch_is_found_with_the_entries_of_a_sample(few: tuple[int, ...], more: tuple[int, ...], place: Place):
    assert place_of(few, more) == place


@pytest.mark.parametrize(("few", "more"), [((3, 3), (5, 5)), ((4,), (6,)), ((3,), (9,)), ((6,), (5,))])
def test_what_grows_in_another_way_is_no_batch(few: tuple[int, ...], more: tuple[int, ...]):
    with pytest.raises(ValueError, match="for 3 and 5 samples"):
        place_of(few, more)


class Draws:
    def __getitem__(self, index: int) -> float:
        return random.random() + np.random.rand() + torch.rand(()).item() + index


def test_a_look_at_the_first_sample_leaves_all_generators_as_they_were():
    before = seeding.snapshot()
    _first_sample(SimpleNamespace(train=Draws()))  # type: ignore[arg-type]
    assert before.same(seeding.snapshot())

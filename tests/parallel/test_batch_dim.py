"""Which dimension is the batch: only one that grows as the number of samples does."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshrun.data import seeding
from meshrun.parallel.batch_dim import BatchFinder, _first_sample, place_of
from meshrun.parallel.functional import key_functions
from meshrun.parallel.moment import Moment, Place


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


class Halves(nn.Module):
    """Time first; a dropout of its own is called for many samples only, where it is asked to."""

    def __init__(self, choosy: bool) -> None:
        super().__init__()
        self.few, self.many = Dropped(), Dropped()
        self.choosy = choosy

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        turned = x.transpose(0, 1)
        turned = self.many(turned) if self.choosy and len(x) > 3 else self.few(turned)
        return turned, x.sum()


class Dropped(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.5, self.training)


def finder(model: nn.Module) -> BatchFinder:
    key_functions(model.eval(), Moment(0))
    experiment: Any = SimpleNamespace(train=[(torch.zeros(7, 2), torch.zeros(()))], collate=None)
    return BatchFinder.of(model, experiment)


def test_the_batch_is_found_in_each_call_of_a_dropout_and_in_the_outputs():
    found = finder(Halves(choosy=False)).find()
    assert found is not None
    assert found.calls == {"few": [Place(1, (7, 1, 2))]}
    assert found.outputs == [1, None]


def test_a_model_that_calls_other_modules_for_more_samples_is_not_taken_for_one_that_does_not():
    looking = finder(Halves(choosy=True))
    assert looking.find() is None
    assert "other modules for another number of samples" in (looking.failure or "")


def test_a_model_is_traced_once(monkeypatch: pytest.MonkeyPatch):
    looking = finder(Halves(choosy=False))
    found = looking.find()
    monkeypatch.setattr(BatchFinder, "_traced", lambda _: pytest.fail("it was traced again"))
    assert looking.find() is found

"""What a model on a mesh keeps between steps, without ranks; `tests/train/test_axes.py` trains on them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from meshrun.parallel.meshed import Meshed


@pytest.fixture
def placed() -> Any:
    """A model of which two stages of this rank hold one weight, which an update has changed on the first."""
    found: Any = Meshed.__new__(Meshed)
    found.first, found.copy = (SimpleNamespace(local=torch.full((2,), value)) for value in (5.0, 1.0))
    found._copied, found._counts_here = [(found.copy, found.first)], True
    found._unused, found._again = None, set()
    found.here = SimpleNamespace(layout=SimpleNamespace(cp=1))
    return found


def test_an_evaluation_sees_the_last_update_on_all_stages_of_a_rank(placed: Any):
    placed.pipeline = SimpleNamespace(score=lambda *_: placed.copy.local.clone())
    assert placed.scores([], {}).tolist() == [5.0, 5.0]
    placed._counts_here = False
    assert placed.scores([], {}).tolist() == [0.0, 0.0], "ranks that have the same outputs count once"


def test_what_steps_have_settled_is_taken_up_by_a_run_that_goes_on(placed: Any):
    assert placed.habits() == {} and not placed.take_up({}) and placed.habits() == {}
    settled = {"unused": ["b", "c"], "again": ["a"]}
    assert not placed.take_up(settled) and placed.habits() == settled

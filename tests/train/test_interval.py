"""How often state is saved."""

from __future__ import annotations

import math

import pytest

from meshrun import UserError
from meshrun.train.interval import FIRST, LONGEST, SHORTEST, Every, failures_apart, parse


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("auto", Every()),
        ("none", Every(never=True)),
        ("500", Every(steps=500)),
        ("10min", Every(given=600.0)),
        ("90s", Every(given=90.0)),
        ("1.5h", Every(given=5400.0)),
        ("2 m", Every(given=120.0)),
    ],
)
def test_an_interval_is_steps_or_a_time(text: str, wanted: Every):
    assert parse(text) == wanted


@pytest.mark.parametrize("text", ["", "0", "often", "-5", "10 parsecs", "1.5", "0min"])
def test_anything_else_is_refused_with_what_would_be_valid(text: str):
    with pytest.raises(UserError, match=r"checkpoint is .*; it must be auto, none, a number of steps"):
        parse(text)


def test_auto_is_young_and_dalys_root_within_bounds():
    day = 86400.0
    assert Every().seconds(cost=0.5, mtbf=day) == pytest.approx(math.sqrt(2 * 0.5 * day))
    assert Every().seconds(cost=None, mtbf=day) == FIRST, "the first one, whose cost is not known"
    assert Every().seconds(cost=100.0, mtbf=365 * day) == LONGEST
    assert Every().seconds(cost=1e-9, mtbf=1.0) == SHORTEST
    assert Every(given=7.0).seconds(cost=100.0, mtbf=day) == 7.0


def test_failures_are_expected_of_every_rank_and_seen_ones_count_where_they_are_more():
    assert failures_apart(hours=50_000, ranks=1000, failures=0, seconds=10.0) == 50 * 3600
    assert failures_apart(hours=50_000, ranks=1000, failures=2, seconds=3600.0) == 1800
    assert failures_apart(hours=1, ranks=1, failures=1, seconds=1e9) == 3600

"""What tests compare with: it must see a NaN, an infinity and a missing value wherever they stand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.compare import difference, differences, largest
from tests.train.small import Course
from tests.train.small import difference as of_courses
from tests.train.whole import Result, weight_difference
from tests.train.whole import differences as of_results

BAD = [math.nan, math.inf, -math.inf]


@pytest.mark.parametrize("bad", [math.nan])
@pytest.mark.parametrize("place", range(3))
def test_a_nan_is_the_largest_wherever_it_stands(bad: float, place: int):
    values = [0.1, 0.2, 0.3]
    values[place] = bad
    assert math.isnan(largest(values)) and not largest(values) < 1e9


def test_the_largest_of_nothing_is_no_answer():
    with pytest.raises(ValueError):
        largest([])


def changed(place: int, bad: float) -> dict[str, Any]:
    numbers = {"losses": [1.0, 2.0], "weights": {"a": torch.ones(3), "b": torch.ones(2, 2)}}
    if place < 2:
        numbers["losses"][place] = bad
    elif place < 5:
        numbers["weights"]["a"][place - 2] = bad
    else:
        numbers["weights"]["b"].view(-1)[place - 5] = bad
    return numbers


@pytest.mark.parametrize("bad", [*BAD, 1.1])
@pytest.mark.parametrize("place", range(9))
def test_one_bad_number_is_a_difference_wherever_it_stands(place: int, bad: float):
    wanted = changed(0, 1.0)
    assert difference(wanted, wanted) == 0
    assert not difference(changed(place, bad), wanted) < 0.01
    assert not difference(wanted, changed(place, bad)) < 0.01
    if not math.isfinite(bad):
        assert not difference(changed(place, bad), changed(place, bad)) < 0.01, "nothing can be said of two of them"


def test_differences_are_named():
    found = differences(changed(3, 1.5), changed(0, 1.0))
    assert {name: each for name, each in found.items() if each} == {"weights.a": 0.5}
    assert list(found) == ["losses[0]", "losses[1]", "weights.a", "weights.b"]


@pytest.mark.parametrize(
    "found", [{"a": 1.0}, {"a": 1.0, "b": 2.0, "c": 3.0}, {"a": 1.0, "c": 2.0}, {"a": 1.0, "b": [2.0]}, [1.0, 2.0]]
)
def test_what_is_missing_or_of_another_shape_is_an_error(found: Any):
    with pytest.raises(AssertionError):
        difference(found, {"a": 1.0, "b": 2.0})


def test_none_equals_only_itself():
    assert difference([None, 1.0], [None, 1.0]) == 0
    assert difference([0.0], [None]) == difference([None], [0.0]) == math.inf


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.bfloat16, torch.complex64])
def test_every_kind_of_number_is_compared(dtype: torch.dtype):
    wanted = torch.tensor([1, 1]).to(dtype)
    assert difference(wanted.clone(), wanted) == 0
    assert difference(torch.tensor([1, 0]).to(dtype), wanted) == 1


@pytest.mark.parametrize("bad", [*BAD, 1.5])
@pytest.mark.parametrize("place", ["losses", "grad_norms", "weights"])
def test_courses_of_trainings_are_compared_so(place: str, bad: float):
    def course(last: float) -> Course:
        fields: dict[str, Any] = {"losses": [1.0, 1.0], "grad_norms": [1.0, 1.0]}
        fields["weights"] = {"a": torch.ones(2), "b": torch.ones(2)}
        if place == "weights":
            fields["weights"]["b"][1] = last
        else:
            fields[place][1] = last
        return Course(**fields)

    assert of_courses(course(1.0), course(1.0)) == 0
    assert not of_courses(course(bad), course(1.0)) < 0.01


@pytest.mark.parametrize("bad", [*BAD, 1.5])
@pytest.mark.parametrize("place", ["losses", "grad_norms", "scores", "weights"])
def test_results_of_trainings_are_compared_so(place: str, bad: float):
    def result(last: float) -> Result:
        found = Result([1.0, 1.0], [1.0, 1.0], {"loss": 1.0, "count": 8, "accuracy": 1.0}, {"a": torch.ones(2)})
        found.weights["b"] = torch.ones(2)
        if place == "weights":
            found.weights["b"][1] = last
        elif place == "scores":
            found.scores["accuracy"] = last
        else:
            getattr(found, place)[1] = last
        return found

    wanted = result(1.0)
    found = [*of_results(result(bad), wanted).values(), weight_difference(result(bad), wanted)[0]]
    assert sum(not each < 0.01 for each in found) == 1
    if place == "weights":
        assert weight_difference(result(bad), wanted)[1] == "b"

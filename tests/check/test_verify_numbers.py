"""How `verify` compares numbers: what is allowed, what is a difference, and which step and weight is named."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from meshrun.check.nan_safe import exceeds, largest
from meshrun.check.probe import LARGEST, WEIGHTS, Found
from meshrun.check.verify import (
    BLOWN,
    GROSS,
    MARGIN,
    TOLERANCE,
    Allowed,
    Measured,
    allow,
    judge,
    measure,
    unequal_integers,
    weight_differences,
)
from meshrun.check.verify import _evals as evals

LIMIT = 1e-5
SAME = Measured([0.0] * 3, [0.0] * 3, [{"w": 0.0, "b": 0.0}] * 3, {"w": 0.0, "b": 0.0}, 0.0, True, True)
STRICT = Allowed([LIMIT] * 3, [LIMIT] * 3, [LIMIT] * 3, LIMIT, LIMIT)


def test_nan_is_the_largest_and_exceeds_every_limit():
    assert largest([1.0, 3.0, 2.0]) == 3.0 and largest([], default=7.0) == 7.0
    assert all(math.isnan(largest(each)) for each in ([math.nan, 1.0], [1.0, math.nan]))
    assert exceeds(math.nan, math.inf) and exceeds(1.1, 1.0) and not exceeds(1.0, 1.0) and exceeds(1.0, math.nan)


@pytest.mark.parametrize("bad", [2 * LIMIT, math.nan, math.inf])
@pytest.mark.parametrize("name", ["losses", "grad_norms"])
def test_a_series_that_parts_is_named_by_its_first_step(name: str, bad: float):
    assert judge(SAME, STRICT).ok
    verdict = judge(replace(SAME, **{name: [0.0, bad, bad]}), STRICT)
    assert not verdict.ok and verdict.first_step == 2 and verdict.first_parameter is None


@pytest.mark.parametrize("bad", [2 * LIMIT, math.nan])
def test_gradients_and_weights_that_part_are_named_by_their_parameter(bad: float):
    fine, other = {"w": 0.0, "b": 0.0}, {"w": 0.0, "b": bad}
    verdict = judge(replace(SAME, parameters=[fine, fine, other]), STRICT)
    assert (verdict.ok, verdict.first_step, verdict.first_parameter) == (False, 3, "b")
    verdict = judge(replace(SAME, weights=other), STRICT)
    assert (verdict.ok, verdict.first_step, verdict.first_parameter) == (False, None, "b")


@pytest.mark.parametrize(
    "change", [{"evals": 2 * LIMIT}, {"evals": math.nan}, {"counts_equal": False}, {"ids_equal": False}]
)
def test_evaluations_counts_and_samples_decide_too(change: dict[str, float]):
    verdict = judge(replace(SAME, **change), STRICT)
    assert (verdict.ok, verdict.first_step) == (False, None)


def test_differences_at_the_limit_are_allowed():
    at = replace(SAME, losses=[LIMIT] * 3, grad_norms=[LIMIT] * 3, weights={"w": LIMIT}, evals=LIMIT)
    assert judge(at, STRICT).ok


def test_what_a_twin_drifts_is_allowed_ten_times_from_that_step_on():
    assert allow(LIMIT, None, 3) == replace(STRICT, integers=None)
    assert allow(LIMIT, SAME, 3) == STRICT
    drift = 3 * LIMIT
    twin = replace(SAME, losses=[0.0, drift, 0.0], weights={"w": drift})
    allowed = allow(LIMIT, twin, 3)
    assert allowed.losses == pytest.approx([LIMIT, MARGIN * drift, MARGIN * drift])
    assert allowed.weight == pytest.approx(MARGIN * drift) and not allowed.depends_on_micro
    within = allow(LIMIT, replace(SAME, losses=[0.0, LIMIT / 2, 0.0]), 3)
    assert within.losses == pytest.approx([LIMIT, MARGIN * LIMIT / 2, MARGIN * LIMIT / 2])
    assert within.grad_norms == [LIMIT] * 3 and within.weight == LIMIT, "what is within the tolerance is each one's own"


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [(7.37, 7.3700004, True), (7.37, 7.38, False), (5e6, 5e6 + 1, False), (math.inf, math.nan, False), (8, 8.0, True)],
)
def test_counts_are_the_same_to_the_last_sample_and_fractions_as_far_as_they_are_added_up(
    one: float, other: float, same: bool
):
    assert evals({"val": {"loss": 1.0, "count": one}}, {"val": {"loss": 1.0, "count": other}})[1] is same


@pytest.mark.parametrize("first", [2 * LIMIT, math.nan])
def test_a_twin_that_parts_at_its_first_step_widens_nothing(first: float):
    allowed = allow(LIMIT, replace(SAME, losses=[first, 0.0, 0.0]), 3)
    assert allowed.depends_on_micro and allowed.losses == [LIMIT] * 3


def test_a_metric_of_hits_may_jump_by_one_sample_and_a_loss_by_none():
    def scores(loss: float, hits: float, count: int = 10) -> dict[str, dict[str, float]]:
        return {"val": {"loss": loss, "count": count, "accuracy": hits / count}}

    assert evals(scores(2.0, 5), scores(2.0, 6)) == (0.0, True)
    assert evals(scores(2.0, 5), scores(2.0, 7))[0] == pytest.approx(0.4)
    assert evals(scores(2.0, 5), scores(2.2, 5))[0] == pytest.approx(0.1)
    assert evals(scores(2.0, 5), scores(2.1, 5))[0] == pytest.approx(0.05), "a loss that looks like hits counts none"
    assert evals(scores(2.0, 5), scores(2.0, 5.5))[0] > 0, "half a hit is no hit that jumped"
    assert evals(scores(2.0, 5), scores(2.0, 5, 11))[1] is False
    assert evals(scores(2.0, 5), {})[1] is False
    assert math.isnan(evals(scores(2.0, 5), scores(math.nan, 5))[0])


@pytest.mark.parametrize(
    ("count", "one", "other"), [(2_000_000, 0.41234567, 0.41401234), (40, 5e-7, 9e-7)], ids=["many tokens", "small"]
)
def test_a_mean_is_not_taken_for_a_count_because_it_has_many_tokens_or_is_small(count: int, one: float, other: float):
    pair = [{"val": {"loss": 1.0, "count": count, "score": score}} for score in (one, other)]
    assert evals(*pair)[0] == pytest.approx((other - one) / one)
    hits = [{"val": {"loss": 1.0, "count": count, "score": hits / count}} for hits in (count // 3, count // 3 + 1)]
    assert evals(*hits) == (0.0, True)


def test_a_metric_or_an_evaluation_that_only_one_side_has_is_a_difference():
    both, one = {"loss": 1.0, "count": 10, "accuracy": 0.5}, {"loss": 1.0, "count": 10}
    assert evals({"val": both}, {"val": one}) == (math.inf, False)
    assert evals({"val": one}, {"val": both}) == (0.0, False)
    assert evals({"val": one}, {"val": one, "test": one}) == (0.0, False)
    assert evals({"val": one, "test": one}, {"val": one})[1] is False


ALONE = Found("dp=1", 1, 1, [10.0, 1e-3], [2.0, 4.0], [{"w": 2.0}, {"w": 4.0}], {}, 8, "ids", {}, [], [1], [], [])


def compared(folder: Path, reference: Found = ALONE, **changes: Any) -> Measured:
    return measure(reference, replace(reference, **changes), (folder, folder))


def test_losses_are_compared_relative_to_themselves_and_gradients_to_the_norm_of_all(tmp_path: Path):
    folder = written(tmp_path / "w", {"w": torch.ones(3)})
    assert compared(folder, losses=[10.0, 2e-3]).losses == pytest.approx([0.0, 1.0])
    assert compared(folder, grad_norms=[2.0, 5.0]).grad_norms == pytest.approx([0.0, 0.25])
    found = compared(folder, gradients=[{"w": 2.0, "v": 0.5}, {}]).parameters
    assert found == [{"w": 0.0, "v": 0.25}, {"w": 1.0}], "also of a parameter that has a gradient on one side only"
    tiny = replace(ALONE, gradients=[{"w": 2.0, "b": 1e-9}] * 2)
    assert compared(folder, tiny, gradients=[{"w": 2.0, "b": 2e-9}] * 2).parameters[0]["b"] == pytest.approx(5e-10)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda bad: {"losses": [10.0, bad]}, "the loss of step 2 is"),
        (lambda bad: {"grad_norms": [bad, 4.0]}, "the gradient norm of step 1 is"),
        (lambda bad: {"gradients": [{"w": 2.0}, {"w": bad}]}, "the gradient norm of w at step 2 is"),
        (lambda bad: {"evals": {"val": {"loss": 1.0, "count": 4, "hits": bad}}}, "the hits of the evaluation 'val' is"),
    ],
)
def test_what_is_no_number_is_named_on_whichever_side_it_is(tmp_path: Path, change: Any, said: str, bad: float):
    folder = written(tmp_path / "w", {"w": torch.ones(3)})
    fine = replace(ALONE, evals={"val": {"loss": 1.0, "count": 4, "hits": 0.5}})
    for sides in ((fine, replace(fine, **change(bad))), (replace(fine, **change(bad)), fine)):
        found = measure(*sides, (folder, folder))
        assert found.not_number is not None and found.not_number.startswith(said)
        assert not judge(found, replace(STRICT, losses=[1.0] * 2, grad_norms=[1.0] * 2, parameters=[1.0] * 2)).ok
    assert measure(fine, fine, (folder, folder)).not_number is None


def test_final_weights_that_are_no_numbers_are_named(tmp_path: Path):
    folders = written(tmp_path / "w", {"w": torch.ones(2)}), written(tmp_path / "n", {"w": torch.tensor([1, math.nan])})
    found = measure(ALONE, ALONE, folders)
    assert found.not_number == "the final values of w are not all numbers, here or in one process"


def test_what_a_twin_drifts_once_holds_for_all_numbers_of_later_steps_and_of_the_end():
    drift = 30 * LIMIT
    allowed = allow(LIMIT, replace(SAME, losses=[0.0, drift, 0.0]), 3)
    wide = pytest.approx([LIMIT, MARGIN * drift, MARGIN * drift])
    assert allowed.losses == wide and allowed.grad_norms == wide and allowed.parameters == wide
    assert allowed.weight == pytest.approx(MARGIN * drift) and allowed.evals == pytest.approx(MARGIN * drift)


def written(folder: Path, weights: dict[str, Tensor], peaks: dict[str, Tensor] | None = None) -> Path:
    folder.mkdir()
    save_file(weights, folder / WEIGHTS)
    save_file(peaks or {name: torch.ones_like(each) for name, each in weights.items()}, folder / LARGEST)
    return folder


def test_weights_that_are_missing_or_of_another_shape_are_infinitely_far(tmp_path: Path):
    one = written(tmp_path / "one", {"w": torch.ones(3), "v": torch.ones(2)})
    assert weight_differences(one, written(tmp_path / "same", {"w": torch.ones(3), "v": torch.ones(2)})) == {
        "w": 0.0,
        "v": 0.0,
    }
    found = weight_differences(one, written(tmp_path / "other", {"w": torch.ones(3, 1), "u": torch.ones(2)}))
    assert found == {"u": math.inf, "v": math.inf, "w": math.inf}


def test_tolerances_are_the_documented_ones():
    assert TOLERANCE == {"fp32": 1e-5, "tf32": 1e-3, "bf16": 1e-3, "float8": 1e-2}


def test_elements_driven_by_noise_are_left_out_and_those_without_gradients_are_not(tmp_path: Path):
    peaks = {"w": torch.tensor([1.0, 1e-9, 0.0, 1e-5])}
    one = written(tmp_path / "one", {"w": torch.ones(4)}, peaks)
    noisy = written(tmp_path / "noisy", {"w": torch.tensor([1.0, 5.0, 1.0, 1.0])})
    assert weight_differences(one, noisy) == {"w": 0.0}
    assert unequal_integers(one, noisy) == frozenset(), "those are fractions"
    for name, place in (("still", 2), ("slow", 3)):
        moved = torch.ones(4)
        moved[place] = 5.0
        assert weight_differences(one, written(tmp_path / name, {"w": moved}))["w"] > 1


@pytest.mark.parametrize("wrong", [math.inf, -math.inf, math.nan, 1.0])
def test_infinities_at_the_same_places_are_no_difference_and_hide_none(tmp_path: Path, wrong: float):
    mask = torch.full((3, 3), -math.inf).triu(1)
    one = written(tmp_path / "one", {"mask": mask})
    assert weight_differences(one, written(tmp_path / "same", {"mask": mask.clone()})) == {"mask": 0.0}
    for place in (0, 1) if wrong != -math.inf else (0,):  # where there is a number, and where there is an infinity
        other = mask.clone()
        other[0, place] = wrong
        assert not weight_differences(one, written(tmp_path / f"{place}", {"mask": other}))["mask"] <= 1e-2


def test_the_imaginary_part_is_compared_whichever_side_has_one(tmp_path: Path):
    real, whole = torch.ones(2), torch.tensor([1.0 + 1.0j, 1.0])
    for number, (mine, theirs) in enumerate([(whole, whole.real + 0j), (real, whole), (whole, real)]):
        folders = [tmp_path / f"{number}-{side}" for side in range(2)]
        one, other = (written(*each, {"w": real}) for each in zip(folders, [{"w": mine}, {"w": theirs}], strict=True))
        assert weight_differences(one, other)["w"] > 0.5


@pytest.mark.parametrize(
    "other",
    [
        torch.tensor([1 << 60, 2]),
        torch.tensor([(1 << 60) + 1, 2, 3]),
        torch.tensor([1.0, 2.0]),
        torch.tensor([True, False]),
    ],
)
def test_whole_numbers_are_the_same_to_the_last_digit_or_named(tmp_path: Path, other: Tensor):
    weights = {"w": torch.ones(3), "seen": torch.tensor([(1 << 60) + 1, 2]), "used": torch.tensor([True, False])}
    one = written(tmp_path / "one", weights)
    same = written(tmp_path / "same", weights)
    alone = Found("dp=1", 1, 1, [2.0], [1.0], [{}], {}, 8, "ids", {}, [], [1], [], [])
    assert measure(alone, alone, (one, same)).integers == frozenset()
    found = measure(alone, alone, (one, written(tmp_path / "other", {**weights, "seen": other})))
    allowed = allow(LIMIT, measure(alone, alone, (one, same)), 1)
    assert found.integers == {"seen"} and judge(measure(alone, alone, (one, same)), allowed).ok
    verdict = judge(found, allowed)
    assert (verdict.ok, verdict.first_step, verdict.first_parameter) == (False, None, "seen")


def test_whole_numbers_that_other_micro_batches_change_too_say_nothing_of_a_layout():
    counted = replace(SAME, integers=frozenset({"calls"}))
    for first in (0.0, 2 * LIMIT):
        allowed = allow(LIMIT, replace(counted, losses=[first, 0.0, 0.0]), 3)
        assert judge(counted, allowed).ok and not judge(replace(SAME, integers=frozenset({"seen"})), allowed).ok
    assert judge(counted, allow(LIMIT, None, 3)).ok, "nobody knows what other micro-batches would change"
    assert not judge(counted, allow(LIMIT, SAME, 3)).ok


@pytest.mark.parametrize(
    "change",
    [{"parameters": [{"w": 2 * GROSS}, {"w": 0.0}, {"w": 0.0}]}, {"not_number": "the loss of step 2 is not a number"}],
)
def test_a_twin_whose_first_gradients_part_or_that_is_not_a_number_widens_nothing(change: dict[str, Any]):
    allowed = allow(LIMIT, replace(SAME, losses=[0.0, 0.0, 3 * LIMIT], **change), 3)
    assert allowed.depends_on_micro and allowed.losses == [LIMIT] * 3 and allowed.weight == LIMIT


@pytest.mark.parametrize(("times", "blown"), [(0.5, False), (2.0, True)])
def test_a_twin_that_ends_far_away_shows_nothing(times: float, blown: bool):
    assert allow(LIMIT, replace(SAME, weights={"w": times * BLOWN * LIMIT}), 3).blown == blown


def test_a_training_on_fewer_samples_is_another_one(tmp_path: Path):
    folder = written(tmp_path / "one", {"w": torch.ones(3)})
    alone = Found("dp=1", 1, 1, [2.0], [1.0], [{}], {}, 8, "ids", {}, [], [1], [], [])
    assert measure(alone, alone, (folder, folder)).ids_equal
    for other in (replace(alone, length=7), replace(alone, ids="others")):
        assert not measure(alone, other, (folder, folder)).ids_equal

"""An update by itself: what is said of one that was recorded, and which numbers keep it from being applied."""

from __future__ import annotations

import math
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

from meshrun import Loss, UserError
from meshrun.parallel.placed import Outcome
from meshrun.train.step import Stepper, as_pair, check_loss
from meshrun.train.update import Plain

NOBODY: Any = None
DATA: Any = SimpleNamespace(step=1, ids=[0], batches=[], pieces=[], real=[])


def stepper(**changes: Any) -> Stepper:
    return Stepper(NOBODY, NOBODY, NOBODY, NOBODY, None, **changes)


def test_who_asks_to_stop_a_recorded_training_is_heard_and_the_recording_stays():
    recorded = torch.arange(5.0)
    replaying = stepper(asked=lambda: 2.0, recorder=NOBODY)
    vars(replaying)["graphed"] = lambda *_: (recorded, 1.0)
    values, factor = replaying._replayed(DATA)
    assert (values.tolist(), factor) == ([0, 1, 2, 3, 6], 1.0)
    assert recorded.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("place", range(3))
def test_an_update_whose_loss_count_or_norm_is_no_number_is_not_applied(place: int):
    for wrong in (math.nan, math.inf):
        values = [1.0, 1.0, 1.0, math.nan, 0.0]  # of this rank's own loss others know nothing
        assert stepper().accept(values)
        values[place] = wrong
        assert not stepper().accept(values)


@pytest.mark.parametrize("parts", [1, 3])
def test_a_sample_of_other_than_two_parts_is_refused(parts: int):
    with pytest.raises(UserError, match=r"a dataset must give pairs of \(inputs, targets\)"):
        as_pair((torch.ones(1),) * parts)


@pytest.mark.parametrize(
    ("total", "says"),
    [(torch.ones(1), r"a Loss whose total is \(1,\); it must be a tensor with one value"), (1.0, "total is float")],
)
def test_a_total_that_is_no_single_number_is_refused(total: Any, says: str):
    with pytest.raises(UserError, match=says):
        check_loss(Loss(total, 1), "loss")


def test_a_loss_without_a_gradient_is_refused():
    with pytest.raises(UserError, match="a Loss whose total has no gradient"):
        Stepper(NOBODY, NOBODY, NOBODY, lambda *_: Loss(torch.ones(()), 1), None)._loss(None, None)


@pytest.mark.parametrize(
    ("norm", "count", "values", "factor"),
    [
        (None, 4.0, [10, 4, 10, 1, 2], 2.0),
        (torch.tensor(7.0), 4.0, [10, 4, 14, 1, 2], 2.0),
        (None, 0.0, [10, 0, math.nan, 1, 2], math.nan),
    ],
)
def test_a_norm_is_that_of_the_mean_over_what_counts_and_of_all_ranks_where_these_know_it(
    norm: torch.Tensor | None, count: float, values: list[float], factor: float
):
    weighing = stepper()
    vars(weighing)["update"] = SimpleNamespace(gradients=lambda: [torch.tensor([3.0, 4.0])])
    outcome = Outcome(torch.tensor([1.0, 2.0]), torch.tensor([10.0, count, 2.0]), norm)
    found = weighing.weigh(outcome, 8)
    assert found == (pytest.approx(values, nan_ok=True), pytest.approx(factor, nan_ok=True))
    assert weighing.accept(found[0]) == (count > 0)  # type: ignore[arg-type]


def test_gradients_that_are_recorded_are_scaled_once():
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([3.0, 4.0])
    outcome = Outcome(torch.zeros(2), torch.tensor([10.0, 4.0, 0.0]), None)
    placed: Any = SimpleNamespace(
        shards=[SimpleNamespace(parameter=parameter)], collect=lambda: None, step=lambda *_: outcome
    )
    recording = stepper(recorder=SimpleNamespace())
    vars(recording).update(placed=placed, update=Plain(SGD([parameter]), placed, [], None))
    values, factor = recording._scaled(0, [], 8)
    assert (values[2].item(), factor, parameter.grad.tolist()) == (10.0, 1.0, [6.0, 8.0])


@pytest.mark.parametrize("looks_first", [False, True])
def test_numbers_on_a_gpu_are_looked_at_before_the_update_only_where_that_is_asked_for(looks_first: bool):
    used: list[Any] = []
    applying = stepper(looks_first=looks_first, updating=nullcontext)
    vars(applying)["update"] = update = lambda factor: used.append(factor)
    update.forget = lambda: used.append("forgotten")  # type: ignore[attr-defined]
    for norm in (1.0, math.nan):
        values = applying.apply(0, torch.tensor([1.0, 1.0, norm, 1.0, 0.0]), 0.5)
        assert isinstance(values, list) is looks_first
    assert used == ([0.5, "forgotten", "forgotten"] if looks_first else [0.5, "forgotten"] * 2)


def test_rows_that_only_fill_a_micro_batch_up_are_known_as_such():
    making = stepper()
    vars(making)["here"] = SimpleNamespace(device=torch.device("cpu"))
    pair = torch.zeros(3, 2), torch.zeros(3)
    data: Any = SimpleNamespace(step=0, batches=[pair], pieces=[[4, 7, 7]], real=[2], augmented=False)
    (piece,) = making.pieces(data)
    assert (piece.ids, piece.real) == ([4, 7, 7], 2)


def test_each_epoch_augments_in_its_own_way():
    here: Any = SimpleNamespace(device=torch.device("cpu"))
    augmenting = stepper(augment=lambda _, draws: draws.epoch, steps_per_epoch=4)
    vars(augmenting)["here"] = here
    assert [augmenting.augmented(step, None, [0]) for step in (0, 3, 4, 9)] == [0, 0, 1, 2]

"""Losses that are no numbers, and losses that jump: stopped at, skipped, or undone, the same on every mesh."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from meshrun import Experiment, Loss, RunFailed, mean_squared_error, mesh
from meshrun.data.order import Order
from meshrun.train.bad_steps import ENOUGH, WINDOW, Policy, Verdict
from meshrun.train.interval import Every
from meshrun.train.loop import Trainer
from meshrun.train.recovery import Keeping
from tests.train.small import start_on_cpu

LENGTH, BATCH, STEPS = 320, 8, 40


class Line:
    """y = sum of x, but for the samples of some steps, whose targets are all `bad`."""

    def __init__(self, steps: tuple[int, ...], bad: float) -> None:
        order = Order(LENGTH, BATCH, seed=0)
        self.spoiled = {int(number) for step in steps for number in order.batch_ids(step - 1)}
        self.inputs = torch.randn(LENGTH, 3, generator=torch.Generator().manual_seed(0))
        self.bad = bad

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        target = self.bad if index in self.spoiled else float(self.inputs[index].sum())
        return self.inputs[index], torch.tensor([target])


def experiment(*bad_steps: int, bad: float = math.nan) -> Experiment:
    return Experiment(
        model=lambda: nn.Linear(3, 1),
        train=Line(bad_steps, bad),
        loss=mean_squared_error,
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.01),
        batch=BATCH,
        steps=STEPS,
    )


def trained(experiment: Experiment, policy: Policy, folder: Path | None = None) -> tuple[Trainer, dict[str, Any], list]:
    events: list[tuple[str, dict[str, Any]]] = []
    keeping = Keeping(folder, every=Every(steps=5)) if folder is not None else None
    trainer = Trainer(
        experiment,
        mesh.start(),
        policy=policy,
        keeping=keeping,
        record=lambda kind, **fields: events.append((kind, fields)),
    )
    return trainer, trainer.train(), events


def weights(trainer: Trainer) -> list[Tensor]:
    return [each.detach().clone() for each in trainer.model.parameters()]


@pytest.fixture(autouse=True)
def leave():
    yield
    mesh.finish()
    mesh.use(mesh.Meeting())


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(map(torch.equal, one, other))


def test_a_step_that_is_skipped_leaves_no_trace_in_the_weights():
    start_on_cpu(1)
    trainer, result, events = trained(experiment(9), Policy(on_nan="skip"))
    assert result["skipped"] == [9] and math.isnan(result["losses"][8]) and math.isfinite(result["losses"][9])
    assert [fields for kind, fields in events if kind == "skipped"] == [{"step": 9, "why": "the loss is nan"}]
    assert all(map(torch.allclose, weights(trainer), by_hand_without(9)))


def by_hand_without(bad_step: int) -> list[Tensor]:
    torch.manual_seed(0)
    made, order = experiment(bad_step), Order(LENGTH, BATCH, seed=0)
    model = made.model()
    optimizer = made.optimizer(model.parameters())
    for step in range(STEPS):
        if step + 1 != bad_step:
            inputs, targets = default_collate([made.train[number] for number in order.batch_ids(step).tolist()])
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
    return [each.detach() for each in model.parameters()]


def test_going_back_is_never_having_trained_on_what_came_since_the_checkpoint(tmp_path: Path):
    start_on_cpu(1)
    trainer, result, events = trained(experiment(13), Policy(on_nan="rollback"), tmp_path)
    assert result["skipped"] == [11, 12, 13]
    assert [fields for kind, fields in events if kind == "rollback"] == [
        {"from_step": 13, "to_step": 10, "why": "the loss is nan"}
    ]
    skipping, _, _ = trained(experiment(11, 12, 13), Policy(on_nan="skip"))
    assert same(weights(trainer), weights(skipping))


def test_a_step_that_is_bad_right_after_going_back_goes_back_further(tmp_path: Path):
    start_on_cpu(1)
    _, result, events = trained(experiment(13, 14), Policy(on_nan="rollback"), tmp_path)
    assert [(fields["from_step"], fields["to_step"]) for kind, fields in events if kind == "rollback"] == [
        (13, 10),
        (14, 5),
    ]
    assert result["skipped"] == list(range(6, 15))


def test_without_a_checkpoint_to_go_back_to_the_run_stops_with_that_sentence(tmp_path: Path):
    start_on_cpu(1)
    with pytest.raises(RunFailed, match="no checkpoint of step 2 or before to go back to"):
        trained(experiment(3), Policy(on_nan="rollback"), tmp_path)


def test_where_no_state_is_kept_a_step_is_left_out_instead_of_gone_back_from():
    start_on_cpu(1)
    _, result, events = trained(experiment(3), Policy(on_nan="rollback"))
    assert result["skipped"] == [3] and "rollback" not in dict(events)


@pytest.mark.parametrize("action", ["skip", "rollback"])
def test_a_jump_of_the_loss_is_told_from_its_usual_spread(action: str, tmp_path: Path):
    start_on_cpu(1)
    _, result, events = trained(experiment(30, bad=500.0), Policy(on_spike=action), tmp_path)
    assert result["skipped"] == ([30] if action == "skip" else [26, 27, 28, 29, 30])
    assert "jumps to" in next(fields["why"] for kind, fields in events if kind in ("skipped", "rollback"))


def test_a_run_may_stop_at_a_jump():
    start_on_cpu(1)
    with pytest.raises(RunFailed, match=r"the loss jumps to .* from a median of .* at step 30"):
        trained(experiment(30, bad=500.0), Policy(on_spike="stop"))


def reference() -> list[Tensor]:
    start_on_cpu(1)
    try:
        return weights(trained(experiment(9, 20), Policy(on_nan="skip"))[0])
    finally:
        mesh.finish()
        mesh.use(mesh.Meeting())


@pytest.fixture
def alone() -> list[Tensor]:
    return reference()


@pytest.mark.ranks(2)
def test_all_ranks_skip_the_same_steps(alone: list[Tensor]):
    start_on_cpu(2)
    trainer, result, _ = trained(experiment(9, 20), Policy(on_nan="skip"))
    assert result["skipped"] == [9, 20]
    assert all(torch.allclose(one, other, rtol=1e-5) for one, other in zip(weights(trainer), alone, strict=True))


def test_verdicts():
    steady = [1.0 + 0.01 * (number % 5) for number in range(64)]
    watching = Policy(on_nan="skip", on_spike="rollback", spike=20.0)
    assert watching.judge(1.1, 1.0, steady) is None
    assert watching.judge(math.inf, 1.0, steady) == Verdict("skip", "the loss is inf")
    assert watching.judge(1.0, math.nan, steady) == Verdict("skip", "the gradient norm is nan")
    found = watching.judge(2.0, 1.0, steady)
    assert found is not None and found.action == "rollback"
    assert watching.judge(2.0, 1.0, steady[: ENOUGH - 1]) is None, "too few to tell"
    assert watching.judge(0.1, 1.0, steady) is None, "a loss that falls is welcome"
    assert watching.judge(2.0, 1.0, [*steady[:20], math.nan, *steady[20:40]]) is not None, (
        "what is no number is no measure"
    )
    assert Policy().judge(100.0, 1.0, steady) is None


def test_a_jump_is_measured_against_the_last_losses_alone():
    """Losses of 10 long ago must not hide a jump from 1 to 5."""
    lately = [1.0 + 0.01 * (number % 5) for number in range(WINDOW)]
    watching = Policy(on_spike="rollback")
    assert watching.judge(5.0, 1.0, [10.0] * (2 * WINDOW) + lately) is not None
    assert watching.judge(5.0, 1.0, [10.0] * (WINDOW - 10) + lately[:20]) is None, "most of the window is 10"


def test_a_jump_is_judged_from_enough_losses_on_and_at_the_limit_is_none():
    even = [1.0] * ENOUGH
    watching = Policy(on_spike="stop", spike=20.0)
    assert watching.judge(1.2, 1.0, even) is None, "20 times one percent of the median is allowed"
    assert watching.judge(-0.81, 1.0, [-1.0] * len(even)) is None, "of its size, where losses are below 0"
    found = watching.judge(1.21, 1.0, even)
    assert found == Verdict("stop", "the loss jumps to 1.21 from a median of 1 (--spike)")
    assert watching.judge(1.21, 1.0, even[1:]) is None
    uneven, narrow = [0.9, 1.1] * ENOUGH, Policy(on_spike="stop", spike=2.0)
    assert narrow.judge(1.29, 1.0, uneven) is None, "0.1 in the median is a deviation of 0.148"
    assert narrow.judge(1.3, 1.0, uneven) is not None


def test_numbers_are_looked_at_before_an_update_only_where_it_may_be_left_out():
    assert not Policy().looks_first
    assert not Policy(on_spike="stop").looks_first
    assert Policy(on_nan="skip").looks_first
    assert Policy(on_spike="rollback").looks_first


def test_the_loss_of_a_bad_sample_can_be_infinite_too():
    start_on_cpu(1)
    bad = Experiment(
        model=lambda: nn.Linear(3, 1),
        train=Line((4,), 1.0),
        loss=lambda outputs, targets: Loss((outputs - targets).square().sum() / (targets != 1.0).sum(), len(targets)),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        batch=BATCH,
        steps=6,
    )
    assert trained(bad, Policy(on_nan="skip"))[1]["skipped"] == [4]


def test_losses_that_are_no_numbers_raise_no_alarm_about_the_next():
    steady = [1.0 + 0.01 * (number % 5) for number in range(20)]
    watching = Policy(on_spike="stop")
    for history in ([math.nan] * 30 + steady, steady + [math.nan] * 30, [math.inf] * 30 + steady):
        assert watching.judge(1.02, 1.0, history) is None
        assert watching.judge(5.0, 1.0, history) is not None

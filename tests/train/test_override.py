"""What the command line changes in an experiment."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any

import pytest

from meshrun import UserError
from meshrun.cli.configured import override
from meshrun.config import RunConfig
from tests.train.small import small


def overridden(**options: Any):
    return override(small(100, 20, steps=9, micro=4), RunConfig("x.py", **options))


def test_nothing_given_changes_nothing():
    experiment, scale, note = overridden()
    assert (experiment.batch, experiment.steps, experiment.micro) == (20, 9, 4)
    assert (scale, note) == (1.0, "")


def test_what_is_given_wins_over_the_experiment():
    given = {"steps": 3, "micro": 2, "seed": 8, "clip": 2.0, "precision": "bf16"}
    experiment, scale, note = overridden(**given)
    assert {name: getattr(experiment, name) for name in given} == given
    assert (scale, note) == (1.0, "")


def test_options_are_applied_before_batch_and_length_are_judged():
    written = replace(small(100, 20), batch=256, steps=None, epochs=None)
    experiment, _, _ = override(written, RunConfig("x.py", batch=12, steps=3))
    assert (experiment.batch, experiment.steps) == (12, 3)
    with pytest.raises(UserError, match="batch is 256 but the training set has only 100 samples"):
        override(written, RunConfig("x.py", steps=3))


def test_a_seed_of_zero_is_given():
    assert overridden(seed=0)[0].seed == 0


def test_a_changed_batch_offers_the_linear_scaling_rule_but_does_not_apply_it():
    experiment, scale, note = overridden(batch=80)
    assert (experiment.batch, scale) == (80, 1.0)
    assert "batch 20 -> 80" in note and "multiply learning rates by 4" in note and "--scale-lr" in note


def test_scale_lr_applies_the_linear_scaling_rule():
    experiment, scale, note = overridden(batch=10, scale_lr=True)
    assert (experiment.batch, scale) == (10, 0.5)
    assert "batch 20 -> 10" in note and "times 0.5" in note


def test_scale_lr_without_a_changed_batch_scales_nothing():
    assert overridden(scale_lr=True)[1:] == (1.0, "")
    assert overridden(batch=20, scale_lr=True)[1:] == (1.0, "")


def test_epochs_given_win_over_the_experiments_steps_but_not_over_given_steps():
    experiment, _, _ = overridden(epochs=2.5)
    assert (experiment.epochs, experiment.steps) == (2.5, None)
    experiment, _, _ = overridden(epochs=2.5, steps=4)
    assert experiment.steps == 4


@pytest.mark.parametrize(
    "options, said",
    [
        ({"batch": 101}, "batch is 101 but the training set has only 100 samples"),
        ({"batch": 0}, "batch is 0"),
        ({"epochs": 0.0}, "epochs is 0.0"),
        ({"clip": -1.0}, "clip is -1.0"),
        ({"micro": 0}, "micro is 0"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], said: str):
    with pytest.raises(UserError, match=said):
        overridden(**options)


@pytest.mark.parametrize("first", [3, 10, 10**6])
def test_the_first_samples_of_an_evaluation_are_at_most_all_of_them(first: int):
    whole = small(10, 5).train
    experiment = dataclasses.replace(small(100, 20, steps=9), evals={"val": whole})
    changed, _, _ = override(experiment, RunConfig("x.py", eval_first=first))
    assert len(changed.evals["val"]) == min(first, len(whole))

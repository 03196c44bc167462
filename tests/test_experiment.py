"""What an Experiment refuses before anything is built: a sentence that names field, value and what would be valid."""

from __future__ import annotations

import dataclasses
import math
import re
import subprocess
import sys
from typing import Any

import pytest
import torch

from meshrun import Experiment, Loss, Schedule, UserError
from meshrun.experiment import Metric

GOOD: dict[str, Any] = {
    "model": lambda: None,
    "train": range(100),
    "loss": lambda outputs, targets: Loss(outputs, targets),
    "optimizer": lambda parameters: parameters,
    "batch": 10,
    "epochs": 2,
}


class Length:
    """A dataset that says so of its length."""

    def __init__(self, length: Any) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


class Endless:
    """Has samples, but no length."""

    def __getitem__(self, index: int) -> int:
        return index


class Counted:
    """Has a length, but no samples by number."""

    def __len__(self) -> int:
        return 5


def test_the_least_that_is_needed_is_enough():
    made = Experiment(**GOOD)
    assert (made.batch, made.epochs, made.steps, made.precision, made.seed) == (10, 2, None, "fp32", 0)
    assert made.evals == {} and made.metrics == {} and made.clip is made.micro is made.schedule is None


@pytest.mark.parametrize(
    "fields",
    [
        {"epochs": 0.5},
        {"epochs": None, "steps": 7},
        {"batch": 100},
        {"clip": 1},
        {"micro": 1000},
        {"precision": "bf16"},
        {"schedule": Schedule("linear")},
        {"schedule": lambda step, steps: step / steps},
        {"evals": {"val": [1]}, "metrics": {"accuracy": lambda outputs, targets: Loss(outputs, targets)}},
    ],
    ids=lambda fields: ",".join(fields),
)
def test_what_is_valid_is_kept(fields: dict[str, Any]):
    made = Experiment(**{**GOOD, **fields})
    assert {name: getattr(made, name) for name in fields} == fields


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model": None}, "Experiment(model=…) is NoneType; it must be a function"),
    ({"loss": 0.5}, "Experiment(loss=…) is 0.5 of type float; it must be a function"),
    ({"optimizer": "adam"}, "Experiment(optimizer=…) is 'adam' of type str; it must be a function"),
    ({"train": Endless()}, "train is Endless; it must be a map-style dataset with len(data) and data[i]"),
    ({"train": Counted()}, "train is Counted; it must be a map-style dataset with len(data) and data[i]"),
    ({"train": 5}, "train is 5 of type int; it must be a map-style dataset with len(data) and data[i]"),
    (
        {"train": (torch.ones(9, 2), torch.ones(9))},
        "train is a tuple of 2 tensors; make a dataset of them: TensorDataset(",
    ),
    ({"train": []}, "train has no samples; a dataset must have at least one"),
    ({"evals": {"val": iter([1])}}, "evals['val'] is list_iterator; it must be a map-style dataset with len(data) and"),
    ({"evals": {"val": []}}, "evals['val'] has no samples; a dataset must have at least one"),
    ({"evals": [1, 2]}, "evals is list; it must be a dict with a name for each"),
    ({"metrics": len}, "metrics is builtin_function_or_method; it must be a dict with a name for each"),
    (
        {"metrics": {"hits": 3}},
        "metric 'hits' must be a function of (outputs, targets), not named loss, count or skipped",
    ),
    (
        {"metrics": {"loss": len}},
        "metric 'loss' must be a function of (outputs, targets), not named loss, count or skipped",
    ),
    (
        {"metrics": {"count": len}},
        "metric 'count' must be a function of (outputs, targets), not named loss, count or skipped",
    ),
    (
        {"metrics": {"hits": lambda outputs: outputs}},
        "Experiment(metrics['hits']=…) is called as <lambda>(outputs, targets), but <lambda>(outputs) takes other arg",
    ),
    ({"metrics": {1: len}}, "metrics has the name 1; names must be texts that can be printed, and not empty"),
    ({"evals": {None: [1]}}, "evals has the name None; names must be texts that can be printed, and not empty"),
    ({"metrics": {"\x1b[31m": len}}, r"metrics has the name '\x1b[31m'; names must be texts that can be printed"),
    ({"evals": {"a\nb": [1]}}, r"evals has the name 'a\nb'; names must be texts that can be printed, and not empty"),
    ({"evals": {"val": range(1 << 62)}}, "evals['val'] has 4,611,686,018,427,387,904 samples by its __len__; they"),
    ({"evals": {"": [1]}}, "evals has the name ''; names must be texts that can be printed, and not empty"),
    ({"evals": {"val": "abc"}}, "evals['val'] is 'abc' of type str; it must be a map-style dataset with len(data) and"),
    (
        {"train": Length(-1)},
        "the length of train, of type Length, cannot be used (__len__() should return >= 0); __len__",
    ),
    (
        {"train": Length(1.5)},
        "the length of train, of type Length, cannot be used ('float' object cannot be interpreted",
    ),
    ({"train": Length(2**70)}, "the length of train, of type Length, cannot be used (cannot fit 'int' into an index-"),
    ({"stage_data": 3}, "stage_data is 3 of type int; it must be a function"),
    (
        {"tensor_plan": "x"},
        "tensor_plan is 'x' of type str; it must be a dict of parameters' names and how each is split",
    ),
    ({"tensor_plan": {1: 2}}, "tensor_plan has 1: 2; both must be texts, such as 'layers.*.wq': 'colwise'"),
    ({"batch": 0}, "batch is 0; it must be a whole number of at least 1 (--batch)"),
    ({"batch": 2.5}, "batch is 2.5; it must be a whole number of at least 1 (--batch)"),
    ({"batch": True}, "batch is True; it must be a whole number of at least 1 (--batch)"),
    ({"batch": None}, "batch is None; it must be a whole number of at least 1 (--batch)"),
    ({"train": list}, "train is the class list; it must be a dataset, such as list()"),
    ({"collate": 3}, "collate is 3 of type int; it must be a function"),
    ({"segments": [1]}, "segments is list; it must be a function"),
    ({"shuffle": True}, "shuffle is True of type bool; it must be a text: full, window, length or none (--shuffle)"),
    (
        {"after": lambda model: model},
        "Experiment(after=…) is called as <lambda>(model, folder), but <lambda>(model) takes other arguments (too many "
        "positional arguments); wrap it, such as after=lambda model, folder: <lambda>(…)",
    ),
    ({"augment": lambda inputs: inputs}, "Experiment(augment=…) is called as <lambda>(inputs, draws), but <lambda>"),
    ({"steps": 0}, "steps is 0; it must be a whole number of at least 1 (--steps)"),
    ({"steps": 1.5}, "steps is 1.5; it must be a whole number of at least 1 (--steps)"),
    ({"micro": -1}, "micro is -1; it must be a whole number of at least 1 (--micro)"),
    ({"epochs": 0}, "epochs is 0; it must be a finite number above 0 (--epochs)"),
    ({"epochs": math.nan}, "epochs is nan; it must be a finite number above 0 (--epochs)"),
    ({"epochs": math.inf}, "epochs is inf; it must be a finite number above 0 (--epochs)"),
    ({"epochs": 1e300}, "epochs is 1e+300; together they must be at most 1,000,000,000,000,000 samples (--epochs)"),
    ({"epochs": 10**400}, "epochs is 1000000"),
    ({"epochs": "3"}, "epochs is '3'; it must be a finite number above 0 (--epochs)"),
    ({"clip": 0}, "clip is 0; it must be a number above 0, or inf for none (--clip)"),
    ({"clip": -1.0}, "clip is -1.0; it must be a number above 0, or inf for none (--clip)"),
    ({"clip": "1"}, "clip is '1'; it must be a number above 0, or inf for none (--clip)"),
    ({"clip": 10**400}, "clip is 1000000"),
    ({"batch_dim": True}, "batch_dim is True; it must be 0 or 1, or be left out"),
    ({"precision": "fp16"}, "precision is 'fp16'; it must be one of fp32, tf32, bf16, float8 (--precision)"),
    ({"schedule": "cosine"}, "schedule is 'cosine' of type str; it must be a Schedule, such as Schedule("),
    (
        {"schedule": torch.optim.lr_scheduler.CosineAnnealingLR},
        'schedule is the class CosineAnnealingLR; it must be a Schedule, such as Schedule("cosine", warmup=100), or a '
        "function of (step, steps)",
    ),
    (
        {"schedule": lambda step: step},
        "Experiment(schedule=…) is called as <lambda>(step, steps), but <lambda>(step) takes other arguments (too many "
        "positional arguments); wrap it, such as schedule=lambda step, steps: <lambda>(…)",
    ),
    (
        {"model": torch.nn.Linear(2, 2)},
        "Experiment(model=…) is a Linear that is built already; it must be a function that builds it, such as "
        "model=lambda: Linear(…)",
    ),
    (
        {"model": torch.nn.Linear},
        "Experiment(model=…) is called as Linear(), but Linear(in_features: int, out_features: int, ",
    ),
    ({"optimizer": torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])}, "Experiment(optimizer=…) is SGD; it must be"),
    (
        {"optimizer": torch.optim.lr_scheduler.StepLR},
        "Experiment(optimizer=…) is called as StepLR(parameters), but StepLR(optimizer: ",
    ),
    ({"loss": torch.nn.CrossEntropyLoss}, "loss is the class CrossEntropyLoss; it must be a function of (outputs, tar"),
    ({"metrics": {"hits": torch.nn.L1Loss}}, "metrics['hits'] is the class L1Loss; it must be a function of (outputs"),
    ({"seed": True}, "seed is True; it must be a whole number of at most 64 bits (--seed)"),
    ({"seed": 1 << 63}, "seed is 9223372036854775808; it must be a whole number of at most 64 bits (--seed)"),
    ({"seed": -(1 << 63) - 1}, "seed is -9223372036854775809; it must be a whole number of at most 64 bits (--seed)"),
    ({"steps": 10**30}, "steps is 1,000,000,000,000,000,000,000,000,000,000; it must be at most "),
    ({"epochs": True}, "epochs is True; it must be a finite number above 0 (--epochs)"),
    ({"metrics": {"skipped": len}}, "metric 'skipped' must be a function of (outputs, "),
    (
        {"loss": lambda outputs: outputs},
        "Experiment(loss=…) is called as <lambda>(outputs, targets), but <lambda>(outputs)",
    ),
]


@pytest.mark.parametrize(
    "fields, said",
    [
        ({"batch": 101}, "batch is 101 but the training set has only 100 samples; it may be at most that (--batch)"),
        ({"epochs": None}, "Experiment has neither epochs nor steps; give one of them, or --steps"),
    ],
)
def test_a_length_that_options_may_mend_is_refused_when_the_training_begins(fields: dict[str, Any], said: str):
    made = Experiment(**{**GOOD, **fields})
    dataclasses.replace(made, batch=10, steps=5).refuse_impossible_length()
    with pytest.raises(UserError, match=re.escape(said)):
        made.refuse_impossible_length()


@pytest.mark.parametrize("fields, said", REFUSED, ids=[",".join(fields) for fields, _ in REFUSED])
def test_what_cannot_be_is_refused_in_a_sentence(fields: dict[str, Any], said: str):
    with pytest.raises(UserError) as caught:
        Experiment(**{**GOOD, **fields})
    assert str(caught.value).startswith(said)
    assert "\n" not in str(caught.value)


def test_describing_a_training_loads_no_torch():
    code = "import sys, meshrun; meshrun.Experiment, meshrun.Loss, meshrun.Schedule; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_a_clip_of_infinity_is_none():
    assert Experiment(**{**GOOD, "clip": float("inf")}).clip is None


class Labelled(list[int]):
    """A dataset whose labels stand for these classes."""

    def __init__(self, *classes: str) -> None:
        super().__init__(range(20))
        self.classes = list(classes)


def test_an_evaluation_whose_labels_mean_other_classes_is_refused():
    fields = {**GOOD, "train": Labelled("cat", "dog")}
    Experiment(**{**fields, "evals": {"val": Labelled("cat", "dog")}})
    for other in (Labelled("dog", "cat"), Labelled("cat")):
        with pytest.raises(UserError, match="so that their numbers mean others"):
            Experiment(**{**fields, "evals": {"val": other}})


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ((3, math.exp), "of of a Metric is 3 of type int; it must be a function"),
        ((max, 3), "then of a Metric is 3 of type int; it must be a function"),
        ((max, lambda: 1), r"Metric\(then=…\) is called as <lambda>\(mean\), but <lambda>\(\) takes other arguments"),
    ],
)
def test_a_metric_that_cannot_be_computed_is_refused(parts: tuple[Any, Any], said: str):
    with pytest.raises(UserError, match=said):
        Metric(*parts)

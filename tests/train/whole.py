"""Whole trainings of the programs in `tests/programs`, and the same ones in a single process to hold them against.

wanted = by_one_process("gpt2")              # in the test's own process; it travels to the ranks
mesh.use(mesh.Meeting(layout="fsdp=2", device="cpu"))
assert_same(trained(program("gpt2")), wanted)
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from meshrun import Experiment, mesh
from meshrun.parallel.how import How
from meshrun.train.loop import Trainer
from tests import compare
from tests.programs import bert, encoder, gpt2, hf_llama, small_llama, t5
from tests.train.small import start_on_cpu

STEPS = 3
TOLERANCE = 1e-5
PROGRAMS = {
    "small_llama": small_llama.experiment,
    "tied_llama": functools.partial(small_llama.experiment, tied=True),
    "encoder": encoder.experiment,
    "gpt2": gpt2.experiment,
    "hf_llama": hf_llama.experiment,
    "t5": t5.experiment,
    "bert": bert.experiment,
}


@dataclass
class Result:
    """What a training went through, and where it came to."""

    losses: list[float]
    grad_norms: list[float]
    scores: dict[str, float]
    weights: dict[str, Tensor]


def trained(experiment: Experiment, how: How | None = None, **options: Any) -> Result:
    """On the layout that was asked for, with options of the trainer; the weights are on rank 0."""
    trainer = Trainer(experiment, mesh.start(), how=how, **options)
    result = trainer.train()
    weights = {name: each.clone() for name, each in trainer.placed.weights()}
    return Result(result["losses"], result["grad_norms"], result["eval"]["val"], weights)


def program(name: str, steps: int = STEPS, **changes: Any) -> Experiment:
    return replace(PROGRAMS[name](), steps=steps, **changes)


@functools.cache
def by_one_process(name: str, steps: int = STEPS) -> Result:
    """The training that all others are held against, made once."""
    start_on_cpu(1)
    try:
        experiment = program(name, steps)
        result = trained(experiment)
    finally:
        mesh.finish()
        mesh.use(mesh.Meeting())
    assert experiment.clip is not None and max(result.grad_norms) > experiment.clip, "the clipping must be seen"
    return result


def differences(found: Result, wanted: Result) -> dict[str, float]:
    """The largest relative difference of each kind."""
    assert found.scores["count"] == wanted.scores["count"]
    return {
        "losses": compare.difference(found.losses, wanted.losses),
        "grad_norms": compare.difference(found.grad_norms, wanted.grad_norms),
        "evaluation": compare.difference(found.scores, wanted.scores),
    }


def weight_difference(found: Result, wanted: Result) -> tuple[float, str]:
    """The largest one, relative to the largest weight of its tensor, and whose it is.

    The bias of attention's keys has no effect: it is nothing but rounding, which is no measure.
    """
    found_by_name = compare.differences(found.weights, wanted.weights, least=1e-2)
    worst = compare.largest(found_by_name.values())
    return worst, next(name for name, each in found_by_name.items() if math.isnan(each) or each == worst)


def assert_same(found: Result, wanted: Result, tolerance: float = TOLERANCE) -> None:
    """On every rank; the weights on rank 0, where they are."""
    far = {kind: each for kind, each in differences(found, wanted).items() if not each <= tolerance}
    assert not far, f"{far}\n{found.losses}\n{wanted.losses}\n{found.grad_norms}\n{wanted.grad_norms}"
    if mesh.start().rank == 0:
        difference, name = weight_difference(found, wanted)
        assert difference <= tolerance, f"{name} differs by {difference}"

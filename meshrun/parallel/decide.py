"""What is left to us of how a step is computed, decided for one model on one mesh.

    found = ways(experiment, here, how, model)           # before axes are applied
    placed.chosen = chosen(found, cudnn=True)            # for the run's record: what was decided, and why

What one part alone decides is in that part: `compiled.py` whether code is compiled, `choose.py` what is computed twice.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from meshrun.experiment import Experiment
from meshrun.kernels import products
from meshrun.mesh import Here
from meshrun.parallel import choose, compiled
from meshrun.parallel.choose import Ways
from meshrun.parallel.how import How


def ways(experiment: Experiment, here: Here, how: How, model: nn.Module) -> Ways:
    """How this model's segments compute here."""
    parameters = sum(each.numel() for each in model.parameters())
    steps = compiled.steps_of(experiment)
    samples = steps * experiment.batch
    choice = compiled.chosen(how.compile, here.layout, here.device, parameters, steps)
    if how.compile is None and choice.compile:
        choice = compiled.if_much(choice, parameters, samples)
    if choice.compile:
        products.time_them(compiled.is_long(parameters, samples / here.size))
    found = choose.ways(choice, how.recompute, here.device, model)
    # Few samples are done before cuDNN has tried its kernels, of which those that round are many. And where a batch is
    # no larger than the weights, to turn these around for each step costs more than such kernels save.
    much = compiled.is_much(parameters, samples)
    if found.channels_last:
        torch.backends.cudnn.benchmark = much or experiment.precision == "fp32"
    return replace(
        found,
        # Convolutions that round nothing have their kernels for channels that come first.
        channels_last=found.channels_last and much and experiment.precision != "fp32",
        # Their blocks differ in width, so there is no code to share, and what is between two of them can be fused. With
        # other ranks, gradients must come one after the other, to be added up meanwhile.
        whole=choice.compile and here.size == 1 and compiled.convolves(model),
    )


def chosen(found: Ways, cudnn: bool) -> dict[str, Any]:
    """What the run's record says of it."""
    return {
        "compile": found.compile.compile,
        "compile_why": found.compile.why,
        "recompute": "auto" if found.auto and found.twice is not None else found.twice.level if found.twice else "none",
        "channels_last": found.channels_last,
        "attention": "cudnn" if cudnn else "torch",
    }

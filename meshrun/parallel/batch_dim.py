"""Which dimension of a dropout's input is the batch: found by sending two batches of other sizes through the model.

    finder = BatchFinder(model, experiment)          # a copy of the model without values, made before axes change it
    found = finder.find()                            # once; `finder.failure` says why nothing could be found
    found.calls["blocks.0.dropout"]                  # [Place(dim=1, shape=(32, 1, 64))]: time first, one entry a sample
    found.outputs                                    # [1]: the dimension of each tensor among the model's outputs

The sizes of tensors alone cannot tell a batch of 32 samples from 32 tokens. So the model's own code is run on fake
tensors, which have shapes and no values, with 3 and with 5 copies of the first sample: the dimension that grows from a
multiple of 3 to that multiple of 5 is the batch.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.data import default_collate

from meshrun.experiment import Experiment
from meshrun.parallel.functional import Seen, recording
from meshrun.parallel.moment import Place
from meshrun.parallel.placed import call

SIZES = (3, 5)
"""Of the two batches: neither a multiple of the other, and more than one sample, for BatchNorm."""


@dataclass(frozen=True)
class BatchDims:
    calls: dict[str, list[Place]]
    """By the name of the module, in the order of its calls."""
    outputs: list[int | None]
    """The batch dimension of each tensor among the model's outputs."""


@dataclass
class BatchFinder:
    """Traces a model once, when it is first asked."""

    model: nn.Module | None
    experiment: Experiment
    failure: str | None = None
    """Why the model could not be traced."""
    _found: BatchDims | None = field(default=None, init=False)
    _tried: bool = field(default=False, init=False)

    @classmethod
    def of(cls, model: nn.Module, experiment: Experiment) -> BatchFinder:
        """Of a model that axes will change: a copy of it is made that has no values."""
        try:
            return cls(_without_values(model), experiment)
        except Exception as error:  # whatever a module of the user's thinks of being copied
            return cls(None, experiment, f"it cannot be copied ({_told(error)})")

    def find(self) -> BatchDims | None:
        if not self._tried:
            self._tried = True
            try:
                self._found = self._traced()
            except Exception as error:  # the user's code may do anything with values that are not there
                self.failure = self.failure or f"it cannot be run without values ({_told(error)})"
            self.model = None
        return self._found

    def _traced(self) -> BatchDims | None:
        if self.model is None:
            return None
        sample = _first_sample(self.experiment)
        batches = [(self.experiment.collate or default_collate)([sample] * size)[0] for size in SIZES]
        runs: list[tuple[Seen, list[tuple[int, ...]]]] = []
        with _fake():
            self.model.to_empty(device="cpu")
            for inputs in batches:
                seen: Seen = []
                with recording(self.model, seen):
                    outputs = call(self.model, inputs)
                runs.append((seen, [tuple(each.shape) for each in tree_leaves(outputs) if isinstance(each, Tensor)]))
        (few, few_outputs), (more, more_outputs) = runs
        if [name for name, _ in few] != [name for name, _ in more]:
            raise ValueError("it calls other modules for another number of samples")
        calls: dict[str, list[Place]] = {}
        for (name, shape), (_, larger) in zip(few, more, strict=True):
            calls.setdefault(name, []).append(place_of(shape, larger))
        return BatchDims(calls, [place_of(*each).dim for each in zip(few_outputs, more_outputs, strict=True)])


def _first_sample(experiment: Experiment) -> Any:
    """What it draws leaves the program's generators as they are."""
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        return experiment.train[0]
    finally:
        torch.set_rng_state(before[0])
        random.setstate(before[1])
        np.random.set_state(before[2])


def place_of(shape: tuple[int, ...], larger: tuple[int, ...]) -> Place:
    """Where the batch is, from the shapes for both of `SIZES`."""
    few, more = SIZES
    grown = [dim for dim, (a, b) in enumerate(zip(shape, larger, strict=True)) if a != b]
    if not grown:
        return Place(None, shape)
    (dim, *others) = grown
    if others or shape[dim] % few or shape[dim] // few * more != larger[dim]:
        raise ValueError(f"for {few} and {more} samples it computes with tensors of {shape} and {larger}")
    return Place(dim, (*shape[:dim], shape[dim] // few, *shape[dim + 1 :]))


def _without_values(model: nn.Module) -> nn.Module:
    kept: dict[int, Any] = {}
    for parameter in model.parameters():
        kept[id(parameter)] = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
    for buffer in model.buffers():
        kept[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(model, kept).train()


@contextmanager
def _fake() -> Iterator[None]:
    """Inside, tensors have shapes and no values, and nothing that is going on around it sees what is computed."""
    from torch._subclasses.fake_tensor import FakeTensorMode  # slow to import

    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad(), fake:
        yield


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"

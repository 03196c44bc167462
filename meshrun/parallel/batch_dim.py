"""Which dimension of a dropout's input is the batch: found by sending two batches of other sizes through the model.

    finder = BatchFinder(model, experiment)          # a copy of the model without values, made before axes change it
    found = finder.find()                            # once; `finder.failure` says why nothing could be found
    found.calls["blocks.0.dropout"]                  # [Place(dim=1, shape=(32, 1, 64))]: time first, one entry a sample
    found.outputs, found.targets                     # [Place(dim=1, …)]: of each tensor among outputs, and targets

The sizes of tensors alone cannot tell a batch of 32 samples from 32 tokens. So the model's own code is run on fake
tensors, which have shapes and no values, with 3 and with 5 copies of the first sample: the dimension that grows from a
multiple of 3 to that multiple of 5 is the batch.

Where a sample owns several entries of it, shapes do not say in which order: (batch * time), (time * batch), two views
of the batch one after the other. So such a model, if it is not large, is also run with values, which may be any, on
two batches that differ in one sample: the entries that differ are that sample's.
"""

from __future__ import annotations

import contextlib
import logging
import math
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.data import default_collate

from meshrun.experiment import Experiment, sample_of
from meshrun.parallel.copied import copied
from meshrun.parallel.functional import Seen, recording
from meshrun.parallel.moment import Place
from meshrun.parallel.placed import call

SIZES = (3, 5)
"""Of the two batches: neither a multiple of the other, and more than one sample, for BatchNorm."""
MOST_WORK = 1e10
"""Values times rows of activations, up to which a model is run with values: about a second."""
LOOKED_AT = 8
"""Samples among which one is looked for that is like the first, with other values."""


@dataclass(frozen=True)
class BatchDims:
    calls: dict[str, list[Place]]
    """By the name of the module, in the order of its calls."""
    outputs: list[Place]
    """Of each tensor among the model's outputs."""
    targets: list[Place] | None
    """Of each tensor among the targets; None where these are no tensors that grow with the batch in one dimension."""


@dataclass
class BatchFinder:
    """Traces a model once, when it is first asked."""

    model: nn.Module | None
    experiment: Experiment
    failure: str | None = None
    """Why the model could not be traced, or calls of a dropout may be missing in what was found."""
    alone: frozenset[str] = frozenset()
    """Names of modules that drop for each sample by itself."""
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
        sample = _sample(self.experiment, 0)
        model = copied(self.model)
        batches = [self._collated([sample] * size) for size in SIZES]
        runs: list[tuple[Seen, list[Tensor]]] = []
        with _fake() as guesses:
            self.model.to_empty(device="cpu")
            for inputs, _ in batches:
                seen: Seen = []
                with recording(self.model, seen):
                    runs.append((seen, _tensors(call(self.model, inputs))))
        if guesses.made:
            self.failure = "its code asks for values, which there are none of where it is traced"
        (few, few_outputs), (more, more_outputs) = runs
        if [name for name, _ in few] != [name for name, _ in more]:
            self.alone = _once_a_sample(few, more)
            raise ValueError("it calls other modules for another number of samples")
        calls: dict[str, list[Place]] = {}
        for (name, shape), (_, larger) in zip(few, more, strict=True):
            calls.setdefault(name, []).append(place_of(shape, larger))
        found = BatchDims(calls, _places(few_outputs, more_outputs), None)
        with contextlib.suppress(ValueError):
            found = replace(found, targets=_places(*(_tensors(targets) for _, targets in batches)))
        places = [place for each in (*calls.values(), found.outputs, found.targets or ()) for place in each]
        return self._ordered(model, found, few) if any(map(_has_several, places)) else found

    def _collated(self, samples: list[Any]) -> tuple[Any, Any]:
        inputs, targets = (self.experiment.collate or default_collate)(samples)
        return inputs, targets

    def _ordered(self, model: nn.Module, found: BatchDims, seen: Seen) -> BatchDims:
        """The places, with the order of a sample's entries where that was found out."""
        rows = max((math.prod(shape[:-1]) for _, shape in seen), default=1)
        if sum(each.numel() for each in model.parameters()) * rows > MOST_WORK:
            return found
        try:
            runs = self._with_values(model)
        except Exception:  # values that are none of the model's own may be too strange for its code
            return found
        if runs is None or [name for name, _ in runs[0].calls] != [name for name, _ in seen]:
            return found
        one, other = runs
        calls: dict[str, list[Place]] = {}
        for (name, few), (_, more) in zip(one.calls, other.calls, strict=True):
            place = found.calls[name][len(calls.setdefault(name, []))]
            calls[name].append(replace(place, together=together(place, few, more)))
        targets = None if found.targets is None else _in_order(found.targets, one.targets, other.targets)
        return BatchDims(calls, _in_order(found.outputs, one.outputs, other.outputs), targets)

    def _with_values(self, model: nn.Module) -> list[_Values] | None:
        """What there is for two batches that differ in the second of three samples; None without such samples."""
        first = _sample(self.experiment, 0)
        shapes = [each.shape for each in _tensors(first)]
        others = (_sample(self.experiment, i) for i in range(1, min(LOOKED_AT, len(self.experiment.train))))
        for other in others:
            if [each.shape for each in _tensors(other)] == shapes:
                break
        else:
            return None
        _fill(model)
        runs = []
        for samples in ([first, first, first], [first, other, first]):
            inputs, targets = self._collated(samples)
            seen: Seen = []
            values: list[Tensor] = []
            own = copied(model)
            with _plain(), recording(own, seen, values):
                torch.manual_seed(0)
                outputs = call(own, inputs)
            calls = [(name, each) for (name, _), each in zip(seen, values, strict=True)]
            runs.append(_Values(calls, _tensors(outputs), _tensors(targets)))
        return runs


@dataclass(frozen=True)
class _Values:
    calls: list[tuple[str, Tensor]]
    """What dropouts get, by the name of the module."""
    outputs: list[Tensor]
    targets: list[Tensor]


def _once_a_sample(few: Seen, more: Seen) -> frozenset[str]:
    """The modules whose calls grow with the number of samples."""
    counts, others = (Counter(name for name, _ in seen) for seen in (few, more))
    return frozenset(name for name in counts if counts[name] * SIZES[1] == others[name] * SIZES[0])


def _tensors(values: Any) -> list[Tensor]:
    return [each for each in tree_leaves(values) if isinstance(each, Tensor)]


def _places(few: list[Tensor], more: list[Tensor]) -> list[Place]:
    return [place_of(tuple(one.shape), tuple(other.shape)) for one, other in zip(few, more, strict=True)]


def _in_order(places: list[Place], few: list[Tensor], more: list[Tensor]) -> list[Place]:
    return [replace(place, together=together(place, *each)) for place, *each in zip(places, few, more, strict=True)]


def _has_several(place: Place) -> bool:
    """Whether a sample owns several entries of the batch's dimension."""
    return place.dim is not None and place.shape[place.dim] > 1


def together(place: Place, one: Tensor, other: Tensor) -> int | None:
    """How many entries of a sample are next to each other: None for all, and 0 where they are in no order.

    `one` and `other` are what a dropout gets for two batches of three samples that differ in the second, or outputs or
    targets of these. None also where these do not tell.
    """
    if not _has_several(place) or place.dim is None or one.shape != other.shape:
        return None
    each = place.shape[place.dim]
    if place.dim >= one.dim() or one.shape[place.dim] != SIZES[0] * each:
        return None
    differs = (one != other).movedim(place.dim, 0).reshape(one.shape[place.dim], -1).any(1)
    if differs.all() or not differs.any() or bool(one.isnan().any() or other.isnan().any()):
        return None  # samples are mixed, by attention over the batch for example
    index = torch.arange(len(differs))
    found = 0
    for number in (number for number in range(each, 0, -1) if each % number == 0):
        second = index // number % SIZES[0] == 1
        if torch.equal(second, differs):
            return None if number == each else number
        if not found and not (differs & ~second).any():
            found = number
    return None if found == each else found


def _fill(model: nn.Module) -> None:
    """Values of which the results of any two samples are others."""
    model.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1 and weight.is_floating_point():
                weight.normal_(0, weight.shape[-1] ** -0.5, generator=generator)
            else:
                weight.fill_(1)
        for buffer in model.buffers():
            counts = not (buffer.is_floating_point() or buffer.is_complex() or buffer.dtype == torch.bool)
            buffer.fill_(0 if counts else 1)
    for part in model.modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm):
            part.eval()  # in training it mixes the samples


@contextmanager
def _plain() -> Iterator[None]:
    """Inside, a model computes beside all that goes on, and the generators are put back."""
    before = random.getstate(), np.random.get_state()
    try:
        with (
            torch.random.fork_rng(devices=[]),
            _disable_current_modes(),
            torch._C.DisableTorchFunction(),
            torch.no_grad(),
        ):
            yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])


def _sample(experiment: Experiment, number: int) -> Any:
    """What it draws leaves the program's generators as they are."""
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        return sample_of(experiment.train, number)
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
    return copied(model, kept).train()


@contextmanager
def _fake() -> Iterator[_Guesses]:
    """Inside, tensors have shapes and no values, and nothing that is going on around it sees what is computed."""
    from torch._subclasses.fake_tensor import FakeTensorMode  # slow to import

    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)  # errors are told in a sentence
    fake, guesses = FakeTensorMode(allow_non_fake_inputs=True), _Guesses()
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad(), fake, guesses:
        yield guesses


class _Guesses(TorchDispatchMode):
    """Answers code that asks for a value which is not there: truth values are false, and numbers are 1.

    Both batches get the same answers, and so take the same way: Hugging Face's layer drop skips no layer.
    """

    made = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from torch._subclasses.fake_tensor import DataDependentOutputException

        try:
            return func(*args, **(kwargs or {}))
        except DataDependentOutputException:
            if func is not torch.ops.aten._local_scalar_dense.default:
                raise
            self.made = True
            return False if args[0].dtype == torch.bool else 1.0 if args[0].is_floating_point() else 1


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"

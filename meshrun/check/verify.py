"""How far two trainings of one program are apart, and whether that is more than rounding.

    measured = measure(reference, other)             # largest relative differences, step by step
    allowed = allow(1e-5, measure(reference, twin))  # what this model's own rounding comes to
    verdict = judge(measured, allowed)
    verdict.ok, verdict.first_step, verdict.first_parameter

Some models blow rounding up: maxima jump where two values are equal but for the last bit, and AdamW makes updates of
full size out of gradients that should be 0. So one process trains twice, the second time with other micro-batches,
which changes the order of summation and nothing else (the twin): no layout can be blamed for what that pair differs by.
BatchNorm over the whole batch allows no micro-batches; there the twin takes each batch from its end. A twin that ends
far away sets no bar: then nothing is judged, and the cause is searched for (`causes.why_unjudged`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from meshrun.check.nan_safe import exceeds, largest
from meshrun.check.probe import LARGEST, WEIGHTS, Found

MARGIN = 10.0
"""How many times the twin's differences a layout's may be."""
GROSS = 1e-3
"""A first step that differs by more than this was not only rounded differently."""
BLOWN = 100.0
"""Tolerances by which the twin's final weights may be apart: what moved them further was more than rounding."""
TOLERANCE = {"fp32": 1e-5, "tf32": 1e-3, "bf16": 1e-3, "float8": 1e-2}
"""Where none is given, by precision. What ranks of tp add up was rounded on each, which no twin in one process does,
and where one number is rounded otherwise, float8 makes an eighth of it."""
DRIVEN_BY_NOISE = 1e-6
"""Elements whose gradient never gets above this share of the model's largest are moved by rounding alone."""
JUMPS = 500
"""A metric that counts samples may differ by one in so many: a sample on the border falls to either side."""


@dataclass(frozen=True)
class Measured:
    """Relative differences of a training from the reference."""

    losses: list[float]
    grad_norms: list[float]
    parameters: list[dict[str, float]]
    """A step's difference of each parameter's gradient norm, as a share of the whole gradient's norm."""
    weights: dict[str, float]
    evals: float
    counts_equal: bool
    ids_equal: bool
    not_number: str | None = None
    """The first result of either training that is NaN or infinite, in a few words."""
    integers: frozenset[str] = frozenset()
    """Buffers of whole numbers or truth values that are not the same."""

    @property
    def loss(self) -> float:
        return largest(self.losses)

    @property
    def grad_norm(self) -> float:
        return largest(self.grad_norms)

    @property
    def weight(self) -> float:
        return largest(self.weights.values())


@dataclass(frozen=True)
class Allowed:
    """What a layout may differ by: at each step, and at the end."""

    losses: list[float]
    grad_norms: list[float]
    parameters: list[float]
    weight: float
    evals: float
    depends_on_micro: bool = False
    """The twin's first step already differs: this model computes something else with other micro-batches."""
    blown: bool = False
    """The twin ends so far away that layouts within what is allowed have not been shown to train the same."""
    integers: frozenset[str] | None = frozenset()
    """Buffers that differ in the twin too, as those that count forward passes do; None where there is no twin."""

    def counts(self, integers: frozenset[str]) -> list[str]:
        """Those of these buffers that must be the same."""
        return [] if self.integers is None else sorted(integers - self.integers)


@dataclass(frozen=True)
class Verdict:
    """Whether a training is the reference's, and where it leaves it if not."""

    ok: bool
    first_step: int | None
    """From 1; None if no step shows it, only the weights or the evaluation at the end."""
    first_parameter: str | None


def measure(reference: Found, other: Found, folders: tuple[Path, Path]) -> Measured:
    """`folders` hold the weights of the two."""
    evals, counts_equal = _evals(reference.evals, other.evals)
    weights = weight_differences(*folders)
    return Measured(
        losses=_relative(reference.losses, other.losses),
        grad_norms=_relative(reference.grad_norms, other.grad_norms),
        parameters=_parameters(reference, other),
        weights=weights,
        evals=evals,
        counts_equal=counts_equal,
        ids_equal=reference.ids == other.ids and reference.length == other.length,
        not_number=next(_not_numbers(reference, other, weights), None),
        integers=unequal_integers(*folders),
    )


def allow(tolerance: float, twin: Measured | None, steps: int) -> Allowed:
    """The tolerance, widened to what rounding alone does to this model."""
    depends = twin is not None and (
        exceeds(twin.losses[0], tolerance) or exceeds(_largest(twin.parameters)[0], GROSS) or bool(twin.not_number)
    )
    integers = None if twin is None else twin.integers
    if twin is None or depends:
        same = [tolerance] * steps
        return Allowed(same, same, same, tolerance, tolerance, depends, integers=integers)

    # Rounding grows from step to step: what it has once reached holds for all steps after. Where that is more than the
    # tolerance, how much of it shows in one number or another is chance, and the largest of them holds for all.
    norms = _largest(twin.parameters)
    all_three = map(max, twin.losses, twin.grad_norms, norms)
    grown = [each if each > tolerance else 0.0 for each in itertools.accumulate(all_three, max)]

    def widened(differences: list[float]) -> list[float]:
        highest = map(max, itertools.accumulate(differences, max), grown)
        return [max(tolerance, MARGIN * each) for each in highest]

    return Allowed(
        losses=widened(twin.losses),
        grad_norms=widened(twin.grad_norms),
        parameters=widened(norms),
        weight=max(tolerance, MARGIN * max(twin.weight, grown[-1])),
        evals=max(tolerance, MARGIN * max(twin.evals, grown[-1])),
        blown=exceeds(twin.weight, BLOWN * tolerance),
        integers=integers,
    )


def judge(measured: Measured, allowed: Allowed) -> Verdict:
    """The same, or where they part."""
    outside = [
        any(map(exceeds, found, limits))
        for found, limits in zip(
            zip(measured.losses, measured.grad_norms, _largest(measured.parameters), strict=True),
            zip(allowed.losses, allowed.grad_norms, allowed.parameters, strict=True),
            strict=True,
        )
    ]
    same_weights = measured.weight <= allowed.weight and not allowed.counts(measured.integers)
    same_end = same_weights and measured.evals <= allowed.evals and measured.counts_equal
    step = outside.index(True) if any(outside) else None
    return Verdict(
        ok=step is None and same_end and measured.ids_equal,
        first_step=None if step is None else step + 1,
        first_parameter=_first_parameter(measured, allowed),
    )


def _first_parameter(measured: Measured, allowed: Allowed) -> str | None:
    for step, limit in zip(measured.parameters, allowed.parameters, strict=True):
        for name, difference in step.items():
            if exceeds(difference, limit):
                return name
    apart = [name for name, difference in measured.weights.items() if exceeds(difference, allowed.weight)]
    return next(iter([*apart, *allowed.counts(measured.integers)]), None)


def _largest(steps: list[dict[str, float]]) -> list[float]:
    return [largest(step.values()) for step in steps]


def _relative(reference: list[float], other: list[float]) -> list[float]:
    # A loss that has come down to nothing has no digits left to compare.
    least = 1e-6 * max((abs(each) for each in reference if math.isfinite(each)), default=0.0) or 1.0
    return [abs(b - a) / max(abs(a), least) for a, b in zip(reference, other, strict=True)]


def _parameters(reference: Found, other: Found) -> list[dict[str, float]]:
    found = []
    for norm, mine, theirs in zip(reference.grad_norms, reference.gradients, other.gradients, strict=True):
        names = dict.fromkeys((*mine, *theirs))
        found.append({name: abs(theirs.get(name, 0.0) - mine.get(name, 0.0)) / (norm or 1.0) for name in names})
    return found


def _evals(reference: dict[str, dict[str, float]], other: dict[str, dict[str, float]]) -> tuple[float, bool]:
    """The largest relative difference of losses and metrics, and whether as many samples were counted."""
    worst, same = 0.0, reference.keys() == other.keys()
    for name, mine in reference.items():
        theirs = other.get(name, {})
        count = mine["count"]
        same = same and _same_count(count, theirs.get("count", math.nan)) and theirs.keys() == mine.keys()
        for metric, value in mine.items():
            if metric == "count":
                continue
            there = theirs.get(metric, math.inf)
            if metric != "loss" and abs(there - value) * count <= _jumps(value, there, count):
                continue
            worst = largest((worst, abs(there - value) / (abs(value) or 1.0)))
    return worst, same


def _same_count(a: float, b: float) -> bool:
    """Whether as much was counted: to the last sample, and fractions as far as fp32 adds them up."""
    return a == b or (not (float(a).is_integer() and float(b).is_integer()) and math.isclose(a, b, rel_tol=1e-6))


def _not_numbers(reference: Found, other: Found, weights: dict[str, float]) -> Iterator[str]:
    """What is NaN or infinite in either training, the steps first, each in a few words."""
    series = {"the loss": "losses", "the gradient norm": "grad_norms"}
    for step in range(min(len(reference.losses), len(other.losses))):
        for what, name in series.items():
            pair = [getattr(found, name)[step] for found in (reference, other)]
            if not all(map(math.isfinite, pair)):
                yield f"{what} of step {step + 1} is {_in_both(*pair)}"
        for name in reference.gradients[step]:
            pair = [found.gradients[step].get(name, 0.0) for found in (reference, other)]
            if not all(map(math.isfinite, pair)):
                yield f"the gradient norm of {name} at step {step + 1} is {_in_both(*pair)}"
    for name, difference in weights.items():
        if math.isnan(difference):
            yield f"the final values of {name} are not all numbers, here or in one process"
    for name, scores in reference.evals.items():
        for metric, value in scores.items():
            pair = [value, other.evals.get(name, {}).get(metric, 0.0)]
            if not all(map(math.isfinite, pair)):
                yield f"the {metric} of the evaluation {name!r} is {_in_both(*pair)}"


def _in_both(reference: float, other: float) -> str:
    if math.isfinite(reference):
        return f"{other:.6g} here and {reference:.6g} in one process"
    return f"{other:.6g} here and {reference:.6g} in one process, where it must be a number to be compared"


def _jumps(a: float, b: float, count: float) -> float:
    """How many counted samples may have fallen to the other side; none if these are no counts."""
    # Of a count the mean times the number of samples is whole but for the last bits of a double.
    hits = [each * count for each in (a, b) if math.isfinite(each)]
    counts = all(math.isclose(each, round(each), rel_tol=1e-12) for each in hits)
    return max(1.0, count / JUMPS) + 1e-6 if counts else 0.0


def weight_differences(reference: Path, other: Path) -> dict[str, float]:
    """By name, the norm of the difference over the norm; elements that only rounding has moved do not count."""
    differences: dict[str, float] = {}
    with (
        safe_open(reference / WEIGHTS, framework="pt") as mine,
        safe_open(other / WEIGHTS, framework="pt") as theirs,
        safe_open(reference / LARGEST, framework="pt") as peaks,
    ):
        driven = set(peaks.keys())
        level = DRIVEN_BY_NOISE * largest(_most(peaks.get_tensor(name)) for name in driven)
        present = set(theirs.keys())
        differences |= dict.fromkeys(sorted(present.symmetric_difference(mine.keys())), math.inf)
        for name in filter(present.__contains__, mine.keys()):
            weight = mine.get_tensor(name)
            if weight.is_floating_point() or weight.is_complex():
                counts = _counts(peaks.get_tensor(name), level) if name in driven else None
                differences[name] = _difference(weight, theirs.get_tensor(name), counts)
    return differences


def unequal_integers(reference: Path, other: Path) -> frozenset[str]:
    """Tensors of whole numbers or truth values that are in both and not the same, to the last digit."""
    with (
        safe_open(reference / WEIGHTS, framework="pt") as mine,
        safe_open(other / WEIGHTS, framework="pt") as theirs,
    ):
        names = set(mine.keys()) & set(theirs.keys())
        pairs = ((name, mine.get_tensor(name), theirs.get_tensor(name)) for name in names)
        return frozenset(
            name
            for name, one, two in pairs
            if not (one.is_floating_point() or one.is_complex())
            and (one.dtype != two.dtype or not torch.equal(one, two))
        )


def _counts(peak: Tensor, level: float) -> Tensor:
    """Without any gradient nothing moves an element, and it must be the same; with next to none, noise does."""
    return (peak == 0) | (peak > level)


def _difference(mine: Tensor, theirs: Tensor, counts: Tensor | None) -> float:
    if mine.shape != theirs.shape:
        return math.inf
    wide = torch.complex128 if mine.is_complex() or theirs.is_complex() else torch.float64
    one, two = mine.to(wide), theirs.to(wide)
    # Infinities at the same places, as in the mask of an attention, are no difference, and no size to measure by.
    apart = torch.where(one == two, 0.0, two - one)
    if counts is not None:
        apart = apart * counts
    size = torch.linalg.vector_norm(torch.where(one.isfinite(), one, 0.0)).item()
    return torch.linalg.vector_norm(apart).item() / (size or 1.0)


def _most(tensor: Tensor) -> float:
    return tensor.max().item() if tensor.numel() else 0.0

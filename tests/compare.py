"""The one way in which tests compare numbers: what is no number, missing, or of another shape never passes for equal.

assert difference(found, wanted) < 1e-6              # numbers, tensors, and lists and dicts of them
assert largest(differences) < 1e-6                   # instead of Python's max, which drops a NaN unless it comes first
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


def largest(values: Iterable[float]) -> float:
    """The largest of some numbers, of which there must be one; NaN if one of them is."""
    numbers = list(values)
    return math.nan if any(map(math.isnan, numbers)) else max(numbers)


def difference(found: Any, wanted: Any, least: float = 1e-30) -> float:
    """The largest relative one: of each tensor, relative to its largest wanted value, or `least` if that is more."""
    return largest(differences(found, wanted, least).values())


def differences(found: Any, wanted: Any, least: float = 1e-30, name: str = "") -> dict[str, float]:
    """The same of each tensor and number, by its name in the lists and dicts that hold it."""
    if isinstance(wanted, dict):
        assert isinstance(found, dict) and found.keys() == wanted.keys(), (name, found, wanted)
        pairs = [(f"{name}.{key}".lstrip("."), found[key], wanted[key]) for key in wanted]
    elif isinstance(wanted, list | tuple):
        assert isinstance(found, list | tuple) and len(found) == len(wanted), (name, found, wanted)
        pairs = [(f"{name}[{index}]", *pair) for index, pair in enumerate(zip(found, wanted, strict=True))]
    else:
        return {name: _of_tensors(found, wanted, least)}
    return {inner: each for place, *pair in pairs for inner, each in differences(*pair, least, place).items()}


def _of_tensors(found: Any, wanted: Any, least: float) -> float:
    if found is None or wanted is None:
        return 0.0 if found is wanted else math.inf
    found, wanted = torch.as_tensor(found), torch.as_tensor(wanted)
    assert found.shape == wanted.shape, (found.shape, wanted.shape)
    if not wanted.numel():
        return 0.0
    apart, size = _wide(found) - _wide(wanted), _wide(wanted).abs().max().clamp(min=least)
    return float(apart.abs().max() / size)  # of tensors, torch's max keeps a NaN


def _wide(tensor: Tensor) -> Tensor:
    return tensor.detach().to(torch.complex128 if tensor.is_complex() else torch.float64)

"""How a reader sends a batch: small tensors by value.

    sent = packed(batch)            # in the reader
    batch = unpacked(sent)          # in the rank

torch sends every tensor as shared memory, whose file is handed over in a conversation between the two processes: half
a millisecond that does not depend on the size, and more than copying a small tensor takes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

SMALL = 1 << 19
"""Bytes of a tensor up to which it is sent by value."""


@dataclass(frozen=True)
class _Value:
    """A tensor by value."""

    array: NDArray[np.generic]


def packed(batch: Any) -> Any:
    """The batch with its small tensors as values."""
    return _with(batch, _as_value)


def unpacked(batch: Any) -> Any:
    """The batch as it was before `packed`."""
    return _with(batch, lambda each: torch.from_numpy(each.array) if isinstance(each, _Value) else each)


def _as_value(each: Any) -> Any:
    plain = type(each) is Tensor and each.is_cpu and each.layout is torch.strided and not each.requires_grad
    if not plain or each.nbytes > SMALL:
        return each
    try:
        # Of its own: what is sent may be a view of something large.
        return _Value(np.array(each.numpy(), order="C"))
    except TypeError:  # a type that numpy has not
        return each


def _with(batch: Any, function: Callable[[Any], Any]) -> Any:
    """The same plain containers around other values; what is no plain one stays whole."""
    if type(batch) is dict:
        return {key: _with(value, function) for key, value in batch.items()}
    if type(batch) in (list, tuple):
        return type(batch)(_with(value, function) for value in batch)
    return function(batch)

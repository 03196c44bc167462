"""How a reader sends a batch: small tensors by value.

    sent = packed(batch)            # in the reader
    batch = unpacked(sent)          # in the rank

torch sends every tensor as shared memory, whose file is handed over in a conversation between the two processes: half
a millisecond that does not depend on the size, and more than copying a small tensor takes.
"""

from __future__ import annotations

import contextlib
import errno
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data._utils import worker

SMALL = 1 << 19
"""Bytes of a tensor up to which it is sent by value."""


_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EFBIG, errno.EMFILE, errno.ENFILE)
"""What the system says where memory is full, or a process has all that it may have (`ulimit -f`, `ulimit -n`)."""


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
    if not plain or (each.nbytes > SMALL and _is_shared(each)):
        return each
    try:
        # Of its own: what is sent may be a view of something large.
        return _Value(np.array(each.numpy(), order="C"))
    except TypeError:  # a type that numpy has not
        return each


def _is_shared(each: Tensor) -> bool:
    """Put a tensor into shared memory; False where there is no room: to send it then would fail where nobody hears."""
    try:
        each.share_memory_()
    except RuntimeError as error:
        if not is_without_room(error):
            raise
        return False
    return True


def is_without_room(error: BaseException) -> bool:
    """Whether torch has found no room in shared memory, or may not use what there is."""
    said = re.match(r"unable to .*</torch_\S*>.*\((\d+)\)", str(error)) if isinstance(error, RuntimeError) else None
    return said is not None and int(said[1]) in _NO_ROOM


@contextlib.contextmanager
def not_shared() -> Iterator[None]:
    """In a reader: torch puts samples together in shared memory wherever it believes to be one."""
    about = worker._worker_info
    worker._worker_info = None
    try:
        yield
    finally:
        worker._worker_info = about


def _with(batch: Any, function: Callable[[Any], Any]) -> Any:
    """The same plain containers around other values; what is no plain one stays whole."""
    if type(batch) is dict:
        return {key: _with(value, function) for key, value in batch.items()}
    if type(batch) in (list, tuple):
        return type(batch)(_with(value, function) for value in batch)
    return function(batch)

"""Random numbers that belong to samples, for training loops that users write themselves.

    before = compute_on(ids)          # the sharded loader says which samples the loop computes from now on
    F.dropout(x, 0.1)                 # drops by sample; so do nn.Dropout and nn.MultiheadAttention, which call it
    randn_like(x)                     # normal numbers by sample
    compute_on(before)

Each call draws one 64-bit word from torch's default generator on the CPU, and hashes it with the id of each sample and
the index of each element in its sample. After the same `torch.manual_seed` all ranks draw the same words, however many
rows each of them has, so a sample gets the numbers that it gets in one process. Ranks that were seeded differently draw
different numbers. `torch.utils.checkpoint` puts the generator back before it recomputes, and so gets the same masks.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from meshrun.parallel.dropout import SAMPLE, dropped, hashed, keeps, mixed
from meshrun.parallel.functional import PLAIN

_before: dict[str, Callable[..., Tensor]] = dict(PLAIN)
"""Functions that the ones of this module have replaced: torch's, or those of an Experiment (`key_functions`)."""
_ids: Tensor | None = None
"""The ids of the samples in the batch that the loop computes; None outside of a loop over a sharded loader."""


def compute_on(ids: Tensor | None) -> Tensor | None:
    """Draw for these samples from now on, and return those before; None leaves all random numbers to torch."""
    global _ids
    for name, function in _FUNCTIONS.items():
        if getattr(F, name) is not function:
            _before[name] = getattr(F, name)
            setattr(F, name, function)
    before, _ids = _ids, ids
    return before


def randn_like(tensor: Tensor) -> Tensor:
    """Like `torch.randn_like`, but rows belong to samples: in a loop over `shard(loader)` any number of ranks draws
    what one process draws. A tensor without a dim for the batch gets torch's own numbers.
    """
    dim = _batch_dim(tensor)
    if dim is None:
        return torch.randn_like(tensor)
    shape = tensor.transpose(0, dim).shape
    # Box-Muller: two uniform numbers, neither of them 0, make a normal one.
    first, second = ((_uniform(shape, tensor.device) + 0.5) / (1 << 32) for _ in range(2))
    normal = torch.sqrt(-2 * torch.log(first)) * torch.cos(2 * math.pi * second)
    return normal.to(tensor.dtype).view(shape).transpose(0, dim)


def _uniform(shape: torch.Size, device: torch.device) -> Tensor:
    """Whole numbers from 0 up to 2^32, as float64: (samples, rows of a sample, columns)."""
    return hashed(_words(device), *_rows_and_columns(shape, device)).double() + (1 << 31)


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    dim = _batch_dim(input) if training and 0 < p < 1 else None
    if dim is None:
        return _before["dropout"](input, p, training, inplace)
    shape = input.transpose(0, dim).shape
    kept = keeps(_words(input.device), *_rows_and_columns(shape, input.device), p)
    return dropped(input, kept.view(shape).transpose(0, dim), p)


def _channel_dropout(name: str, dims: int) -> Callable[..., Tensor]:
    """Dropout of whole channels, for inputs of (batch, channels, …) with so many dims."""

    def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        drops = training and 0 < p < 1 and input.dim() == dims
        if not drops or _batch_dim(input) != 0:
            return _before[name](input, p, training, inplace)
        channels = input.shape[:2]
        kept = keeps(_words(input.device), *_rows_and_columns(channels, input.device), p)
        return dropped(input, kept.view(*channels, *[1] * (dims - 2)), p)

    return dropout


_FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "dropout": _dropout,
    "dropout1d": _channel_dropout("dropout1d", 3),
    "dropout2d": _channel_dropout("dropout2d", 4),
    "dropout3d": _channel_dropout("dropout3d", 5),
}


def _batch_dim(tensor: Tensor) -> int | None:
    """Which dim of a tensor is the batch, 0 or 1; None where neither fits, or where nobody draws by sample.

    Dim 0 may hold several entries of each sample, such as its attention heads.
    """
    if _ids is None or tensor.dim() == 0 or torch.compiler.is_compiling():
        return None
    samples, shape = len(_ids), tensor.shape
    if shape[0] == samples:
        return 0
    several = samples > 0 and shape[0] % samples == 0
    attention = several and len(shape) == 3 and shape[1] == shape[2]  # (batch * heads, queries, keys)
    if len(shape) > 1 and shape[1] == samples and not attention:
        return 1  # (time, batch, …)
    return 0 if several else None


def _words(device: torch.device) -> Tensor:
    """A 64-bit word for each sample, different words at each call."""
    assert _ids is not None
    word = int(torch.randint(1 << 62, (), device="cpu"))
    return mixed(_ids.to(device, non_blocking=True) * SAMPLE + word)


def _rows_and_columns(shape: torch.Size, device: torch.device) -> tuple[Tensor, Tensor]:
    """Numbers for the rows (all dims but the last) and the columns (the last dim) of one sample."""
    assert _ids is not None
    columns = shape[-1] if len(shape) > 1 else 1
    rows = math.prod(shape) // max(1, len(_ids) * columns)
    return torch.arange(rows, device=device), torch.arange(columns, device=device)

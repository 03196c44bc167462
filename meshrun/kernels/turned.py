"""Transposed copies of matrices in float8, row after row in memory, as the hardware wants them for gradients.

    turned(values, shares, after)           # (R, C) -> (C, R) in float8; times `shares`, one a row, or one for all

Where Triton runs it is a kernel that reads and writes whole lines of the cache: compilers make one of it that writes a
quarter of a line at a time. `after` may be any tensor, and nothing is done with it: for a compiler that cuts a graph
into forward and backward pass, the copy then cannot be made before that tensor is there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from meshrun.kernels.here import available

FORMAT = torch.float8_e4m3fn


def turned(values: Tensor, shares: Tensor | None, after: Tensor | None) -> Tensor:
    """The transposed matrix of one in float8, or of any other with `shares`, powers of two, that make it fit."""
    found: Tensor = torch.ops.meshrun.turned(values, shares, after)
    return found


def _turned(values: Tensor, shares: Tensor | None, _: Tensor | None) -> Tensor:
    if available(values.device):
        from meshrun.kernels import _turned_triton

        return _turned_triton.turned(values.contiguous(), None if shares is None else shares.contiguous())
    if shares is not None:
        values = (values.float() * shares).to(FORMAT)
    return values.t().contiguous()


def _shape(values: Tensor, *_: Tensor | None) -> Tensor:
    return values.new_empty(values.shape[1], values.shape[0], dtype=FORMAT)


_LIBRARY = torch.library.Library("meshrun", "FRAGMENT")
# In whatever order they lie: compiled code would else make a copy for this one beside what others read.
_LIBRARY.define("turned(Tensor values, Tensor? shares, Tensor? after) -> Tensor", tags=(torch.Tag.flexible_layout,))
_LIBRARY.impl("turned", _turned, "CompositeExplicitAutograd")
torch.library.register_fake("meshrun::turned", _shape, lib=_LIBRARY)

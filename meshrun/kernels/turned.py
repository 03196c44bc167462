"""Transposed copies of float8 matrices, row after row in memory, as the hardware wants them for gradients.

    turned(values8, shares, after)           # (R, C) -> (C, R); each row times its share, where there are shares

Where Triton runs it is a kernel that reads and writes whole lines of the cache: compilers make one of it that writes a
quarter of a line at a time. `after` may be any tensor, and nothing is done with it: for a compiler that cuts a graph
into forward and backward pass, the copy then cannot be made before that tensor is there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from meshrun.kernels.here import available


def turned(values8: Tensor, shares: Tensor | None, after: Tensor | None) -> Tensor:
    """The transposed matrix. Shares (R, 1) are powers of two, at most 1."""
    found: Tensor = torch.ops.meshrun.turned(values8, shares, after)
    return found


def _turned(values8: Tensor, shares: Tensor | None, _: Tensor | None) -> Tensor:
    if available(values8.device):
        from meshrun.kernels import _turned_triton

        return _turned_triton.turned(values8.contiguous(), None if shares is None else shares.contiguous())
    if shares is not None:
        values8 = (values8.to(torch.bfloat16) * shares.to(torch.bfloat16)).to(values8.dtype)
    return values8.t().contiguous()


def _shape(values8: Tensor, *_: Tensor | None) -> Tensor:
    return values8.new_empty(values8.shape[1], values8.shape[0])


_LIBRARY = torch.library.Library("meshrun", "FRAGMENT")
_LIBRARY.define("turned(Tensor values8, Tensor? shares, Tensor? after) -> Tensor")
_LIBRARY.impl("turned", _turned, "CompositeExplicitAutograd")
torch.library.register_fake("meshrun::turned", _shape, lib=_LIBRARY)

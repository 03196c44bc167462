"""The gradient of what a maximum was taken of: each window's gradient goes back to where its largest value was.

    OPERATION(gradient, offsets, size=[112, 112], kernel=[3, 3], stride=[2, 2], padding=[1, 1])

`offsets` says where in its window that was, row by row, as compiled code keeps it from the forward pass: in 8 bits.
Channels come last in all of it. torch's compiler finds out for every number anew which windows it is in; here that is
done once for all channels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from meshrun.kernels.here import available

Sizes = Sequence[int]


def _spread(gradient: Tensor, offsets: Tensor, size: Sizes, kernel: Sizes, stride: Sizes, padding: Sizes) -> Tensor:
    """The gradient (N, C, *size) of what was pooled, of that of the maxima."""
    gradient = gradient.contiguous(memory_format=torch.channels_last)
    offsets = offsets.contiguous(memory_format=torch.channels_last)
    if available(gradient.device):
        from meshrun.kernels import _pooled_triton

        return _pooled_triton.spread(gradient, offsets, size, kernel, stride, padding)
    tops, lefts = (
        torch.arange(count, device=offsets.device) * step - pad
        for count, step, pad in zip(offsets.shape[2:], stride, padding, strict=True)
    )
    within = offsets.long()
    rows, columns = tops[:, None] + within // kernel[1], lefts + within % kernel[1]
    found = gradient.new_zeros(*gradient.shape[:2], size[0] * size[1], dtype=torch.float32)
    found.scatter_add_(2, (rows * size[1] + columns).flatten(2), gradient.float().flatten(2))
    found = found.view(*gradient.shape[:2], *size).to(gradient.dtype)
    return found.contiguous(memory_format=torch.channels_last)


def _shape(gradient: Tensor, _: Tensor, size: Sizes, *__: Sizes) -> Tensor:
    made = gradient.new_empty(gradient.shape[0], *size, gradient.shape[1])
    return made.permute(0, 3, 1, 2)


_LIBRARY = torch.library.Library("meshrun", "FRAGMENT")
_LIBRARY.define(
    "pooled_spread(Tensor gradient, Tensor offsets, int[] size, int[] kernel, int[] stride, int[] padding) -> Tensor",
    tags=(torch.Tag.flexible_layout,),
)
_LIBRARY.impl("pooled_spread", _spread, "CompositeExplicitAutograd")
torch.library.register_fake("meshrun::pooled_spread", _shape, lib=_LIBRARY)
OPERATION = torch.ops.meshrun.pooled_spread.default
"""What compilers know it by."""

"""Gradients of pooled maxima, a part of a row of pixels with all their channels at a time: see `pooled.py`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

NUMBERS = 2048
"""Pixels times channels that a program computes."""


@triton.jit
def _spread(
    gradient,
    offsets,
    out,
    rows,
    columns,
    channels,
    pooled_rows,
    pooled_columns,
    KERNEL_ROWS: tl.constexpr,
    KERNEL_COLUMNS: tl.constexpr,
    STRIDE_ROWS: tl.constexpr,
    STRIDE_COLUMNS: tl.constexpr,
    TOP: tl.constexpr,
    LEFT: tl.constexpr,
    PIXELS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    # A place of a picture's row, by 64 bits where it may be far.
    sample, row = (tl.program_id(0) // rows).to(tl.int64), tl.program_id(0) % rows
    column = tl.program_id(1) * PIXELS + tl.arange(0, PIXELS)
    channel = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)
    there = (column < columns)[:, None] & (channel < channels)[None, :]
    first = sample * pooled_rows * pooled_columns * channels
    found = tl.zeros((PIXELS, CHANNELS), dtype=tl.float32)
    # From the last window that a pixel is in to the first.
    for up in tl.static_range((KERNEL_ROWS + STRIDE_ROWS - 1) // STRIDE_ROWS):
        pooled_row = (row + TOP) // STRIDE_ROWS - up
        down = row + TOP - pooled_row * STRIDE_ROWS
        in_rows = (pooled_row >= 0) & (pooled_row < pooled_rows) & (down < KERNEL_ROWS)
        for left in tl.static_range((KERNEL_COLUMNS + STRIDE_COLUMNS - 1) // STRIDE_COLUMNS):
            pooled_column = (column + LEFT) // STRIDE_COLUMNS - left
            right = column + LEFT - pooled_column * STRIDE_COLUMNS
            in_columns = (pooled_column >= 0) & (pooled_column < pooled_columns) & (right < KERNEL_COLUMNS)
            inside = there & (in_columns & in_rows)[:, None]
            at = first + ((pooled_row * pooled_columns + pooled_column) * channels)[:, None] + channel[None, :]
            largest = tl.load(offsets + at, mask=inside, other=-1).to(tl.int32)
            value = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32)
            found += tl.where(largest == (down * KERNEL_COLUMNS + right)[:, None], value, 0.0)
    place = (sample * rows + row) * columns * channels + (column * channels)[:, None] + channel[None, :]
    tl.store(out + place, found.to(out.dtype.element_ty), mask=there)


def spread(
    gradient: Tensor,
    offsets: Tensor,
    size: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
) -> Tensor:
    """The same of tensors that have their channels last."""
    samples, channels, pooled_rows, pooled_columns = gradient.shape
    rows, columns = size
    out = gradient.new_empty(samples, rows, columns, channels)
    many = min(256, triton.next_power_of_2(channels))
    pixels = min(triton.next_power_of_2(columns), max(1, NUMBERS // many))
    grid = (samples * rows, triton.cdiv(columns, pixels), triton.cdiv(channels, many))
    with torch.cuda.device_of(gradient):
        _spread[grid](
            gradient,
            offsets,
            out,
            rows,
            columns,
            channels,
            pooled_rows,
            pooled_columns,
            *kernel,
            *stride,
            *padding,
            pixels,
            many,
        )
    return out.permute(0, 3, 1, 2)

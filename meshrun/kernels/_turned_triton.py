"""Transposed copies of 8-bit matrices, tile by tile: see `turned.py`, whose numbers these are."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 128
"""Rows and columns of a tile: what is read and what is written at a time are then whole lines of the cache."""


@triton.jit
def _turn(values, shares, out, rows, columns, PER_ROW: tl.constexpr, SHARED: tl.constexpr, TILE: tl.constexpr):
    # Far places by 64 bits, those inside of a tile by 32.
    first_row, first_column = tl.program_id(0).to(tl.int64) * TILE, tl.program_id(1).to(tl.int64) * TILE
    values += first_row * columns + first_column
    out += first_column * rows + first_row
    row, column = tl.arange(0, TILE), tl.arange(0, TILE)
    there = first_row + row < rows
    inside = there[:, None] & (first_column + column < columns)[None, :]
    tile = tl.load(values + row[:, None] * columns + column[None, :], mask=inside)
    if SHARED:
        share = tl.load(shares + (first_row + row) * PER_ROW, mask=there, other=0.0)
        tile = (tile.to(tl.float32) * share[:, None]).to(out.dtype.element_ty)
    tl.store(out + column[None, :] * rows + row[:, None], tile, mask=inside)


def turned(values: Tensor, shares: Tensor | None) -> Tensor:
    """The transposed matrix; with `shares`, times the one of each row, or of all."""
    rows, columns = values.shape
    out = torch.empty(columns, rows, dtype=torch.float8_e4m3fn, device=values.device)
    grid = (triton.cdiv(rows, TILE), triton.cdiv(columns, TILE))
    if shares is None:
        bits = values.view(torch.uint8)
        _turn[grid](bits, bits, out.view(torch.uint8), rows, columns, 0, False, TILE, num_warps=8)
    else:
        _turn[grid](values, shares, out, rows, columns, int(shares.numel() > 1), True, TILE, num_warps=8)
    return out

"""Transposed copies of float8 matrices."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from meshrun.kernels.turned import turned


def case(rows: int, columns: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    values = (100 * torch.randn(rows, columns, generator=generator)).clamp(-448, 448).to(torch.float8_e4m3fn)
    shares = torch.exp2(-torch.randint(0, 12, (rows, 1), generator=generator).float())
    return values.to(device), shares.to(device)


def compare(values: Tensor, shares: Tensor) -> None:
    found = turned(values, None, values)
    assert found.is_contiguous() and torch.equal(found.float(), values.float().t())
    wanted = (values.float() * shares).to(values.dtype).float().t()
    assert torch.equal(turned(values, shares, None).float(), wanted)
    wide = values.bfloat16() * 32
    assert torch.equal(turned(wide, torch.tensor(2.0**-5).to(values.device), None).float(), values.float().t())


def test_rows_become_columns_each_times_its_share():
    compare(*case(48, 80))


@pytest.mark.gpu
def test_the_kernel_gives_the_same():
    for rows, columns in ((16, 16), (128, 128), (144, 272), (2048, 512), (16, 8192)):
        compare(*case(rows, columns, "cuda"))


@pytest.mark.gpu
def test_the_kernel_is_one_graph_for_the_compiler():
    values, shares = case(64, 128, "cuda")
    compiled = torch.compile(lambda each, share: turned(each, share, None).t(), fullgraph=True)
    assert torch.equal(compiled(values, shares).float(), turned(values, shares, None).t().float())

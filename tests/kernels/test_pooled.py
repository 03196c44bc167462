"""Gradients of pooled maxima go where torch's own go."""

from __future__ import annotations

import pytest
import torch
import torch._inductor.inductor_prims  # which defines what is asked of torch here
import torch.nn.functional as F
from torch import Tensor

from meshrun.kernels.pooled import OPERATION

POOLS = [
    ((3, 3), (2, 2), (1, 1), (14, 14)),
    ((2, 2), (2, 2), (0, 0), (9, 12)),
    ((3, 2), (1, 2), (1, 0), (7, 9)),
    ((2, 3), (3, 4), (0, 1), (11, 13)),
]


Sizes = tuple[int, ...]


def pooled(
    device: str, dtype: torch.dtype, kernel: Sizes, stride: Sizes, padding: Sizes, size: Sizes
) -> tuple[Tensor, Tensor]:
    """What is found, and what torch finds."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 5, *size, generator=generator).to(device, dtype)
    x = x.contiguous(memory_format=torch.channels_last).requires_grad_()
    maxima = F.max_pool2d(x, kernel, stride, padding)
    gradient = torch.randn(maxima.shape, generator=generator).to(device, dtype)
    (wanted,) = torch.autograd.grad(maxima, x, gradient)
    _, offsets = torch.ops.prims._low_memory_max_pool_with_offsets(
        x.detach(), list(kernel), list(stride), list(padding), [1, 1], False
    )
    return OPERATION(gradient, offsets, size, kernel, stride, padding), wanted


@pytest.mark.parametrize(("kernel", "stride", "padding", "size"), POOLS)
def test_gradients_go_where_the_largest_values_were(kernel: Sizes, stride: Sizes, padding: Sizes, size: Sizes):
    found, wanted = pooled("cpu", torch.float32, kernel, stride, padding, size)
    torch.testing.assert_close(found, wanted)
    assert found.is_contiguous(memory_format=torch.channels_last)


def test_a_compiler_knows_the_shape_and_the_order_of_it():
    middles = torch.full((2, 3, 4, 4), 4, dtype=torch.int8)
    given = torch.randn(2, 3, 4, 4), middles, [8, 8], [3, 3], [2, 2], [1, 1]
    torch.library.opcheck(OPERATION, given, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.gpu
@pytest.mark.parametrize(("kernel", "stride", "padding", "size"), POOLS)
def test_on_a_gpu_one_kernel_does_it(kernel: Sizes, stride: Sizes, padding: Sizes, size: Sizes):
    found, wanted = pooled("cuda", torch.float32, kernel, stride, padding, size)
    torch.testing.assert_close(found, wanted)
    halves, near = pooled("cuda", torch.bfloat16, kernel, stride, padding, size)
    torch.testing.assert_close(halves, near, rtol=2e-2, atol=2e-2)

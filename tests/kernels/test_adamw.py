"""The update in one pass: torch's own numbers, a gradient that is scaled on the way, and a copy that is rounded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Adam, AdamW

from meshrun.kernels.adamw import Rule, adamw_, adamw_many_

NUMBERS: dict[str, Any] = {"lr": 3e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def by_torch(start: Tensor, gradients: list[Tensor], decoupled: bool, **how: Any) -> tuple[Tensor, Tensor, Tensor]:
    parameter = nn.Parameter(start.clone())
    numbers = {"lr": NUMBERS["lr"], "betas": (NUMBERS["beta1"], NUMBERS["beta2"]), "eps": NUMBERS["eps"]}
    optimizer = (AdamW if decoupled else Adam)([parameter], **numbers, weight_decay=NUMBERS["weight_decay"], **how)
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
    state = optimizer.state[parameter]
    return parameter.detach(), state["exp_avg"], state["exp_avg_sq"]


@pytest.mark.parametrize("decoupled", [True, False], ids=["adamw", "adam"])
def test_three_updates_are_torchs_own_bit_by_bit(decoupled: bool):
    start, gradients = drawn(37, 5), [drawn(37, 5, seed=number) for number in (1, 2, 3)]
    parameter, moments = start.clone(), (torch.zeros(37, 5), torch.zeros(37, 5))
    for number, gradient in enumerate(gradients):
        adamw_(parameter, gradient, *moments, Rule(step=number + 1, decoupled=decoupled, **NUMBERS), factor=1.0)
    wanted = by_torch(start, gradients, decoupled, foreach=False, fused=False)
    assert all(torch.equal(mine, its) for mine, its in zip((parameter, *moments), wanted, strict=True))


def test_a_gradient_in_halves_is_scaled_in_fp32_and_the_copy_is_the_rounded_parameter():
    start, gradient = drawn(64), drawn(64, seed=1).bfloat16()
    parameter, copy = start.clone(), torch.empty(64, dtype=torch.bfloat16)
    factor = torch.tensor(0.37)
    adamw_(parameter, gradient, torch.zeros(64), torch.zeros(64), Rule(step=1, **NUMBERS), copy=copy, factor=factor)
    wanted, *_ = by_torch(start, [gradient.float() * 0.37], True, foreach=False, fused=False)
    torch.testing.assert_close(parameter, wanted, rtol=1e-6, atol=1e-8)
    assert torch.equal(copy, parameter.bfloat16())


@pytest.mark.parametrize("decoupled", [True, False], ids=["adamw", "adam"])
def test_many_parameters_get_what_each_gets_alone(decoupled: bool):
    shapes = [(3,), (1 << 16,), (40, 7), (5, 2)]
    masters = [drawn(*shape, seed=number) for number, shape in enumerate(shapes)]
    gradients = [drawn(*shape, seed=9 + number) for number, shape in enumerate(shapes)]
    gradients[1], gradients[3] = gradients[1].bfloat16(), gradients[3].bfloat16()
    gradients[2] = gradients[2].t().contiguous().t()  # lies otherwise in memory than its parameter
    copies = [None, masters[1].bfloat16(), None, masters[3].bfloat16()]
    moments = [[torch.zeros(shape) for shape in shapes] for _ in range(2)]
    alone = [[each.clone() for each in of] for of in (masters, *moments)]
    for step in (1, 2):
        rule, factor = Rule(step=step, decoupled=decoupled, **NUMBERS), torch.tensor(0.5)
        adamw_many_(masters, gradients, *moments, copies, rule, factor=factor)
        for parameter, gradient, exp_avg, exp_avg_sq in zip(alone[0], gradients, *alone[1:], strict=True):
            adamw_(parameter, gradient, exp_avg, exp_avg_sq, rule, factor=factor)
    for mine, its in zip((masters, *moments), alone, strict=True):
        for one, other in zip(mine, its, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)
    assert all(
        copy is None or torch.equal(copy, master.bfloat16()) for copy, master in zip(copies, masters, strict=True)
    )


def test_a_single_copy_is_rounded_from_its_parameter():
    parameter, copy = drawn(5), torch.zeros(5, dtype=torch.bfloat16)
    moments = torch.zeros(5), torch.zeros(5)
    adamw_many_(
        [parameter], [drawn(5, seed=1)], *([each] for each in moments), [copy], Rule(step=1, **NUMBERS), factor=1.0
    )
    assert torch.equal(copy, parameter.bfloat16())


@pytest.mark.gpu
@pytest.mark.parametrize("decoupled", [True, False], ids=["adamw", "adam"])
@pytest.mark.parametrize("shape", [(1,), (1023,), (257, 1025), (64, 32, 3, 3)], ids=str)
def test_the_kernel_is_torchs_fused_update(shape: tuple[int, ...], decoupled: bool):
    start = drawn(*shape).cuda()
    if start.dim() == 4:
        start = start.contiguous(memory_format=torch.channels_last)
    gradients = [drawn(*shape, seed=number).cuda().bfloat16() for number in (1, 2, 3)]
    gradients = [torch.empty_like(start, dtype=torch.bfloat16).copy_(each) for each in gradients]
    parameter, copy = start.clone(), torch.empty_like(start, dtype=torch.bfloat16)
    moments = torch.zeros_like(start), torch.zeros_like(start)
    factor = torch.full((), 0.37, device="cuda")
    for number, gradient in enumerate(gradients):
        adamw_(
            parameter,
            gradient,
            *moments,
            Rule(step=number + 1, decoupled=decoupled, **NUMBERS),
            copy=copy,
            factor=factor,
        )
    wanted = by_torch(start, [each.float() * factor for each in gradients], decoupled, fused=True)
    for mine, its in zip((parameter, *moments), wanted, strict=True):
        torch.testing.assert_close(mine, its, rtol=2e-6, atol=1e-7)
    assert torch.equal(copy, parameter.bfloat16())


@pytest.mark.gpu
def test_the_kernel_reaches_elements_beyond_the_range_of_32_bits():
    size = (1 << 31) + 1025
    if torch.cuda.mem_get_info()[0] < size * 15:
        pytest.skip("takes 32 GB of a GPU's memory")
    tensors = [torch.zeros(size, device="cuda") for _ in range(3)]
    gradient = torch.ones(size, device="cuda", dtype=torch.bfloat16)
    adamw_(*tensors[:1], gradient, *tensors[1:], Rule(step=1, **NUMBERS), factor=1.0)
    for each in (tensors[0], tensors[1], tensors[2]):
        assert each[-1].item() == each[0].item() != 0.0

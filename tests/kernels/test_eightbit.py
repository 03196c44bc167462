"""Moments in 8 bits: near enough, never 0 where they were not, the same codes again, and trainings that end as well."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW

from meshrun.kernels.adamw import Rule, adamw_
from meshrun.kernels.eightbit import BLOCK, Eight, adamw8_

NUMBERS: dict[str, Any] = {"lr": 3e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01}


def uneven(*shape: int, seed: int = 0) -> Tensor:
    """Numbers of five decades, in no order."""
    generator = torch.Generator().manual_seed(seed)
    decades = torch.rand(*shape, generator=generator) * 5 - 5
    return torch.randn(*shape, generator=generator) * 10**decades


def test_numbers_come_back_near_what_they_were_each_by_its_own_size():
    values = uneven(37, 29)
    read = Eight.of(values, signed=True).read(values)
    assert read.shape == values.shape
    large = values.abs() > values.abs().max() / 100
    assert ((read - values).abs() / values.abs())[large].max() < 0.09
    assert (read * values >= 0).all(), "no sign changes"
    # What the update divides by is the root of the other moment.
    squares = values.square()
    roots = Eight.of(squares, signed=False).read(squares).sqrt()
    assert (roots / values.abs())[large].sub(1).abs().max() < 0.05
    assert roots[values != 0].min() > 0, "a small number must not become 0 to divide by"


@pytest.mark.parametrize("signed", [True, False])
def test_what_was_read_gives_the_very_same_codes_again(signed: bool):
    values = uneven(3, 1000)
    values[0, :BLOCK] = 0.0  # a block of nothing
    first = Eight.of(values if signed else values.square(), signed)
    second = Eight.of(first.read(values), signed)
    assert torch.equal(first.codes, second.codes) and torch.equal(first.scales, second.scales)
    assert torch.isfinite(first.read(values)).all()


def test_a_quarter_of_the_memory():
    parameter = torch.empty(1000, 256)
    moment = Eight.zeros(parameter, signed=True)
    held = moment.codes.nbytes + moment.scales.nbytes
    assert held < 0.26 * parameter.nbytes
    assert (len(moment.codes), len(moment.scales)) == (256_000, 1000), "no block more than there are"


class Net(nn.Module):
    """Guesses the next of 64 words from the two before."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(64, 64), nn.Linear(128, 64, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.embed(words)).flatten(1))
        return out


def test_a_thousand_steps_end_within_a_percent_of_fp32_moments():
    """Words come as often as one by their number, so that gradients of rows differ by two decades."""

    def end(eight: bool) -> float:
        torch.manual_seed(0)
        net, generator, last = Net(), torch.Generator().manual_seed(1), []
        often = 1 / torch.arange(1.0, 65)
        following = torch.randint(0, 64, (64, 64), generator=generator)
        optimizer = AdamW(net.parameters(), lr=NUMBERS["lr"], weight_decay=NUMBERS["weight_decay"])
        kept = {each: [Eight.zeros(each, signed) for signed in (True, False)] for each in net.parameters()}
        for step in range(1000):
            words = torch.multinomial(often, 128, replacement=True, generator=generator).view(64, 2)
            noise = torch.rand(64, generator=generator) < 0.2
            targets = torch.where(noise, words[:, 0], following[words[:, 0], words[:, 1]])
            loss = F.cross_entropy(net(words), targets)
            loss.backward()
            if eight:
                with torch.no_grad():
                    for each, moments in kept.items():
                        adamw8_(each, each.grad, *moments, Rule(step=step + 1, **NUMBERS), factor=1.0)
            else:
                optimizer.step()
            optimizer.zero_grad()
            last = [*last[-99:], loss.item()]
        return math.fsum(last) / len(last)

    wanted = end(eight=False)
    assert wanted < 3.0, "it learns"
    assert end(eight=True) == pytest.approx(wanted, rel=0.01)


@pytest.mark.gpu
@pytest.mark.parametrize("decoupled", [True, False], ids=["adamw", "adam"])
@pytest.mark.parametrize("shape", [(256,), (1001,), (257, 1025)], ids=str)
def test_the_kernel_does_what_plain_torch_does(shape: tuple[int, ...], decoupled: bool):
    start = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    places = []
    for device in ("cuda", "cpu"):
        parameter = start.to(device)
        copy = torch.empty_like(parameter, dtype=torch.bfloat16)
        moments = Eight.zeros(parameter, True), Eight.zeros(parameter, False)
        for step in (1, 2, 3):
            gradient = uneven(*shape, seed=step).bfloat16().to(device)
            adamw8_(
                parameter, gradient, *moments, Rule(step=step, decoupled=decoupled, **NUMBERS), copy=copy, factor=0.37
            )
        assert torch.equal(copy, parameter.bfloat16())
        places.append((parameter, moments))
    (mine, my_moments), (plain, its_moments) = places
    torch.testing.assert_close(mine.cpu(), plain, rtol=1e-3, atol=1e-4)
    for one, other in zip(my_moments, its_moments, strict=True):
        # Rounding may fall to the other side, of few and by one.
        apart = (one.codes.cpu().int() - other.codes.int()).abs()
        assert apart.max() <= 1 and apart.float().mean() < 0.01
        torch.testing.assert_close(one.scales.cpu(), other.scales, rtol=1e-5, atol=0)


def test_the_first_update_is_that_of_fp32_moments():
    """Nothing was stored before it, so nothing was rounded."""
    start, gradient = uneven(5000), uneven(5000, seed=1)
    mine, plain = start.clone(), start.clone()
    adamw8_(mine, gradient, Eight.zeros(mine, True), Eight.zeros(mine, False), Rule(step=1, **NUMBERS), factor=1.0)
    adamw_(plain, gradient, torch.zeros(5000), torch.zeros(5000), Rule(step=1, **NUMBERS), factor=1.0)
    assert torch.equal(mine, plain)

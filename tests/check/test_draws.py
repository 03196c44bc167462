"""Whatever a forward pass draws at random outside keyed modules is found, with its module and line."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshrun.check.draws import Draw, find_draws
from meshrun.parallel.attention import key_attentions
from meshrun.parallel.dropout import key_dropouts
from meshrun.parallel.moment import Moment

HERE = Path(__file__)
X = torch.ones(2, 4, 8)


class Applies(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def drawn_by(module: nn.Module, x: Tensor = X) -> list[Draw]:
    model = nn.Sequential(nn.Linear(8, 8), nn.ModuleDict({"inner": module})["inner"])
    return find_draws(model, lambda: model(x))


def line_of(text: str) -> str:
    lines = HERE.read_text().splitlines()
    return f"{HERE}:{1 + next(number for number, line in enumerate(lines) if text in line)}"


def functional_dropout(x: Tensor) -> Tensor:
    return F.dropout(x, 0.1)


def noise(x: Tensor) -> Tensor:
    return x + torch.rand(8)


def shuffled(x: Tensor) -> Tensor:
    return x[torch.randperm(2)]


def attention(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x, dropout_p=0.2)


@pytest.mark.parametrize(
    "function, op, line",
    [
        (functional_dropout, "aten.bernoulli_", "return F.dropout(x, 0.1)"),
        (noise, "aten.rand", "return x + torch.rand(8)"),
        (shuffled, "aten.randperm", "return x[torch.randperm(2)]"),
        (attention, "aten.bernoulli_", "return F.scaled_dot_product_attention(x, x, x, dropout_p=0.2)"),
    ],
)
def test_a_draw_in_a_forward_pass_is_found_with_module_and_line(function: Any, op: str, line: str):
    assert drawn_by(Applies(function)) == [Draw("1", op, line_of(line))]


@pytest.mark.parametrize(
    "module",
    [nn.RReLU(), nn.GRU(8, 8, 2, dropout=0.3), nn.Dropout(0.1), nn.AlphaDropout(0.2), nn.LSTM(8, 8, 2, dropout=0.3),
     nn.TransformerEncoderLayer(8, 2, 8, dropout=0.1, batch_first=True)],
)  # fmt: skip
def test_modules_of_torch_that_draw_are_found_and_not_in_evaluation(module: nn.Module):
    found = drawn_by(module)
    assert found and all(draw.module.startswith("1") for draw in found)
    assert drawn_by(module.eval()) == []


def test_operations_that_could_draw_but_do_not_are_not_found():
    for module in (nn.GRU(8, 8, 2), nn.Dropout(0.0), nn.Linear(8, 8)):
        assert drawn_by(module) == []
    assert drawn_by(Applies(lambda x: F.scaled_dot_product_attention(x, x, x))) == []
    assert drawn_by(Applies(lambda x: F.dropout(x, 0.5, training=False))) == []


@pytest.mark.parametrize("step", [None, 3])
def test_a_keyed_model_draws_nothing(step: int | None):
    layer = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.1, batch_first=True)
    model = nn.Sequential(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Dropout1d(0.1))
    before = find_draws(model, lambda: model(X))
    assert {draw.module for draw in before} >= {"0.layers.0.self_attn", "0.layers.1.dropout", "1"}
    moment = Moment(seed=0, step=step, ids=torch.arange(2))
    key_dropouts(model, moment), key_attentions(model, moment)
    assert find_draws(model, lambda: model(X)) == []


def test_numbers_of_python_and_numpy_are_found():
    assert drawn_by(Applies(lambda x: x * random.random())) == [Draw("", "Python's random", None)]
    assert drawn_by(Applies(lambda x: x * float(np.random.rand()))) == [Draw("", "numpy.random", None)]


def test_a_draw_in_a_loop_is_told_once_and_in_a_sentence():
    (found,) = drawn_by(Applies(lambda x: noise(noise(noise(x)))))
    assert str(found) == f"drawn at {line_of('return x + torch.rand(8)')} (aten.rand in 1)"


def fail(_: Tensor) -> Tensor:
    raise ZeroDivisionError


def test_a_draw_after_a_module_that_has_failed_is_not_that_modules():
    class Catches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tried = Applies(fail)

        def forward(self, x: Tensor) -> Tensor:
            with contextlib.suppress(ZeroDivisionError):
                self.tried(x)
            return noise(x)

    (found,) = drawn_by(Catches())
    assert found.module == "1"


def test_a_forward_pass_that_fails_leaves_no_hooks():
    model = nn.Sequential(Applies(fail))
    with pytest.raises(ZeroDivisionError):
        find_draws(model, lambda: model(X))
    assert not any(each._forward_hooks or each._forward_pre_hooks for each in model.modules())


@pytest.mark.gpu
def test_fused_kernels_of_gpus_are_found_only_with_dropout():
    x = torch.ones(2, 2, 8, 16, device="cuda", dtype=torch.bfloat16)
    for p, count in ((0.1, 1), (0.0, 0)):
        model = Applies(lambda x, p=p: F.scaled_dot_product_attention(x, x, x, dropout_p=p))
        assert len(find_draws(model, lambda m=model: m(x))) == count
        model = nn.GRU(16, 16, 2, dropout=p).cuda()
        assert bool(find_draws(model, lambda m=model: m(x[0].float()))) == (p > 0)
    assert len(find_draws(drop := nn.Dropout(0.1), lambda: drop(x))) == 1

"""Dropouts that torch draws in C++, computed with `F.dropout`: as torch documents them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshrun.parallel.composed_dropout import PLAIN_RECURRENT, compose_of_dropout


@pytest.fixture(autouse=True)
def _composed() -> None:
    compose_of_dropout()


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("batch_first", [False, True])
def test_layers_one_by_one_compute_what_all_layers_compute(
    kind: Any, batch_first: bool, monkeypatch: pytest.MonkeyPatch
):
    torch.manual_seed(0)
    module = kind(3, 4, num_layers=3, dropout=0.5, bidirectional=True, batch_first=batch_first)
    inputs = torch.randn(5, 2, 3)
    states = torch.randn(6, 5 if batch_first else 2, 4)
    states = (states, states + 1) if kind is nn.LSTM else states
    expected, last = module.eval()(inputs, states)
    monkeypatch.setattr(F, "dropout", lambda input, _: input)
    found, found_last = module.train()(inputs, states)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(found_last, last)


def test_between_layers_only_the_first_dim_can_be_the_batch(monkeypatch: pytest.MonkeyPatch):
    shapes = []
    monkeypatch.setattr(F, "dropout", lambda input, _: shapes.append(input.shape) or input)
    nn.LSTM(3, 4, num_layers=2, dropout=0.5)(torch.ones(6, 2, 3))
    assert shapes == [(2, 1, 24)], "24 features could be twelve of each sample"


def test_packed_sequences_and_single_layers_stay_torchs_own(monkeypatch: pytest.MonkeyPatch):
    def refuse(*arguments: Any) -> Tensor:
        raise AssertionError(arguments)

    monkeypatch.setattr(F, "dropout", refuse)
    packed = nn.utils.rnn.pack_sequence([torch.ones(4, 3), torch.ones(2, 3)])
    nn.LSTM(3, 4, num_layers=2, dropout=0.5)(packed)
    nn.LSTM(3, 4, num_layers=2)(torch.ones(5, 2, 3))
    assert PLAIN_RECURRENT["lstm"] is not torch._VF.lstm


@pytest.mark.parametrize(
    ("function", "shape"), [(F.alpha_dropout, (400, 500)), (F.feature_alpha_dropout, (400, 500, 2))]
)
def test_alpha_dropout_keeps_mean_and_variance(function: Callable[..., Tensor], shape: tuple[int, ...]):
    torch.manual_seed(0)
    function = getattr(F, function.__name__)
    inputs = torch.randn(shape)
    output = function(inputs, 0.3, training=True)
    assert abs(output.mean()) < 0.02 and abs(output.std() - 1) < 0.02
    scale = ((1.7580993408473766**2 * 0.3 + 1) * 0.7) ** -0.5
    dropped = output.isclose(torch.tensor(-1.7580993408473766 * 0.7 * scale), atol=1e-5)
    assert abs(dropped.float().mean() - 0.3) < 0.01
    assert torch.equal(function(inputs, 0.3, training=False), inputs)
    if inputs.dim() == 3:
        assert torch.equal(dropped[..., 0], dropped[..., 1]), "whole channels"

"""Dropouts of torch's that draw in C++, computed with `F.dropout` instead, which is drawn by sample.

    compose_of_dropout()
    nn.LSTM(16, 16, num_layers=2, dropout=0.2)   # between its layers
    F.alpha_dropout(x, 0.1)                      # nn.AlphaDropout and nn.FeatureAlphaDropout call such functions

torch's functions are replaced once, for all of the process. A call that drops nothing goes to torch's own at once.
Recurrent layers of packed sequences stay torch's own: the rows of a time step are not those of the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

PLAIN_ALPHA: dict[str, Callable[..., Tensor]] = {
    name: getattr(functional, name) for name in ("alpha_dropout", "feature_alpha_dropout")
}
PLAIN_RECURRENT: dict[str, Callable[..., Any]] = {
    name: getattr(torch._VF, name) for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")
}
"""What `nn.LSTM`, `nn.GRU` and `nn.RNN` call."""
SATURATION = -1.7580993408473766
"""What SELU gives for minus infinity: alpha dropout puts it in the place of what it drops."""


def compose_of_dropout() -> None:
    """Replace the functions; once they are, this does nothing."""
    functional.alpha_dropout = alpha_dropout
    functional.feature_alpha_dropout = feature_alpha_dropout
    for name, function in _RECURRENT.items():
        setattr(torch._VF, name, function)


def alpha_dropout(input: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False) -> Tensor:
    """`F.alpha_dropout`, with the elements that `F.dropout` drops."""
    if not training or not 0 < p < 1 or input.is_meta:
        return PLAIN_ALPHA["alpha_dropout"](input, p, training, inplace)
    return _saturated(input, functional.dropout(torch.ones_like(input), p), p, inplace)


def feature_alpha_dropout(input: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False) -> Tensor:
    """`F.feature_alpha_dropout`, with the channels that `F.dropout` drops."""
    if not training or not 0 < p < 1 or input.is_meta or input.dim() < 2:
        return PLAIN_ALPHA["feature_alpha_dropout"](input, p, training, inplace)
    channels = functional.dropout(input.new_ones(input.shape[:2]), p)  # (batch, channels)
    return _saturated(input, channels.view(*input.shape[:2], *[1] * (input.dim() - 2)), p, inplace)


def _saturated(input: Tensor, kept: Tensor, p: float, inplace: bool) -> Tensor:
    """The input with the saturation value where `kept` is 0, scaled to the mean and variance that it had."""
    scale = ((SATURATION**2 * p + 1) * (1 - p)) ** -0.5
    kept = (kept != 0).to(input.dtype)
    output = (input * kept + SATURATION * (1 - kept) - SATURATION * p) * scale
    return input.copy_(output) if inplace else output


def _by_layer(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function as `nn.LSTM.forward` does: (input, states, weights, bias, layers, p, training, both, first)."""
    input, states, weights, bias, layers, p, training, both, batch_first = arguments
    packed = not isinstance(bias, bool)  # then the second argument is the sizes of batches, and all others come later
    if packed or not training or not 0 < p < 1 or layers < 2:
        return function(*arguments)
    every = isinstance(states, tuple | list)  # hidden and cell states, each (layers * directions, batch, features)
    directions, each = 1 + both, len(weights) // layers
    found = []
    for layer in range(layers):
        if layer:
            rows = input if batch_first else input.transpose(0, 1)
            # A row for each sample, so that nobody takes the time, or what a sample has, for the batch.
            rows = functional.dropout(rows.flatten(1)[:, None], p).view(rows.shape)
            input = rows if batch_first else rows.transpose(0, 1)
        of_layer = slice(layer * directions, (layer + 1) * directions)
        own = tuple(state[of_layer].contiguous() for state in states) if every else states[of_layer].contiguous()
        part = weights[layer * each : (layer + 1) * each]
        input, *last = function(input, own, part, bias, 1, 0.0, training, both, batch_first)
        found.append(last)
    return input, *(torch.cat(parts) for parts in zip(*found, strict=True))


_RECURRENT = {name: partial(_by_layer, function) for name, function in PLAIN_RECURRENT.items()}

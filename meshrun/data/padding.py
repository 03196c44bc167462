"""Sequences of unequal length in one batch: filled up to the longest of the micro-batch.

    Experiment(…, collate=padded(fill=0, mask="attention_mask"))

A sample is (inputs, targets), inputs a sequence or a dict of them. Filled-up targets are `ignore`, which
`token_cross_entropy` does not count: so the loss is the same however samples are put together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshrun.errors import UserError


def padded(
    fill: float | Mapping[str, float] = 0, ignore: float = -100, mask: str | None = None, multiple: int = 1
) -> Padded:
    """A collate that fills sequences up: inputs with `fill` (for a dict also one by name), targets with `ignore`.

    `mask` is the name under which inputs that are a dict get a tensor that is true where the first of them is real.
    Lengths become multiples of `multiple`: layouts that cut sequences need such (2 x cp x tp).
    """
    if not isinstance(multiple, int) or multiple < 1:
        raise UserError(f"multiple of padded() is {multiple!r}; it must be a number of tokens above 0")
    return Padded(fill, ignore, mask, multiple)


@dataclass(frozen=True)
class Padded:
    """See `padded`."""

    fill: float | Mapping[str, float]
    ignore: float
    mask: str | None
    multiple: int = 1

    def __call__(self, samples: list[Any]) -> tuple[Any, Tensor]:
        inputs, targets = zip(*samples, strict=True)
        filled = self._filled(list(targets), self.ignore, "targets")
        if not isinstance(inputs[0], Mapping):
            if self.mask is not None or isinstance(self.fill, Mapping):
                raise UserError("padded() with a mask, or a fill by name, needs inputs that are a dict of sequences")
            return self._filled(list(inputs), self.fill, "inputs"), filled
        made = {name: self._filled([each[name] for each in inputs], self._fill_of(name), name) for name in inputs[0]}
        if self.mask is not None:
            first = next(iter(made))
            lengths = torch.tensor([len(each[first]) for each in inputs])
            made[self.mask] = torch.arange(made[first].shape[1]) < lengths[:, None]
        return made, filled

    def _fill_of(self, name: str) -> float:
        return self.fill.get(name, 0) if isinstance(self.fill, Mapping) else self.fill

    def _filled(self, sequences: Sequence[Any], fill: float, name: str) -> Tensor:
        tensors = [torch.as_tensor(each) for each in sequences]
        if tensors[0].dim() == 0:
            return torch.stack(tensors)
        if any(each.dim() != 1 for each in tensors):
            shape = next(tuple(each.shape) for each in tensors if each.dim() != 1)
            raise UserError(f"padded() was given {name} of shape {shape}; it fills up sequences of one dimension")
        found = torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=fill)
        return torch.nn.functional.pad(found, (0, -found.shape[1] % self.multiple), value=fill)

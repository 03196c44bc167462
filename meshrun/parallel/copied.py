"""Copies of a model, also where its modules hold tensors that were computed and are no parameters.

    copied(model)                    # as copy.deepcopy
    copied(model, {id(weight): …})   # with something else in place of some of its parts

`torch.nn.utils.weight_norm` and pruning keep the weight that they compute as an attribute, which torch does not copy.
They compute it anew in each forward pass, so the copy has its values and no history.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn


def copied(model: nn.Module, replaced: dict[int, Any] | None = None) -> nn.Module:
    """A deep copy; `replaced` says by `id` what stands for a part in it."""
    held = (value for module in model.modules() for value in vars(module).values())
    computed = {id(each): each.detach().clone() for each in held if isinstance(each, Tensor) and not each.is_leaf}
    return copy.deepcopy(model, computed | (replaced or {}))

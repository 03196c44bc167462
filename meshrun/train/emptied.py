"""A batch of no samples, for a rank that has none of an epoch's last batch but must take part in the backward pass.

    emptied(collate([row]), collate([row, row]))      # tensors of (0, …), lists without entries, counts of 0

What becomes longer when a sample is given twice belongs to samples, whichever dim it is.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, MutableMapping
from typing import Any

import numpy as np
from torch import Tensor

from meshrun.errors import UserError


def emptied(batch: Any, twice: Any) -> Any:
    """What is left of a batch of one sample without it; `twice`, with the same sample two times, shows what is its."""
    if isinstance(batch, Tensor | np.ndarray) and batch.shape:
        dims = [dim for dim, (one, two) in enumerate(zip(batch.shape, twice.shape, strict=True)) if one != two]
        return batch[(*[slice(None)] * dims[0], slice(0, 0))] if dims else batch
    if isinstance(batch, Mapping):
        values = {key: emptied(value, twice[key]) for key, value in batch.items()}
        if not isinstance(batch, MutableMapping):
            return values
        kept = copy.copy(batch)  # which may have methods of its own, as what a tokenizer gives has
        kept.update(values)
        return kept
    if isinstance(batch, tuple | list):
        if len(batch) != len(twice):
            return type(batch)()
        parts = [emptied(one, two) for one, two in zip(batch, twice, strict=True)]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    if batch is None or isinstance(batch, bool | str | bytes):
        return batch
    if isinstance(batch, int | float | np.number | Tensor | np.ndarray):  # such as a count of tokens
        return 2 * batch - twice
    raise UserError(
        f"a rank has no samples of the last batch of the epoch, and collate_fn made a {type(batch).__name__}, which "
        f"cannot be without any: leave that batch out with DataLoader(drop_last=True), or choose another batch_size"
    )

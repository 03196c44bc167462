"""Comparisons that never lose a NaN: Python's `max` drops one unless it comes first, and `nan > limit` is false.

largest([0.1, math.nan])             # nan
exceeds(math.nan, 1e-5)              # True
"""

from __future__ import annotations

import math
from collections.abc import Iterable


def largest(values: Iterable[float], default: float = 0.0) -> float:
    """The largest of some numbers; NaN if one of them is."""
    numbers = list(values)
    return math.nan if any(map(math.isnan, numbers)) else max(numbers, default=default)


def exceeds(difference: float, limit: float) -> bool:
    """Whether a difference is more than a limit allows; one that is no number always is."""
    return not difference <= limit

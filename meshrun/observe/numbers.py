"""Numbers in documents that anybody may have written: what cannot be one is none.

number("x"), number(10**400)       # nan
whole(7.0), whole(None)            # 7, 0
"""

from __future__ import annotations

import math
from typing import Any

LARGEST = 1e300
MOST_STEPS = 1 << 53
"""Above this a float does not count in ones."""


def number(value: Any, otherwise: float = math.nan) -> float:
    """A value of a document as a number; what no run could have measured is none."""
    known = isinstance(value, int | float) and not isinstance(value, bool) and not abs(value) > LARGEST
    return float(value) if known else otherwise


def whole(value: Any) -> int:
    found = number(value)
    return int(found) if abs(found) <= MOST_STEPS else 0

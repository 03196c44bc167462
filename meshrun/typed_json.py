"""Values as JSON that keeps their types: how ranks tell each other numbers, texts and collections of them.

    raw = encode(({"a", "b"}, {3: math.nan}, Path("runs")))
    decode(raw)                          # the same again

JSON has lists, texts, numbers, true, false and null. Every other type is an object with one name: {"tuple": [...]}. NaN
and infinities are written as Python writes them, since only Python reads them here. Nothing that is decoded can execute
code, as a pickle could.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

_READ: dict[str, Callable[[Any], Any]] = {
    "tuple": lambda items: tuple(map(_read, items)),
    "set": lambda items: set(map(_read, items)),
    "frozenset": lambda items: frozenset(map(_read, items)),
    "dict": lambda pairs: {_read(key): _read(value) for key, value in pairs},
    "bytes": base64.b64decode,
    "path": Path,
}


def encode(value: Any) -> bytes:
    """The value in letters; a TypeError that names the type of whatever cannot be sent."""
    return json.dumps(_written(value), separators=(",", ":")).encode()


def decode(raw: bytes) -> Any:
    """The value that was encoded."""
    return _read(json.loads(raw))


def _written(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [_written(item) for item in value]
    if isinstance(value, dict):  # as pairs: keys of JSON are texts
        return {"dict": [[_written(key), _written(inner)] for key, inner in value.items()]}
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, Path):
        return {"path": str(value)}
    if isinstance(value, tuple | set | frozenset):
        name = "tuple" if isinstance(value, tuple) else "set" if isinstance(value, set) else "frozenset"
        return {name: [_written(item) for item in value]}
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:  # a number of numpy's
        return _written(value.item())
    raise TypeError(type(value).__name__)


def _read(written: Any) -> Any:
    if isinstance(written, list):
        return list(map(_read, written))
    if isinstance(written, dict):
        ((name, inner),) = written.items()
        return _READ[name](inner)
    return written

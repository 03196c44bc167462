"""JSON that every reader accepts: a NaN or an infinity is written as null, and named beside it with what it was.

    dumps({"loss": math.nan})      # {"loss": null, "not_numbers": {"/loss": "NaN"}}
    loads(text)                    # the document again, with its NaN
    read(path)                     # the document in a file, which must be an object
    of_type(Staged, document, "it")     # a dataclass of it, each field of its type; else a ValueError

`not_numbers` maps JSON pointers (RFC 6901) to NaN, Infinity or -Infinity. Reading raises a ValueError for whatever is
no such document: text that is no JSON or no UTF-8, nested too deep, or a number of too many digits.
"""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from meshrun.files import read_plain

NOT_NUMBERS = "not_numbers"
UNIONS = (typing.Union, types.UnionType)


def dumps(document: dict[str, Any], indent: int | None = None) -> str:
    """The document as text; the object at its top also names what is no number in it."""
    try:
        return json.dumps(document, indent=indent, allow_nan=False)
    except ValueError:  # seldom: whether a document has such numbers is not asked beforehand
        names: dict[str, str] = dict(document.get(NOT_NUMBERS, {}))
        numbers = _without_nan(document, "", names)
        return json.dumps({**numbers, NOT_NUMBERS: names}, indent=indent, allow_nan=False)


def loads(text: str | bytes) -> Any:
    """What a text says, with the NaN and infinities that `dumps` has named back in their places."""
    try:
        document = json.loads(text)
    except RecursionError:
        raise ValueError("nested too deep") from None
    if isinstance(document, dict) and isinstance(names := document.get(NOT_NUMBERS), dict):
        del document[NOT_NUMBERS]
        for pointer, name in names.items():
            _put(document, pointer, name)
    return document


def read(path: Path) -> dict[str, Any]:
    """The object that a file holds; an OSError where it cannot be read, a ValueError where it holds something else."""
    document = loads(read_plain(path))
    if not isinstance(document, dict):
        raise ValueError(f"it holds {type(document).__name__} where an object must be")
    return document


def of_type(hint: Any, value: Any, name: str) -> Any:
    """A value of a document as a field of that type holds it, dataclasses and what is in them included.

    A ValueError names the first value that is of another type. Texts for paths and lists for tuples are converted.
    """
    kinds = typing.get_args(hint) if typing.get_origin(hint) in UNIONS else (hint,)
    for kind in kinds:
        origin = typing.get_origin(kind) or kind
        if _fits(kind, origin, value):
            return _converted(kind, origin, value, name)
    raise ValueError(f"{name} = {value!r:.80}, where {_shape(hint)} must be")


def _fits(kind: Any, origin: Any, value: Any) -> bool:
    """Whether a value is of that kind, whatever is in it."""
    if kind is Any:
        return True
    if origin is Literal:
        return isinstance(value, str) and value in typing.get_args(kind)
    if origin is tuple:
        return isinstance(value, list)
    if origin is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if origin is Path:
        return isinstance(value, str) and "\0" not in value
    if dataclasses.is_dataclass(origin) or origin is Mapping:
        return isinstance(value, dict)
    return isinstance(value, origin) and not (origin is int and isinstance(value, bool))


def _converted(kind: Any, origin: Any, value: Any, name: str) -> Any:
    inner = typing.get_args(kind)
    if dataclasses.is_dataclass(origin):
        hints = typing.get_type_hints(origin)
        if unknown := value.keys() - hints.keys():
            raise ValueError(f"{name} has {min(unknown)!r}, which this version of meshrun does not know")
        fields = {key: of_type(hints[key], each, f"{name}.{key}") for key, each in value.items()}
        try:
            return origin(**fields)  # type: ignore[operator]
        except TypeError:  # fields without a default that are missing
            raise ValueError(f"{name} is not all there: it has only {', '.join(fields) or 'nothing'}") from None
    if origin in (tuple, list) and inner:
        return origin(of_type(inner[0], each, f"{name}[{place}]") for place, each in enumerate(value))
    if origin in (dict, Mapping) and inner:
        return {key: of_type(inner[1], each, f"{name}.{key}") for key, each in value.items()}
    return Path(value) if origin is Path else value


def _shape(hint: Any) -> str:
    """A type as a sentence says it."""
    words = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", Path: "a path"}
    words |= {type(None): "null", dict: "a table", Mapping: "a table", list: "a list"}
    origin = typing.get_origin(hint) or hint
    if origin in UNIONS:
        return " or ".join(map(_shape, typing.get_args(hint)))
    if origin is Literal:
        return "one of " + ", ".join(typing.get_args(hint))
    if origin is tuple:
        return "a list of texts" if typing.get_args(hint)[0] is str else "a list"
    return words.get(origin, "a table")


def _without_nan(value: Any, pointer: str, names: dict[str, str]) -> Any:
    if isinstance(value, dict):
        return {
            key: _without_nan(inner, f"{pointer}/{str(key).replace('~', '~0').replace('/', '~1')}", names)
            for key, inner in value.items()
        }
    if isinstance(value, list | tuple):
        return [_without_nan(inner, f"{pointer}/{index}", names) for index, inner in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        names[pointer] = "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
        return None
    return value


def _put(document: Any, pointer: str, name: Any) -> None:
    keys = [key.replace("~1", "/").replace("~0", "~") for key in pointer.split("/")[1:]]
    try:
        for key in keys[:-1]:
            document = document[int(key) if isinstance(document, list) else key]
        last = int(keys[-1]) if isinstance(document, list) else keys[-1]
        if document[last] is not None:
            raise ValueError
        document[last] = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}[name]
    except (LookupError, TypeError, ValueError):
        raise ValueError(f"{NOT_NUMBERS} says {pointer!r}: {name!r}, which does not fit the document") from None

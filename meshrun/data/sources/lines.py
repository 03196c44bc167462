"""JSON lines: one object a line, found by number without reading what lies before it.

    part = Lines(Path("news.jsonl"), first=0, columns=("document", "summary"))
    part.rows([17, 3])                       # [{"document": …, "summary": …}, {…}]

The file is mapped and its line breaks are looked for once, at two to three gigabytes a second. Blank lines are none. A line
that is no JSON is told when it is asked for, with its number, and can be skipped like any other bad sample.
"""

from __future__ import annotations

import gzip
import json
import mmap
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshrun.data.sources.watched import Watched, bad_sample
from meshrun.errors import BadSample, UserError

_PIECE = 1 << 22
"""Bytes that are looked through at a time: their comparison should stay in the processor's cache."""
_BREAK = 10
_BLANK = np.isin(np.arange(256), list(b" \t\r\n"))
_MARK = b"\xef\xbb\xbf"
"""What some editors put in front of UTF-8."""


class Lines:
    """One file of JSON lines. `first` is the sample number of its first line in the whole table."""

    def __init__(self, path: Path, first: int, columns: Sequence[str] | None) -> None:
        self.path, self.columns, self._first = path, columns, first
        self._watched: Watched | None = None
        if path.suffix == ".gz":
            self._bytes: bytes | mmap.mmap = _unpacked(path)
        else:
            self._watched = Watched(path)
            self._bytes = self._watched.mapped()
        self._starts = starts_of(np.frombuffer(self._bytes, np.uint8))
        self.size = len(self._bytes)

    def __len__(self) -> int:
        return len(self._starts) - 1

    def rows(self, ids: NDArray[np.int64]) -> list[dict[str, Any]]:
        """The rows of these numbers, counted from this file's first."""
        if self._watched:
            self._watched.refuse_changes()
        whole, begins, ends = self._bytes, self._starts[ids].tolist(), self._starts[ids + 1].tolist()
        found = []
        for number, begin, end in zip(ids.tolist(), begins, ends, strict=True):
            try:
                row = json.loads(str(whole[begin:end], "utf-8"))
            except (ValueError, RecursionError) as error:
                raise self._bad(number, _reason(error)) from None
            if not isinstance(row, dict):
                raise self._bad(number, f"it is {_named(row)} and not an object like {{…}}")
            found.append(row if self.columns is None else self._picked(number, row))
        return found

    def lengths(self, column: str, ids: NDArray[np.int64]) -> list[int]:
        """How long that column is in these rows; 0 in one that cannot be read, which is told when it is used."""
        return [self._length(column, number) for number in ids]

    def _length(self, column: str, number: np.int64) -> int:
        try:
            value = self.rows(np.array([number]))[0][column]
        except (BadSample, KeyError):
            return 0
        if isinstance(value, str):
            return len(value.encode())
        return len(value) if isinstance(value, list | dict) else 0

    def _picked(self, number: int, row: dict[str, Any]) -> dict[str, Any]:
        try:
            return {name: row[name] for name in self.columns or ()}
        except KeyError as error:
            has = ", ".join(map(repr, row)) or "nothing"
            raise self._bad(number, f"it has no {error.args[0]!r} but {has}") from None

    def _bad(self, number: int, why: str) -> BadSample:
        before = np.frombuffer(self._bytes, np.uint8, int(self._starts[number]))
        line = 1 + sum(int(np.count_nonzero(piece == _BREAK)) for _, piece in _pieces(before))
        return bad_sample(self._first + number, f"{self.path}, line {line:,}", why)


def starts_of(data: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Where lines that are not blank start, and after them where the last one ends.

    A blank line counts as the end of the one before it: JSON may be followed by blanks.
    """
    return np.concatenate([*_starts(data), np.array([len(data)])])


def _starts(data: NDArray[np.uint8]) -> Iterator[NDArray[np.int64]]:
    first = len(_MARK) if bytes(data[: len(_MARK)]) == _MARK else 0
    yield _not_blank(data, np.array([first], np.int64))
    for at, piece in _pieces(data):
        starts = np.flatnonzero(piece == _BREAK)
        starts += at + 1
        yield _not_blank(data, starts)


def _pieces(data: NDArray[np.uint8]) -> Iterator[tuple[int, NDArray[np.uint8]]]:
    return ((at, data[at : at + _PIECE]) for at in range(0, len(data), _PIECE))


def _not_blank(data: NDArray[np.uint8], starts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Those at which a line with something in it starts."""
    if len(starts) and starts[-1] == len(data):
        starts = starts[:-1]
    doubtful = np.flatnonzero(_BLANK[data[starts]])
    blank = [place for place in doubtful.tolist() if _is_blank(data, int(starts[place]))]
    return np.delete(starts, blank) if blank else starts


def _is_blank(data: NDArray[np.uint8], at: int) -> bool:
    for here in range(at, len(data), 64):
        some = data[here : here + 64]
        ends = np.flatnonzero((some == _BREAK) | ~_BLANK[some])
        if len(ends):
            return int(some[ends[0]]) == _BREAK
    return True


def _unpacked(path: Path) -> bytes:
    try:
        return gzip.decompress(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from None
    except (EOFError, zlib.error) as error:
        raise UserError(f"{path} cannot be unpacked, its end is missing or it is damaged: {error}") from None


def _reason(error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError):
        return f"byte {error.start} of it, 0x{error.object[error.start]:02x}, is not UTF-8"
    if isinstance(error, json.JSONDecodeError):
        return f"it is no JSON at column {error.colno}: {error.msg}"
    return f"it is no JSON: {error}"


def _named(value: object) -> str:
    names = {list: "a list", str: "a text", type(None): "null", bool: "true or false"}
    return names.get(type(value), "a number")

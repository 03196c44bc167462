"""JSON lines: one object a line, found by number without reading what lies before it.

    part = Lines(Path("news.jsonl"), first=0, columns=("document", "summary"))
    part.rows([17, 3])                       # [{"document": …, "summary": …}, {…}]

The file is mapped and its line breaks are looked for once, at two to three gigabytes a second; where the lines of big
files start is kept on the node. Blank lines are none. A line that is no JSON is told when it is asked for, with its
number, and can be skipped like any other bad sample. Packed files are unpacked, into memory or big ones onto the node.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import mmap
import shutil
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshrun.data.cache import free_memory
from meshrun.data.sources.mapped import Mapped
from meshrun.data.sources.once import Progress, once
from meshrun.data.sources.source import Watched, bad_sample, is_bomb, memory_for
from meshrun.errors import BadSample, UserError

_PIECE = 1 << 20
"""Bytes that are looked through at a time: their comparison should stay in the processor's cache."""
BIG = 1 << 28
"""Bytes from which on it is kept on the node where lines start."""
MANY = 1 << 22
"""The same for a file that is packed tightly."""
BIG_WHEN_PACKED = 1 << 25
"""Bytes from which on a packed file is unpacked onto the node and not into memory."""
_UNPACKED = 8
"""Bytes in memory for each byte of a packed file; one that is packed more tightly is unpacked onto the node."""
_LONG = 1 << 20
"""Bytes of a line that is looked at before it is parsed, which takes many times its length of memory."""
_OF_VALUE, _OF_BYTE = 72, 4
"""Bytes of memory that a value takes, which may be two bytes of a line, and one byte of a text."""
_FIRST = 100
"""Rows of which one must have a column that is asked for: else its name is wrong, and not all rows."""
_STEPS = 64
"""Blanks at the beginning of a line up to which lines are looked at together, and beyond which each by itself."""
_BREAK = 10
_BLANK = np.isin(np.arange(256), list(b" \t\r\n"))
_MARK = b"\xef\xbb\xbf"
"""What some editors put in front of UTF-8."""


class Lines:
    """One file of JSON lines. `first` is the sample number of its first line in the whole table."""

    def __init__(self, path: Path, first: int, columns: Sequence[str] | None) -> None:
        self.path, self.columns, self._first = path, columns, first
        self._file = Watched(path) if path.suffix == ".gz" else Mapped(path)
        self._whole = self._file.whole if isinstance(self._file, Mapped) else _unpacked(path)
        self.size = len(self._whole)
        self._data = np.frombuffer(self._whole, np.uint8)
        # Of a small file that is packed tightly, the starts of lines may be a thousand times as large.
        many = self.size >= BIG or self.size > max(MANY, _UNPACKED * path.stat().st_size)
        self._starts = _kept_starts(path, self._data) if many else starts_of(self._data)
        self._lengths: dict[str, NDArray[np.int64]] = {}

    def __len__(self) -> int:
        return len(self._starts) - 1

    def rows(self, ids: NDArray[np.int64]) -> list[dict[str, Any]]:
        """The rows of these numbers, counted from this file's first."""
        self._file.check()
        rows = [self._row(*each) for each in self._placed(ids)]
        if self.columns is None:
            return rows
        return [self._picked(number, row) for number, row in zip(ids.tolist(), rows, strict=True)]

    def lengths(self, column: str, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """How long that column is in these rows; 0 in one that cannot be read, which is told when it is used."""
        self._file.check()
        if column not in self._lengths:
            # From 1, and only once: a row must be parsed for it, and a training that goes on asks for all before it.
            self._lengths[column] = np.zeros(len(self), np.int64)
        known = self._lengths[column]
        for number, begin, end in self._placed(ids[known[ids] == 0]):
            known[number] = 1 + self._length(column, number, begin, end)
        return known[ids] - 1

    def names(self) -> list[str]:
        """What its first rows have, of those that can be read."""
        found: dict[str, None] = {}
        for each in self._placed(np.arange(min(len(self), _FIRST))):
            with contextlib.suppress(BadSample):
                found.update(dict.fromkeys(self._row(*each)))
        return list(found)

    def _placed(self, ids: NDArray[np.int64]) -> Iterator[tuple[int, int, int]]:
        """Numbers of rows, and where each begins and ends."""
        return zip(ids.tolist(), self._starts[ids].tolist(), self._starts[ids + 1].tolist(), strict=True)

    def _row(self, number: int, begin: int, end: int) -> dict[str, Any]:
        if end - begin > _LONG:
            self._look_at(number, begin, end)
        try:
            row = json.loads(str(self._whole[begin:end], "utf-8"))
        except (ValueError, RecursionError) as error:
            raise self._bad(number, _reason(error)) from None
        if not isinstance(row, dict):
            raise self._bad(number, f"it is {_named(row)} and not an object like {{…}}")
        return row

    def _look_at(self, number: int, begin: int, end: int) -> None:
        """Refuse a long line that is no object, or that would take far more memory than its file is large."""
        if not bytes(self._whole[begin : begin + 64]).lstrip().startswith(b"{"):
            raise self._bad(number, f"it has {end - begin:,} bytes and does not begin like an object, with {{")
        if (why := too_much_in(self._whole, begin, end, self.path.stat().st_size)) is not None:
            raise self._bad(number, why)

    def _length(self, column: str, number: int, begin: int, end: int) -> int:
        try:
            value = self._row(number, begin, end).get(column)
        except BadSample:
            return 0
        if isinstance(value, str):
            return len(value.encode(errors="surrogatepass"))
        return len(value) if isinstance(value, list) else 0

    def _picked(self, number: int, row: dict[str, Any]) -> dict[str, Any]:
        try:
            return {name: row[name] for name in self.columns or ()}
        except KeyError as error:
            has = ", ".join(map(repr, row)) or "nothing"
            raise self._bad(number, f"it has no {error.args[0]!r} but {has}") from None

    def _bad(self, number: int, why: str) -> BadSample:
        before = self._data[: int(self._starts[number])]
        line = 1 + sum(int(np.count_nonzero(piece == _BREAK)) for _, piece in _pieces(before))
        return bad_sample(self._first + number, "the table", f"{self.path}, line {line:,}", why)


def longest_in(size: int) -> int:
    """Bytes of a line that is no bomb in a file of that size, whatever it says."""
    return memory_for(size) // _OF_BYTE


def too_much_in(text: bytes | mmap.mmap | memoryview, begin: int, end: int, size: int) -> str | None:
    """Why this JSON would take far more memory than its file of `size` bytes should; None where it would not."""
    taken = _OF_BYTE * (end - begin)
    for at in range(begin, end, _PIECE) if end - begin > _LONG else ():
        piece = bytes(text[at : min(at + _PIECE, end)])
        taken += _OF_VALUE * sum(piece.count(each) for each in (b",", b"[", b"{"))
        if is_bomb(taken, taken, size):
            return (
                f"it has {end - begin:,} bytes that take {taken:,} or more of memory; that is too much for a file of "
                f"{size:,} bytes"
            )
    return None


def starts_of(data: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Where lines that are not blank start, and after them where the last one ends.

    A blank line counts as the end of the one before it: JSON may be followed by blanks.
    """
    return np.concatenate([*_starts(data), np.array([len(data)])])


def _kept_starts(path: Path, data: NDArray[np.uint8]) -> NDArray[np.int64]:
    """The same from a file on the node, where one can be kept there."""

    def make(to: Path) -> None:
        told = Progress(path, "looking for its lines")
        with to.open("wb") as file:
            for starts in _starts(data):
                file.write(starts.tobytes())
                told(int(starts[-1]) / len(data) if len(starts) else 0)
            file.write(np.array([len(data)]).tobytes())

    made = once(path, "starts of lines 1", make)
    return starts_of(data) if made is None else np.memmap(made, np.int64, "r")


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
    if not len(doubtful):
        return starts
    keep = np.ones(len(starts), np.bool_)
    at = starts[doubtful]
    for _ in range(_STEPS):  # all at once, byte by byte: a file may have millions of blank lines
        byte = data[at]
        keep[doubtful[byte == _BREAK]] = False
        going_on = _BLANK[byte] & (byte != _BREAK)
        doubtful, at = doubtful[going_on], at[going_on] + 1
        keep[doubtful[at == len(data)]] = False
        doubtful, at = doubtful[at < len(data)], at[at < len(data)]
        if not len(doubtful):
            break
    keep[[place for place, here in zip(doubtful.tolist(), at.tolist(), strict=True) if _is_blank(data, here)]] = False
    return starts[keep]


def _is_blank(data: NDArray[np.uint8], at: int) -> bool:
    length = _STEPS
    while at < len(data):
        some = data[at : at + length]
        ends = np.flatnonzero((some == _BREAK) | ~_BLANK[some])
        if len(ends):
            return int(some[ends[0]]) == _BREAK
        at, length = at + length, min(2 * length, _PIECE)
    return True


def _unpacked(path: Path) -> mmap.mmap | bytes:
    def make(to: Path) -> None:
        try:
            with gzip.open(path) as packed, to.open("wb") as file:
                shutil.copyfileobj(packed, file, _PIECE)
        except gzip.BadGzipFile as error:  # is an OSError, and would be taken for one of the node's
            raise EOFError(error) from None

    try:
        size = path.stat().st_size
        found = _unpacked_in_memory(path, max(BIG_WHEN_PACKED, _UNPACKED * size)) if size < BIG_WHEN_PACKED else None
        if found is not None:
            return found
        made = once(path, "unpacked 1", make)
        if made is None:
            found = _unpacked_in_memory(path, free_memory() // 2)
            if found is None:
                raise UserError(
                    f"{path} unpacks to more than half of the free memory, and nothing can be kept on this node; "
                    f"name a folder with room for it (--cache)"
                )
            return found
        with made.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{path} cannot be unpacked, it is damaged or not all there: {error}") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from None


def _unpacked_in_memory(path: Path, most: int) -> bytes | None:
    """None where that would be more bytes than `most`."""
    pieces, length = [], 0
    with gzip.open(path) as packed:
        while piece := packed.read(_PIECE):
            pieces.append(piece)
            length += len(piece)
            if length > most:
                return None
    return b"".join(pieces)


def _reason(error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError):
        return f"byte {error.start} of it, 0x{error.object[error.start]:02x}, is not UTF-8"
    if isinstance(error, json.JSONDecodeError):
        return f"it is no JSON at column {min(error.pos, len(error.doc.rstrip())) + 1}: {error.msg}"
    return f"it is no JSON: {error}"


def _named(value: object) -> str:
    names = {list: "a list", str: "a text", type(None): "null", bool: "true or false"}
    return names.get(type(value), "a number")

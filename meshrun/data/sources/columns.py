"""Arrow files: rows by number out of mapped record batches, without a copy and without a Python object a row.

    part = Columns(Path("data-00000-of-00002.arrow"), first=0, columns=None)
    part.rows(np.array([17, 3]))             # [{"text": "…", "label": 4}, {…}]

Kept are where each record batch lies and how many rows come before its end: a billion rows in batches of a thousand
are 16 MB. A batch's columns become views of the file when a row of it is first asked for. Numbers, texts and lists of
numbers are taken out of the views by hand, several times as fast as through pyarrow's scalars, which read all else.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from meshrun.data.sources.mapped import Mapped
from meshrun.data.sources.source import Watched, bad_sample, is_bomb, listed, refuse_missing, twice
from meshrun.errors import UserError, is_of_machine, unreadable_here

MAGIC = b"ARROW1"
"""Begins and ends Arrow's file format, which is its stream format with a table of contents."""
_AFTER_MAGIC = 8
_TIMES = 3
"""How often an unpacked record batch is in memory while it is read."""
_MOST_ROWS = 1 << 48
_OPEN = 1024
"""Record batches whose views are kept."""

Value = Callable[[int], Any]
"""(number of a row in its batch) -> value of one column."""


class NotPlain(Exception):
    """The file cannot be read where it lies: it is compressed, or has dictionaries."""


class Columns:
    """One Arrow file, or what is one in memory. `first` is the sample number of its first row in the whole table."""

    def __init__(self, path: Path, first: int, columns: Sequence[str] | None, turned: Any = None) -> None:
        """`turned` is the memory that is read in place of `path`, where that had to be turned into it."""
        self.path, self._first = path, first
        self._file = Mapped(path) if turned is None else Watched(path)
        self._whole = pa.py_buffer(self._file.whole) if isinstance(self._file, Mapped) else turned
        self.size = self._whole.size
        with sentences(path):
            self.schema, self._offsets, self._ends = _contents(path, self._whole)
            self.columns = tuple(columns or self.schema.names)
        refuse_missing(path, self.columns, self.schema.names)
        wanted = set(self.columns)
        if (double := twice(name for name in self.schema.names if name in wanted)) is not None:
            raise UserError(f"{path} has two columns {double[:80]!r}; write it again with a name of its own for each")
        self._views: dict[int, list[tuple[str, Value]]] = {}

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def rows(self, ids: NDArray[np.int64]) -> list[dict[str, Any]]:
        """The rows of these numbers, counted from this file's first."""
        self._file.check()
        numbers, within = self._placed(ids)
        found = []
        for number, row in zip(numbers.tolist(), within.tolist(), strict=True):
            with sentences(self.path):
                views = self._views.get(number) or self._view(number)
            try:
                found.append({name: value(row) for name, value in views})
            except (ValueError, LookupError, OverflowError, TypeError, ImportError, pa.ArrowException) as error:
                raise self._bad(number, row, views) from error
        return found

    def lengths(self, column: str, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """How long that column is in these rows: elements of a list, bytes of a text; 0 where there is nothing."""
        refuse_missing(self.path, [column], self.schema.names)
        self._file.check()
        numbers, within = self._placed(ids)
        found = np.zeros(len(ids), np.int64)
        for number in np.unique(numbers):
            some = np.flatnonzero(numbers == number)
            with sentences(self.path):
                found[some] = _lengths(self._batch(int(number)).column(column), within[some])
        return found

    def names(self) -> list[str]:
        """What its columns are called."""
        return list(self.schema.names)

    def numbers(self) -> NDArray[Any]:
        """All of the first column."""
        with sentences(self.path):
            return np.concatenate([np.asarray(self._batch(number).column(0)) for number in range(len(self._offsets))])

    def _placed(self, ids: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The record batch of each row, and its number there."""
        numbers = np.searchsorted(self._ends, ids, side="right")
        return numbers, ids - np.where(numbers > 0, self._ends[numbers - 1], 0)

    def _batch(self, number: int) -> pa.RecordBatch:
        reader = pa.BufferReader(self._whole)
        reader.seek(int(self._offsets[number]))
        batch = pa.ipc.read_record_batch(pa.ipc.read_message(reader), self.schema)
        batch.validate()
        return batch

    def _view(self, number: int) -> list[tuple[str, Value]]:
        if len(self._views) >= _OPEN:
            self._views.clear()
        batch = self._batch(number)
        self._views[number] = views = [(name, value_of(batch.column(name))) for name in self.columns]
        return views

    def _bad(self, number: int, row: int, views: list[tuple[str, Value]]) -> Exception:
        sample = self._first + row + (int(self._ends[number - 1]) if number else 0)
        for name, value in views:
            try:
                value(row)
            except Exception as error:
                return bad_sample(sample, "the table", str(self.path), f"its {name!r} is unusable, {one_line(error)}")
        return bad_sample(sample, "the table", str(self.path), "another time it could be")


@contextlib.contextmanager
def sentences(path: Path) -> Iterator[None]:
    """Turns what pyarrow and numpy raise for a damaged file, of many types, into a sentence that has its name."""
    try:
        yield
    except (pa.ArrowException, OSError, ValueError, LookupError, TypeError, ArithmeticError, MemoryError) as error:
        if is_of_machine(error):
            raise unreadable_here(path, one_line(error)) from None
        raise UserError(f"{path} is damaged: {one_line(error)}; copy or write it again") from None


def refuse_others(part: Columns, first: Columns) -> None:
    """A sentence for a part whose columns are not those of the first."""
    if set(first.columns) - set(part.columns) or set(part.columns) - set(first.columns):
        there, wanted = listed(part.columns), listed(first.columns)
        raise UserError(f"{part.path} has the columns {there} and {first.path} has {wanted}; parts must have the same")
    for name in first.columns:
        here, before = part.schema.field(name).type, first.schema.field(name).type
        if here != before and not (_is_number(here) and _is_number(before)):
            raise UserError(
                f"column {name!r} is of type {here} in {part.path} and {before} in {first.path}; "
                f"parts of a table must have the same types"
            )


def _is_number(kind: pa.DataType) -> bool:
    return pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_null(kind)


def _contents(path: Path, whole: pa.Buffer) -> tuple[pa.Schema, NDArray[np.int64], NDArray[np.int64]]:
    """The columns, where each record batch is, and the number of rows up to its end."""
    reader = pa.BufferReader(whole)
    content = memoryview(whole)
    if content[: len(MAGIC)] == MAGIC:
        if content[-len(MAGIC) :] != MAGIC or len(content) < 2 * _AFTER_MAGIC:
            raise UserError(f"{path} is not all there: the end of an Arrow file is missing; copy or write it again")
        reader.seek(_AFTER_MAGIC)
    offsets: list[int] = []
    counts: list[int] = []
    plain = True
    try:
        schema = pa.ipc.read_schema(reader)
        while True:
            offset = reader.tell()
            try:
                message = pa.ipc.read_message(reader)
            except EOFError:
                break
            if (unpacked := _unpacked_size(message)) is not None:
                plain = False
                if is_bomb(unpacked, _TIMES * unpacked, message.body.size):
                    raise UserError(
                        f"{path} has a record batch of {unpacked:,} bytes packed into {message.body.size:,}, "
                        f"which is damage or would fill the memory; write it again, in smaller record batches"
                    )
            plain = plain and message.type == "record batch"
            if not plain:  # the others are looked at for their sizes only
                continue
            batch = pa.ipc.read_record_batch(message, schema)
            if not counts and not _lies_in(batch, whole):
                plain = False
            if not 0 <= batch.num_rows <= _MOST_ROWS:  # columns without values may say any number
                raise UserError(f"{path} is damaged: a record batch has {batch.num_rows:,} rows; write it again")
            offsets.append(offset)
            counts.append(batch.num_rows)
        if not plain:
            raise NotPlain
    except (pa.ArrowException, OSError) as error:
        batches = f" after {len(counts):,} record batches" if counts else ""
        raise UserError(f"{path} is no whole Arrow file{batches}: {one_line(error)}; write it again") from None
    return schema, np.array(offsets, np.int64), np.cumsum(counts, dtype=np.int64)


def _unpacked_size(message: Any) -> int | None:
    """Bytes that the buffers of a message say that they unpack to; None where they are not packed.

    Before pyarrow takes that much memory. What it says lies in a table of flatbuffers, which pyarrow does not show.
    """
    about, body = memoryview(message.metadata), memoryview(message.body or b"")

    def field(table: int, number: int) -> int:
        """Where a field of a table is; 0 where the table does not have it."""
        names = table - struct.unpack_from("<i", about, table)[0]
        (length,) = struct.unpack_from("<H", about, names)
        (at,) = struct.unpack_from("<H", about, names + 4 + 2 * number) if 4 + 2 * number < length else (0,)
        return table + at if at else 0

    def table_at(place: int) -> int:
        return place + int(struct.unpack_from("<I", about, place)[0])

    try:
        batch = table_at(field(table_at(0), 2))
        if message.type == "dictionary":
            batch = table_at(field(batch, 1))
        if not field(batch, 3):
            return None
        buffers = table_at(field(batch, 2))
        (count,) = struct.unpack_from("<I", about, buffers)
        places = (struct.unpack_from("<qq", about, buffers + 4 + 16 * number) for number in range(count))
        return sum(max(0, struct.unpack_from("<q", body, at)[0]) for at, length in places if length >= 8)
    except struct.error:  # pyarrow says what is wrong with it
        return None


def _lies_in(batch: pa.RecordBatch, whole: pa.Buffer) -> bool:
    """Whether its columns are views of that memory: what was compressed is a copy."""
    buffers = [each for column in batch.columns for each in column.buffers() if each is not None and each.size]
    return all(whole.address <= each.address < whole.address + whole.size for each in buffers)


def value_of(column: pa.Array) -> Value:
    """Reads one value of a column by its number."""
    if isinstance(column, pa.ExtensionArray):
        return value_of(column.storage)
    value = _by_hand(column)
    if value is None:
        column.validate(full=True)  # pyarrow believes offsets that lie, and reads other memory
        return lambda row: column[row].as_py()
    if not column.null_count:
        return value
    there = np.frombuffer(column.buffers()[0], np.uint8)
    return lambda row: value(row) if there.item(row >> 3) >> (row & 7) & 1 else None


def _by_hand(column: pa.Array) -> Value | None:
    """Without regard to values that are missing; None for types that pyarrow must read."""
    kind = column.type
    if column.offset:
        return None
    if (numbers := _numbers(column)) is not None:
        return numbers.item
    if pa.types.is_boolean(kind):
        bits = np.frombuffer(column.buffers()[1], np.uint8)
        return lambda row: bool(bits.item(row >> 3) >> (row & 7) & 1)
    if _is_text(kind) or pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        content = _content(column)
        ends = _ends(column, len(content))
        if _is_text(kind):
            return lambda row: str(content[ends.item(row) : ends.item(row + 1)], "utf-8")
        return lambda row: bytes(content[ends.item(row) : ends.item(row + 1)])
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        ends, inner = _ends(column, len(column.values)), _numbers(column.values)
        if inner is None or column.values.null_count:
            return None
        return lambda row: inner[ends.item(row) : ends.item(row + 1)].tolist()
    if pa.types.is_fixed_size_list(kind):
        return _of_fixed_size(column)
    return None


def _of_fixed_size(column: pa.Array) -> Value | None:
    """Arrays of one shape, a copy each: what becomes a tensor must be its owner's to write."""
    shape: list[int] = []
    while pa.types.is_fixed_size_list(column.type):
        if shape and column.null_count:
            return None
        shape.append(column.type.list_size)
        column = column.values
    inner = _numbers(column)
    if inner is None or column.null_count or not all(shape):
        return None
    rows = inner.reshape(-1, *shape)
    return lambda row: rows[row].copy()


def _numbers(column: pa.Array) -> NDArray[Any] | None:
    """The numbers of a column as they lie in memory; None where they are none."""
    kind = column.type
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind)) or column.offset:
        return None
    return np.frombuffer(column.buffers()[1] or b"", kind.to_pandas_dtype())[: len(column)]


def _is_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def _content(column: pa.Array) -> memoryview:
    """The bytes of all its texts, one after the other."""
    return memoryview(column.buffers()[2] or b"")


def _ends(column: pa.Array, most: int) -> NDArray[Any]:
    """Where the values of texts and lists begin, and where the last one ends; a ValueError where they do not follow
    each other within the `most` that there are: a slice would be other values, without a word."""
    if not len(column):
        return np.zeros(1, np.int32)
    long = pa.types.is_large_list(column.type) or str(column.type).startswith("large_")
    ends: NDArray[Any] = np.frombuffer(column.buffers()[1], np.int64 if long else np.int32)[: len(column) + 1]
    if ends[0] < 0 or ends[-1] > most or (ends[1:] < ends[:-1]).any():
        raise ValueError(f"offsets of a column of {column.type} do not rise from 0 to at most {most:,}")
    return ends


def _lengths(column: pa.Array, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    if isinstance(column, pa.ExtensionArray):
        column = column.storage
    kind = column.type
    if pa.types.is_fixed_size_list(kind):
        found = np.full(len(rows), kind.list_size, np.int64)
    elif _is_text(kind) or pa.types.is_binary(kind) or pa.types.is_list(kind) or pa.types.is_large_list(kind):
        of_lists = pa.types.is_list(kind) or pa.types.is_large_list(kind)
        most = len(column.values) if of_lists else len(_content(column))
        ends = _ends(column, most).astype(np.int64, copy=False)
        found = ends[rows + 1] - ends[rows]
    else:
        raise UserError(f"lengths names a column of {kind}; it must be one of texts or lists")
    if column.null_count:
        found[~np.asarray(column.is_valid())[rows]] = 0
    return found


def one_line(error: Exception) -> str:
    """What pyarrow says, as part of a sentence."""
    return " ".join(str(error).split())

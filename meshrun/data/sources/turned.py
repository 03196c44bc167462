"""Parquet, CSV and compressed Arrow files, turned once into Arrow files that can be read where they lie.

    whole = turned(Path("big.parquet"), "parquet", columns=("text", "label"), in_memory=False)

Rows of the former can only be read many at a time: a row group is unpacked as a whole, and a line of CSV is found by
counting. Small ones are turned in memory.
"""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import json
import os
import resource
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet
from numpy.typing import NDArray

from meshrun.data.cache import free_memory
from meshrun.data.sources.columns import one_line, sentences
from meshrun.data.sources.delimited import Wider, read_delimited
from meshrun.data.sources.once import Progress, once
from meshrun.data.sources.source import PER_BYTE, is_bomb, memory_for, refuse_missing
from meshrun.errors import UserError

SMALL = 32 << 20
"""Bytes of a table up to which it is turned in memory."""
_UNPACKED = 8
"""Bytes in memory for each byte of a file; a larger one that is packed more tightly is turned on the node's disk."""
_BATCH = 8 << 20
"""Bytes of a record batch, about."""
_ROWS = 1 << 16
"""Most rows of a record batch."""

_TIMES = 9
"""How often a row is in memory while it is read, as pages, columns and Python's values."""
_LARGE_TEXTS = 64 << 20
"""Bytes of texts in lists that are read at a time."""
_LARGEST, _DENSEST = 1 << 30, 1100
"""Bytes on a disk that any file may become, and those above that for each byte of it: deflate makes 1032 of one."""
_LEAST_ROWS = 32
"""Rows of lists of texts that are read at a time, however long these may be."""
_SECONDS_TO_ASK = 10
_TRIED = 1 << 20
"""Bytes of a file up to which it is tried out whatever it says of itself: it takes a few milliseconds."""
_DAMAGED, _TOO_LARGE = 1, 3
"""How the process ends that a file is tried out in."""
_VALUE = 8
"""Bytes of a number or of the place of a text."""

Batches = tuple[pa.Schema, Iterator[tuple[pa.RecordBatch, float]]]
"""Columns, and record batches with the share of the file that is read after each."""


class _TooLarge(Exception):
    """A small file has more rows than memory should hold."""


def turned(path: Path, kind: str, columns: Sequence[str] | None, in_memory: bool) -> pa.Buffer:
    """The rows of the file as plain Arrow: a mapped file of this node, or memory where that is asked for or must do."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise UserError(f"{path} has a path that is not UTF-8, which pyarrow cannot open; rename or move it") from None
    if in_memory:
        with contextlib.suppress(_TooLarge):
            return _write(path, kind, columns, pa.BufferOutputStream, max(_BATCH, _UNPACKED * path.stat().st_size))
    made = once(path, f"arrow 1 {columns}", lambda to: _write(path, kind, columns, lambda: pa.OSFile(str(to), "wb")))
    if made is not None:
        return pa.memory_map(str(made)).read_buffer()
    try:
        return _write(path, kind, columns, pa.BufferOutputStream, free_memory() // 2)
    except _TooLarge:
        raise UserError(
            f"{path} has more rows than half of the free memory holds, and nothing can be kept on this node; "
            f"name a folder with room for it (--cache)"
        ) from None


def _write(path: Path, kind: str, columns: Sequence[str] | None, to: Callable[[], Any], most: int | None = None) -> Any:
    """Writes the rows into what `to` opens; memory is given back. _TooLarge beyond `most` bytes."""
    types: dict[str, pa.DataType] = {}
    while True:
        try:
            with sentences(path):
                schema, found = _read(path, kind, columns, types)
            with to() as sink:
                _fill(sink, path, schema, found, most)
                return sink.getvalue() if isinstance(sink, pa.BufferOutputStream) else None
        except Wider as wider:
            types[wider.column] = wider.kind


def _read(path: Path, kind: str, columns: Sequence[str] | None, types: dict[str, pa.DataType]) -> Batches:
    if kind == "csv":
        return read_delimited(path, columns, types)
    return _parquet(path, columns) if kind == "parquet" else _arrow(path, columns)


def _fill(
    sink: Any, path: Path, schema: pa.Schema, found: Iterator[tuple[pa.RecordBatch, float]], most: int | None
) -> None:
    told = Progress(path, "turning it into a file whose rows can be read by number")
    size = path.stat().st_size
    largest = max(_LARGEST, _DENSEST * size)
    for field in schema:
        if _has_dictionary(field.type):
            raise UserError(
                f"column {field.name[:80]!r} of {path} is of type {field.type}; "
                f"write the table again with the values themselves and no dictionary inside of lists or structs"
            )
    plain = pa.schema([_plain(field) for field in schema])
    with pa.ipc.new_file(sink, plain) as writer:
        for batch, share in found:
            with sentences(path):
                batch.validate(full=True)  # what is written from offsets that lie is other memory
                parts = _parts(batch)
            for part in parts:
                with sentences(path):
                    columns = [_decoded(column) for column in part.columns]
                    pieces = pa.Table.from_arrays(columns, schema=plain).to_batches(_ROWS)
                for piece in pieces:
                    writer.write_batch(piece)
                    if most is not None and sink.tell() > most:
                        raise _TooLarge
                    if sink.tell() > largest:  # a text that is there once, for each of any number of rows
                        raise UserError(
                            f"{path} has more than {largest:,} bytes of rows packed into {size:,}, which is damage or "
                            f"would fill the disk; write it again, in several files"
                        )
            told(share)


def _parts(batch: pa.RecordBatch) -> list[pa.RecordBatch]:
    """A batch in parts of about `_BATCH` bytes once its dictionaries are gone: these hold each value only once."""
    dictionaries = [column for column in batch.columns if isinstance(column, pa.DictionaryArray)]
    if not dictionaries or not batch.num_rows:
        return [batch]
    sizes = np.sum([_sizes(column) for column in dictionaries], axis=0)
    part_of_row = np.cumsum(sizes) // _BATCH
    starts = [0, *(np.flatnonzero(np.diff(part_of_row)) + 1).tolist(), batch.num_rows]
    return [batch.slice(start, stop - start) for start, stop in itertools.pairwise(starts)]


def _sizes(column: pa.DictionaryArray) -> NDArray[np.int64]:
    """Bytes that the value of each row takes, or as many as that may be."""
    values = column.dictionary
    if _is_text(values.type):
        lengths = pa.compute.binary_length(values).cast(pa.int64())
    else:
        lengths = pa.array(np.full(len(values), values.nbytes, np.int64))
    found: NDArray[np.int64] = lengths.take(column.indices).fill_null(0).to_numpy(zero_copy_only=False)
    return found


def _is_text(kind: pa.DataType) -> bool:
    types = pa.types
    return any(each(kind) for each in (types.is_string, types.is_large_string, types.is_binary, types.is_large_binary))


def _has_dictionary(kind: pa.DataType) -> bool:
    """Whether it is of lists or structs with values that are numbers in a list of values."""
    inner = [kind.field(number).type for number in range(kind.num_fields)]
    return any(pa.types.is_dictionary(each) or _has_dictionary(each) for each in inner)


def _plain(field: pa.Field) -> pa.Field:
    """Values themselves, where they are numbers in a list of values."""
    return field.with_type(field.type.value_type) if pa.types.is_dictionary(field.type) else field


def _decoded(column: pa.Array) -> pa.Array:
    return column.dictionary_decode() if isinstance(column, pa.DictionaryArray) else column


def _parquet(path: Path, columns: Sequence[str] | None) -> Batches:
    try:
        schema = pa.parquet.read_schema(path)
        # A text that is there a million times lies in such a file once: it is also read so.
        texts = [field.name for field in schema if "." not in field.name and _is_text(field.type)]
        file = pa.parquet.ParquetFile(path, read_dictionary=texts)
        schema = file.schema_arrow
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path} is no whole Parquet file: {one_line(error)}; copy or write it again") from None
    refuse_missing(path, columns or (), schema.names)
    names = list(columns or schema.names)

    rows_at_once = _rows_at_once(path, names, texts)

    def batches() -> Iterator[tuple[pa.RecordBatch, float]]:
        for group, rows in enumerate(rows_at_once):
            try:
                for batch in file.iter_batches(rows, row_groups=[group], columns=names, use_threads=False):
                    yield batch.select(names), group / file.num_row_groups
            except (pa.ArrowException, OSError) as error:
                raise UserError(
                    f"row group {group} of {path} cannot be read: {one_line(error)}; copy or write it again"
                ) from None

    return pa.schema([schema.field(name) for name in names]), batches()


def _rows_at_once(path: Path, names: Sequence[str], texts: Sequence[str]) -> list[int]:
    """Rows to read at a time of each row group; a sentence for a file that takes memory beyond reason.

    Asked in a process of its own: pyarrow ends the one that asks a damaged file for its sizes. A list may have any
    number of values that take almost no bytes in the file, and a text may be as long as all others together, so what
    may expand is also read there, with no more memory than a file of its size may take.
    """
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = _DAMAGED
        with contextlib.suppress(BaseException):
            faulthandler.disable()  # its crash is an answer
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(_SECONDS_TO_ASK)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what it says when it ends
            about = pa.parquet.read_metadata(path)
            groups = [about.row_group(number) for number in range(about.num_row_groups)]
            sizes = [_sizes_of_rows(group) for group in groups]
            rows = [_rows_of_group(*each) for each in sizes]
            with open(writing, "wb") as answer:  # noqa: PTH123
                answer.write(json.dumps([[size for size, _ in sizes], rows]).encode())
            signal.alarm(0)  # it may take longer than to ask
            unpacked = [max(group.num_rows * size, long) for group, (size, long) in zip(groups, sizes, strict=True)]
            status = _try_out(path, names, texts, rows) if _may_expand(path, max(unpacked, default=0)) else 0
        os._exit(status)
    os.close(writing)
    with open(reading, "rb") as answered:  # noqa: PTH123
        said = answered.read()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    found_sizes, found_rows = json.loads(said) if said else ([], [])
    for number, size in enumerate(found_sizes):
        refuse_beyond(path, number, size)
    if status == _TOO_LARGE:
        size = path.stat().st_size
        raise UserError(
            f"{path} takes more than {memory_for(size):,} bytes of memory to read, which is too much for a file of "
            f"{size:,} bytes; write it again, with fewer rows in a row group"
        )
    if status:
        raise UserError(
            f"{path} is no whole Parquet file: what it says of its columns is damaged; copy or write it again"
        )
    return [int(rows) for rows in found_rows]


def _try_out(path: Path, names: Sequence[str], texts: Sequence[str], rows: Sequence[int]) -> int:
    """Read the file in a process that may not have more memory for it; the status to end that process with."""
    file, size = pa.parquet.ParquetFile(path, read_dictionary=texts, pre_buffer=False), path.stat().st_size
    most, data = memory_for(size), int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_DATA, (data + most,) * 2)
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from now on
    before = _peak()
    for group, at_once in enumerate(rows):
        try:
            for batch in file.iter_batches(at_once, row_groups=[group], columns=list(names), use_threads=False):
                if _peak() - before > most:  # of what pyarrow had from the system in advance
                    return _TOO_LARGE
                if batch.nbytes > _BATCH:  # more than is to be expected, so that a row may be long
                    row = max(batch.slice(number, 1).nbytes for number in range(batch.num_rows))
                    if is_bomb(row, _TIMES * row, size):
                        return _TOO_LARGE
        except MemoryError:
            return _TOO_LARGE
        except (pa.ArrowException, OSError):
            pass  # who reads it afterwards says in what row group
    return 0


def _peak() -> int:
    """Most bytes of memory that this process has had."""
    line = next(each for each in Path("/proc/self/status").read_text().splitlines() if each.startswith("VmHWM"))
    return int(line.split()[1]) << 10


def _may_expand(path: Path, unpacked: int) -> bool:
    """Whether a file could take more memory than one of its size may: to try it out is to read it twice."""
    size = path.stat().st_size
    return size <= _TRIED or (size <= SMALL and unpacked > PER_BYTE * size)


def refuse_beyond(path: Path, group: int, row: int) -> None:
    """Refuse a row group with rows of so many bytes in memory that a file of this size cannot hold them."""
    size = path.stat().st_size
    if is_bomb(row, _TIMES * row, size):
        raise UserError(
            f"row group {group} of {path} has rows of {row:,} bytes by what it says of itself, which a file of "
            f"{size:,} bytes cannot hold; copy or write it again"
        )


def _sizes_of_rows(group: Any) -> tuple[int, int]:
    """Bytes of a row of a row group in memory, and most bytes that the texts in the lists of a row may take."""
    columns, rows = [group.column(number) for number in range(group.num_columns)], max(1, group.num_rows)
    numbers = _VALUE * sum(each.num_values for each in columns)
    texts = [each for each in columns if each.physical_type == "BYTE_ARRAY" and "." in each.path_in_schema]
    longest = sum(max(1, each.num_values // rows) * each.total_uncompressed_size for each in texts)
    return max(group.total_byte_size, numbers) // rows, longest


def _rows_of_group(size: int, of_texts: int) -> int:
    """Rows of so many bytes to read at a time."""
    of_lists = max(_LEAST_ROWS, _LARGE_TEXTS // of_texts) if of_texts else _ROWS
    return max(1, min(_ROWS, _BATCH // max(1, size), of_lists))


def _arrow(path: Path, columns: Sequence[str] | None) -> Batches:
    try:
        source = pa.memory_map(str(path))
        try:
            file = pa.ipc.open_file(source)
            found = (file.get_batch(number) for number in range(file.num_record_batches))
        except pa.ArrowInvalid:
            source.seek(0)
            file = found = pa.ipc.open_stream(source)
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path} is no whole Arrow file: {one_line(error)}; copy or write it again") from None
    refuse_missing(path, columns or (), file.schema.names)
    names = list(columns or file.schema.names)

    def batches() -> Iterator[tuple[pa.RecordBatch, float]]:
        try:
            for batch in found:
                yield batch.select(names), source.tell() / source.size()
        except (pa.ArrowException, OSError) as error:
            raise UserError(f"{path} is no whole Arrow file: {one_line(error)}; copy or write it again") from None

    return pa.schema([file.schema.field(name) for name in names]), batches()

"""Parquet, CSV and compressed Arrow files, turned once into Arrow files that can be read where they lie.

    whole = turned(Path("big.parquet"), "parquet", columns=("text", "label"), in_memory=False)

Rows of the former can only be read many at a time: a row group is unpacked as a whole, and a line of CSV is found by
counting. Small ones are turned in memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet

from meshrun.data.cache import free_memory
from meshrun.data.sources.columns import one_line, sentences
from meshrun.data.sources.delimited import Wider, read_delimited
from meshrun.data.sources.once import Progress, once
from meshrun.data.sources.source import refuse_missing
from meshrun.errors import UserError

SMALL = 32 << 20
"""Bytes of a table up to which it is turned in memory."""
_UNPACKED = 8
"""Bytes in memory for each byte of a file; one that is packed more tightly is turned on the node's disk."""
_BATCH = 16 << 20
"""Bytes of a record batch, about."""
_ROWS = 1 << 16
"""Most rows of a record batch."""

Batches = tuple[pa.Schema, Iterator[tuple[pa.RecordBatch, float]]]
"""Columns, and record batches with the share of the file that is read after each."""


class _TooLarge(Exception):
    """A small file has more rows than memory should hold."""


def turned(path: Path, kind: str, columns: Sequence[str] | None, in_memory: bool) -> pa.Buffer:
    """The rows of the file as plain Arrow: a mapped file of this node, or memory where that is asked for or must do."""
    if in_memory:
        with contextlib.suppress(_TooLarge):
            return _write(path, kind, columns, pa.BufferOutputStream, max(SMALL, _UNPACKED * path.stat().st_size))
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
                columns = [_decoded(column) for column in batch.columns]
                pieces = pa.Table.from_arrays(columns, schema=plain).to_batches(_ROWS)
            for piece in pieces:
                writer.write_batch(piece)
                if most is not None and sink.tell() > most:
                    raise _TooLarge
            told(share)


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
        file = pa.parquet.ParquetFile(path)
        schema = file.schema_arrow
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path} is no whole Parquet file: {one_line(error)}; copy or write it again") from None
    refuse_missing(path, columns or (), schema.names)
    names = list(columns or schema.names)

    def batches() -> Iterator[tuple[pa.RecordBatch, float]]:
        for group in range(file.num_row_groups):
            about = file.metadata.row_group(group)
            rows = max(1, min(_ROWS, _BATCH * about.num_rows // max(1, about.total_byte_size)))
            try:
                for batch in file.iter_batches(rows, row_groups=[group], columns=names, use_threads=False):
                    yield batch.select(names), group / file.num_row_groups
            except (pa.ArrowException, OSError) as error:
                raise UserError(
                    f"row group {group} of {path} cannot be read: {one_line(error)}; copy or write it again"
                ) from None

    return pa.schema([schema.field(name) for name in names]), batches()


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

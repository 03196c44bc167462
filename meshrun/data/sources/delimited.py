"""CSV and TSV: record batches of columns with one type each, or a sentence with the row that is wrong.

    schema, batches = read_delimited(Path("ratings.csv"), columns=None, types={})

The first line has the names. A column's type is that of the values in the first megabytes. A later value that does not
fit raises `Wider` where another type takes them all (1, 2, 3.5), for the caller to begin anew with it, and a UserError
where none does.
"""

from __future__ import annotations

import csv
import gzip
import io
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.csv

from meshrun.data.sources.columns import one_line
from meshrun.data.sources.source import refuse_missing, twice
from meshrun.errors import UserError

_BLOCK = 16 << 20
"""Most bytes that are parsed at a time, and most that a line may have: pyarrow takes up to 100 times as much memory."""
_LEAST_BLOCK = 1 << 19
"""The same for a file of fewer bytes, whatever it unpacks to."""
_FOLLOWING = {"null": pa.int64(), "int64": pa.float64(), "double": None, "bool": None}
"""The type to try when a value does not fit; None where a value is wrong, and text for all other types."""
_PLACE = re.compile(r"(?:In CSV column #(?P<column>\d+): )?(?:Row #(?P<row>\d+): )?(?P<why>.*)", re.DOTALL)
_RAGGED = re.compile(r"Expected (?P<expected>\d+) columns, got (?P<got>\d+)")
_UNFIT = re.compile(r"CSV conversion error to (?P<kind>[^:]*): (?P<what>.*)", re.DOTALL)


class Wider(Exception):
    """A column is of a wider type than its first values said."""

    def __init__(self, column: str, kind: pa.DataType) -> None:
        super().__init__(column, kind)
        self.column, self.kind = column, kind


def read_delimited(
    path: Path, columns: Sequence[str] | None, types: Mapping[str, pa.DataType]
) -> tuple[pa.Schema, Iterator[tuple[pa.RecordBatch, float]]]:
    """The columns, and record batches with the share of the file that is read after each."""
    names = _names(path)
    refuse_missing(path, columns or (), names)
    wanted = list(columns or names)
    try:
        reader = pa.csv.open_csv(
            path,
            read_options=pa.csv.ReadOptions(use_threads=False, block_size=_block(path)),
            parse_options=_parsing(path),
            convert_options=pa.csv.ConvertOptions(include_columns=wanted, column_types=dict(types)),
        )
    except (pa.ArrowException, OSError) as error:
        raise _told(path, names, error) from None
    for field in reader.schema:
        if pa.types.is_binary(field.type):
            raise UserError(f"{path} has text that is not UTF-8{_where_not_utf8(path)}; write the file as UTF-8")
    return reader.schema, _batches(path, names, reader)


def _batches(
    path: Path, names: Sequence[str], reader: pa.csv.CSVStreamingReader
) -> Iterator[tuple[pa.RecordBatch, float]]:
    read, size = 0, max(1, path.stat().st_size)
    try:
        for batch in reader:
            read += batch.nbytes
            yield batch, min(1.0, read / size)
    except (pa.ArrowException, OSError) as error:
        raise _told(path, names, error) from None


def _block(path: Path) -> int:
    """Bytes of the file's text that are parsed at a time."""
    return min(_BLOCK, max(_LEAST_BLOCK, path.stat().st_size))


def _parsing(path: Path) -> pa.csv.ParseOptions:
    tabs = ".tsv" in path.suffixes[-2:]
    return pa.csv.ParseOptions(delimiter="\t" if tabs else ",", newlines_in_values=True)


def _names(path: Path) -> list[str]:
    """What the columns are called."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            header = file.readline(_block(path))
        names = pa.csv.read_csv(pa.py_buffer(header), parse_options=_parsing(path)).column_names
    except UnicodeDecodeError:
        raise UserError(f"{path} has text that is not UTF-8{_where_not_utf8(path)}; write the file as UTF-8") from None
    except (pa.ArrowException, OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path} has no line with names of columns: {one_line(error)}") from None
    if (name := twice(names)) is not None:
        raise UserError(f"{path} has two columns {name[:80]!r}; give each a name of its own in the first line")
    return names


def _told(path: Path, names: Sequence[str], error: Exception) -> Exception:
    found = _PLACE.match(str(error).removeprefix("CSV parse error: "))
    assert found is not None
    row = f"{_line(path, int(found['row']))} of {path}" if found["row"] else f"{path}"
    if ragged := _RAGGED.match(found["why"]):
        return UserError(
            f"{row} has {ragged['got']} columns and not {ragged['expected']} like the first; "
            f"repair or remove it: rows of CSV cannot be skipped, as those of JSON lines can (--skip-bad-samples)"
        )
    if "straddling" in found["why"]:
        return UserError(
            f"{path} has a row of more than {_block(path):,} bytes, or a quotation mark without the one that ends its "
            f"text; repair it, or write the table as JSON lines or Parquet"
        )
    if found["column"] is None or not (unfit := _UNFIT.match(found["why"])):
        return UserError(f"{path} cannot be read as CSV: {one_line(error)}; repair it")
    if "UTF8" in unfit["what"]:
        return UserError(f"{path} has text that is not UTF-8{_where_not_utf8(path)}; write the file as UTF-8")
    # Numbers of columns are those of the file, not of what was asked for.
    column, following = names[int(found["column"])], _FOLLOWING.get(unfit["kind"], pa.string())
    if following is not None:
        return Wider(column, following)
    return UserError(
        f"{row} has an {unfit['what']} in column {column!r}, which has {_plural(unfit['kind'])} before it; "
        f"repair it, or write the table as JSON lines or Parquet, which say what each value is"
    )


def _plural(kind: str) -> str:
    return {"double": "numbers", "bool": "true and false"}[kind]


def _line(path: Path, row: int) -> str:
    """The line of the file that a row starts in: values may have line breaks, and lines without any are no rows."""
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            text = io.TextIOWrapper(file, "utf-8", errors="replace", newline="")
            rows, count, before = csv.reader(text, delimiter=_parsing(path).delimiter), 0, 0
            for each in rows:
                count += bool(each)
                if count == row:
                    return f"line {before + 1:,}"
                before = rows.line_num
    except (csv.Error, OSError, EOFError, zlib.error):
        pass
    return f"row {row:,}"


def _where_not_utf8(path: Path) -> str:
    if path.suffix == ".gz":
        return ""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                line.decode()
            except UnicodeDecodeError as error:
                return f" in line {number:,}, byte {error.start + 1}"
    return ""

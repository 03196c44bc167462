"""Documents of texts: a file each, a line each, or a column of JSON lines or Parquet; cut into jobs, and read.

    kind = kind_of(source, inputs)                       # "text", "lines", "json" or "parquet"
    for job in jobs_of(source, inputs, reading, part_bytes=1 << 20): …
    for document in documents(source, job.units, reading):
        document.where                                   # "line 17 of news.jsonl", for whoever has to say what is wrong
    for texts in good(documents(…), skip=True, bad=bad):
        for text in texts: …                             # in pieces: a document may be larger than memory

Jobs are cut by what the inputs are and never by how many processes there are, so that parts are always the same.
"""

from __future__ import annotations

import codecs
import gzip
import importlib
import itertools
import json
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from meshrun.data.convert.inputs import Input, Job, Unit, opened, path_of, unusable
from meshrun.data.convert.work import Bad
from meshrun.data.sources.lines import longest_in, too_much_in
from meshrun.data.sources.source import listed
from meshrun.errors import BadSample, UserError, is_of_machine, unreadable_here

_JSON = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz")
_PARQUET = (".parquet", ".pq")
_READ = 1 << 20
_ROWS = 1024


@dataclass(frozen=True)
class Reading:
    """How documents are found in files."""

    kind: str
    """text: a file each; lines: a line each; json: an object a line; parquet: a row each."""
    column: str = "text"
    """Of json and parquet."""


@dataclass(frozen=True)
class Document:
    """A text: which it is, and its pieces."""

    where: str
    texts: Callable[[], Iterator[str]]
    exactly: Callable[[], str] | None = None
    """Which it is, in words that take long to find."""


def kind_of(source: Path, inputs: Iterable[Input], split_lines: bool) -> str:
    """What the files hold, by their names; all must be of one kind."""
    example: dict[str, str] = {}
    for each in inputs:
        example.setdefault(_kind(each.name), each.name)
    if not example:
        raise UserError(f"there are no files in {source}; give a file or folder of texts (SOURCE)")
    if len(example) > 1:
        some = " and ".join(sorted(example.values()))
        raise UserError(f"{source} holds files of several kinds, such as {some}; convert one kind at a time (SOURCE)")
    kind = next(iter(example))
    if split_lines and kind != "text":
        raise UserError(f"--split-lines is for plain texts, but {example[kind]} has a document a row as it is")
    return "lines" if split_lines else kind


def _kind(name: str) -> str:
    lower = name.lower()
    return "json" if lower.endswith(_JSON) else "parquet" if lower.endswith(_PARQUET) else "text"


def jobs_of(source: Path, inputs: Iterable[Input], reading: Reading, part_bytes: int) -> Iterator[Job]:
    """Units in order, put together until they have the size of a part."""
    number, units, weight = 0, list[Unit](), 0
    for each in inputs:
        for unit, size in _units(source, each, reading, part_bytes):
            units.append(unit)
            weight += size
            if weight >= part_bytes or len(units) >= 4096:
                yield Job(number, tuple(units))
                number, units, weight = number + 1, [], 0
    if units:
        yield Job(number, tuple(units))


def _units(source: Path, each: Input, reading: Reading, part_bytes: int) -> Iterator[tuple[Unit, int]]:
    """What can be read of a file by itself, and how many bytes of text that is, about."""
    if reading.kind == "parquet":
        groups = _parquet(source, each, reading.column).metadata
        for group in range(groups.num_row_groups):
            unpacked = groups.row_group(group).total_byte_size
            yield Unit(each, group, group + 1, each.size // groups.num_row_groups), unpacked
    elif reading.kind == "text" or each.name.endswith(".gz"):
        yield Unit(each, 0, each.size, each.size), each.size
    else:
        for begin in range(0, each.size, part_bytes):
            end = min(begin + part_bytes, each.size)
            yield Unit(each, begin, end, end - begin), end - begin


def documents(source: Path, units: Iterable[Unit], reading: Reading) -> Iterator[Document | BadSample]:
    """All documents of the units; a file that cannot be opened at all is told as one that is bad."""
    for unit in units:
        path = path_of(source, unit.input)
        try:
            if reading.kind == "text":
                yield _of_file(source, unit, path)
            elif reading.kind == "parquet":
                yield from _of_rows(source, unit, path, reading.column)
            else:
                yield from _of_lines(source, unit, path, reading)
        except BadSample as bad:
            yield bad


def _of_file(source: Path, unit: Unit, path: Path) -> Document:
    def texts() -> Iterator[str]:
        with _bytes_of(source, unit.input) as file:
            decoder = codecs.getincrementaldecoder("utf-8-sig")()
            try:
                block = file.read(_READ)
                while block:
                    after = file.read(_READ)
                    yield decoder.decode(block, final=not after)
                    block = after
            except (OSError, EOFError, zlib.error) as error:
                _refuse_of_machine(path, error)
                raise ValueError(f"it cannot be read ({error})") from None

    return Document(str(path), texts)


def _of_lines(source: Path, unit: Unit, path: Path, reading: Reading) -> Iterator[Document]:
    """Lines that begin inside the unit; the last one may end behind it."""
    packed = unit.input.name.endswith(".gz")
    with _bytes_of(source, unit.input) as file:
        if unit.begin:
            file.seek(unit.begin - 1)
            file.readline()
        number, size = 0, unit.input.size
        longest = longest_in(size)
        while packed or file.tell() < unit.end:
            at, number = file.tell(), number + 1
            try:
                line = file.readline(longest + 1)
            except (OSError, EOFError, zlib.error) as error:
                _refuse_of_machine(path, error)
                raise unusable(str(path), f"it cannot be unpacked ({error})") from None
            if not line:
                return
            if len(line) > longest:
                why = f"line {number:,} of it has more than {longest:,} bytes, too much for a file of {size:,} bytes"
                raise unusable(str(path), why)
            if at == 0:
                line = line.removeprefix(codecs.BOM_UTF8)
            if line.isspace():
                continue

            def texts(line: bytes = line) -> Iterator[str]:
                if reading.kind != "json":
                    yield _without_break(line)
                    return
                if (why := too_much_in(line, 0, len(line), size)) is not None:
                    raise ValueError(why)
                yield _column(json.loads(line), reading.column)

            if unit.begin:
                exactly = partial(_numbered, source, unit.input, path, at)
                yield Document(f"the line at byte {at:,} of {path}", texts, exactly)
            else:
                yield Document(f"line {number:,} of {path}", texts)


def _without_break(line: bytes) -> str:
    return line.decode().removesuffix("\n").removesuffix("\r")


def _numbered(source: Path, each: Input, path: Path, at: int) -> str:
    """Which line it is that begins at that byte: all before it has to be read."""
    number = 1
    with opened(source, each) as file:
        while at and (block := file.read(min(at, _READ))):
            number += block.count(b"\n")
            at -= len(block)
    return f"line {number:,} of {path}"


def _of_rows(source: Path, unit: Unit, path: Path, column: str) -> Iterator[Document]:
    from meshrun.data.sources.turned import refuse_beyond  # late: it imports pyarrow

    table, number = _parquet(source, unit.input, column), 0
    group = table.metadata.row_group(unit.begin)
    refuse_beyond(path, unit.begin, group.total_byte_size // max(1, group.num_rows))
    before = sum(table.metadata.row_group(group).num_rows for group in range(unit.begin))
    try:
        for rows in table.iter_batches(_ROWS, [unit.begin], [column], use_threads=False):
            for value in rows.column(0):
                number += 1

                def texts(value: Any = value) -> Iterator[str]:
                    yield _column({column: value.as_py()}, column)

                yield Document(f"row {before + number:,} of {path}", texts)
    except (OSError, ValueError, LookupError, TypeError, NotImplementedError, MemoryError) as error:  # so are pyarrow's
        _refuse_of_machine(path, error)
        raise unusable(f"row group {unit.begin} of {path}", f"{error} after {number:,} of its rows") from None


def _refuse_of_machine(path: Path, error: Exception) -> None:
    if is_of_machine(error):
        raise unreadable_here(path, str(error)) from None


def _column(row: Any, column: str) -> str:
    """The text in a row; ValueError says what is there instead."""
    if not isinstance(row, dict):
        raise ValueError(f"it is no object but {type(row).__name__}")
    if column not in row:
        raise ValueError(f"it has no column {column!r} but {', '.join(map(repr, sorted(row))) or 'none'} (--column)")
    text = row[column]
    if not isinstance(text, str):
        raise ValueError(f"its {column!r} is no text but {'null' if text is None else type(text).__name__} (--column)")
    text.encode()  # halves of characters, which JSON can hold, are no text
    return text


def good(found: Iterable[Document | BadSample], skip: bool, bad: Bad) -> Iterator[Iterator[str]]:
    """The texts of documents that can be read to their ends; others are counted, or end everything."""
    for document in found:
        try:
            if isinstance(document, BadSample):
                raise document
            yield _read(document, skip)
        except BadSample as error:
            if not skip:
                raise
            bad.add(error)


def _read(document: Document, skip: bool) -> Iterator[str]:
    """The pieces of a document. Of a long one all are looked at first: none must be used if a later one is bad."""
    try:
        texts = document.texts()
        first = list(itertools.islice(texts, 2))
        if len(first) < 2:
            return iter(first)
        for _ in texts:
            pass
        return document.texts()
    except (ValueError, LookupError, RecursionError) as error:
        where = document.exactly() if document.exactly and not skip else document.where
        raise unusable(where, why_of(error)) from None


def why_of(error: Exception) -> str:
    """What is wrong with a document, in words."""
    if isinstance(error, UnicodeDecodeError):
        return f"it is not UTF-8 (byte 0x{error.object[error.start]:02x})"
    if isinstance(error, UnicodeEncodeError):
        return "it holds half of a character"
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, json.JSONDecodeError):
        return f"it is no JSON ({error.msg} at character {error.pos + 1})"
    return str(error) or type(error).__name__


def _bytes_of(source: Path, each: Input) -> BinaryIO:
    file = opened(source, each)
    return gzip.GzipFile(fileobj=file) if each.name.endswith(".gz") else file  # type: ignore[return-value]


def _parquet(source: Path, each: Input, column: str) -> Any:
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise UserError("Parquet is read by pyarrow, which is not installed; pip install 'meshrun[tables]'") from None
    path = path_of(source, each)
    try:
        opened(source, each).close()
        # A text that is there a million times lies in such a file once: it is also read so.
        found = parquet.ParquetFile(path, read_dictionary=[column])
        names = found.schema_arrow.names
    except (OSError, ValueError, LookupError, TypeError, NotImplementedError, MemoryError) as error:  # so are pyarrow's
        _refuse_of_machine(path, error)
        raise UserError(f"{path} is not a Parquet file that can be read: {error}") from None
    if column not in names:
        raise UserError(f"{path} has no column {column!r}; it has: {listed(names)} (--column)")
    return found

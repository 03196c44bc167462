"""Tables: the rows that were written, by number, from every kind of file; a sentence for what is wrong with one."""

from __future__ import annotations

import csv
import errno
import gzip
import itertools
import json
import multiprocessing
import os
import pickle
import time
import tracemalloc
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshrun import Table
from meshrun.data import cache
from meshrun.data.sources import delimited, lines, mapped, once, source, turned
from meshrun.data.sources.saved import saved as files_saved_in
from meshrun.data.sources.tables import files_of
from meshrun.errors import BadSample, RunFailed, UserError
from tests.data.forked import forked

Row = dict[str, Any]


def arrow(rows: list[Row]) -> pa.Table:
    return pa.Table.from_pylist(rows)


def as_lines(rows: list[Row]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def jsonl(rows: list[Row], folder: Path) -> Path:
    (folder / "t.jsonl").write_bytes(as_lines(rows))
    return folder / "t.jsonl"


def packed(rows: list[Row], folder: Path) -> Path:
    (folder / "t.jsonl.gz").write_bytes(gzip.compress(as_lines(rows)))
    return folder / "t.jsonl.gz"


def parquet(rows: list[Row], folder: Path) -> Path:
    pa.parquet.write_table(arrow(rows), folder / "t.parquet", row_group_size=3)
    return folder / "t.parquet"


def stream(rows: list[Row], folder: Path) -> Path:
    table = arrow(rows)
    with pa.OSFile(str(folder / "t.arrow"), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=4)
    return folder / "t.arrow"


def file(rows: list[Row], folder: Path) -> Path:
    table = arrow(rows)
    with pa.OSFile(str(folder / "t.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=5)
    return folder / "t.arrow"


def feather(rows: list[Row], folder: Path) -> Path:
    pa.feather.write_feather(arrow(rows), str(folder / "t.feather"), compression="lz4", chunksize=4)
    return folder / "t.feather"


def categories(rows: list[Row], folder: Path) -> Path:
    table = arrow(rows)
    column = table.column("text").dictionary_encode()
    table = table.set_column(table.schema.get_field_index("text"), "text", column)
    pa.feather.write_feather(table, str(folder / "t.feather"), compression="uncompressed")
    return folder / "t.feather"


def parts(rows: list[Row], folder: Path) -> Path:
    middle = max(1, len(rows) // 3)
    for number, some in enumerate((rows[:middle], rows[middle:])):
        pa.parquet.write_table(
            pa.Table.from_pylist(some, schema=arrow(rows).schema), folder / f"part-{number:04}.parquet"
        )
    (folder / "_SUCCESS").touch()
    return folder


def saved(rows: list[Row], folder: Path) -> Path:
    """As save_to_disk writes it, in two files."""
    table, middle = arrow(rows), len(rows) // 2
    names = [f"data-0000{number}-of-00002.arrow" for number in range(2)]
    for name, some in zip(names, (table.slice(0, middle), table.slice(middle)), strict=True):
        with pa.OSFile(str(folder / name), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(some, max_chunksize=3)
    state = {"_data_files": [{"filename": name} for name in names], "_split": "train", "_format_columns": None}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def comma(rows: list[Row], folder: Path) -> Path:
    with (folder / "t.csv").open("w", newline="") as sink:
        writer = csv.DictWriter(sink, ["text", "number", "share"], extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return folder / "t.csv"


WITH_LISTS = [jsonl, packed, parquet, stream, file, feather, categories, parts, saved]

TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00\r"), max_size=12).map("t".__add__)
ROW = st.fixed_dictionaries(
    {
        "text": TEXT,
        "number": st.integers(-(2**62), 2**62),
        "share": st.floats(allow_nan=False, allow_infinity=False).map(lambda value: value + 0.5),
        "tokens": st.lists(st.integers(0, 60_000), max_size=5),
        "right": st.booleans(),
        "maybe": st.none() | TEXT,
        "words": st.lists(TEXT, max_size=3),
    }
)


@pytest.mark.parametrize("write", [*WITH_LISTS, comma], ids=lambda write: write.__name__)
@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(ROW, min_size=1, max_size=25), data=st.data())
def test_rows_are_those_that_were_written(
    write: Callable[[list[Row], Path], Path],
    rows: list[Row],
    data: st.DataObject,
    tmp_path_factory: pytest.TempPathFactory,
):
    table = Table(write(rows, tmp_path_factory.mktemp("table")))
    ids = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=40))
    expected = [{"text": "", "number": 0, "share": 0} | rows[number] for number in ids]
    if write is comma:
        expected = [{name: row[name] for name in ("text", "number", "share")} for row in expected]
    assert len(table) == len(rows)
    assert table.__getitems__(ids) == expected
    assert [table[number] for number in ids] == expected
    assert table[-1] == table[len(rows) - 1]


ROWS = [{"text": f"text {number}", "number": number, "tokens": list(range(number % 7))} for number in range(40)]


@pytest.mark.parametrize("write", WITH_LISTS, ids=lambda write: write.__name__)
def test_columns_transform_and_lengths(write: Callable[[list[Row], Path], Path], tmp_path: Path):
    path = write(ROWS, tmp_path)
    table = Table(path, columns=["number"], transform=lambda row: (row["number"], -row["number"]), lengths=None)
    assert table.__getitems__([7, 3]) == [(7, -7), (3, -3)]
    with pytest.raises(UserError, match="does not know how long samples are; name a column, lengths="):
        table.lengths([1])
    whole = Table(path, lengths="tokens")
    assert whole.lengths(np.array([6, 39, 7])).tolist() == [6, 4, 0]
    assert Table(path, lengths="text").lengths([3, 33]).tolist() == [6, 7]
    for wrong in (-1, 40):
        with pytest.raises(IndexError, match=f"there is no sample {wrong}"):
            whole.__getitems__([3, wrong])


def test_a_line_is_parsed_once_for_its_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    table = Table(jsonl(ROWS, tmp_path), lengths="tokens")
    expected = table.lengths(range(40))
    monkeypatch.setattr(lines.json, "loads", lambda _: pytest.fail("it is known"))
    assert (table.lengths(range(39, -1, -1)) == expected[::-1]).all()


@pytest.mark.parametrize("write", [jsonl, parquet, parts], ids=lambda write: write.__name__)
def test_goes_to_another_process_as_it_is(write: Callable[[list[Row], Path], Path], tmp_path: Path):
    table = Table(write(ROWS, tmp_path), columns=["text"])
    sent = pickle.dumps(table)
    assert len(sent) < 1000
    there = pickle.loads(sent)
    assert there.__getitems__([39, 0]) == table.__getitems__([39, 0]) == [{"text": "text 39"}, {"text": "text 0"}]
    assert there.fingerprint == table.fingerprint


def test_what_else_a_column_may_hold(tmp_path: Path):
    matrices = pa.FixedSizeListArray.from_arrays(
        pa.FixedSizeListArray.from_arrays(pa.array(np.arange(12, dtype=np.float32)), 2), 3
    )
    table = pa.table(
        {
            "matrix": matrices,
            "bytes": pa.array([b"\x00\xff", None], pa.large_binary()),
            "nested": [{"a": [{"b": 1}]}, None],
            "small": pa.array([1, None], pa.int8()),
            "when": pa.array([0, 1], pa.date32()),
        }
    )
    pa.parquet.write_table(table, tmp_path / "t.parquet")
    first, second = Table(tmp_path / "t.parquet").__getitems__([0, 1])
    assert first["matrix"].dtype == np.float32 and first["matrix"].tolist() == [[0, 1], [2, 3], [4, 5]]
    first["matrix"] += 1  # its own, not the file's
    assert first["bytes"] == b"\x00\xff" and first["nested"] == {"a": [{"b": 1}]} and first["small"] == 1
    assert (second["bytes"], second["nested"], second["small"]) == (None, None, None)
    assert str(second["when"]) == "1970-01-02"


def test_rows_that_a_saved_dataset_has_picked(tmp_path: Path):
    folder = saved(ROWS, tmp_path)
    picked = pa.table({"indices": pa.array([31, 2, 2, 17], pa.uint64())})
    with pa.OSFile(str(folder / "indices.arrow"), "wb") as sink, pa.ipc.new_stream(sink, picked.schema) as writer:
        writer.write_table(picked)
    state = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps(state | {"_indices_files": [{"filename": "indices.arrow"}]}))
    table = Table(folder)
    assert [table[number]["number"] for number in range(len(table))] == [31, 2, 2, 17]
    beyond = pa.table({"indices": pa.array([0, len(ROWS)], pa.uint64())})
    with pa.OSFile(str(folder / "indices.arrow"), "wb") as sink, pa.ipc.new_stream(sink, beyond.schema) as writer:
        writer.write_table(beyond)
    with pytest.raises(UserError, match="picks rows beyond the"):
        Table(folder)


def test_blank_lines_and_a_mark_in_front_are_no_rows(tmp_path: Path):
    text = b'\xef\xbb\xbf\n  \n{"n": 0}\r\n\r\n \t \n  {"n": 1}\n\n{"n": 2}'
    (tmp_path / "t.jsonl").write_bytes(text)
    assert [row["n"] for row in Table(tmp_path / "t.jsonl").__getitems__([0, 1, 2])] == [0, 1, 2]
    assert len(Table(tmp_path / "t.jsonl")) == 3


@settings(max_examples=40)
@given(st.lists(st.sampled_from([b"x", b"  y", b"", b" ", b"\r", b" " * 70, b" " * 70 + b"z"]), max_size=30))
def test_starts_of_lines_do_not_depend_on_the_pieces_that_are_looked_through(found: list[bytes]):
    data = np.frombuffer(b"\n".join(found), np.uint8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lines, "_PIECE", 3)
        starts = lines.starts_of(data).tolist()
    full = [each for each in found if each.strip()]
    assert [bytes(data[begin:end]).strip() for begin, end in pairwise(starts)] == [each.strip() for each in full]


BAD_LINES = [
    (b'{"a": 1', r"it is no JSON at column 8: Expecting ',' delimiter"),
    (b"[1, 2]", "it is a list and not an object"),
    (b'{"a": "\xff"}', "byte 7 of it, 0xff, is not UTF-8"),
    (b'{"b": 2}', "it has no 'a' but 'b'"),
    (b"[" * 100_000, "it is no JSON"),
]


@pytest.mark.parametrize(("line", "why"), BAD_LINES, ids=[why for _, why in BAD_LINES])
def test_a_bad_line_is_named_with_its_sample(tmp_path: Path, line: bytes, why: str):
    (tmp_path / "0.jsonl").write_bytes(b'{"a": 0}\n' * 3)
    (tmp_path / "1.jsonl").write_bytes(b'{"a": 3}\n\n' + line + b'\n{"a": 5}\n')
    table = Table(tmp_path, columns=["a"], lengths="a")
    with pytest.raises(
        BadSample, match=rf"^sample 4 of .*1\.jsonl, line 3\) cannot be read: {why}.*--skip-bad-samples"
    ):
        table.__getitems__([0, 4])
    assert table.__getitems__([2, 3, 5]) == [{"a": 0}, {"a": 3}, {"a": 5}]
    assert table.lengths([4]).tolist() == [0]


def test_text_that_is_not_utf_8_in_a_table_is_a_bad_sample(tmp_path: Path):
    content = pa.array([b"fine", b"\xff"], pa.binary()).view(pa.string())
    with pa.OSFile(str(tmp_path / "t.arrow"), "wb") as sink:
        table = pa.table({"text": content})
        with pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
    table = Table(tmp_path / "t.arrow")
    assert table[0] == {"text": "fine"}
    with pytest.raises(BadSample, match=r"sample 1 of .*its 'text' is unusable, 'utf-8' codec can't decode"):
        table.__getitems__([0, 1])


def csv_of(text: str) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        (folder / "t.csv").write_bytes(text.encode("latin-1"))
        return folder / "t.csv"

    return write


def cut(write: Callable[[list[Row], Path], Path], keep: float) -> Callable[[Path], Path]:
    def written(folder: Path) -> Path:
        path = write(ROWS * 30, folder)
        path.write_bytes(path.read_bytes()[: int(path.stat().st_size * keep)])
        return path

    return written


def damaged_group(folder: Path) -> Path:
    path = folder / "t.parquet"
    pa.parquet.write_table(pa.table({"a": np.arange(50_000)}), path, row_group_size=25_000, use_dictionary=False)
    at = pa.parquet.ParquetFile(path).metadata.row_group(1).column(0).data_page_offset
    with path.open("r+b") as file:
        file.seek(at)
        file.write(b"\xff" * 64)
    return path


def splits(folder: Path) -> Path:
    (folder / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    return folder


def unlike_parts(second: Row) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        for number, row in enumerate(({"a": 1, "b": "x"}, second)):
            pa.parquet.write_table(arrow([row]), folder / f"{number}.parquet")
        return folder

    return write


def with_file_missing(folder: Path) -> Path:
    (saved(ROWS, folder) / "data-00001-of-00002.arrow").unlink()
    return folder


def of_two_kinds(folder: Path) -> Path:
    return comma([], jsonl(ROWS, folder).parent).parent


def named(name: str, content: bytes = b"") -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        (folder / name).write_bytes(content)
        return folder / name

    return write


def twice(folder: Path) -> Path:
    table = pa.table([[1], [2]], ["a", "a"])
    with pa.ipc.new_file(folder / "t.arrow", table.schema) as writer:
        writer.write(table)
    return folder / "t.arrow"


WRONG: list[tuple[str, Callable[[Path], Path], str]] = [
    ("no file", lambda folder: folder / "no.csv", "there is no table .*no.csv; give a file, or a folder"),
    ("other file", named("t.xlsx"), "t.xlsx is no table of a known kind; its name must end with .jsonl, .*, .tsv"),
    ("empty folder", lambda folder: folder, "has no parts of a table; their names must end with"),
    ("two kinds", of_two_kinds, "has parts of several kinds, .csv and .jsonl; keep them apart"),
    ("empty lines", named("t.jsonl", b"\n\n"), "t.jsonl has no rows; a table must have at least one"),
    ("damaged gzip", cut(packed, 0.5), "t.jsonl.gz cannot be unpacked, it is damaged or not all there"),
    ("no gzip", named("t.jsonl.gz", b"hello"), "t.jsonl.gz cannot be unpacked.*Not a gzipped file"),
    (
        "ragged",
        csv_of("a,b\n1,2\n3\n"),
        "line 3 of .*t.csv has 1 columns and not 2 like the first; repair or remove it: rows of CSV cannot be skipped",
    ),
    (
        "mixed",
        csv_of("a,b\n" + "1.5,x\n" * 9000 + "oh,y\n"),
        "line 9,002 of .*invalid value 'oh' in column 'a'.*numbers",
    ),
    (
        "latin",
        csv_of("a,b\n1,x\n2,\xe4\n"),
        "t.csv has text that is not UTF-8 in line 3, byte 3; write the file as UTF-8",
    ),
    ("late latin", csv_of("a,b\n" + "1,x\n" * 9000 + "2,\xe4\n"), "not UTF-8 in line 9,002, byte 3"),
    ("twice", csv_of("a,a\n1,x\n"), "t.csv has two columns 'a'; give each a name of its own in the first line"),
    ("empty csv", csv_of(""), "t.csv has no line with names of columns"),
    ("header only", csv_of("a,b\n"), "t.csv has no rows"),
    ("cut parquet", cut(parquet, 0.7), "t.parquet is no whole Parquet file"),
    ("damaged group", damaged_group, "row group 1 of .*t.parquet cannot be read"),
    ("cut arrow file", cut(file, 0.7), "t.arrow is not all there: the end of an Arrow file is missing"),
    ("cut stream", cut(stream, 0.701), "t.arrow is no whole Arrow file after .* record batches"),
    ("arrow twice", twice, "t.arrow has two columns 'a'; write it again with a name of its own for each"),
    ("no arrow", named("t.arrow", b"hello, world"), "t.arrow is no whole Arrow file"),
    ("empty arrow", named("t.arrow"), "t.arrow is no whole Arrow file"),
    ("splits", splits, r"has several sets; name one of them: .*/train, .*/test"),
    (
        "missing part",
        with_file_missing,
        "is not all there: data-00001-of-00002.arrow, which state.json names, is missing",
    ),
    (
        "other columns",
        unlike_parts({"a": 1, "c": "x"}),
        "1.parquet has the columns 'a', 'c' and .*0.parquet has 'a', 'b'",
    ),
    ("other types", unlike_parts({"a": "1", "b": "x"}), "column 'a' is of type string in .*1.parquet and int64 in"),
]


@pytest.mark.parametrize(("write", "why"), [case[1:] for case in WRONG], ids=[case[0] for case in WRONG])
def test_what_is_wrong_with_a_table_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Path], Path], why: str
):
    monkeypatch.setattr("meshrun.data.sources.delimited._BLOCK", 4096)
    with pytest.raises(UserError, match=why) as told:
        Table(write(tmp_path))
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("write", [parquet, stream, comma, saved, jsonl], ids=lambda write: write.__name__)
@pytest.mark.parametrize("asked", [{"columns": ["text", "title"]}, {"lengths": "title"}], ids=["columns", "lengths"])
def test_a_column_that_is_not_there_is_named(
    tmp_path: Path, write: Callable[[list[Row], Path], Path], asked: dict[str, Any]
):
    with pytest.raises(UserError, match="has no column 'title'; it has 'text', 'number'"):
        Table(write([{"text": "a", "number": 1}], tmp_path), **asked)


def test_a_column_that_some_lines_have_is_there(tmp_path: Path):
    (tmp_path / "t.jsonl").write_bytes(b'oh\n{"a": 1}\n{"a": 2, "b": 3}\n')
    table = Table(tmp_path / "t.jsonl", columns=["b"])
    assert table[2] == {"b": 3}
    with pytest.raises(BadSample, match=r"line 2.*it has no 'b' but 'a'"):
        table[1]


def test_a_broken_row_of_csv_is_told_by_its_line(tmp_path: Path):
    (tmp_path / "t.csv").write_text('a,b\n\n1,"two\nlines"\n\n4,5,6\n')
    with pytest.raises(UserError, match=r"line 6 of .*t\.csv has 3 columns"):
        Table(tmp_path / "t.csv")


def test_columns_are_a_list(tmp_path: Path):
    with pytest.raises(UserError, match="is the text 'number'; it must be a list of names"):
        Table(jsonl(ROWS, tmp_path), columns="number")


def test_a_type_is_that_of_the_whole_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("meshrun.data.sources.delimited._BLOCK", 4096)
    rows = ["1,,2020-01-01"] * 2000
    (tmp_path / "t.tsv").write_text("\n".join(["a,b,c", *rows, "2.5,3,soon"]).replace(",", "\t"))
    table = Table(tmp_path / "t.tsv")
    assert table[0] == {"a": 1.0, "b": None, "c": "2020-01-01"}
    assert table[2000] == {"a": 2.5, "b": 3, "c": "soon"}


def test_pyarrow_is_asked_for_only_where_it_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    assert len(Table(jsonl(ROWS, tmp_path))) == 40
    with pytest.raises(UserError, match=r"can only be read with pyarrow; pip install 'meshrun\[tables\]'"):
        Table(parquet(ROWS, tmp_path))


@pytest.mark.parametrize("write", [jsonl, packed, stream, parquet], ids=lambda write: write.__name__)
@pytest.mark.parametrize("how", ["shorter", "rewritten", "gone"])
def test_a_file_that_changes_ends_the_run(
    tmp_path: Path, write: Callable[[list[Row], Path], Path], how: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("meshrun.data.sources.source.LOOK_AGAIN", 0)
    path = write(ROWS, tmp_path)
    table = Table(path, lengths="text")
    table.__getitems__([0, 39])
    if how == "gone":
        path.unlink()
    else:
        content = path.read_bytes()
        path.write_bytes(content[:100] if how == "shorter" else content)
        os.utime(path, ns=(time.time_ns(), time.time_ns() + 1))
    for asked in (table.__getitems__, table.lengths):
        with pytest.raises(RunFailed, match="has changed while it is being trained on"):
            asked([39])


def test_the_fingerprint_is_of_what_lies_in_the_files(tmp_path: Path):
    (tmp_path / "copy").mkdir()
    (tmp_path / "other").mkdir()
    first = Table(jsonl(ROWS, tmp_path)).fingerprint
    assert Table(jsonl(ROWS, tmp_path / "copy")).fingerprint == first
    changed = [{**row, "text": str(row["text"]).replace("39", "93")} for row in ROWS]
    assert Table(jsonl(changed, tmp_path / "other")).fingerprint != first


def test_nothing_is_kept_a_row(tmp_path: Path):
    table = pa.table({"number": np.arange(1_000_000)})
    with pa.OSFile(str(tmp_path / "t.arrow"), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=1000)
    tracemalloc.start()
    began = time.process_time()
    found = Table(tmp_path / "t.arrow")
    assert found.__getitems__([999_999, 0]) == [{"number": 999_999}, {"number": 0}]
    taken = time.process_time() - began
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 1 << 20 and taken < 5
    assert found.chunk == pytest.approx(1 << 17, rel=0.1)


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Everything counts as big, and this is the node's folder for what is kept."""
    monkeypatch.setattr(turned, "SMALL", 0)
    monkeypatch.setattr(lines, "BIG", 0)
    monkeypatch.setattr(lines, "BIG_WHEN_PACKED", 0)
    folder = tmp_path / "node"
    cache.use(folder, None)
    yield folder
    cache.use(None, None)


@pytest.mark.parametrize("write", [parquet, comma, feather, jsonl, packed], ids=lambda write: write.__name__)
def test_big_tables_are_kept_on_the_node_and_found_again(
    node: Path, tmp_path: Path, write: Callable[[list[Row], Path], Path], monkeypatch: pytest.MonkeyPatch
):
    path = write(ROWS, tmp_path)
    expected = Table(path).__getitems__([39, 1])
    assert [row["number"] for row in expected] == [39, 1]
    kept = sorted(node.iterdir())
    assert kept and all(each.name.startswith(("t.", "t-", ".")) for each in kept)
    monkeypatch.setattr(once, "_make", lambda *_: pytest.fail("it is made already"))
    assert Table(path).__getitems__([39, 1]) == expected


def test_what_was_made_of_an_older_file_is_not_used(node: Path, tmp_path: Path):
    path = parquet(ROWS, tmp_path)
    assert len(Table(path)) == 40
    assert len(Table(parquet(ROWS[:7], tmp_path))) == 7
    assert node.is_dir()


@pytest.mark.usefixtures("node")
def test_a_file_that_was_written_again_in_the_same_length_is_made_anew(tmp_path: Path):
    path = tmp_path / "t.csv"
    path.write_text("number\n1\n")
    assert Table(path)[0] == {"number": 1}
    path.write_text("number\n2\n")
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 10**9))
    assert Table(path)[0] == {"number": 2}


def test_a_file_that_could_not_be_made_leaves_no_part_and_is_tried_again_after_a_while(node: Path, tmp_path: Path):
    source = comma(ROWS, tmp_path)

    def fills_the_disk(to: Path) -> None:
        to.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    assert once.once(source, "rows", fills_the_disk) is None
    (mark,) = node.iterdir()
    assert once.once(source, "rows", lambda _: pytest.fail("it was tried just now")) is None
    os.utime(mark, (0, 0))

    def makes(to: Path) -> None:
        to.write_bytes(b"whole")

    made = once.once(source, "rows", makes)
    assert made == mark and made.read_bytes() == b"whole"


@pytest.mark.usefixtures("node")
def test_a_fork_that_ends_leaves_the_temporary_table_of_its_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    cache.use(None, None)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(once, "_in_use", {})
    Table(parquet(ROWS, tmp_path))
    (made,) = (tmp_path / f"meshrun-{os.getuid()}").iterdir()
    fork = multiprocessing.get_context("fork").Process(target=once._leave)
    fork.start()
    fork.join(60)
    assert fork.exitcode == 0 and made.exists()
    once._leave()
    assert not made.exists()


@pytest.mark.usefixtures("node")
def test_offsets_that_lie_in_a_packed_arrow_file_are_refused(tmp_path: Path):
    """Only a look at every offset finds one between others that are right; it comes before any row is written."""
    offsets = pa.array([0, 1000, 2], pa.int32()).buffers()[1]
    texts = pa.Array.from_buffers(pa.string(), 2, [None, offsets, pa.py_buffer(b"ab")])
    path = tmp_path / "t.arrow"
    batch = pa.record_batch([texts], ["text"])
    with pa.ipc.new_file(str(path), batch.schema, options=pa.ipc.IpcWriteOptions(compression="lz4")) as writer:
        writer.write_batch(batch)
    with pytest.raises(UserError, match=r"t\.arrow is damaged: .*offset for slot 1 out of bounds"):
        Table(path)[0]


def test_fingerprints_see_the_length_of_a_file_and_its_last_bytes(tmp_path: Path):
    files = [tmp_path / name for name in ("short", "long", "other")]
    for file, content in zip(files, (bytes(10_000), bytes(1 << 20), bytes((1 << 20) - 1) + b"x"), strict=True):
        file.write_bytes(content)
    assert len({mapped.fingerprint([file], "rows") for file in files}) == 3
    zeros = tmp_path / "zeros"
    zeros.write_bytes(bytes(20_000))
    assert mapped.fingerprint([zeros], "rows") != mapped.fingerprint([files[0]], "rows")


def test_a_saved_dataset_that_was_moved_is_read_where_it_is_now(tmp_path: Path):
    (tmp_path / "data-0.arrow").write_bytes(b"")
    (tmp_path / "state.json").write_text('{"_data_files": [{"filename": "../elsewhere/data-0.arrow"}]}')
    assert files_saved_in(tmp_path) == ([tmp_path / "data-0.arrow"], [])


def _open(path: Path, made: Path, answer: Any) -> None:
    def slowly(to: Path) -> None:
        with made.open("a") as file:
            file.write("made\n")
        time.sleep(0.3)
        turned._write(path, "parquet", None, lambda: pa.OSFile(str(to), "wb"))

    found = once.once(path, "arrow 1 None", slowly)
    answer.put((str(found), Table(path)[39]["number"]))


@pytest.mark.parametrize("kept", [True, False], ids=["cache", "temporary"])
def test_one_of_several_processes_turns_a_table(
    node: Path, tmp_path: Path, kept: bool, monkeypatch: pytest.MonkeyPatch
):
    if not kept:
        cache.use(None, None)
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    path, made = parquet(ROWS, tmp_path), tmp_path / "made"
    fork = multiprocessing.get_context("fork")
    answers = fork.Queue()
    several = [fork.Process(target=_open, args=(path, made, answers)) for _ in range(3)]
    for each in several:
        each.start()
    found = [answers.get(timeout=60) for _ in several]
    for each in several:
        each.join(60)
    assert len(set(found)) == 1 and found[0][1] == 39
    assert made.read_text() == "made\n"
    assert Path(found[0][0]).parent == (node if kept else tmp_path / f"meshrun-{os.getuid()}")


@pytest.mark.usefixtures("node")
def test_the_last_to_use_a_temporary_table_removes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    cache.use(None, None)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(once, "_in_use", {})
    table = Table(parquet(ROWS, tmp_path))
    (made,) = (tmp_path / f"meshrun-{os.getuid()}").iterdir()
    other = os.open(made, os.O_RDONLY)
    once.fcntl.flock(other, once.fcntl.LOCK_SH)
    once._leave()
    assert made.exists()
    os.close(other)
    once._leave()
    assert not made.exists()
    assert table[3]["number"] == 3, "what is open stays readable"


@pytest.mark.usefixtures("node")
def test_a_folder_that_another_has_put_there_is_not_used_and_nothing_in_it_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    notes: list[str] = []
    cache.use(None, None, notes.append)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    home = tmp_path / "home"
    home.mkdir()
    for name in ("thesis.txt", "t.csv-0123456789abcdef"):
        (home / name).write_text("years of work")
        os.utime(home / name, (0, 0))
    folder = tmp_path / f"meshrun-{os.getuid()}"
    folder.symlink_to(home)
    assert Table(comma(ROWS, tmp_path))[39]["number"] == 39
    assert len(notes) == 1 and f"{folder} is not this user's alone" in notes[0]
    assert len(list(home.iterdir())) == 2

    folder.unlink()
    home.rename(folder)
    folder.chmod(0o700)
    Table(comma(ROWS[:7], tmp_path))
    assert (folder / "thesis.txt").exists(), "only what was made by us is removed"
    assert not (folder / "t.csv-0123456789abcdef").exists()


def test_a_maker_that_was_killed_leaves_nothing_that_is_taken_for_a_table(node: Path, tmp_path: Path):
    path = parquet(ROWS, tmp_path)

    def dies(to: Path) -> None:
        to.write_bytes(b"half")
        os._exit(9)

    killed = multiprocessing.get_context("fork").Process(target=once.once, args=(path, "arrow 1 None", dies))
    killed.start()
    killed.join(60)
    assert killed.exitcode == 9 and any(each.name.endswith(".part") for each in node.iterdir())
    assert Table(path)[39]["number"] == 39
    assert not any(each.name.endswith(".part") for each in node.iterdir())


def test_a_big_file_that_is_not_packed_as_it_says_is_refused_without_a_note(node: Path, tmp_path: Path):
    notes: list[str] = []
    cache.use(node, None, notes.append)
    path = tmp_path / "t.jsonl.gz"
    path.write_bytes(b"hello")
    for _ in range(2):
        with pytest.raises(UserError, match=r"t\.jsonl\.gz cannot be unpacked.*Not a gzipped file"):
            Table(path)
    assert not notes


def test_a_copy_that_is_gone_is_told_with_its_original(node: Path, tmp_path: Path):
    path = jsonl(ROWS, tmp_path)
    table = Table(path)
    for copy in node.glob("t-*.jsonl"):
        copy.unlink()
    with pytest.raises(RunFailed, match=rf"t-.*\.jsonl \(the copy of {path} on this node\) has changed"):
        table[3]


def test_without_room_on_the_node_a_note_is_told_and_memory_is_used(
    node: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    notes: list[str] = []
    cache.use(node, None, notes.append)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(pa, "OSFile", full)
    path = comma(ROWS, tmp_path)
    assert Table(path)[39]["number"] == 39
    assert len(notes) == 1 and "t.csv is kept in memory" in notes[0] and "No space left" in notes[0]
    assert Table(path)[39]["number"] == 39
    assert len(notes) == 1, "those who come after are not told again"


def test_rows_are_numbered_from_either_end_and_not_beyond(tmp_path: Path):
    table = Table(jsonl(ROWS, tmp_path))
    assert table[-1] == table[len(table) - 1] and table[-len(table)] == table[0]
    for number in (len(table), -len(table) - 1):
        with pytest.raises(IndexError, match=f"sample {number} of {len(table)}"):
            table[number]


def test_a_reader_that_finds_other_rows_than_the_rank_ends_the_run(tmp_path: Path):
    path = jsonl(ROWS, tmp_path)
    sent = pickle.dumps(Table(path))
    with path.open("ab") as file:
        file.write(as_lines(ROWS[:1]))
    with pytest.raises(RunFailed, match="another process finds other rows"):
        pickle.loads(sent)


def test_hidden_files_are_no_parts_of_a_table(tmp_path: Path):
    for name in ("b.jsonl", "a.jsonl", "._a.jsonl", "_metadata.jsonl", ".c.jsonl"):
        (tmp_path / name).write_bytes(as_lines(ROWS[:2]))
    kind, files, _ = files_of(tmp_path)
    assert kind == "lines" and [each.name for each in files] == ["a.jsonl", "b.jsonl"]


@pytest.mark.parametrize("ending", ["jsonl", "jsonl.gz", "csv", "csv.gz", "parquet", "arrow"])
@pytest.mark.parametrize("what", ["pipe", "link to itself", "link to a device"])
def test_a_part_that_is_no_plain_file_is_named(tmp_path: Path, ending: str, what: str):
    part = tmp_path / f"a.{ending}"
    if what == "pipe":
        os.mkfifo(part)
    else:
        part.symlink_to("/dev/zero" if what == "link to a device" else part.name)
    with pytest.raises(UserError, match=rf"a\.{ending} is no plain file"):
        Table(tmp_path)


@pytest.mark.parametrize("column", [["x"], [1.5], [[1]], [1, None]])
def test_a_saved_dataset_that_picks_rows_by_other_than_whole_numbers_is_refused(tmp_path: Path, column: list[Any]):
    for name, rows in (("data.arrow", [{"a": 1}]), ("picked.arrow", [{"i": each} for each in column])):
        stream(rows, tmp_path).rename(tmp_path / name)
    files = {"_data_files": [{"filename": "data.arrow"}], "_indices_files": [{"filename": "picked.arrow"}]}
    (tmp_path / "state.json").write_text(json.dumps(files))
    with pytest.raises(UserError, match=r"picked\.arrow picks rows by \w+ and not by whole numbers"):
        Table(tmp_path)


def test_splits_that_are_no_list_are_refused(tmp_path: Path):
    (tmp_path / "dataset_dict.json").write_text('{"splits": 1}')
    with pytest.raises(UserError, match=r"'splits' in .*dataset_dict\.json is no list of names"):
        Table(tmp_path)


@pytest.mark.parametrize("values", [["aaaa", "bbbb", "cccc"], [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]])
@pytest.mark.parametrize("lie", [(0, 4, 99, 12), (0, -3, 8, 12), (0, 8, 4, 12), (0, 4, 8, 0)])
def test_offsets_that_lie_in_a_plain_arrow_file_are_refused(tmp_path: Path, values: list[Any], lie: tuple[int, ...]):
    path = stream([{"a": each} for each in values], tmp_path)
    data = path.read_bytes()
    true, false = (np.array(each, "<i4").tobytes() for each in ((0, 4, 8, 12), lie))
    assert data.count(true) == 1
    path.write_bytes(data.replace(true, false))
    with pytest.raises(UserError, match="is damaged"):
        Table(path)[0]
    with pytest.raises(UserError, match="is damaged"):
        Table(path, lengths="a").lengths([0])


def test_a_dictionary_inside_of_lists_is_refused(tmp_path: Path):
    table = pa.table({"a": pa.array([["x"]], pa.list_(pa.dictionary(pa.int8(), pa.string())))})
    pa.parquet.write_table(table, tmp_path / "t.parquet")
    with pytest.raises(UserError, match=r"column 'a' of .*t\.parquet is of type list<.*dictionary"):
        Table(tmp_path / "t.parquet")


def test_millions_of_blank_lines_are_passed_over_at_once():
    data = np.frombuffer(b"\n" * (1 << 22) + b" \t\r\n" * 100_000 + b" " * 1000 + b"{}\n" + b" " * 1000, np.uint8)
    begin = time.process_time()
    assert lines.starts_of(data).tolist() == [(1 << 22) + 400_000, len(data)]
    assert time.process_time() - begin < 5  # one by one they took half a minute


@pytest.mark.parametrize("ending", ["jsonl.gz", "csv.gz"])
def test_what_is_packed_very_tightly_is_unpacked_on_the_disk_of_the_node(
    node: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
):
    monkeypatch.setattr(lines, "BIG_WHEN_PACKED", 1 << 16)
    monkeypatch.setattr(turned, "_BATCH", 1 << 16)
    row = b'{"a":1}\n' if ending == "jsonl.gz" else b"1234567\n"
    path = tmp_path / f"t.{ending}"
    path.write_bytes(gzip.compress(b"a\n" * (ending == "csv.gz") + row * 50_000))
    table = Table(path)
    assert len(table) == 50_000
    assert table[49_999] == {"a": 1 if ending == "jsonl.gz" else 1234567}
    assert any(each.stat().st_size >= 400_000 for each in node.iterdir())


@pytest.mark.parametrize("ending", ["jsonl.gz", "csv.gz"])
def test_what_neither_the_node_nor_memory_can_hold_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
):
    for module in (lines, turned):
        monkeypatch.setattr(module, "once", lambda *_: None)
        monkeypatch.setattr(module, "free_memory", lambda: 1 << 17)
    monkeypatch.setattr(lines, "BIG_WHEN_PACKED", 1 << 16)
    monkeypatch.setattr(turned, "_BATCH", 1 << 16)
    path = tmp_path / f"t.{ending}"
    path.write_bytes(gzip.compress(b'{"a":1}\n' * 50_000 if ending == "jsonl.gz" else b"a\n" + b"1\n" * 50_000))
    with pytest.raises(UserError, match=r"half of the free memory.*\(--cache\)"):
        Table(path)


@pytest.mark.usefixtures("node")
def test_big_tables_below_a_name_that_is_no_unicode(tmp_path: Path):
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    folder.mkdir()
    for write in (jsonl, packed, file, comma, feather):
        (moved := folder / write(ROWS, tmp_path).name).unlink(missing_ok=True)
        (tmp_path / moved.name).rename(moved)
        if write not in (comma, feather):
            assert len(Table(moved)) == 40
            continue
        with pytest.raises(UserError, match="has a path that is not UTF-8, which pyarrow cannot open; rename or move"):
            Table(moved)


@pytest.mark.parametrize("ending", ["parquet", "arrow"])
def test_a_long_text_of_very_many_rows_is_refused_before_the_disk_is_full(
    node: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
):
    monkeypatch.setattr(turned, "_LARGEST", 1 << 24)
    rows = pa.table({"a": pa.DictionaryArray.from_arrays(np.zeros(1000, np.int32), ["x" * 100_000])})
    path = tmp_path / f"t.{ending}"
    if ending == "parquet":
        pa.parquet.write_table(rows, path, compression="zstd")
    else:
        with pa.ipc.new_stream(path, rows.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
            writer.write_table(rows)
    with pytest.raises(UserError, match=r"more than 16,777,216 bytes of rows packed into [\d,]+, .* fill the disk"):
        Table(path)
    assert not any(each.stat().st_size > 1000 for each in node.iterdir())


@pytest.mark.parametrize("kind", ["list", "list of structs", "map"])
def test_long_texts_in_lists_that_lie_in_a_file_once_are_refused_unless_they_are_few(tmp_path: Path, kind: str):
    path = tmp_path / "t.parquet"

    def written(count: int) -> Path:
        texts = pa.DictionaryArray.from_arrays(np.zeros(count, np.int32), ["x" * 1_000_000]).dictionary_decode()
        if kind == "map":
            values = pa.MapArray.from_arrays([0, count], pa.array(range(count)), texts)
        else:
            inner = texts if kind == "list" else pa.StructArray.from_arrays([texts], ["b"])
            values = pa.ListArray.from_arrays([0, count], inner)
        pa.parquet.write_table(pa.table({"a": values}), path, compression="zstd")
        return path

    assert len(Table(written(6))[0]["a"]) == 6
    with pytest.raises(UserError, match=r"takes more than 75,497,472 bytes of memory to read, .* too much for a file"):
        Table(written(20))


@pytest.mark.parametrize("kind", ["list", "text", "page"])
def test_a_file_that_takes_far_more_memory_than_it_says_is_refused(tmp_path: Path, kind: str):
    """Sizes of rows are means, and of pages nothing is said."""
    path, long = tmp_path / "t.parquet", 12_000_000

    def write(_: int) -> None:
        if kind == "list":
            offsets = np.concatenate([[0], long + np.arange(1001)]).astype(np.int32)
            values = pa.ListArray.from_arrays(offsets, np.zeros(long + 1000, np.int64))
        else:
            values = pa.array(["x" * long, *["y"] * 1000] if kind == "text" else ["x" * (long // 100)] * 1000)
        pa.parquet.write_table(pa.table({"a": values}), path, compression="zstd", use_dictionary=kind != "page")

    forked(1, write)  # else this process had memory left over
    with pytest.raises(UserError, match=r"takes more than 75,497,472 bytes of memory to read, .* too much for a file"):
        Table(path)


def test_lists_of_values_that_take_no_bytes_in_their_file_are_refused(tmp_path: Path):
    """A row of a million and a half empty lists, in 700 bytes: as Python has them, they take 100 MB."""
    empty = pa.ListArray.from_arrays(np.zeros(1_500_001, np.int32), pa.array([], pa.int8()))
    rows = pa.table({"a": pa.ListArray.from_arrays([0, len(empty)], empty)})
    pa.parquet.write_table(rows, tmp_path / "t.parquet", compression="zstd")
    with pytest.raises(UserError, match=r"row group 0 of .* has rows of 12,000,000 bytes .* cannot hold"):
        Table(tmp_path / "t.parquet")


@pytest.mark.parametrize("value", ["{}", "[]", "1", '"' + "x" * 100 + '"'])
def test_a_long_line_that_would_take_far_more_memory_than_its_file_is_a_bad_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str
):
    monkeypatch.setattr(lines, "_LONG", 1 << 12)
    monkeypatch.setattr(source, "AT_ONCE", 1 << 20)
    row = f'{{"a": [{", ".join([value] * 20_000)}]}}\n'.encode()
    (tmp_path / "t.jsonl").write_bytes(row)
    (tmp_path / "t.jsonl.gz").write_bytes(gzip.compress(b'{"a": 1}\n' + row))
    assert len(Table(tmp_path / "t.jsonl")[0]["a"]) == 20_000
    with pytest.raises(
        BadSample, match=r"t\.jsonl\.gz, line 2\) .* bytes that take [\d,]{9,} or more .* too much for a"
    ):
        Table(tmp_path / "t.jsonl.gz")[1]


def test_of_a_small_file_of_csv_little_is_parsed_at_a_time(tmp_path: Path):
    """pyarrow reads many blocks ahead: of 16 megabytes each, they would take a gigabyte."""
    path = tmp_path / "t.csv.gz"
    path.write_bytes(gzip.compress(b"a\n" + b"1234567\n" * 500_000))
    sizes = [batch.nbytes for batch, _ in delimited.read_delimited(path, None, {})[1]]
    assert sum(sizes) == 4_000_000 and max(sizes) <= 1 << 19
    path.write_bytes(gzip.compress(b"a,b\n1," + b"x" * (2 << 20) + b"\n"))
    with pytest.raises(UserError, match=r"t\.csv\.gz has a row of more than 524,288 bytes, or a quotation mark"):
        Table(path)


def test_a_name_that_no_table_can_have_is_refused():
    with pytest.raises(UserError, match=r"table x{200} cannot be read: File name too long"):
        Table("x" * 5000)


def test_a_text_that_is_longer_than_its_file_can_hold_is_refused(tmp_path: Path):
    path = tmp_path / "t.parquet"
    pa.parquet.write_table(pa.table({"a": ["x" * 10_000_000]}), path, compression="zstd")
    with pytest.raises(UserError, match=r"row group 0 of .* has rows of 10,\d+,\d+ bytes .* cannot hold"):
        Table(path)


def test_names_of_twenty_thousand_columns_are_read_in_time_and_not_all_listed(tmp_path: Path):
    names = [f"c{number}" for number in range(20_000)]
    (tmp_path / "t.csv").write_text(",".join(names) + "\n" + ",".join(["1"] * len(names)) + "\n")
    with pytest.raises(UserError, match=r"has no column 'a'; it has 'c0', .* and 19,980 others$"):
        Table(tmp_path / "t.csv", columns=["a"])
    assert Table(tmp_path / "t.csv")[0]["c19999"] == 1


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make files of others")
@pytest.mark.parametrize("planted", ["link", "rows"])
def test_in_a_folder_for_copies_that_others_can_write_to_nothing_planted_is_read_or_written(
    planted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The name of what is made of a file can be guessed from the file."""
    monkeypatch.setattr(once, "_make", lambda *_: pytest.fail("tells the name"))
    shared, source = tmp_path / "shared", comma(ROWS, tmp_path)
    shared.mkdir()
    shared.chmod(0o1777)
    cache.use(shared, None, lambda _: None)
    names: list[str] = []
    monkeypatch.setattr(once, "_found_or_made", lambda path, _make: names.append(path.name))
    once.once(source, "x", lambda _: None)
    monkeypatch.undo()
    precious = tmp_path / "precious"
    precious.write_text("years of work")
    if planted == "link":
        (shared / names[0]).symlink_to(precious)
    else:
        (shared / names[0]).write_text("rows of another user")
        os.chown(shared / names[0], 12345, -1)

    def make(path: Path) -> None:
        path.write_text("own rows")

    cache.use(shared, None, lambda _: None)
    try:
        made = once.once(source, "x", make)
    finally:
        cache.use(None, None)
    assert made is not None and made.read_text() == "own rows" and made.stat().st_uid == os.getuid()
    assert precious.read_text() == "years of work"


def test_what_killed_users_have_left_goes_with_the_next_one_and_what_is_being_made_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """It may be many gigabytes, and the folder that of the whole machine."""
    cache.use(None, None)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(once, "_in_use", {})
    folder = tmp_path / f"meshrun-{os.getuid()}"
    folder.mkdir(mode=0o700)
    left, made = (f"{name}.csv-0123456789abcdef" for name in ("left", "made"))
    for name in (left, f".{left}.part", f".gone{left}.part", made, f".{made}.part"):
        (folder / name).touch()
        os.utime(folder / name, (time.time() - 120, time.time() - 120))
    held = os.open(folder / made, os.O_RDWR)
    once.fcntl.flock(held, once.fcntl.LOCK_EX)
    try:
        once._folder()
    finally:
        os.close(held)
    assert sorted(each.name for each in folder.iterdir()) == [f".{made}.part", made]


@pytest.mark.parametrize("kind", ["arrow", "parquet"])
def test_a_text_that_a_dictionary_holds_once_takes_the_memory_of_a_few_rows(tmp_path: Path, kind: str):
    """Both files are some kilobytes; the rows of the whole batch would be two gigabytes."""
    text = "x" * 200_000
    column = pa.DictionaryArray.from_arrays(pa.array([0, None] * 10_000, pa.int16()), pa.array([text]))
    table, path = pa.table({"text": column, "number": range(20_000)}), tmp_path / f"t.{kind}"
    if kind == "parquet":
        pa.parquet.write_table(table, path, compression="zstd", store_schema=False)
    else:
        with pa.ipc.new_file(str(path), table.schema) as writer:
            writer.write_table(table)
    _, found = turned._read(path, kind, None, {})
    before = pa.total_allocated_bytes()
    for batch, _ in itertools.islice(found, 3):
        parts = turned._parts(batch)
        assert sum(part.num_rows for part in parts) == batch.num_rows
        for part in parts[:3]:
            assert turned._decoded(part.column(0)).nbytes < 2 * turned._BATCH
            assert pa.total_allocated_bytes() - before < 100 << 20


def test_a_packed_batch_that_says_it_is_far_larger_than_its_file_is_refused(tmp_path: Path):
    """zstd makes a few kilobytes of 400 megabytes of zeros; that much memory would be taken before a row is known."""
    column = pa.array(np.zeros(50_000_000, np.int8))
    for make in (pa.ipc.new_file, pa.ipc.new_stream):
        path = tmp_path / "t.arrow"
        options = pa.ipc.IpcWriteOptions(compression="zstd")
        with make(str(path), pa.schema([("a", pa.int8()), ("b", pa.int8())]), options=options) as writer:
            writer.write_batch(pa.record_batch([column, column], ["a", "b"]))
        with pytest.raises(UserError, match=r"t\.arrow has a record batch of 100,000,\d+ bytes packed into \d"):
            Table(path)


def test_a_row_of_a_million_times_the_size_of_its_file_is_refused(tmp_path: Path):
    numbers = pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(20_000_000, np.int64)), 20_000_000)
    pa.parquet.write_table(pa.table({"a": numbers}), tmp_path / "t.parquet", compression="zstd")
    with pytest.raises(UserError, match=r"row group 0 of .*t\.parquet has rows of 160,000,000 bytes"):
        Table(tmp_path / "t.parquet")


def test_a_number_of_rows_that_no_file_has_is_refused(tmp_path: Path):
    """A column of nulls takes no bytes, so that it may say any number of rows."""
    path = tmp_path / "t.arrow"
    with pa.ipc.new_file(str(path), pa.schema([("a", pa.null())])) as writer:
        writer.write_batch(pa.record_batch([pa.nulls(5)], ["a"]))
    path.write_bytes(path.read_bytes().replace((5).to_bytes(8, "little"), (1 << 62).to_bytes(8, "little")))
    with pytest.raises(UserError, match="a record batch has 4,611,686,018,427,387,904 rows"):
        Table(path)


def test_a_time_zone_that_there_is_not_makes_its_rows_bad(tmp_path: Path):
    path = tmp_path / "t.arrow"
    table = pa.table({"a": pa.array([1, 2], pa.timestamp("us", tz="Nowhere/City"))})
    with pa.ipc.new_file(str(path), table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(BadSample, match=r"sample 1 of the table .* its 'a' is unusable"):
        Table(path)[1]


def test_the_lines_of_a_tightly_packed_file_are_looked_for_on_the_disk_of_the_node(node: Path, tmp_path: Path):
    """Of a file of 10 kilobytes: 8 megabytes of lines, whose starts would take 32."""
    path = tmp_path / "t.jsonl.gz"
    path.write_bytes(gzip.compress(b"1\n" * (4 << 20)))
    table = Table(path)
    assert len(table) == 4 << 20
    assert any(each.stat().st_size > 32 << 20 for each in node.iterdir())

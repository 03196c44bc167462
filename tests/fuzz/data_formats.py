"""Files of samples: tokens, tables, HDF5, images, and the lists beside them."""

from __future__ import annotations

import contextlib
import gzip
import io
import itertools
import json
import random
import struct
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from meshrun import ImageFolder, Table, TokenFile
from meshrun.data.convert import texts
from meshrun.data.convert.inputs import files_below
from meshrun.data.convert.result import checked
from meshrun.data.convert.work import Bad
from meshrun.data.download import Quiet, _had
from meshrun.data.sources.hdf5 import Hdf5
from meshrun.data.sources.token_format import write as write_tokens
from meshrun.data.staging import read_list
from meshrun.errors import BadSample
from meshrun.recipes import llama, summarize
from tests.fuzz.engine import Format, WrongValue
from tests.fuzz.mutations import EDGES, INTEGERS, in_gzip, of_bytes, of_json, of_text

ROWS = 24
"""Samples that are read of a set: a damaged header may promise billions."""


def put(folder: Path, name: str, data: bytes) -> Path:
    """The input as a new file, so that nothing that is kept of the last one is taken for it."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.write_bytes(data)
    return path


def some(length: int) -> list[int]:
    """The first and the last samples of a set."""
    return sorted({*range(min(length, ROWS)), *range(max(0, length - 3), length)})


def _tokens(folder: Path) -> list[bytes]:
    found = []
    for vocabulary, lengths in ((100, [5, 1, 30, 0, 7, 57]), (70_000, [40, 60]), (100, [1] * 100)):
        path = folder / "some.tokens"
        write_tokens(path, [np.arange(sum(lengths)) % vocabulary], np.array(lengths), vocabulary, "ab" * 32)
        found.append(path.read_bytes())
    return found


CHOICES = (None, slice(None, -1), slice(1, None), slice(-2, -1))


def _read_tokens(data: bytes, folder: Path) -> list[Any]:
    path = put(folder, "some.tokens", data)
    found: list[Any] = []
    refused: Exception | None = None
    for documents in CHOICES:
        for cross in (False, True):
            try:
                tokens = TokenFile(path, 4, documents=documents, cross=cross, vocabulary=70_000)
                ids = some(len(tokens))
                inputs, targets = tokens.batch_of(ids)
            except BadSample:
                continue
            except Exception as error:  # another choice may be read well
                refused = error
                continue
            found.append((documents, cross, ids, inputs, targets.numpy()))
    if not found and refused is not None:
        raise refused
    return found


def _check_tokens(data: bytes, value: list[Any]) -> None:
    """Windows are those of the numbers in the file, cut at its documents."""
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])

    def numbers(name: str, dtype: str) -> np.ndarray:
        begin, end = header[name]["data_offsets"]
        return np.frombuffer(data[8 + length + begin : 8 + length + end], dtype).astype(np.int64)

    tokens = numbers("tokens", {"U16": "<u2", "U32": "<u4"}[header["tokens"]["dtype"]])
    starts = numbers("starts", "<i8")
    for documents, cross, ids, inputs, targets in value:
        first, last, _ = (documents or slice(None)).indices(len(starts) - 1)
        for row, number in enumerate(ids):
            at = int(starts[first]) + number * 4
            read = tokens[at : at + 5]
            whose = np.searchsorted(starts, np.arange(at, at + 5), side="right")
            wanted = read[1:] if cross else np.where(np.diff(whose) > 0, -100, read[1:])
            given = (inputs if cross else inputs["tokens"])[row].numpy()
            inside = at >= 0 and at + 5 <= starts[last] <= len(tokens)
            if not inside or not np.array_equal(given, read[:4]) or not np.array_equal(targets[row], wanted):
                raise WrongValue(f"window {number} of documents {documents} is not what the file holds")


def _h5(make: Callable[[Any], None]) -> Callable[[Path], bytes]:
    def made(folder: Path) -> bytes:
        import h5py

        path = folder / "some.h5"
        with h5py.File(path, "w") as file:
            make(file)
        return path.read_bytes()

    return made


def _plain(file: Any) -> None:
    file["images"] = np.arange(20 * 3 * 4 * 4, dtype=np.uint8).reshape(20, 3, 4, 4)
    file["labels"] = np.arange(20)
    file.attrs["classes"] = [b"cat", "d\u00f6g".encode()]


def _chunks(file: Any) -> None:
    images = np.arange(20 * 3 * 4 * 4, dtype=np.float32).reshape(20, 3, 4, 4)
    file.create_dataset("images", data=images, chunks=(4, 3, 4, 4))
    file.create_dataset("labels", data=np.arange(20), chunks=(8,), maxshape=(None,))


def _packed(file: Any) -> None:
    images = np.arange(20 * 3 * 4 * 4, dtype=np.int16).reshape(20, 3, 4, 4)
    file.create_dataset("images", data=images, chunks=(4, 3, 4, 4), compression="gzip", shuffle=True)
    file["labels"] = np.arange(20) / 7


def _encoded(file: Any) -> None:
    images = [picture("PNG"), picture("JPEG")]
    file["bytes"] = np.frombuffer(b"".join(images), np.uint8)
    file["offsets"] = np.cumsum([0, *map(len, images)])
    file["labels"] = np.arange(2)
    file["names"] = [b"one.png", b"two.jpg"]


def _read_hdf5(data: bytes, folder: Path) -> Any:
    path = put(folder, "some.h5", data)
    read = Hdf5(path, size=8 if b"offsets" in data else None)
    ids = some(len(read))
    inputs, targets = read.batch_of(ids)
    return path, read, ids, inputs, targets, read.classes


def _repacked(rng: random.Random, examples: Sequence[bytes]) -> bytes:
    """A chunk that unpacks to something else, or that the file says other filters have packed; or other damage."""
    import h5py

    if rng.random() < 0.7:
        return of_bytes(rng, examples)
    held = io.BytesIO(next(each for each in examples if b"deflate" in each))
    with h5py.File(held, "r+") as file:
        images = file["images"].id
        place = (rng.randrange(5) * 4, 0, 0, 0)
        mask, stored = images.read_direct_chunk(place)
        content = of_bytes(rng, [zlib.decompress(stored)])
        packed = rng.choice((zlib.compress(content, rng.randrange(10)), content, of_bytes(rng, [stored])))
        images.write_direct_chunk(place, packed or b"0", rng.choice((mask, mask, 1, 2, 3)))
    return held.getvalue()


def _written_rows(ids: list[int]) -> np.ndarray[Any, Any]:
    """The numbers in these rows of images, where they are not damaged."""
    return np.concatenate([np.arange(48) + 48 * number for number in ids])


def _check_hdf5(data: bytes, value: Any) -> None:
    """Rows are those that h5py itself gives, or those that were written: it gives zeros for a chunk that it lists and
    does not find."""
    import h5py

    path, read, ids, inputs, targets, _ = value
    if b"offsets" in data:
        return
    with h5py.File(path, "r", locking=False) as file:
        for name, rows in (("images", inputs), ("labels", targets)):
            wanted = np.stack([file[name][number] for number in ids])
            if name == "images" and np.array_equal(rows.numpy().ravel(), _written_rows(ids)):
                continue
            if not np.array_equal(rows.numpy(), wanted.astype(rows.numpy().dtype), equal_nan=wanted.dtype.kind in "fc"):
                raise WrongValue(f"{name} of {read.path} are not the rows that h5py gives")


def picture(kind: str) -> bytes:
    from PIL import Image

    pixels = np.arange(12 * 10 * 3, dtype=np.uint8).reshape(12, 10, 3)
    held = io.BytesIO()
    Image.fromarray(pixels).save(held, kind)
    return held.getvalue()


def _pictures(folder: Path) -> list[bytes]:
    del folder
    return [picture(kind) for kind in ("PNG", "JPEG", "GIF", "BMP", "TIFF", "PPM", "WEBP")]


def _read_picture(data: bytes, folder: Path) -> Any:
    put(folder, "pictures/cat/some.png", data)
    read = ImageFolder(folder / "pictures", 8)
    return [read[number] for number in range(len(read))]


LINES = [
    b'{"text": "one", "label": 1, "list": [1, 2]}\n{"text": "tw\xc3\xb6", "label": -2, "list": []}\n\n'
    b'{"text": null, "label": 3.5, "list": [7]}\n' * 3,
    b'\xef\xbb\xbf{"text": "with a mark", "label": 1}\r\n{"text": "\\u00e9\\ud83d\\ude00", "label": 2}\r\n',
]


def _rows(name: str) -> Callable[[bytes, Path], Any]:
    def read(data: bytes, folder: Path) -> Any:
        table = Table(put(folder, name, data))
        rows, bad = [], None
        for number in some(len(table)):
            try:
                rows.append(table[number])
            except BadSample as error:  # which --skip-bad-samples leaves out
                bad = error
        if not rows and bad is not None:
            raise bad
        if "text" in (table._parts[0].names() or ["text"]):
            Table(put(folder, name, data), columns=["text"], lengths="text").lengths([0])
        return rows

    return read


def _check_lines(data: bytes, value: Any) -> None:
    """Each row is an object that stands in a line of the file."""
    lines = []
    for line in data.removeprefix(b"\xef\xbb\xbf").split(b"\n"):
        try:
            lines.append(repr(json.loads(line)))
        except (ValueError, RecursionError):
            continue
    if any(repr(row) not in lines for row in value):
        raise WrongValue("a row is none of the file's lines")


def _check_unpacked(data: bytes, value: Any) -> None:
    _check_lines(gzip.decompress(data), value)


def _same_rows(examples: Sequence[str]) -> Callable[[bytes, Any], None]:
    def check(_: bytes, value: Any) -> None:
        if repr(value) not in examples:
            raise WrongValue("the rows are those of none of the examples")

    return check


def _table() -> Any:
    import pyarrow as pa

    numbers = list(range(50))
    return pa.table(
        {
            "number": pa.array(numbers, pa.int32()),
            "text": [None if number % 7 == 3 else f"t\u00ebxt {number}" for number in numbers],
            "list": [[number] * (number % 4) for number in numbers],
            "fixed": pa.array([[number, 1.5] for number in numbers], pa.list_(pa.float32(), 2)),
            "flag": [number % 3 == 0 for number in numbers],
            "kind": pa.array([str(number % 3) for number in numbers]),
        }
    )


def _parquet(folder: Path) -> list[bytes]:
    import pyarrow.parquet as pq

    found = []
    for options in ({"compression": "none"}, {"compression": "snappy", "row_group_size": 20}, {"compression": "zstd"}):
        pq.write_table(_table(), folder / "some.parquet", **options)
        found.append((folder / "some.parquet").read_bytes())
    return found


def _arrow(folder: Path) -> list[bytes]:
    import pyarrow as pa

    found, table = [], _table()
    for make, packed, kind in (
        (pa.ipc.new_file, None, None),
        (pa.ipc.new_stream, None, None),
        (pa.ipc.new_file, "lz4", None),
        (pa.ipc.new_stream, None, pa.dictionary(pa.int8(), pa.string())),
    ):
        rows = table if kind is None else table.set_column(5, "kind", table["kind"].cast(kind))
        path = folder / "some.arrow"
        with make(str(path), rows.schema, options=pa.ipc.IpcWriteOptions(compression=packed)) as writer:
            writer.write_table(rows, max_chunksize=20)
        found.append(path.read_bytes())
    return found


def _rewritten(rng: random.Random, examples: Sequence[bytes]) -> bytes:
    """Offsets, lengths and values that lie, written and perhaps packed as they should be; or other damage."""
    import pyarrow as pa

    if rng.random() < 0.5:
        return of_bytes(rng, examples)
    data = rng.choice(examples)
    opened = pa.ipc.open_file if data.startswith(b"ARROW1") else pa.ipc.open_stream
    batch = next(iter(opened(pa.py_buffer(data)).read_all().combine_chunks().to_batches()))
    column = batch.column(number := rng.randrange(batch.num_columns))
    held = [bytearray(each) if each is not None else None for each in column.buffers()]
    lying = _again(column, iter([each and pa.py_buffer(each) for each in held]))
    for _ in range(rng.choice((1, 1, 2))):
        buffer = rng.choice([each for each in held if each])
        width = rng.choice((1, 4, 4, 8))
        at = rng.randrange(max(1, len(buffer) // width)) * width
        value = rng.choice((*INTEGERS, *EDGES, rng.randrange(256))) % (1 << 8 * width)
        buffer[at : at + width] = value.to_bytes(width, "little")[: len(buffer) - at]
    sink, packed = pa.BufferOutputStream(), rng.choice((None, "lz4", "zstd"))
    columns = [lying if place == number else each for place, each in enumerate(batch.columns)]
    try:
        with rng.choice((pa.ipc.new_file, pa.ipc.new_stream))(
            sink, batch.schema, options=pa.ipc.IpcWriteOptions(compression=packed)
        ) as writer:
            writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=batch.schema))
    except pa.ArrowInvalid:  # a lie that cannot be written
        return of_bytes(rng, examples)
    return bytes(sink.getvalue())


def _again(column: Any, buffers: Any) -> Any:
    """The same column with other buffers, which are in the order in which it gives its own."""
    import pyarrow as pa

    kind = column.type
    if pa.types.is_dictionary(kind):
        indices = pa.Array.from_buffers(kind.index_type, len(column), [next(buffers), next(buffers)])
        return pa.DictionaryArray.from_arrays(indices, column.dictionary, safe=False)
    own = [next(buffers) for _ in range(3 if pa.types.is_string(kind) else 1 if _is_fixed(kind) else 2)]
    inner = [_again(column.values, buffers)] if pa.types.is_list(kind) or _is_fixed(kind) else []
    return pa.Array.from_buffers(kind, len(column), own, children=inner)


def _is_fixed(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_fixed_size_list(kind))


CSV = [
    b'text,label,list\none,1,a\n"tw\xc3\xb6, \nlines",2,b\n,3.5,\n' + b"x,7,y\n" * 30,
    b"a,b\n1,true\n2,false\n,\n",
    b"day,number\n2024-01-02,1\n2024-01-03,0x1f\n",
]


def _saved(_: Path) -> list[bytes]:
    names = [{"filename": "data-00000-of-00001.arrow"}]
    return [json.dumps(each).encode() for each in ({"_data_files": names}, {"_data_files": names, "_split": "train"})]


def _read_saved(data: bytes, folder: Path) -> Any:
    import pyarrow as pa

    part = folder / "saved" / "data-00000-of-00001.arrow"
    if not part.exists():
        part.parent.mkdir()
        with pa.ipc.new_stream(str(part), _table().schema) as writer:
            writer.write_table(_table())
    put(folder, "saved/state.json", data)
    return Table(folder / "saved")[3]


def _read_splits(data: bytes, folder: Path) -> Any:
    put(folder, "splits/dataset_dict.json", data)
    return Table(folder / "splits")


def _staged(_: Path) -> list[bytes]:
    file = {"name": "a.txt", "size": 3, "sha256": "ab" * 32, "url": None, "when": "2026-01-01 00:00:00"}
    return [json.dumps({"format": 1, "files": each}).encode() for each in ([], [file], [file, {**file, "name": "b"}])]


def _read_staged(data: bytes, folder: Path) -> Any:
    put(folder, "staged/staged.json", data)
    found = read_list(folder / "staged")
    return [(each.sum, f"{each.name} {each.size:,} {each.when}") for each in found.values()]


def _read_sums(data: bytes, folder: Path) -> Any:
    put(folder, "some.h5", b"content")
    put(folder, "some.h5.sha256", data)
    return checked(folder / "some.h5", Quiet())


def _read_note(data: bytes, folder: Path) -> Any:
    part = put(folder, "part", b"some")
    return _had(part, put(folder, "note", data))


def _documents_in(name: str, kind: str) -> Callable[[bytes, Path], Any]:
    """The texts that convert-data makes tokens of, without those that are bad."""

    def read(data: bytes, folder: Path) -> Any:
        path = put(folder, name, data)
        reading, bad = texts.Reading(kind), Bad()
        units = [unit for job in texts.jobs_of(path, files_below(path), reading, 1 << 20) for unit in job.units]
        found = texts.good(itertools.islice(texts.documents(path, units, reading), ROWS), True, bad)
        return ["".join(itertools.islice(document, 3)) for document in found], bad.count

    return read


def _check_texts(data: bytes, value: Any) -> None:
    """Each text stands in a line of the file."""
    there = set()
    for line in data.removeprefix(b"\xef\xbb\xbf").split(b"\n"):
        with contextlib.suppress(ValueError, RecursionError):
            row = json.loads(line)
            there.add(str(row.get("text")) if isinstance(row, dict) else "")
    if not set(value[0]) - {""} <= there:
        raise WrongValue("a text is in none of the file's lines")


def _read_hf_index(data: bytes, folder: Path) -> Any:
    for name in ("a.safetensors", "b.safetensors"):
        put(folder, f"weights/{name}", b"")
    put(folder, "weights/model.safetensors.index.json", data)
    return llama._safetensors(folder / "weights")


def _read_llama(data: bytes, folder: Path) -> Any:
    return llama._check_config(put(folder, "config.json", data), llama.PRESETS["tiny"])


def _read_t5(data: bytes, folder: Path) -> Any:
    put(folder, "t5/config.json", data)
    return summarize.shape_of(folder / "t5")


def _one(*data: bytes) -> Callable[[Path], Sequence[bytes]]:
    return lambda _: data


FORMATS = [
    Format("tokens", _tokens, _read_tokens, of_bytes, _check_tokens),
    Format(
        "hdf5",
        lambda folder: [_h5(make)(folder) for make in (_plain, _chunks, _packed)],
        _read_hdf5,
        _repacked,
        _check_hdf5,
    ),
    Format("hdf5-encoded", lambda folder: [_h5(_encoded)(folder)], _read_hdf5),
    Format("json-lines", _one(*LINES), _rows("some.jsonl"), of_json, _check_lines),
    Format(
        "json-lines-gz",
        lambda _: [gzip.compress(each, mtime=0) for each in LINES],
        _rows("some.jsonl.gz"),
        in_gzip(of_json),
        _check_unpacked,
    ),
    Format("csv", _one(*CSV), _rows("some.csv"), of_text),
    Format("csv-gz", lambda _: [gzip.compress(each, mtime=0) for each in CSV], _rows("some.csv.gz"), in_gzip(of_text)),
    Format("parquet", _parquet, _rows("some.parquet")),
    Format("arrow", _arrow, _rows("some.arrow"), _rewritten),
    Format("texts-lines", _one(*LINES), _documents_in("some.jsonl", "json"), of_json, _check_texts),
    Format(
        "texts-lines-gz",
        lambda _: [gzip.compress(each, mtime=0) for each in LINES],
        _documents_in("some.jsonl.gz", "json"),
        in_gzip(of_json),
    ),
    Format("texts-parquet", _parquet, _documents_in("some.parquet", "parquet")),
    Format(
        "weights-index", _one(b'{"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}'), _read_hf_index, of_json
    ),
    Format(
        "llama-config", lambda _: [json.dumps(llama.hf_config(llama.PRESETS["tiny"])).encode()], _read_llama, of_json
    ),
    Format(
        "t5-config", lambda _: [json.dumps(summarize.hf_config(summarize.PRESETS["small"])).encode()], _read_t5, of_json
    ),
    Format("pictures", _pictures, _read_picture),
    Format("saved-dataset", _saved, _read_saved, of_json),
    Format("staged-files", _staged, _read_staged, of_json),
    Format("checksums", _one(b"%s  some.h5\n%s  other\n" % (b"ab" * 32, b"cd" * 32)), _read_sums, of_text),
    Format("download-note", _one(b'{"url": "https://x/y", "same": "\\"abc\\""}'), _read_note, of_json),
]

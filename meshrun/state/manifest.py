"""What a checkpoint says of itself, as JSON: strict in what it takes, since anybody may have written it.

    raw = Manifest(step=120, …).encode()
    Manifest.decode(raw)                    # or Unfit, with what is wrong

`Index` is the part of one rank: which rectangles lie where in its file. A manifest is those of all ranks.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch

from meshrun.files import open_plain
from meshrun.state.region import Box, Region
from meshrun.state.shards import BLOCK, DTYPES, NAMES, Plan, Spec, plan

FORMAT = 1
MOST_BYTES = 1 << 27
"""Of a manifest; a longer one is refused unread."""
_FILE = re.compile(r"[a-z][a-z0-9-]{0,40}-\d{5,9}\.safetensors")
_LARGEST = 1 << 60
_DIMENSIONS = 64
_FLOAT = "__float__"


class Unfit(Exception):
    """A document that is no manifest: what is wrong with it, as the end of a sentence."""


def content(path: Path) -> bytes:
    """A document as it lies on disk: of a plain file that is no longer than such documents are."""
    with open_plain(path) as file:
        if os.fstat(file.fileno()).st_size > MOST_BYTES:
            raise Unfit(f"is larger than {MOST_BYTES:,} bytes")
        return file.read(MOST_BYTES)


class Piece(NamedTuple):
    """A rectangle of a tensor, and where its bytes begin."""

    file: str
    offset: int
    box: Box


@dataclass(frozen=True)
class Info:
    """A tensor of a checkpoint."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: list[Piece] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class File:
    """A rank's file: its size, and the checksum of each block; None where there are none."""

    bytes: int
    blocks: list[int] | None


class Entry(NamedTuple):
    """A rectangle in one rank's file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    box: Box
    offset: int


def laid_out(regions: Sequence[Region], about: dict[str, str]) -> tuple[Plan, list[Entry]]:
    """Where each region goes in a file of its own."""
    keys: dict[str, Region] = {}
    for region in regions:
        key, number = region.name, 0
        while key in keys:
            number += 1
            key = f"{region.name}#{number}"
        keys[key] = region
    laid = plan((Spec(key, each.tensor.dtype, tuple(each.tensor.shape)) for key, each in keys.items()), about)
    entries = [
        Entry(each.name, each.tensor.dtype, tuple(each.shape), each.box, laid.offsets[key])
        for key, each in keys.items()
    ]
    return laid, entries


@dataclass(frozen=True)
class Index:
    """What one rank has written, and of which moment."""

    rank: int
    step: int
    layout: str
    world: int
    state: dict[str, Any]
    name: str
    file: File
    entries: list[Entry]

    def encode(self) -> bytes:
        of_entries = [[e.name, NAMES[e.dtype], e.shape, e.box.start, e.box.size, e.offset] for e in self.entries]
        body = {
            **{key: getattr(self, key) for key in ("rank", "step", "layout", "world", "name")},
            "state": plain(self.state),
            "bytes": self.file.bytes,
            "blocks": self.file.blocks,
            "entries": of_entries,
        }
        return _seal(body)

    @classmethod
    def decode(cls, raw: bytes) -> Index:
        body = _unseal(raw)
        name = _file_name(body.get("name"))
        file = _file(name, [body.get("bytes"), body.get("blocks")])
        entries = []
        for row in _list(body.get("entries"), "entries"):
            title, dtype, shape, start, size, offset = _row(row, 6, "entries")
            info = _info(_text(title, "a tensor's name"), dtype, shape)
            piece = _piece(title, info, name, file, offset, start, size)
            entries.append(Entry(title, info.dtype, info.shape, piece.box, piece.offset))
        return cls(_count(body.get("rank"), "rank"), name=name, file=file, entries=entries, **_common(body))


@dataclass(frozen=True)
class Manifest:
    """All that there is to know of a checkpoint, but for the numbers themselves."""

    step: int
    layout: str
    world: int
    state: dict[str, Any]
    files: dict[str, File]
    tensors: dict[str, Info]

    @classmethod
    def of(cls, indices: Sequence[Index]) -> Manifest:
        """The indices of several ranks, put together; the first one's state is that of all."""
        first = indices[0]
        tensors: dict[str, Info] = {}
        for index in indices:
            for entry in index.entries:
                info = tensors.setdefault(entry.name, Info(entry.dtype, entry.shape))
                if (info.dtype, info.shape) != (entry.dtype, entry.shape):
                    raise Unfit(
                        f"{entry.name!r} is {_shown(entry.dtype, entry.shape)} on rank {index.rank} "
                        f"and {_shown(info.dtype, info.shape)} on another"
                    )
                info.pieces.append(Piece(index.name, entry.offset, entry.box))
        files = {index.name: index.file for index in indices}
        return cls(first.step, first.layout, first.world, first.state, files, tensors)

    def encode(self) -> bytes:
        numbers = {name: number for number, name in enumerate(self.files)}
        body = {
            "step": self.step,
            "layout": self.layout,
            "world": self.world,
            "state": plain(self.state),
            "files": [[name, file.bytes, file.blocks] for name, file in self.files.items()],
            "tensors": {
                name: [NAMES[info.dtype], info.shape, [[numbers[p.file], p.offset, *p.box] for p in info.pieces]]
                for name, info in self.tensors.items()
            },
        }
        return _seal(body)

    @classmethod
    def decode(cls, raw: bytes) -> Manifest:
        body = _unseal(raw)
        files: dict[str, File] = {}
        for row in _list(body.get("files"), "files"):
            name, *rest = _row(row, 3, "files")
            if (file := _file(_file_name(name), rest)).blocks is None:
                raise Unfit(f"has no checksums of {name}")
            files[name] = file
        names = list(files)
        tensors = {}
        for name, row in _dict(body.get("tensors"), "tensors").items():
            dtype, shape, pieces = _row(row, 3, name)
            info = _info(name, dtype, shape)
            for piece in _list(pieces, f"pieces of {name!r}"):
                number, offset, start, size = _row(piece, 4, name)
                if _count(number, "a file's number") >= len(names):
                    raise Unfit(f"{name!r} lies in file {number} of {len(names)}")
                file = names[number]
                info.pieces.append(_piece(name, info, file, files[file], offset, start, size))
            tensors[name] = info
        found = cls(files=files, tensors=tensors, **_common(body))
        found.check_extent()
        return found

    def check_extent(self) -> None:
        """Each tensor is as large as its pieces, and no two of these share bytes: so none is larger than the files."""
        spans: dict[str, list[tuple[int, int]]] = {name: [] for name in self.files}
        for name, info in self.tensors.items():
            held = sum(math.prod(piece.box.size) for piece in info.pieces)
            if held != math.prod(info.shape):
                raise Unfit(f"{name!r} has {math.prod(info.shape):,} elements and pieces of {held:,}")
            for piece in info.pieces:
                length = math.prod(piece.box.size) * info.dtype.itemsize
                spans[piece.file].append((piece.offset, piece.offset + length))
        for name, found in spans.items():
            found.sort()
            if any(after[0] < before[1] for before, after in itertools.pairwise(found)):
                raise Unfit(f"two tensors overlap in {name}")


def plain(value: Any) -> Any:
    """A value as strict JSON has it, which knows no infinity and nothing that is not a number."""
    if isinstance(value, float) and not math.isfinite(value):
        return {_FLOAT: repr(value)}
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, list | tuple) else value


def _unplain(value: Any) -> Any:
    if isinstance(value, dict):
        if value.keys() == {_FLOAT} and value[_FLOAT] in ("nan", "inf", "-inf"):
            return float(value[_FLOAT])
        return {key: _unplain(each) for key, each in value.items()}
    return [_unplain(each) for each in value] if isinstance(value, list) else value


def _canonical(body: dict[str, Any]) -> str:
    return json.dumps(body, separators=(",", ":"), allow_nan=False)


def _seal(body: dict[str, Any]) -> bytes:
    text = _canonical(body)
    digest = hashlib.sha256(text.encode()).hexdigest()
    return f'{{"format":{FORMAT},"sha256":"{digest}","body":{text}}}\n'.encode()


def _unseal(raw: bytes) -> dict[str, Any]:
    try:
        document = json.loads(raw, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        raise Unfit("is not valid JSON") from None
    document = _dict(document, "it")
    found = document.get("format")
    if type(found) is int and found > FORMAT:
        raise Unfit(f"has format {found}, which a newer meshrun wrote; this one reads up to format {FORMAT}")
    if found != FORMAT or type(found) is not int:
        raise Unfit("is no manifest of meshrun")
    body = _dict(document.get("body"), "body")
    try:
        text = _canonical(body)
    except (ValueError, RecursionError):
        raise Unfit("is not valid JSON") from None
    if hashlib.sha256(text.encode()).hexdigest() != document.get("sha256"):
        raise Unfit("has a wrong checksum")
    return body


def _no_constant(text: str) -> NoReturn:
    raise ValueError(text)


def _common(body: dict[str, Any]) -> dict[str, Any]:
    try:
        state = _unplain(_dict(body.get("state"), "state"))
    except RecursionError:
        raise Unfit("is no manifest of meshrun: state has no end") from None
    return {
        "step": _count(body.get("step"), "step"),
        "layout": _text(body.get("layout"), "layout"),
        "world": _count(body.get("world"), "world"),
        "state": state,
    }


def _file_name(name: Any) -> str:
    if not isinstance(name, str) or not _FILE.fullmatch(name):
        raise Unfit(f"names a file {str(name)[:80]!r}; they are called rank-00000.safetensors and so on")
    return name


def _file(name: str, row: Iterable[Any]) -> File:
    size, blocks = row
    size = _count(size, f"the size of {name}")
    if blocks is not None:
        blocks = _counts(blocks, f"checksums of {name}")
        if len(blocks) != -(-size // BLOCK):
            raise Unfit(f"has {len(blocks)} checksums for the {size:,} bytes of {name}")
    return File(size, blocks)


def _info(name: str, dtype: Any, shape: Any) -> Info:
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise Unfit(f"gives {name!r} the type {str(dtype)[:80]!r}, which is none of {', '.join(DTYPES)}")
    sizes = tuple(_counts(shape, f"the shape of {name!r}"))
    if len(sizes) > _DIMENSIONS or math.prod(sizes) >= _LARGEST:
        raise Unfit(f"gives {name!r} an impossible shape")
    return Info(DTYPES[dtype], sizes)


def _piece(name: str, info: Info, file: str, of: File, offset: Any, start: Any, size: Any) -> Piece:
    at = _count(offset, f"the offset of {name!r}")
    box = Box(tuple(_counts(start, f"the start of {name!r}")), tuple(_counts(size, f"the size of {name!r}")))
    if not len(box.start) == len(box.size) == len(info.shape):
        raise Unfit(f"has a piece of {name!r} with another number of dimensions")
    if any(begin + extent > whole for begin, extent, whole in zip(*box, info.shape, strict=True)):
        raise Unfit(f"has a piece of {name!r} outside of its shape {list(info.shape)}")
    if at + math.prod(box.size) * info.dtype.itemsize > of.bytes:
        raise Unfit(f"has a piece of {name!r} beyond the end of {file}")
    return Piece(file, at, box)


def _dict(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise Unfit(f"is no manifest of meshrun: {what} is no table")
    return value


def _list(value: Any, what: str) -> list[Any]:
    if not isinstance(value, list):
        raise Unfit(f"is no manifest of meshrun: {what} is no list")
    return value


def _row(value: Any, length: int, what: str) -> Iterator[Any]:
    if len(_list(value, what)) != length:
        raise Unfit(f"is no manifest of meshrun: an entry of {what} has not {length} fields")
    return iter(value)


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise Unfit(f"is no manifest of meshrun: {what} is no text")
    return value


def _count(value: Any, what: str) -> int:
    if type(value) is not int or not 0 <= value < _LARGEST:
        raise Unfit(f"is no manifest of meshrun: {what} is no count")
    return value


def _counts(value: Any, what: str) -> list[int]:
    return [_count(each, what) for each in _list(value, what)]


def _shown(dtype: torch.dtype, shape: Sequence[int]) -> str:
    return f"{NAMES[dtype]} {list(shape)}"

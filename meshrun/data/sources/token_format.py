"""What a token file is: one safetensors file of tokens and of where each document starts.

    write(Path("news.tokens"), [np.array([0, 5, 7]), np.array([0, 9])], lengths=np.array([3, 2]), vocabulary=4096)
    layout = read_layout(Path("news.tokens"))         # where in the file the numbers are, and what they are
    tokenizer_beside(Path("news.tokens"))             # news.tokenizer.json

Two tensors: `starts`, the number of each document's first token and behind them that of all tokens; and `tokens`, two
bytes each where the vocabulary allows, else four. `starts` come first, so that both are aligned. Its metadata say how
large the vocabulary is, which tokenizer made it, and the checksum of all its numbers. Equal tokens are equal bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from meshrun import strict_json
from meshrun.errors import UserError
from meshrun.files import open_plain

FORMAT = "meshrun-tokens-1"
ENDING = ".tokens"
_DTYPES: dict[str, np.dtype[Any]] = {"U16": np.dtype("<u2"), "U32": np.dtype("<u4")}
_STARTS = np.dtype("<i8")
_LONGEST_HEADER = 1 << 20
_LARGEST = 1 << 60
_BLOCK = 1 << 22


@dataclass(frozen=True)
class TokenLayout:
    """Where the numbers of a token file are, and what its metadata say of them."""

    size: int
    """Bytes of the whole file."""
    dtype: np.dtype[Any]
    tokens: int
    """How many there are."""
    tokens_at: int
    """The byte in the file at which they begin."""
    documents: int
    starts_at: int
    vocabulary: int
    tokenizer_sha256: str | None
    sha256: str


def tokenizer_beside(path: Path) -> Path:
    """Where the tokenizer of a token file lies."""
    return path.with_name(path.name.removesuffix(ENDING) + ".tokenizer.json")


def dtype_for(vocabulary: int) -> np.dtype[Any]:
    """The smallest numbers that hold every token of a vocabulary."""
    return _DTYPES["U16" if vocabulary <= 1 << 16 else "U32"]


def write(
    path: Path,
    blocks: Iterable[NDArray[Any]],
    lengths: NDArray[np.int64],
    vocabulary: int,
    tokenizer_sha256: str | None = None,
) -> TokenLayout:
    """Write a token file: documents of these lengths, whose tokens come one after the other, cut into any blocks."""
    return write_many(path, (len(lengths), int(np.sum(lengths))), [lengths], blocks, vocabulary, tokenizer_sha256)


def write_many(
    path: Path,
    counts: tuple[int, int],
    lengths: Iterable[NDArray[np.int64]],
    blocks: Iterable[NDArray[Any]],
    vocabulary: int,
    tokenizer_sha256: str | None,
) -> TokenLayout:
    """The same for more than memory holds: so many documents and tokens, whose lengths come in blocks too."""
    dtype = dtype_for(vocabulary)
    metadata = {
        "format": FORMAT,
        "vocabulary": str(vocabulary),
        "documents": str(counts[0]),
        "tokenizer_sha256": tokenizer_sha256 or "",
        "sha256": "0" * 64,  # known when all is written; as long as the real one
    }
    name = next(name for name, each in _DTYPES.items() if each == dtype)
    with path.open("w+b") as file:
        file.write(_header(metadata, name, counts))
        starts_at, end = file.tell(), 0
        file.write(struct.pack("<q", 0))
        for block in lengths:
            starts = np.cumsum(block, dtype=_STARTS) + end
            end = int(starts[-1]) if len(starts) else end
            file.write(starts.data)
        tokens_at = file.tell()
        for block in blocks:
            file.write(np.ascontiguousarray(block, dtype=dtype).data)
        if (end, tokens_at, file.tell()) != (
            counts[1],
            starts_at + (counts[0] + 1) * _STARTS.itemsize,
            tokens_at + counts[1] * dtype.itemsize,
        ):
            raise ValueError(f"{path}: what came is not {counts[0]} documents of {counts[1]} tokens")
        summed = _sha256(file, [(tokens_at, counts[1] * dtype.itemsize), (starts_at, tokens_at - starts_at)])
        file.seek(0)
        file.write(_header({**metadata, "sha256": summed}, name, counts))
        file.flush()
        os.fsync(file.fileno())
    return read_layout(path)


def _header(metadata: dict[str, str], dtype: str, counts: tuple[int, int]) -> bytes:
    documents, tokens = counts
    first = (documents + 1) * _STARTS.itemsize
    tensors = {
        "starts": {"dtype": "I64", "shape": [documents + 1], "data_offsets": [0, first]},
        "tokens": {
            "dtype": dtype,
            "shape": [tokens],
            "data_offsets": [first, first + tokens * _DTYPES[dtype].itemsize],
        },
    }
    text = json.dumps({"__metadata__": metadata, **tensors}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the numbers behind it begin at a multiple of their own size
    return struct.pack("<Q", len(text)) + text


def read_layout(path: Path) -> TokenLayout:
    """Read the header; a file that is no token file, or not all there, is a sentence."""
    try:
        with open_plain(path) as file:
            size = os.fstat(file.fileno()).st_size
            length = struct.unpack("<Q", file.read(8).ljust(8, b"\0"))[0]
            header = file.read(length) if 0 < length <= _LONGEST_HEADER else b""
    except IsADirectoryError:
        raise UserError(
            f"{path} is a folder and not a token file; meshrun convert-data {path} NAME{ENDING} makes one of its texts"
        ) from None
    except OSError as error:
        raise UserError(f"token file {path} cannot be read: {error.strerror or error}") from None
    try:
        document = strict_json.loads(header)
        metadata = document["__metadata__"]
        if metadata["format"] != FORMAT:
            raise KeyError("format")
        tokens, starts = document["tokens"], document["starts"]
        dtype = _dtype(path, tokens["dtype"], starts["dtype"])
        count, tokens_at, tokens_end = _span(tokens, dtype)
        ends, starts_at, starts_end = _span(starts, _STARTS)
        if sorted((tokens_at, starts_at)) != [0, min(tokens_end, starts_end)]:
            raise ValueError("the tensors overlap, or have a gap between them")
        layout = TokenLayout(
            size=8 + length + max(tokens_end, starts_end),
            dtype=dtype,
            tokens=count,
            tokens_at=8 + length + tokens_at,
            documents=ends - 1,
            starts_at=8 + length + starts_at,
            vocabulary=_whole(metadata["vocabulary"]),
            tokenizer_sha256=_sha256_in(metadata.get("tokenizer_sha256")),
            sha256=_sha256_in(metadata["sha256"]) or "",
        )
        if ends < 1 or layout.vocabulary > 1 << (8 * dtype.itemsize) or _whole(metadata["documents"]) != ends - 1:
            raise ValueError("counts that no token file has")
    except (ValueError, LookupError, TypeError, AttributeError):
        raise UserError(
            f"{path} is not a token file; meshrun convert-data TEXTS NAME{ENDING} makes one of texts"
        ) from None
    if size != layout.size:
        raise UserError(
            f"token file {path} has {size:,} bytes, but its header speaks of {layout.size:,}: it is not all there; "
            f"copy or convert it again"
        )
    return layout


def _span(tensor: dict[str, Any], dtype: np.dtype[Any]) -> tuple[int, int, int]:
    """How many numbers a tensor of the header has, and the bytes between which they lie; a ValueError if these differ.

    JSON has floats, booleans and negative numbers too, none of which is a count.
    """
    (count,), (begin, end) = tensor["shape"], tensor["data_offsets"]
    if any(type(each) is not int or not 0 <= each < _LARGEST for each in (count, begin, end)):
        raise ValueError("a shape or an offset is no count")
    if end - begin != count * dtype.itemsize:
        raise ValueError("data_offsets do not fit the shape")
    return count, begin, end


def _whole(text: Any) -> int:
    """A count in the metadata, which safetensors keeps as texts."""
    if not isinstance(text, str) or not text.isascii() or not text.isdigit():
        raise ValueError("a count of the metadata is none")
    return int(text)


def _sha256_in(text: Any) -> str | None:
    """A checksum in the metadata; None where it is empty."""
    if text and not re.fullmatch("[0-9a-f]{64}", text):
        raise ValueError("a checksum of the metadata is none")
    return text or None


def _dtype(path: Path, tokens: str, starts: str) -> np.dtype[Any]:
    if tokens not in _DTYPES or starts != "I64":
        raise UserError(
            f"token file {path} has tokens of type {tokens} and starts of type {starts}; "
            f"they must be U16 or U32, and I64: convert it again"
        )
    return _DTYPES[tokens]


def sha256_of_numbers(path: Path, layout: TokenLayout) -> str:
    """The checksum of the numbers as they are now, which should be `layout.sha256`."""
    spans = [(layout.tokens_at, layout.tokens * layout.dtype.itemsize)]
    spans.append((layout.starts_at, (layout.documents + 1) * _STARTS.itemsize))
    with path.open("rb") as file:
        return _sha256(file, spans)


def _sha256(file: BinaryIO, spans: Iterable[tuple[int, int]]) -> str:
    hashed = hashlib.sha256()
    for at, length in spans:
        file.seek(at)
        while length and (block := file.read(min(length, _BLOCK))):
            hashed.update(block)
            length -= len(block)
    return hashed.hexdigest()

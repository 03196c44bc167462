"""One rank's file: a valid safetensors file, with a checksum of every mebibyte of it.

    written = write(Path("rank-00000.safetensors"), [("weight", tensor)])
    reader = Reader(path, written.bytes, written.blocks)
    reader.read(written.offsets["weight"], 4096)          # these bytes, or Damaged

Whoever reads knows from elsewhere where a tensor lies, so the file's own header is for other programs: it is never
trusted here. Bytes go from a tensor's memory to the file and back without a copy between them.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from meshrun.files import open_plain

BLOCK = 1 << 20
CHUNK = 8 << 20
"""Bytes that are handed to the system at once."""
ALIGN = 64

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
}
"""What safetensors calls the kinds of numbers."""
NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Damaged(Exception):
    """A file is not what was written: one sentence that names it and the place."""


@dataclass(frozen=True)
class Spec:
    """A tensor to be: what a header says of it."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Plan:
    """A file before its tensors: its first bytes, and where each tensor goes."""

    header: bytes
    offsets: dict[str, int]
    bytes: int


@dataclass(frozen=True)
class Written:
    """A file on disk."""

    bytes: int
    blocks: list[int]
    offsets: dict[str, int]


def plan(specs: Iterable[Spec], about: dict[str, str] | None = None) -> Plan:
    """Lay tensors out one after the other, wide numbers first, so that each is aligned to its own width."""
    entries: dict[str, object] = {"__metadata__": about} if about else {}
    offsets, at = {}, 0
    for spec in sorted(specs, key=lambda each: -each.dtype.itemsize):
        if spec.key in offsets:
            raise ValueError(f"two tensors are called {spec.key!r}")
        entries[spec.key] = {
            "dtype": NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [at, at + spec.bytes],
        }
        offsets[spec.key] = at
        at += spec.bytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % ALIGN)
    header = len(text).to_bytes(8, "little") + text
    return Plan(header, {key: offset + len(header) for key, offset in offsets.items()}, len(header) + at)


def write(path: Path, tensors: Sequence[tuple[str, Tensor]], sync: bool = True) -> Written:
    """Write tensors under these names, straight from their memory."""
    named = dict(tensors)
    laid = plan(Spec(key, tensor.dtype, tuple(tensor.shape)) for key, tensor in tensors)
    ordered = sorted(laid.offsets, key=laid.offsets.__getitem__)
    buffers = [memoryview(laid.header), *(bytes_of(named[key]) for key in ordered)]
    return Written(laid.bytes, write_buffers(path, buffers, sync), laid.offsets)


def bytes_of(tensor: Tensor) -> memoryview:
    """A tensor's memory; of a tensor elsewhere, or with gaps, that of a copy."""
    return memory_of(tensor.detach().cpu().contiguous())


def memory_of(tensor: Tensor) -> memoryview:
    """The memory of a tensor without gaps, on the host."""
    # By its strides: one of a single element counts as without gaps whatever its stride is, and a view does not.
    return torch.as_strided(tensor, (tensor.numel(),), (1,)).view(torch.uint8).numpy().data


def write_buffers(path: Path, buffers: Iterable[memoryview], sync: bool = True) -> list[int]:
    """Write buffers one after the other to a new file; returns the checksum of each block."""
    blocks: list[int] = []
    crc = filled = at = 0
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        for buffer in buffers:
            for begin in range(0, len(buffer), CHUNK):
                chunk = buffer[begin : begin + CHUNK]
                _write_all(file, chunk)
                while chunk:
                    part = chunk[: BLOCK - filled]
                    crc, filled, chunk = zlib.crc32(part, crc), filled + len(part), chunk[len(part) :]
                    if filled == BLOCK:
                        blocks.append(crc)
                        crc = filled = 0
                if sync:
                    written = min(CHUNK, len(buffer) - begin)
                    _begin_writeback(file, at, written)
                    at += written
        if filled:
            blocks.append(crc)
        if sync:
            os.fsync(file)
    finally:
        os.close(file)
    return blocks


def _write_all(file: int, chunk: memoryview) -> None:
    while chunk:
        chunk = chunk[os.write(file, chunk) :]


_libc = ctypes.CDLL(None, use_errno=True)
_SYNC_FILE_RANGE_WRITE = 2


def _begin_writeback(file: int, at: int, length: int) -> None:
    """Let the disk begin with these bytes while the next ones are copied; fsync would else find all of them waiting."""
    if hasattr(_libc, "sync_file_range"):
        # A hint: where the file system does not know it, fsync does all the work.
        _libc.sync_file_range(file, ctypes.c_int64(at), ctypes.c_int64(length), _SYNC_FILE_RANGE_WRITE)


class Reader:
    """Reads a file whose size and checksums are known; without checksums, bytes come as they are."""

    def __init__(self, path: Path, size: int, blocks: Sequence[int] | None) -> None:
        self.path, self.size, self.blocks = path, size, blocks
        self._edge = (-1, b"")
        try:
            self._file = open_plain(path)
        except OSError as error:
            raise Damaged(f"{path} cannot be read: {error.strerror}") from None
        found = os.fstat(self._file.fileno()).st_size
        # The memory of a node keeps a file's room for the next, maybe longer, state.
        if found != size if blocks is not None else found < size:
            self.close()
            raise Damaged(f"{path} has {found:,} bytes where {size:,} were written")

    def close(self) -> None:
        self._file.close()

    def read(self, offset: int, length: int) -> bytearray:
        """Bytes of the file, each of a block that was verified."""
        found = bytearray(length)
        self.read_into(offset, memoryview(found))
        return found

    def read_into(self, offset: int, into: memoryview) -> None:
        """The same, into memory that is there already."""
        if offset < 0 or offset + len(into) > self.size:
            raise Damaged(f"{self.path} has no bytes {offset:,} to {offset + len(into):,}: it ends at {self.size:,}")
        if self.blocks is None:
            self._fill(offset, into)
            return
        at = 0
        while at < len(into):
            block, within = divmod(offset + at, BLOCK)
            length = min(BLOCK, self.size - block * BLOCK)
            if within == 0 and len(into) - at >= length:
                part = into[at : at + length]
                self._fill(offset + at, part)
                self._verify(block, part)
                at += length
            else:
                take = min(length - within, len(into) - at)
                into[at : at + take] = self._edge_block(block, length)[within : within + take]
                at += take

    def _edge_block(self, block: int, length: int) -> bytes | bytearray:
        """A block of which only a part is wanted: its neighbour in the file is often wanted next."""
        if self._edge[0] != block:
            found = bytearray(length)
            self._fill(block * BLOCK, memoryview(found))
            self._verify(block, memoryview(found))
            self._edge = (block, found)  # type: ignore[assignment]
        return self._edge[1]

    def _fill(self, offset: int, into: memoryview) -> None:
        while into:
            try:
                count = os.preadv(self._file.fileno(), [into[:CHUNK]], offset)
            except OSError as error:
                raise Damaged(f"{self.path} cannot be read at byte {offset:,}: {error.strerror}") from None
            if count == 0:
                raise Damaged(f"{self.path} ends at byte {offset:,} where {self.size:,} were written")
            offset, into = offset + count, into[count:]

    def _verify(self, block: int, found: memoryview) -> None:
        assert self.blocks is not None
        if zlib.crc32(found) != self.blocks[block]:
            last = block * BLOCK + len(found)
            raise Damaged(f"{self.path} has a wrong checksum in bytes {block * BLOCK:,} to {last:,}")

    def problems(self, progress: Callable[[int], None]) -> list[str]:
        """Every block that is not what was written; `progress` hears of each, by its bytes."""
        found, buffer = [], memoryview(bytearray(BLOCK))
        for offset in range(0, self.size, BLOCK):
            try:
                self.read_into(offset, buffer[: min(BLOCK, self.size - offset)])
            except Damaged as damage:
                found.append(str(damage))
            progress(min(BLOCK, self.size - offset))
        return found

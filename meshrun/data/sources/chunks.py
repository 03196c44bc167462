"""Where the data of an HDF5 dataset lie in its file, and rows of datasets that gzip has packed, both with checks.

    starts = places(h5["images"])               # where each chunk begins; ValueError where that cannot be right
    packing = Packing.of(h5["images"])          # once: to ask takes as long as to unpack a small chunk
    read(h5["images"], packing, 128, 256, into) # into: (128 or more, …) of the dataset's own type

The HDF5 library does not check: where the index of a damaged file names too few bytes, or a chunk unpacks to less than
a chunk, the library returns memory that nobody wrote, other numbers each time. gzip, with or without shuffling, is
therefore unpacked here; other filters are left to the library.
"""

from __future__ import annotations

import importlib
import itertools
import math
import zlib
from array import array
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

_GZIP, _SHUFFLE = 1, 2
"""Numbers that the format gives to filters."""


@dataclass(frozen=True)
class Packing:
    """How chunks are packed, by filters that are known here."""

    filters: tuple[tuple[int, tuple[int, ...]], ...]
    """Numbers and parameters of the filters, in the order in which they packed."""
    plain: bool
    """Whether numbers lie in an unpacked chunk as in memory."""

    @staticmethod
    def of(dataset: Any) -> Packing | None:
        """None where nothing is packed, or by other filters."""
        filters = _filters(dataset)
        if not filters or any(number not in (_GZIP, _SHUFFLE) for number, _ in filters):
            return None
        as_in_memory = importlib.import_module("h5py").h5t.py_create(dataset.dtype)
        return Packing(filters, dataset.dtype.kind in "iuf" and bool(dataset.id.get_type() == as_in_memory))


def places(dataset: Any) -> NDArray[np.int64] | None:
    """Where in the file each chunk begins, in the order of the chunks; None without chunks, or where some are missing.

    ValueError where the places that the file names cannot be right.
    """
    if dataset.is_virtual or dataset.external is not None:
        return None
    if dataset.chunks is None:
        stored = dataset.id.get_storage_size()
        if stored not in (0, dataset.nbytes):
            raise ValueError(f"{dataset.name} has {stored:,} bytes instead of {dataset.nbytes:,}")
        return None
    file_size = dataset.file.id.get_filesize()
    size = dataset.dtype.itemsize * math.prod(dataset.chunks)
    packed = bool(_filters(dataset))
    numbers, offsets = array("q"), array("q")
    grid = [-(-length // chunk) for length, chunk in zip(dataset.shape, dataset.chunks, strict=True)]

    def look(chunk: Any) -> Any:
        number = 0
        for at, length, step, many in zip(chunk.chunk_offset, dataset.shape, dataset.chunks, grid, strict=True):
            if at >= length or at % step:
                return chunk
            number = number * many + at // step
        ends = 0 if chunk.byte_offset is None else chunk.byte_offset + chunk.size
        if not chunk.size < ends <= file_size or not (packed or chunk.size == size):
            return chunk
        numbers.append(number)
        offsets.append(chunk.byte_offset)
        return None

    if (wrong := dataset.id.chunk_iter(look)) is not None:
        raise ValueError(f"{dataset.name} has a chunk of {wrong.size:,} bytes at {wrong.chunk_offset}")
    if len(np.unique(numbers)) < len(numbers):
        raise ValueError(f"{dataset.name} has a chunk twice")
    return np.asarray(offsets)[np.argsort(numbers)] if len(numbers) == math.prod(grid) else None


def read(dataset: Any, packing: Packing | None, start: int, stop: int, into: NDArray[Any]) -> None:
    """Read these rows into the first rows of `into`; OSError where a chunk cannot be unpacked."""
    if packing is not None:
        corners = list(_corners(dataset, start, stop))
        for corner in corners:
            chunk = _unpacked(dataset, packing, corner)
        if len(corners) == 1 and chunk is not None and packing.plain:
            rows = np.frombuffer(chunk, dataset.dtype).reshape(dataset.chunks)
            # A chunk may be larger than the dataset, which has grown into it or is to grow.
            into[: stop - start] = rows[start % len(rows) :, *map(slice, dataset.shape[1:])][: stop - start]
            return
    dataset.read_direct(into, np.s_[start:stop], np.s_[: stop - start])


def _filters(dataset: Any) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Numbers and parameters of a dataset's filters, in the order in which they packed it."""
    if dataset.chunks is None or dataset.is_virtual:
        return ()
    created = dataset.id.get_create_plist()
    listed = (created.get_filter(number) for number in range(created.get_nfilters()))
    return tuple((number, parameters) for number, _, parameters, _ in listed)


def _corners(dataset: Any, start: int, stop: int) -> Any:
    """The first indices of all chunks that hold some of these rows."""
    first = range(start - start % dataset.chunks[0], stop, dataset.chunks[0])
    others = (range(0, size, chunk) for size, chunk in zip(dataset.shape[1:], dataset.chunks[1:], strict=True))
    return itertools.product(first, *others)


def _unpacked(dataset: Any, packing: Packing, corner: tuple[int, ...]) -> bytes | None:
    """The bytes of a chunk whose place was checked; None if it was never written."""
    if dataset.id.get_chunk_info_by_coord(corner).byte_offset is None:
        return None
    size = dataset.dtype.itemsize * math.prod(dataset.chunks)
    skipped, packed = dataset.id.read_direct_chunk(corner)
    for place, (number, parameters) in reversed(list(enumerate(packing.filters))):
        if skipped >> place & 1:
            continue
        packed = _without_gzip(packed, size) if number == _GZIP else _without_shuffle(packed, parameters)
    if len(packed) != size:
        raise OSError(f"a chunk unpacks to {len(packed):,} bytes instead of {size:,}")
    return bytes(packed)


def _without_gzip(packed: bytes, size: int) -> bytes:
    unpacking = zlib.decompressobj()
    try:
        unpacked = unpacking.decompress(packed, size + 1)
    except zlib.error as error:
        raise OSError(f"a chunk cannot be unpacked: {error}") from None
    if not unpacking.eof:
        raise OSError(f"a chunk unpacks to other than {size:,} bytes")
    return unpacked


def _without_shuffle(data: bytes, parameters: tuple[int, ...]) -> bytes:
    """Shuffling has put the first bytes of all numbers before all second bytes; what is left over stays at the end."""
    width = parameters[0] if parameters else 1
    if width < 2 or len(data) < width:
        return data
    whole = len(data) // width * width
    return np.frombuffer(data, np.uint8, whole).reshape(width, -1).T.tobytes() + data[whole:]

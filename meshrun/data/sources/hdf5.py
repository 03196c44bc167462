"""Samples in an HDF5 file: rows of one dataset as inputs, rows of another as targets.

    train = Hdf5("stamps.h5", "train")                          # as `meshrun convert-data` writes them
    data = Hdf5("simulation.h5", inputs="fields", targets="energy")
    photos = Hdf5("photos.h5", "train", size=224)               # image files inside, decoded here

Integers of targets become int64, fractions float32. `chunk` neighbours are best read together, which the order
`window` does; the file is opened once a process, and must stay as it is while it is trained on.
"""

from __future__ import annotations

import contextlib
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from meshrun.data.cache import cached
from meshrun.data.sources import chunks, pictures
from meshrun.data.sources.kept import Kept
from meshrun.data.sources.mapped import fingerprint
from meshrun.data.sources.rows import NEIGHBOURS, H5File, Rows
from meshrun.data.sources.source import Source, bad_sample, empty, inside, is_bomb
from meshrun.errors import UserError

IN_MEMORY = 32 << 20
"""Targets of at most so many bytes, in the file and as torch computes with them, are read when the dataset is made."""
_TIMES = 3
"""How often a chunk is in memory while it is unpacked."""
_DENSEST = 1100
"""Bytes of data that one byte of a file can hold: gzip packs at most 1,032 to 1."""
_BESIDE = 1 << 16
"""Bytes that are added to a file's size for that: rows that were never written are all alike, and in no file."""
_AS_TENSORS = {"f8": "f4", "c16": "c8", "u2": "i4", "u4": "i8", "u8": "i8"}
"""What torch computes with instead of what some files hold."""


class Hdf5(Source):
    """Samples of a group of an HDF5 file; images that are stored encoded (`bytes`, `offsets`) need a `size`."""

    draws = False

    def __init__(
        self,
        path: str | Path,
        group: str = "/",
        *,
        inputs: str = "images",
        targets: str = "labels",
        size: int | None = None,
    ) -> None:
        self.path, self.group, self.inputs, self.targets, self.size = Path(path), group, inputs, targets, size
        for name, value in (("group", group), ("inputs", inputs), ("targets", targets)):
            if not isinstance(value, str):
                raise UserError(f"{name} of Hdf5({str(path)!r}) is {value!r}; it must be a name in the file")
        if size is not None and (not isinstance(size, int) or not 0 < size <= pictures.LARGEST_SIDE):
            raise UserError(
                f"size of Hdf5({str(path)!r}) is {size!r}; it must be a number of pixels above 0 and at most "
                f"{pictures.LARGEST_SIDE:,}"
            )
        self._file = H5File(self.path)
        if (copy := cached(self.path)) != self.path:
            self._file = H5File(copy)
        self._file.try_out(self._look)
        with self._file.sentences(), self._file.opened() as h5:
            found = self._found(h5, group)
            self.classes = _classes(found) or _classes(h5)
            """Names of the classes, if the file has them."""
            self._targets = self._column(found, targets)
            self._offsets: NDArray[np.int64] | None = None
            if inputs not in found and "bytes" in found and "offsets" in found:
                self._open_encoded(found)
            else:
                self._open_arrays(found)
        self.fingerprint = f"hdf5-{fingerprint([self._file.path], f'{group} {inputs} {targets}')}"

    def _look(self, h5: Any) -> None:
        """All that is asked of the file's metadata, be it there or not."""
        for name in (self.group, self.inputs, self.targets, "bytes", "offsets"):
            with contextlib.suppress(Exception):
                repr(h5[self.group].get(name))
        for place in (h5, h5.get(self.group)):
            with contextlib.suppress(Exception):
                _classes(place)

    def _open_arrays(self, found: Any) -> None:
        dataset = self._dataset(found, self.inputs)
        self._rows = Rows(self._file, dataset)
        self.chunk = self._rows.chunk
        self._same_length(len(dataset))
        if self.size is not None and tuple(dataset.shape[-2:]) != (self.size, self.size):
            stored = " x ".join(map(str, dataset.shape[1:]))
            raise UserError(
                f"size is {self.size} but {self._called(self.inputs)} holds arrays of {stored}; "
                f"leave the size out, or convert the images to that size (meshrun convert-data)"
            )

    def _open_encoded(self, found: Any) -> None:
        if self.size is None:
            raise UserError(
                f"{self._called('bytes')} holds encoded images, which need a size to be brought to; "
                f"give one: Hdf5({str(self.path)!r}, {self.group!r}, size=224)"
            )
        self._rows = Rows(self._file, self._dataset(found, "bytes"))
        dataset = self._dataset(found, "offsets")
        self._refuse_bomb(dataset, dataset.nbytes)
        offsets = _whole(dataset).astype(np.int64)
        if len(offsets) < 2 or (offsets[1:] < offsets[:-1]).any() or offsets[0] < 0 or offsets[-1] > self._rows.count:
            raise UserError(
                f"{self._called('offsets')} does not fit {self._called('bytes')}: "
                f"it must rise from 0 to at most {self._rows.count}, one more than there are images"
            )
        self._refuse_bomb(found["bytes"], int(np.diff(offsets).max()))
        self._offsets = offsets
        self._same_length(len(offsets) - 1)
        mean = max(1, int(offsets[-1] - offsets[0]) // (len(offsets) - 1))
        self.chunk = max(1, NEIGHBOURS // mean)
        self._kept = Kept(f"{self._file.watched.key} {self.group}", len(offsets) - 1, self.size, None)

    def __len__(self) -> int:
        return self._rows.count if self._offsets is None else len(self._offsets) - 1

    @property
    def decoded(self) -> bool:
        """Whether all images are in memory by now, and are few: reading them costs next to nothing."""
        return self._offsets is not None and self._kept.all_there

    def batch_of(self, ids: list[int]) -> tuple[Tensor, Tensor]:
        """The inputs and the targets of these numbers."""
        numbers = inside(ids, len(self))
        with self._file.sentences():
            return self._batch_of(numbers)

    def _batch_of(self, numbers: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        if self._offsets is None:
            inputs = self._taken(self._rows, numbers, _native(self._rows.dtype))
        else:
            assert self.size is not None
            self._file.check()
            inputs = empty((len(numbers), 3, self.size, self.size), torch.uint8)
            self._kept.take(numbers, inputs, self._decode)
        if isinstance(self._targets, Rows):
            return inputs, self._taken(self._targets, numbers, _of_targets(self._targets.dtype))
        return inputs, torch.from_numpy(self._targets[numbers])

    def _taken(self, rows: Rows, numbers: NDArray[np.int64], dtype: np.dtype[Any]) -> Tensor:
        result = empty((len(numbers), *rows.shape), torch.from_numpy(np.empty(0, dtype)).dtype)
        into = result.numpy() if dtype == rows.dtype else np.empty((len(numbers), *rows.shape), rows.dtype)
        try:
            rows.take(numbers, into)
        except ValueError as error:
            start, stop, why = error.args
            number = next(each for each in numbers.tolist() if start <= each < stop)
            raise self._bad(number, why) from None
        if into.dtype != dtype:
            self._refuse_beyond_torch(into)
            result.numpy()[...] = into
        return result

    def _decode(self, number: int, into: Tensor) -> None:
        assert self._offsets is not None
        try:
            pictures.decode(self._rows.span(int(self._offsets[number]), int(self._offsets[number + 1])), into)
        except ValueError as error:
            raise self._bad(number, str(error.args[-1])) from None

    def _bad(self, number: int, why: str) -> Exception:
        file = str(self.path)
        names = self._file.library()[self.group].get("names")
        if names is not None and number < len(names):
            name = names[number]
            file += f": {name.decode(errors='replace') if isinstance(name, bytes) else name}"
        return bad_sample(number, self.group if self.group.strip("/") else self.path.name, file, why)

    def _found(self, h5: Any, group: str) -> Any:
        found = h5.get(group)
        if found is None or not hasattr(found, "keys"):
            groups = [name for name, each in h5.items() if hasattr(each, "keys")]
            raise UserError(
                f"HDF5 file {self.path} has no group {group!r}; it has "
                f"{', '.join(groups) if groups else 'none, leave the group out'}"
            )
        return found

    def _dataset(self, found: Any, name: str) -> Any:
        dataset = found.get(name)
        if dataset is None or not hasattr(dataset, "shape"):
            there = [each for each in found if hasattr(found.get(each), "shape")]
            groups = [each for each in found if hasattr(found.get(each), "keys")]
            has = f"it has {', '.join(there)}" if there else "it has no datasets"
            beside = f", and the groups {', '.join(groups)}" if groups else ""
            raise UserError(f"{self._called('')} has no dataset {name!r}; {has}{beside} (inputs=…, targets=…)")
        if dataset.dtype.kind not in "biufc" or not dataset.shape:
            raise UserError(
                f"{self._called(name)} is {_described(dataset)}; it must be an array of numbers with a row a sample"
            )
        if 0 in dataset.shape:
            raise UserError(f"{self._called(name)} is empty (shape {dataset.shape}); it must have a row a sample")
        size = self._size_of_files(dataset)
        if dataset.nbytes > _DENSEST * (size + _BESIDE):
            raise UserError(
                f"{self._called(name)} has {dataset.nbytes:,} bytes of data by its shape {dataset.shape}, which a file "
                f"of {size:,} bytes cannot hold; it is damaged or was not written, write it again"
            )
        row, chunk = dataset.nbytes // len(dataset), dataset.chunks or (1,)
        self._refuse_bomb(dataset, max(chunk[0] * row, math.prod(chunk) * dataset.dtype.itemsize))
        if dataset.is_virtual:  # perhaps of itself, on which the library crashes
            self._file.try_out(lambda h5: [h5[dataset.name][(at,) * dataset.ndim] for at in (0, -1)])
        return dataset

    def _refuse_bomb(self, dataset: Any, unpacked: int) -> None:
        """Refuse a dataset of which so many bytes must be in memory at once that no file of this size is meant so."""
        size = self._size_of_files(dataset)
        if is_bomb(unpacked, _TIMES * unpacked, size):
            raise UserError(
                f"{self.path}:{dataset.name} can only be read {unpacked:,} bytes at a time, by its shape "
                f"{dataset.shape} and its chunks {dataset.chunks}; that is too much memory for a file of {size:,} "
                f"bytes, which is damaged or must be written again in smaller rows and chunks"
            )

    def _size_of_files(self, dataset: Any) -> int:
        elsewhere = dataset.is_virtual or dataset.external is not None
        return self._file.watched.size + (self._elsewhere(dataset) if elsewhere else 0)

    def _elsewhere(self, dataset: Any) -> int:
        """Bytes of the other files that the rows lie in; a sentence where these are no plain files, not there or cut
        off: HDF5 would wait for a pipe for ever, and gives zeros for what is missing."""
        parts = dataset.external or ()
        sources = dataset.virtual_sources() if dataset.is_virtual else []
        folder, found = self._file.path.parent, 0
        for name in dict.fromkeys([*(each[0] for each in parts), *(each.file_name for each in sources)]):
            if name == "." or "%" in name:  # the file itself, or a pattern of names
                continue
            there = [each for each in (Path(name), folder / name, folder / Path(name).name) if each.exists()]
            if not there:
                raise UserError(f"{self._called('')} has rows in {name}, which is not there; copy it too")
            for file in there:
                if not file.is_file():
                    raise UserError(f"{self._called('')} has rows in {file}, which is no plain file")
            found += max(file.stat().st_size for file in there)
        left = dataset.nbytes
        for name, offset, size in parts:
            end, left = offset + min(size, left), left - min(size, left)
            if Path(name).is_file() and Path(name).stat().st_size < end:
                raise UserError(f"{self._called('')} has rows in {name} up to byte {end:,}, which is cut off before it")
        return found

    def _column(self, found: Any, name: str) -> NDArray[Any] | Rows:
        """Targets: in memory where they are few bytes, as mostly, since they are classes."""
        dataset = self._dataset(found, name)
        dtype = _of_targets(dataset.dtype)
        if max(dataset.nbytes, dataset.size * dtype.itemsize) <= IN_MEMORY:
            rows = _whole(dataset)
            self._refuse_beyond_torch(rows)
            return np.ascontiguousarray(rows.astype(dtype))
        self._refuse_bomb(dataset, dataset.size // len(dataset) * dtype.itemsize)
        return Rows(self._file, dataset)

    def _refuse_beyond_torch(self, rows: NDArray[Any]) -> None:
        """Refuse numbers that torch's largest integers cannot hold: they would become negative ones."""
        if rows.dtype.kind == "u" and rows.dtype.itemsize == 8 and int(rows.max()) >= 1 << 63:
            raise UserError(
                f"{self._called('')} holds the number {rows.max():,}; it must be below 2^63, as torch needs"
            )

    def _same_length(self, inputs: int) -> None:
        targets = self._targets.count if isinstance(self._targets, Rows) else len(self._targets)
        if inputs != targets:
            raise UserError(
                f"{self._called('')} has {inputs} inputs but {targets} targets ({self.targets}); "
                f"there must be one for each"
            )

    def _called(self, dataset: str) -> str:
        return f"{self.path}:{os.path.join('/', self.group, dataset)}".rstrip("/")  # noqa: PTH118 - not of the disk


def _whole(dataset: Any) -> NDArray[Any]:
    chunks.places(dataset)  # for its checks
    into: NDArray[Any] = np.empty(dataset.shape, dataset.dtype)
    chunks.read(dataset, chunks.Packing.of(dataset), 0, len(dataset), into)
    return into


def _native(dtype: np.dtype[Any]) -> np.dtype[Any]:
    plain = dtype.newbyteorder("=")
    return np.dtype(_AS_TENSORS.get(plain.str[1:], plain))


def _of_targets(dtype: np.dtype[Any]) -> np.dtype[Any]:
    if dtype.kind in "biu":
        return np.dtype(np.int64)
    return np.dtype(np.float32 if dtype.kind == "f" else np.complex64)


def _described(dataset: Any) -> str:
    if not dataset.shape:
        return "a single value"
    kind = (
        "of several fields" if dataset.dtype.names else "of strings or objects" if dataset.dtype.kind in "OSU" else ""
    )
    return f"an array {kind or f'of type {dataset.dtype}'}"


def _classes(found: Any) -> list[str]:
    names = found.attrs.get("classes")
    if names is None:
        return []
    # Names that are not UTF-8 come as bytes, or as texts with surrogates; they are only shown.
    raw = [each if isinstance(each, bytes) else str(each).encode(errors="surrogateescape") for each in np.ravel(names)]
    return [each.decode(errors="backslashreplace") for each in raw]

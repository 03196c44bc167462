"""Folders of pictures to one HDF5 file, encoded as they are or as arrays of one size.

    made = to_hdf5(Path("stamps"), Path("stamps.h5"), Pictures(form="arrays", size=96), Crew(workers=2), Quiet())

A folder `train`, `val` or `test` becomes a group of that name, with `labels`, `names`, and `images` (N, 3, size, size)
or `bytes` and `offsets`; where the classes' folders are at the top, all is in the root. Every picture is decoded once,
so that what cannot be read is told now and not in the middle of a training.
"""

from __future__ import annotations

import importlib
import itertools
import os
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray

from meshrun.data.convert.inputs import Input, Job, Unit, files_below, opened, path_of, unusable
from meshrun.data.convert.parts import Filled, Parts, facts_of, kept_parts, unwritable, write_part
from meshrun.data.convert.result import Converted, finished, free_to_write
from meshrun.data.convert.work import Bad, Crew, Made, Totals, make_all
from meshrun.data.download import Told
from meshrun.data.sources import pictures
from meshrun.errors import BadSample, UserError

FORMAT = "meshrun-images-1"
SPLITS = ("train", "training", "val", "valid", "validation", "test", "testing")
FORMS = ("encoded", "arrays")
_CHUNK = 1 << 20
"""Bytes of arrays that are read at once."""
_CHUNKS_READY = 32
_SMALLEST_PART, _LARGEST_PART, _PARTS = 1 << 20, 1 << 26, 1024
_MOST_FILES = 2048
_LOOK = 8
"""Pixels of what encoded pictures are decoded to, only to see that they can be."""
_LIBVER = ("v108", "v108")
_GZIP_LEVEL = 4


@dataclass(frozen=True)
class Pictures:
    """How pictures are to be converted."""

    form: str = "encoded"
    size: int | None = None
    """Of arrays: pixels of each side."""
    compress: str | None = None
    """Of arrays: gzip, or absent."""
    skip_bad: bool = False

    def __post_init__(self) -> None:
        if self.form not in FORMS:
            raise UserError(f"images is {self.form!r}; it must be {' or '.join(FORMS)} (--images)")
        if self.form == "arrays" and (self.size is None or self.size < 1):
            given = "" if self.size is None else f", not {self.size}"
            raise UserError(f"images as arrays need a size, such as --size 224{given}")
        if self.form == "encoded" and self.size is not None:
            raise UserError(
                f"size is {self.size}, but encoded images stay as they are; leave it out, or --images arrays"
            )
        if self.size is not None and self.size > pictures.LARGEST_SIDE:
            raise UserError(f"size is {self.size}; it must be at most {pictures.LARGEST_SIDE:,} pixels (--size)")
        if self.compress not in (None, "gzip"):
            raise UserError(f"compress is {self.compress!r}; it must be gzip, or absent (--compress)")
        if self.compress and self.form == "encoded":
            raise UserError("encoded images are compressed as they are; leave --compress out, or --images arrays")


@dataclass(frozen=True)
class Folders:
    """How the pictures lie: in groups, "" being the root, each with folders of classes."""

    groups: tuple[str, ...]
    classes: tuple[str, ...]
    """Of all groups, in order."""
    folders: tuple[tuple[str, str], ...]
    """Group and class of each folder of pictures."""

    def place_of(self, name: str) -> tuple[str, str] | None:
        """Group and class of a file; None for one that lies in no class."""
        words = name.split("/")
        group = words.pop(0) if self.groups != ("",) else ""
        return (group, words[0]) if len(words) > 1 else None


def to_hdf5(source: Path, dest: Path, wanted: Pictures, crew: Crew, told: Told, overwrite: bool = False) -> Converted:
    """Have the HDF5 file; raises a sentence where that cannot be."""
    free_to_write([dest], overwrite)
    h5py = library()
    folders = folders_in(source)
    seen: set[tuple[str, str]] = set()
    options = {"source": str(source.resolve()), **asdict(wanted), "classes": list(folders.classes)}
    with kept_parts(dest, options, _pictures_below(source, folders, seen), told) as parts:
        for group, name in folders.folders:
            if (group, name) not in seen:
                raise UserError(
                    f"class folder {source / group / name} has no pictures; put some there, or remove it "
                    f"(they end in {', '.join(sorted(pictures.SUFFIXES))})"
                )
        told.begin(dest.name, 0, parts.bytes)
        jobs = jobs_of(parts.inputs(), folders, wanted, parts.bytes)
        make = partial(_part, parts.folder, source, folders, wanted)
        crew = Crew(crew.workers, partial(_begin, crew.begin))
        totals = make_all(parts, jobs, make, crew, told)
        told.line(f"joining {totals.parts:,} parts")
        joined = _joined(h5py, parts, totals, folders, wanted, crew.workers, source)
        return finished(parts, dest, {joined: dest}, "images", totals, told)


def _begin(begin: Any) -> None:
    torch.set_num_threads(1)
    if begin is not None:
        begin()


def folders_in(source: Path) -> Folders:
    """Find groups and classes by the names of folders."""
    top = _folders(source)
    groups = tuple(top) if top and set(top) <= set(SPLITS) else ("",)
    found = [(group, name) for group in groups for name in (_folders(source / group) if group else top)]
    for group in groups:
        if not any(each == group for each, _ in found):
            raise UserError(
                f"{source / group} has no folders of classes; it must have one for each, with pictures in it, "
                f"or folders train and val with such folders (SOURCE)"
            )
    return Folders(groups, tuple(sorted({name for _, name in found})), tuple(found))


def _folders(path: Path) -> list[str]:
    try:
        with os.scandir(path) as entries:
            return sorted(each.name for each in entries if each.is_dir() and not each.name.startswith("."))
    except OSError as error:
        raise UserError(f"image folder {path} cannot be read: {error.strerror} (SOURCE)") from None


def _pictures_below(source: Path, folders: Folders, seen: set[tuple[str, str]]) -> Iterator[Input]:
    """All pictures, and which folders have some."""
    for each in files_below(source):
        if each.name.rpartition(".")[2].lower() in pictures.SUFFIXES and (place := folders.place_of(each.name)):
            seen.add(place)
            yield each


def jobs_of(inputs: Iterable[Input], folders: Folders, wanted: Pictures, total: int) -> Iterator[Job]:
    """Pictures in order, each part of one group, and all but the last ones of a size that only the inputs decide."""
    most = max(_SMALLEST_PART, min(total // _PARTS, _LARGEST_PART))
    number, units, weight, current = 0, list[Unit](), 0, ""
    labels = {name: label for label, name in enumerate(folders.classes)}
    for each in inputs:
        group, name = folders.place_of(each.name) or ("", "")
        if units and (weight >= most or len(units) >= _MOST_FILES or group != current):
            yield Job(number, tuple(units))
            number, units, weight = number + 1, [], 0
        current = group
        units.append(Unit(each, 0, each.size, each.size, labels[name]))
        weight += each.size if wanted.size is None else 3 * wanted.size**2
    if units:
        yield Job(number, tuple(units))


def _part(folder: Path, source: Path, folders: Folders, wanted: Pictures, job: Job) -> Made:
    """Make one part: pictures one after the other, and behind them what they are."""
    bad, sizes, labels, names = Bad(), list[int](), list[int](), list[bytes]()
    side = wanted.size or _LOOK
    into = torch.empty(3, side, side, dtype=torch.uint8)
    group, _ = folders.place_of(job.units[0].input.name) or ("", "")

    def fill(file: BinaryIO) -> Filled:
        for unit in job.units:
            try:
                data = _decoded(source, unit, into)
            except BadSample as error:
                if not wanted.skip_bad:
                    raise
                bad.add(error)
                continue
            file.write(into.numpy().data if wanted.size else data)
            sizes.append(len(data))
            labels.append(unit.label)
            names.append(os.fsencode(unit.input.name.removeprefix(f"{group}/" if group else "")))
        arrays: dict[str, NDArray[Any]] = {
            "sizes": np.array(sizes, np.int64),
            "labels": np.array(labels, np.int64),
            "names": np.frombuffer(b"".join(names), np.uint8),
            "name_sizes": np.array(list(map(len, names)), np.int64),
        }
        longest = max(map(len, names), default=1)
        return Filled(
            arrays, {"group": group, "samples": len(labels), "longest": longest, "bad": bad.count, "why": bad.why}
        )

    return write_part(folder, job.number, fill)


def _decoded(source: Path, unit: Unit, into: torch.Tensor) -> bytes:
    path = path_of(source, unit.input)
    with opened(source, unit.input) as file:
        try:
            data = file.read()
        except OSError as error:
            raise unusable(str(path), error.strerror or str(error)) from None
    try:
        pictures.decode(data, into)
    except ValueError as error:
        raise unusable(str(path), str(error)) from None
    return data


def _joined(
    h5py: Any, parts: Parts, totals: Totals, folders: Folders, wanted: Pictures, threads: int, source: Path
) -> Path:
    """The whole HDF5 file, beside its parts."""
    path = parts.folder / "whole"
    path.unlink(missing_ok=True)
    of_group: dict[str, list[int]] = {group: [] for group in folders.groups}
    for number in range(totals.parts):
        of_group[facts_of(parts.folder, number)["group"]].append(number)
    try:
        with h5py.File(path, "w", libver=_LIBVER, locking=False) as file, ThreadPoolExecutor(threads) as pool:
            file.attrs["format"] = FORMAT
            for group, numbers in of_group.items():
                count = sum(facts_of(parts.folder, number)["samples"] for number in numbers)
                if not count:
                    parts.remove()
                    raise UserError(f"{source / group} has no picture that can be read: {totals.why[0]} (SOURCE)")
                into = file.create_group(group) if group else file
                into.attrs["format"] = FORMAT
                into.attrs["classes"] = [each.encode(errors="backslashreplace").decode() for each in folders.classes]
                _what_they_are(h5py, into, parts, numbers, count)
                if wanted.size is None:
                    _encoded(into, parts, numbers, count)
                else:
                    _arrays(into, parts, numbers, count, wanted, pool)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise unwritable(path, error, parts.folder) from error
    return path


def _what_they_are(h5py: Any, group: Any, parts: Parts, numbers: list[int], count: int) -> None:
    longest = max(facts_of(parts.folder, number)["longest"] for number in numbers)
    labels = group.create_dataset("labels", (count,), np.int64, track_times=False)
    names = group.create_dataset("names", (count,), h5py.string_dtype("utf-8", longest), track_times=False)
    at = 0
    for number in numbers:
        part = parts.part(number)
        ends = np.cumsum(part.array("name_sizes"))
        joined, many = part.array("names").tobytes(), len(ends)
        if many:
            labels[at : at + many] = part.array("labels")
            starts = [0, *ends[:-1].tolist()]
            cut = [joined[start:end] for start, end in zip(starts, ends.tolist(), strict=True)]
            names[at : at + many] = np.array(cut, names.dtype)
        at += many


def _encoded(group: Any, parts: Parts, numbers: list[int], count: int) -> None:
    total = sum(facts_of(parts.folder, number)["data"] for number in numbers)
    whole = group.create_dataset("bytes", (total,), np.uint8, track_times=False)
    offsets = group.create_dataset("offsets", (count + 1,), np.int64, track_times=False)
    at, sample = 0, 0
    for number in numbers:
        part = parts.part(number)
        sizes = part.array("sizes")
        if part.size:
            whole[at : at + part.size] = part.data(np.uint8)
            offsets[sample + 1 : sample + 1 + len(sizes)] = at + np.cumsum(sizes)
        at += part.size
        sample += len(sizes)


def _arrays(
    group: Any, parts: Parts, numbers: list[int], count: int, wanted: Pictures, pool: ThreadPoolExecutor
) -> None:
    """Chunk by chunk, as the file has them: compressing is then up to us, and to all cores."""
    assert wanted.size is not None
    shape = (3, wanted.size, wanted.size)
    rows = min(count, max(1, _CHUNK // (3 * wanted.size**2)))
    images = group.create_dataset(
        "images",
        (count, *shape),
        np.uint8,
        chunks=(rows, *shape),
        compression=wanted.compress,
        compression_opts=_GZIP_LEVEL if wanted.compress else None,
        track_times=False,
    )
    blocks = (parts.part(number).data(np.uint8) for number in numbers)
    chunks, row = _chunks(blocks, rows * 3 * wanted.size**2), 0
    while ready := list(itertools.islice(chunks, _CHUNKS_READY)):
        packed = pool.map(lambda chunk: zlib.compress(chunk, _GZIP_LEVEL), ready) if wanted.compress else ready
        for chunk in packed:
            images.id.write_direct_chunk((row, 0, 0, 0), chunk)
            row += rows


def _chunks(blocks: Iterable[NDArray[np.uint8]], size: int) -> Iterator[bytes]:
    """The same bytes in pieces of one size; the last is filled up with zeros."""
    rest = b""
    for block in blocks:
        whole = rest + block.tobytes()
        end = len(whole) // size * size
        yield from (whole[at : at + size] for at in range(0, end, size))
        rest = whole[end:]
    if rest:
        yield rest.ljust(size, b"\0")


def library() -> Any:
    """`h5py`, which is optional."""
    try:
        return importlib.import_module("h5py")
    except ImportError:
        raise UserError("HDF5 is written by h5py, which is not installed; pip install 'meshrun[images]'") from None

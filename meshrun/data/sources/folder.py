"""Images in folders, a class a folder: FOLDER/CLASS/*.jpg.

    train = ImageFolder("stamps/train", size=96)
    train.classes                       # ["animal", "plant"], the folders' names in order
    train[17]                           # (uint8 (3, 96, 96), the number of its class)
    train.files[17]                     # "animal/cat.jpg"

Samples are numbered by class and name, so that the same folder is the same dataset everywhere. Names lie in one piece
of memory: a million of them are listed in seconds and cost readers nothing. Decoded images of a small set are kept in
memory that all readers share, so that each is decoded once.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor

from meshrun.data.cache import fence, note, shared
from meshrun.data.sources import pictures
from meshrun.data.sources.kept import Kept
from meshrun.data.sources.source import Source, bad_sample, changed, empty, inside, unreadable
from meshrun.errors import RunFailed, UserError, is_of_machine
from meshrun.files import open_plain

_LOOKED_AT = 64
"""Files whose sizes tell other pictures of the same names."""
_SUFFIXES = frozenset(os.fsencode(each) for each in pictures.SUFFIXES)


class ImageFolder(Source):
    """The images below a folder: (uint8 (3, size, size), class); shorter side resized to `size`, the middle cut out.

    `keep` says whether decoded images are kept in memory; None: when the whole set takes at most 1 GiB and a tenth of
    the free memory. `classes` are those of another folder, where this one has not all of them: the training's, for
    validation.
    """

    draws = False

    def __init__(
        self, folder: str | Path, size: int = 224, *, keep: bool | None = None, classes: Sequence[str] | None = None
    ) -> None:
        if not isinstance(size, int) or not 0 < size <= pictures.LARGEST_SIDE:
            raise UserError(
                f"size of ImageFolder({str(folder)!r}) is {size!r}; it must be a number of pixels above 0 and at most "
                f"{pictures.LARGEST_SIDE:,}"
            )
        self.folder, self.size = Path(folder), size
        found = _classes(self.folder)
        if classes is not None:
            found = _numbered_like(classes, found, self.folder)
        self.classes = [os.fsdecode(name) for name, _, _ in found]
        self.ignored = sum(ignored for _, _, ignored in found)
        """Files in the class folders that are no images by their names."""
        names = [os.path.join(name, file) for name, files, _ in found for file in files]  # noqa: PTH118 - of bytes
        self._starts = np.cumsum([0, *(len(files) for _, files, _ in found)])
        self.files = Names(names)
        self._root = os.path.join(os.fsencode(self.folder), b"")  # noqa: PTH118
        self.fingerprint = f"images-{self.files.digest}-{self._sizes()}"
        self._kept = Kept(f"{self.folder.resolve()} {self.fingerprint}", len(names), size, keep)
        self._map()
        if len(found) == 1:
            note(f"{self.folder} holds one class only ({self.classes[0]}): there is nothing to tell apart")

    def _sizes(self) -> str:
        """A word for the sizes of some files: names alone may be those of other pictures."""
        some = range(0, len(self.files), -(-len(self.files) // _LOOKED_AT))
        return hashlib.sha256(repr((self.classes, [self._size(number) for number in some])).encode()).hexdigest()[:8]

    def _size(self, number: int) -> int:
        try:
            return os.stat(self._root + self.files.raw(number)).st_size  # noqa: PTH116 - of bytes
        except OSError:
            return -1  # told when it is read

    def _map(self) -> None:
        # Of each file, the size (from 1) and the time that it had when it was first read.
        key = f"states {self.folder.resolve()} {self.fingerprint}"
        self._memory = shared(key, len(self) * 16)
        self._states = self._memory.bytes.view(np.int64).reshape(len(self), 2)

    def __len__(self) -> int:
        return len(self.files)

    @property
    def decoded(self) -> bool:
        """Whether all images are in memory by now, and are few: reading them costs next to nothing."""
        return self._kept.all_there

    def batch_of(self, ids: list[int]) -> tuple[Tensor, Tensor]:
        """The images of these numbers, (N, 3, size, size), and their classes."""
        numbers = inside(ids, len(self))
        images = empty((len(ids), 3, self.size, self.size), torch.uint8)
        if self._kept.on and len(numbers):
            self._look(int(numbers[0]))
        self._kept.take(numbers, images, self._decode)
        return images, torch.from_numpy(np.searchsorted(self._starts, numbers, side="right") - 1)

    def _decode(self, number: int, into: Tensor) -> None:
        data = self._read(number)
        try:
            pictures.decode(data, into)
        except ValueError as error:
            raise bad_sample(number, str(self.folder), self._path(number), str(error)) from None

    def _read(self, number: int) -> bytes:
        """The bytes of a file, which must be what it was when it was first read."""
        name = self._root + self.files.raw(number)
        try:
            file = open_plain(name)
        except OSError as error:
            if not is_of_machine(error) and (self._states[number, 0] or not os.path.lexists(name)):
                raise RunFailed(changed(self._path(number), error.strerror or str(error))) from None
            raise unreadable(number, str(self.folder), self._path(number), error) from None
        try:
            found = os.fstat(file.fileno())
            data = os.read(file.fileno(), found.st_size + 1)
            while len(data) < found.st_size and (more := os.read(file.fileno(), found.st_size - len(data) + 1)):
                data += more
        except OSError as error:
            raise unreadable(number, str(self.folder), self._path(number), error) from None
        finally:
            file.close()
        self._compare(number, found, len(data))
        return data

    def _look(self, number: int) -> None:
        """What is decoded is not read again: of each batch, the first file is looked at."""
        if not self._states[number, 0]:
            return
        try:
            found = os.stat(self._root + self.files.raw(number))  # noqa: PTH116 - of bytes
        except OSError as error:
            if is_of_machine(error):
                raise unreadable(number, str(self.folder), self._path(number), error) from None
            raise RunFailed(changed(self._path(number), error.strerror or str(error))) from None
        self._compare(number, found, found.st_size)

    def _compare(self, number: int, found: os.stat_result, read: int) -> None:
        size, written = self._states[number].tolist()
        if not size:
            self._states[number, 1] = found.st_mtime_ns
            fence()
            self._states[number, 0] = found.st_size + 1
            size, written = found.st_size + 1, found.st_mtime_ns
        if (size, written) != (found.st_size + 1, found.st_mtime_ns) or read != found.st_size:
            what = f"it had {size - 1} bytes and has {read}" if read != size - 1 else "it was written anew"
            raise RunFailed(changed(self._path(number), what))

    def _path(self, number: int) -> str:
        return os.fsdecode(self._root + self.files.raw(number))

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_memory", "_states")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._map()


class Names(Sequence[str]):
    """Names in one piece of memory, where a fork does not copy them and a pickle is one string."""

    def __init__(self, names: list[bytes]) -> None:
        self._all = b"".join(names)
        self._ends = np.cumsum(np.fromiter(map(len, names), np.int64, len(names)))
        self.digest = hashlib.sha256(b"%d\0" % len(names) + self._ends.tobytes() + self._all).hexdigest()[:16]

    def __len__(self) -> int:
        return len(self._ends)

    def raw(self, number: int) -> bytes:
        """One name, as the file system has it."""
        return self._all[int(self._ends[number - 1]) if number else 0 : int(self._ends[number])]

    @overload
    def __getitem__(self, number: int) -> str: ...

    @overload
    def __getitem__(self, number: slice) -> list[str]: ...

    def __getitem__(self, number: int | slice) -> str | list[str]:
        if isinstance(number, slice):
            return [self[each] for each in range(*number.indices(len(self)))]
        return os.fsdecode(self.raw(range(len(self))[number]))


def _classes(folder: Path) -> list[tuple[bytes, list[bytes], int]]:
    """Each class folder's name, the images in it, and how many other files there are."""
    wanted = f"it must hold a folder for each class, with images in them ({', '.join(sorted(pictures.SUFFIXES))})"
    try:
        entries = sorted(os.scandir(os.fsencode(folder)), key=lambda each: each.name)
    except OSError as error:
        raise UserError(f"image folder {folder} cannot be read: {error.strerror}; {wanted}") from None
    found = []
    for entry in entries:
        if entry.name.startswith(b".") or not entry.is_dir():
            continue
        files, others = _images(entry.path, {os.path.realpath(entry.path)})
        where = os.fsdecode(entry.path)
        if not files and not others:
            raise UserError(f"class folder {where} is empty; put images into it, or remove it")
        if not files:
            raise UserError(
                f"class folder {where} has no image among its {len(others)} files, "
                f"such as {os.fsdecode(min(others))}; images end in {', '.join(sorted(pictures.SUFFIXES))}"
            )
        found.append((entry.name, sorted(files), len(others)))
    if not found:
        images = sum(_is_image(each.name) for each in entries)
        has = f"{images} images but no class folder" if images else "no class folder"
        raise UserError(f"image folder {folder} has {has}; {wanted}")
    return found


def _numbered_like(
    classes: Sequence[str], found: list[tuple[bytes, list[bytes], int]], folder: Path
) -> list[tuple[bytes, list[bytes], int]]:
    """The classes in that order; without images, those that are not here."""
    here = {os.fsdecode(each[0]): each for each in found}
    unknown = sorted(here.keys() - set(classes))
    if unknown:
        raise UserError(
            f"image folder {folder} has the class {unknown[0]!r}, which is none of {', '.join(classes)}; "
            f"remove it, or name it too (classes=…)"
        )
    return [here.get(name, (os.fsencode(name), [], 0)) for name in classes]


def _images(top: bytes, seen: set[bytes]) -> tuple[list[bytes], list[bytes]]:
    """Names below a folder, relative to it: of images, and of what is none. Asks the file system about no file."""
    images: list[bytes] = []
    others: list[bytes] = []
    for prefix, entry in _walk(top, b"", seen):
        (images if _is_image(entry.name) else others).append(prefix + entry.name)
    return images, others


def _walk(folder: bytes, prefix: bytes, seen: set[bytes]) -> Iterator[tuple[bytes, os.DirEntry[bytes]]]:
    try:
        listed = os.scandir(folder)
    except OSError as error:
        raise UserError(f"class folder {os.fsdecode(folder)} cannot be read: {error.strerror}") from None
    with listed:
        for entry in listed:
            if entry.name.startswith(b"."):
                continue
            if not entry.is_dir(follow_symlinks=not _is_image(entry.name)):
                yield prefix, entry
                continue
            real = os.path.realpath(entry.path) if entry.is_symlink() else entry.path
            if real not in seen:  # a link to a folder that it is in itself would have no end
                yield from _walk(entry.path, prefix + entry.name + b"/", seen | {real})


def _is_image(name: bytes) -> bool:
    return name.rpartition(b".")[2].lower() in _SUFFIXES

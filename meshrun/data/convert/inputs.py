"""What is to be converted: the files of a folder in one order, whatever the file system gives them in.

    for each in files_below(Path("news")):
        each.name, each.size, each.changed         # "2021/07.txt", …

Names are relative to the folder. Hidden files are left out; a folder that is linked to is gone into, once.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from meshrun.errors import BadSample, RunFailed, UserError, is_of_machine, unreadable_here
from meshrun.files import open_plain


@dataclass(frozen=True)
class Input:
    """A file, as it was when it was listed."""

    name: str
    size: int
    changed: int
    """When it was last written, in nanoseconds."""


@dataclass(frozen=True)
class Unit:
    """What one process reads in one go: a file from byte, or from row group, `begin` up to `end`."""

    input: Input
    begin: int
    end: int
    bytes: int
    """About how many are read for it."""
    label: int = 0
    """The class of a picture."""


@dataclass(frozen=True)
class Job:
    """The units of one part of the result."""

    number: int
    units: tuple[Unit, ...]

    @property
    def bytes(self) -> int:
        return sum(each.bytes for each in self.units)


def files_below(root: Path) -> Iterator[Input]:
    """Every file below a folder, or the one file that `root` is."""
    if root.is_dir():
        yield from _below(root, "", (os.path.realpath(root),))
    else:
        try:
            yield _input(root, root.name)
        except OSError as error:
            raise UserError(f"{root} cannot be read: {error.strerror}; give a file or folder (SOURCE)") from None


def _below(folder: Path, prefix: str, inside: tuple[str, ...]) -> Iterator[Input]:
    try:
        with os.scandir(folder) as entries:
            found = [each for each in entries if not each.name.startswith(".")]
        # As the whole names would be sorted.
        for each in sorted(found, key=lambda each: os.fsencode(f"{each.name}/" if each.is_dir() else each.name)):
            if not each.is_dir():
                yield _input(Path(each.path), prefix + each.name)
            elif (real := os.path.realpath(each.path)) not in inside:
                yield from _below(Path(each.path), f"{prefix}{each.name}/", (*inside, real))
    except OSError as error:
        raise UserError(f"{error.filename or folder} cannot be read: {error.strerror} (SOURCE)") from None


def _input(path: Path, name: str) -> Input:
    found = path.stat()
    return Input(name, found.st_size, found.st_mtime_ns)


def path_of(root: Path, each: Input) -> Path:
    """Where a file lies, be `root` the folder that it was found in or the file itself."""
    return root / each.name if root.is_dir() else root


def opened(root: Path, each: Input) -> BinaryIO:
    """The file, if it is still the one that was listed."""
    path = path_of(root, each)
    try:
        file = io.BufferedReader(open_plain(path))
        now = os.fstat(file.fileno())
    except FileNotFoundError:
        raise changed(path) from None
    except OSError as error:
        if is_of_machine(error):
            raise unreadable_here(path, error.strerror or str(error)) from None
        raise unusable(str(path), error.strerror or str(error)) from None
    if (now.st_size, now.st_mtime_ns) != (each.size, each.changed):
        file.close()
        raise changed(path)
    return file


def changed(path: Path) -> RunFailed:
    """A file is not the one that was listed."""
    return RunFailed(f"{path} has changed while it was being converted; run the same command again when it is at rest")


def unusable(where: str, why: str) -> BadSample:
    """A file, line or row that cannot be converted, as a sentence."""
    return BadSample(
        f"{where} cannot be used: {why}; repair or remove it, or go on without such samples (--skip-bad-samples)"
    )

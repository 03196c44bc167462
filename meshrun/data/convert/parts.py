"""Parts of a result that are kept until it is whole, so that a conversion that was killed goes on where it was.

    with kept_parts(Path("news.tokens"), {"vocabulary": 4096}, files_below(source), told) as parts:
        parts.inputs()                            # in order
        write_part(parts.folder, 7, fill)         # in any process; whole or not at all
        part = parts.part(7)                      # checked by its sha256
        part.array("lengths")

They lie in `.news.tokens.parts/` beside the result, with a list of all inputs and options: parts of other inputs, or
made with other options, are thrown away.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from meshrun import strict_json
from meshrun.config import made_private, write_json
from meshrun.data.convert.inputs import Input
from meshrun.data.download import Told
from meshrun.errors import RunFailed, UserError

FORMAT = 2
_SEAL = "seal"
_LIST, _MANIFEST, _LOCK = "inputs.jsonl", "manifest.json", "lock"
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True)
class Filled:
    """What a part holds beside the bytes that were written to it: more arrays, and facts for whoever joins them."""

    arrays: Mapping[str, NDArray[Any]]
    facts: Mapping[str, Any]


@dataclass(frozen=True)
class Part:
    """A part that is whole."""

    path: Path
    facts: dict[str, Any]

    @property
    def size(self) -> int:
        """Bytes of its data, without the arrays behind it."""
        return int(self.facts["data"])

    def data(self, dtype: Any) -> NDArray[Any]:
        return self._mapped(dtype, 0, self.size)

    def array(self, name: str) -> NDArray[Any]:
        dtype, at, size = self.facts["arrays"][name]
        return self._mapped(np.dtype(dtype), at, size)

    def _mapped(self, dtype: Any, at: int, size: int) -> NDArray[Any]:
        kind = np.dtype(dtype)
        return np.memmap(self.path, kind, "r", at, (size // kind.itemsize,)) if size else np.zeros(0, kind)


def write_part(folder: Path, number: int, fill: Callable[[BinaryIO], Filled]) -> dict[str, Any]:
    """Have `fill` write a part, and keep it with its checksum; returns its facts."""
    path = _path(folder, number)
    new = path.with_suffix(".new")
    try:
        with new.open("wb") as file:
            filled = fill(file)
            data, arrays = file.tell(), {}
            for name, array in filled.arrays.items():
                file.write(b"\0" * (-file.tell() % 8))
                arrays[name] = (array.dtype.str, file.tell(), array.nbytes)
                file.write(np.ascontiguousarray(array).data)
        facts = {**filled.facts, "data": data, "arrays": arrays, "sha256": _sha256(new)}
        new.replace(path)
        write_json(path.with_suffix(".json"), {**facts, _SEAL: _seal(facts)})
    except OSError as error:
        with contextlib.suppress(OSError):
            new.unlink(missing_ok=True)
        raise unwritable(path, error, folder) from error
    return facts


def whole_part(folder: Path, number: int) -> Part | None:
    """A part that was kept and is as it was then."""
    path = _path(folder, number)
    try:
        facts = facts_of(folder, number)
        return Part(path, facts) if _sha256(path) == facts["sha256"] else None
    except (OSError, ValueError):
        return None


def facts_of(folder: Path, number: int) -> dict[str, Any]:
    """What is known of a part, without reading it; a ValueError where that is not what was written of it."""
    facts = strict_json.read(_path(folder, number).with_suffix(".json"))
    if facts.pop(_SEAL, None) != _seal(facts):
        raise ValueError("it has another checksum than when it was written")
    return facts


def _seal(facts: Mapping[str, Any]) -> str:
    """The checksum of what is known of a part: where its arrays lie is believed later."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def unwritable(path: Path, error: OSError, parts: Path) -> RunFailed:
    """Why a file could not be written, and what to do, as a sentence."""
    if error.errno in _NO_ROOM or "No space left" in str(error):
        kept = f"what is done so far is kept in {parts}: " if any(parts.glob("*.part")) else ""
        return RunFailed(
            f"there is no room left for {path} ({os.strerror(error.errno or errno.ENOSPC)}); "
            f"{kept}free some space and run the same command again"
        )
    return RunFailed(f"{path} cannot be written: {error.strerror or error}")


@dataclass
class Parts:
    """The folder of parts of one result."""

    folder: Path
    files: int = 0
    bytes: int = 0
    """Of the inputs."""

    def inputs(self) -> Iterator[Input]:
        """All inputs in order, from the list on disk: there may be many millions."""
        with (self.folder / _LIST).open() as file:
            for line in file:
                yield Input(*strict_json.loads(line))

    def part(self, number: int) -> Part:
        """A part to be joined with others."""
        part = whole_part(self.folder, number)
        if part is None:
            path = _path(self.folder, number)
            path.with_suffix(".json").unlink(missing_ok=True)
            raise RunFailed(f"{path} is not as it was written; run the same command again, which makes it anew")
        return part

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def has_parts(dest: Path) -> bool:
    """Whether an earlier start has left some."""
    return any(_folder(dest).glob("*.part"))


def _folder(dest: Path) -> Path:
    return dest.with_name(f".{dest.name}.parts")


@contextlib.contextmanager
def kept_parts(dest: Path, options: Mapping[str, Any], inputs: Iterable[Input], told: Told) -> Iterator[Parts]:
    """The parts of a result, which nobody else makes at the same time; without any, nothing stays behind."""
    folder = _folder(dest)
    try:
        if not made_private(folder):
            raise UserError(
                f"{dest} cannot be made: {folder}, where its parts are kept, must be a folder that this user alone can "
                f"write to; remove it, or give another DEST"
            )
        held = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        raise UserError(f"{dest} cannot be made: {folder}: {error.strerror} (DEST)") from None
    try:
        _take(held, dest)
        try:
            yield _matched(folder, options, inputs, told)
        finally:
            if not any(folder.glob("*.part")):
                shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(held)


def _take(held: int, dest: Path) -> None:
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"{dest} is being made by another process; wait for it, or give another DEST") from None
    except OSError:
        return  # a file system without locks


def _matched(folder: Path, options: Mapping[str, Any], inputs: Iterable[Input], told: Told) -> Parts:
    """List the inputs, and keep the parts that are there if they are of the same inputs and options."""
    parts, new = Parts(folder), folder / f"{_LIST}.new"
    try:
        with new.open("w") as file:
            for each in inputs:
                file.write(json.dumps(astuple(each)) + "\n")
                parts.files += 1
                parts.bytes += each.size
        count = sum(1 for _ in folder.glob("*.part"))
        why = _difference(folder, options, new) if count else None
        if why or not count:
            for old in folder.iterdir():
                if old.name not in (_LOCK, new.name):
                    old.unlink()
        if count:
            told.line(
                f"starting anew, without the {count:,} parts of an earlier start: {why}"
                if why
                else f"going on from {count:,} parts of an earlier start"
            )
        new.replace(folder / _LIST)
        write_json(folder / _MANIFEST, {"format": FORMAT, "options": dict(options)})
    except OSError as error:
        raise unwritable(folder, error, folder) from error
    return parts


def _difference(folder: Path, options: Mapping[str, Any], new: Path) -> str | None:
    """Why parts of before cannot be used now; None when they can."""
    try:
        manifest = strict_json.loads((folder / _MANIFEST).read_text())
        before = manifest["options"]
        if manifest["format"] != FORMAT:
            return "they are of another version of meshrun"
        for name in sorted(before.keys() | options.keys()):
            if before.get(name) != options.get(name):
                return f"{name} is {_shown(options.get(name))} and was {_shown(before.get(name))}"
        with (folder / _LIST).open() as old, new.open() as now:
            for then, here in itertools.zip_longest(old, now):
                if then != here:
                    return f"{strict_json.loads(here or then)[0]} has changed, or is new or gone"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return "what was done cannot be told"
    return None


def _shown(value: Any) -> str:
    return "absent" if value is None else str(value)


def _path(folder: Path, number: int) -> Path:
    return folder / f"{number:08d}.part"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

"""What all sources share: files that must not change under the run, opening once a process, sentences.

watched = Watched(path)             # remembers the file as it is now
watched.check(opened)               # later: RunFailed if it is another one by now

file = OncePerProcess(partial(open, path, "rb"))
file().read()                       # opened anew in each process that asks: readers are forked

raise bad_sample(17, "train", "train/cat/3.jpg", "it is truncated")
raise unreadable(17, "train", "train/cat/3.jpg", error)    # of the sample, or of the machine
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import get_worker_info

from meshrun.data import cache
from meshrun.data.sending import SMALL
from meshrun.errors import BadSample, RunFailed, UserError, is_of_machine, unreadable_here

T = TypeVar("T")

LOOK_AGAIN = 1.0
"""Seconds between two looks at a file's name: on a parallel file system each is a question to a server."""
AT_ONCE = 72 << 20
"""Bytes of memory that reading a part of any file, however small, may take."""
PER_BYTE = 100
"""Bytes that a larger part may become, for each byte of its file: real data are packed less tightly."""
_MOST_LISTED, _LONGEST = 20, 80
"""Names in a sentence, and characters of each."""


def is_bomb(unpacked: int, taken: int, size: int) -> bool:
    """Whether a part of a file of `size` bytes is a decompression bomb: it becomes far more bytes than real data would,
    and reading it takes more memory than any file may take."""
    return taken > AT_ONCE and unpacked > PER_BYTE * size


def memory_for(size: int) -> int:
    """Most bytes of memory that reading a part of a file of `size` bytes may take."""
    return max(AT_ONCE, PER_BYTE * size)


class Source:
    """A dataset that reads whole batches at once: `batch_of` is all that it must have."""

    def batch_of(self, ids: list[int]) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        inputs, targets = self.batch_of([number])
        return inputs[0], targets[0]

    def __getitems__(self, ids: list[int]) -> list[tuple[Tensor, Tensor]]:
        return list(zip(*self.batch_of(ids), strict=True))


class OncePerProcess(Generic[T]):
    """What every process opens for itself when it first needs it: files do not survive a fork unharmed."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._made: tuple[int, T] | None = None

    def __call__(self) -> T:
        pid = os.getpid()
        if self._made is None or self._made[0] != pid:
            self._made = pid, self._make()
        return self._made[1]

    def __getstate__(self) -> dict[str, Any]:
        return {"_make": self._make, "_made": None}


class Watched:
    """A file as it was when this was made."""

    def __init__(self, path: Path) -> None:
        found = path.stat()
        self.path, self.size = path, found.st_size
        self._state, self._looked = _state(found), 0.0
        self.key = f"{path.resolve()} {self._state}"
        """Names this file in this state: for what is kept of it."""

    def check(self, file: int | None = None) -> None:
        """RunFailed if the opened file, if it is, or what has its name now, is not the one that it was."""
        if file is None or _state(os.fstat(file)) == self._state:
            now = time.monotonic()
            if now - self._looked < LOOK_AGAIN:
                return
            self._looked = now
        self.look()

    def look(self) -> None:
        """The same of what has its name now, at once."""
        try:
            found = self.path.stat()
        except OSError as error:
            raise RunFailed(changed(self.path, error.strerror or str(error))) from None
        if _state(found) != self._state:
            raise RunFailed(changed(self.path, f"it had {self.size} bytes and has {found.st_size}"))


def _state(found: os.stat_result) -> tuple[int, int, int]:
    return found.st_size, found.st_mtime_ns, found.st_ino


def changed(path: Path | str, what: str) -> str:
    original = cache.original(Path(path))
    copy = f" (the copy of {original} on this node)" if original is not None else ""
    return (
        f"{path}{copy} has changed while it is being trained on ({what}); "
        f"give each training data that nobody writes to, and resume from a checkpoint"
    )


def bad_sample(number: int, source: str, file: str, why: str) -> BadSample:
    """One sentence, with the sample's number and its file."""
    return BadSample(
        f"sample {number} of {source} ({file}) cannot be read: {why}; "
        f"repair or remove it, or go on without such samples (--skip-bad-samples)"
    )


def unreadable(number: int, source: str, file: str, error: OSError) -> Exception:
    """What to raise where a sample's file cannot be read."""
    why = error.strerror or str(error)
    return unreadable_here(file, why) if is_of_machine(error) else bad_sample(number, source, file, why)


def refuse_missing(path: Path, columns: Sequence[str], there: Sequence[str]) -> None:
    """A sentence for a column that a table does not have."""
    known = set(there)
    for name in columns:
        if name not in known:
            raise UserError(f"{path} has no column {name!r}; it has {listed(there)}")


def listed(names: Sequence[str]) -> str:
    """Names as part of a sentence, which a file with thousands of them must not make endless."""
    some = ", ".join(repr(name[:_LONGEST]) for name in names[:_MOST_LISTED])
    return some if len(names) <= _MOST_LISTED else f"{some} and {len(names) - _MOST_LISTED:,} others"


def twice(names: Iterable[str]) -> str | None:
    """The first name that comes a second time."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None


def inside(ids: Sequence[int] | NDArray[np.int64], length: int) -> NDArray[np.int64]:
    """The numbers as an array; IndexError if one of them is no sample's."""
    numbers = np.asarray(ids, dtype=np.int64)
    if len(numbers) and (numbers.min() < 0 or numbers.max() >= length):
        wrong = next(each for each in ids if not 0 <= each < length)
        raise IndexError(f"there is no sample {wrong}: they are numbered from 0 to {length - 1}")
    return numbers


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor to read a batch into; in a reader, if it is not sent by value, where the rank will see it uncopied."""
    size = dtype.itemsize * math.prod(shape)
    if size <= SMALL or get_worker_info() is None:
        return torch.empty(shape, dtype=dtype)
    storage = torch.UntypedStorage._new_shared(size)
    return torch.empty(0, dtype=dtype).set_(storage, 0, shape)  # type: ignore[call-overload]

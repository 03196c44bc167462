"""A file whose bytes are read as if they were in memory, and which must stay as it is meanwhile.

    mapped = Mapped(Path("news.jsonl"))      # or its copy on this node, where copies are kept
    mapped.whole[100:200]
    mapped.check()                           # before each batch

Mappings survive a fork: readers share their rank's.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

from meshrun.data.cache import cached
from meshrun.data.sources.source import Watched
from meshrun.errors import UserError
from meshrun.files import open_plain

_LOOKED_AT = 4096
"""Bytes of a place that is looked at to tell one state of the data from another."""
_PLACES = 64
"""So many of them in all."""


class Mapped:
    """A mapped file."""

    def __init__(self, path: Path) -> None:
        self.path = path = cached(path)
        try:
            self._watched = Watched(path)
            self._file = open_plain(path)
            # A mapping of nothing is refused.
            self.whole: mmap.mmap | bytes = (
                mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ) if self._watched.size else b""
            )
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror or error}") from None

    def check(self) -> None:
        """RunFailed if the file has changed: what a shorter one no longer has cannot be read without being killed."""
        self._watched.check(self._file.fileno())


def fingerprint(files: Sequence[Path], what: str) -> str:
    """A word for what lies in these files, and what is read of them, whatever they are called and wherever they are.

    Of names and times it takes nothing, since copies have others; it looks at sizes and at some places of each file.
    """
    summed = hashlib.sha256(what.encode(errors="surrogateescape"))
    for path in files:
        size = path.stat().st_size
        places = max(2, _PLACES // len(files))
        summed.update(str(size).encode())
        with path.open("rb", buffering=0) as file:
            for place in range(places):
                at = max(0, size - _LOOKED_AT) * place // (places - 1)
                summed.update(os.pread(file.fileno(), _LOOKED_AT, at))
    return summed.hexdigest()[:16]

"""A mapped file that must stay as it is while it is trained on.

watched = Watched(Path("news.jsonl"))
whole = watched.mapped()
watched.refuse_changes()                 # before each reading
"""

from __future__ import annotations

import mmap
from pathlib import Path

from meshrun.errors import BadSample, RunFailed, UserError


class Watched:
    """A file as it was when it was first looked at."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._seen = _stamp(path)
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror}") from None

    def mapped(self) -> mmap.mmap | bytes:
        """Its bytes, without reading them."""
        self.refuse_changes()
        try:
            with self.path.open("rb") as file:
                return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if self._seen[0] else b""
        except OSError as error:
            raise UserError(f"{self.path} cannot be read: {error.strerror}") from None

    def refuse_changes(self) -> None:
        """What a shorter file no longer has could not be read without being killed."""
        try:
            now = _stamp(self.path)
        except OSError as error:
            raise RunFailed(f"{self.path} has changed while it is being trained on: {error.strerror}") from None
        if now != self._seen:
            raise RunFailed(
                f"{self.path} has changed while it is being trained on: it had {self._seen[0]:,} bytes, now it has "
                f"{now[0]:,} and was written anew; put the old one back, or start a new run"
            )


def _stamp(path: Path) -> tuple[int, int, int]:
    found = path.stat()
    return found.st_size, found.st_mtime_ns, found.st_ino


def bad_sample(number: int, file: str, why: str) -> BadSample:
    return BadSample(
        f"sample {number} ({file}) cannot be read: {why}; "
        f"repair or remove it, or go on without such samples (--skip-bad-samples)"
    )

"""Files that are made of others once on a node: whoever comes first makes them, the others wait and find them.

    path = once(Path("big.parquet"), "rows of text, label", make)       # make(path) writes it
    if path is None: …                                                  # no room on the node, which the user was told

They lie where copies are kept (`--cache`). Without that they lie in the machine's folder for temporary files, and
whoever is the last to use one removes it. Each is known by the state of the file that it was made of: of one that has
changed it is made anew. What was being made when its maker died is thrown away by the next.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import hashlib
import os
import re
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from meshrun.config import made_private
from meshrun.data import cache
from meshrun.data.sources.source import Watched
from meshrun.files import new_file

_FAILED = b"no room"
"""What stands in a file that could not be made, for those who waited for it."""
_AGAIN = 600.0
"""Seconds after which it is tried again."""
_OLD = 60.0
"""Seconds after which what nobody uses is removed by whoever comes by: its last user was killed."""
_OURS = re.compile(r"-[0-9a-f]{16}(\.part)?$")
"""How names end that were given here."""
_TELL = 10.0
"""Seconds of work after which the user is told what is going on, and again each three times that."""

_in_use: dict[Path, tuple[int, int]] = {}
"""Locks that this process holds for as long as it lives, and which process that is."""


def once(source: Path, what: str, make: Callable[[Path], None]) -> Path | None:
    """The file that was made of this one; None where that does not go."""
    watched = Watched(source)
    state = f"{source.resolve()} {watched.size} {source.stat().st_mtime_ns} {what}"
    name = f"{source.name}-{hashlib.sha256(state.encode(errors='surrogateescape')).hexdigest()[:16]}"
    try:
        folder, passing = _folder()
        made = folder / name
        held = _found_or_made(made, make)
    except OSError as error:
        cache.note(f"{source} is kept in memory, since nothing can be kept on this node: {error} (--cache)")
        return None
    if held is None:
        return None
    watched.look()
    if passing and made not in _in_use:
        if not _in_use:
            atexit.register(_leave)
        _in_use[made] = held, os.getpid()
    else:
        os.close(held)
    return made


def _folder() -> tuple[Path, bool]:
    """Where files are kept, and whether only for as long as somebody uses them."""
    if (kept := cache.folder()) is not None:
        return cache.own_part(kept), False
    folder = Path(tempfile.gettempdir()) / f"meshrun-{os.getuid()}"
    if not made_private(folder):
        raise OSError(f"{folder} is not this user's alone")
    _remove_old(folder)
    return folder, True


def _found_or_made(path: Path, make: Callable[[Path], None]) -> int | None:
    """The opened file, with a lock that says that it is used; None where it could not be made a while ago."""
    while True:
        held = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        keep = False
        try:
            fcntl.flock(held, fcntl.LOCK_SH)  # waits while somebody makes it
            if keep := _is_still(path, held) and _is_made(held):
                return held
            fcntl.flock(held, fcntl.LOCK_EX)
            if not _is_still(path, held):
                continue
            if os.fstat(held).st_size and time.time() - os.fstat(held).st_mtime < _AGAIN:
                return None
            return _make(path, held, make)
        finally:
            if not keep:
                os.close(held)


def _is_made(held: int) -> bool:
    return bool(os.fstat(held).st_size) and os.pread(held, len(_FAILED), 0) != _FAILED


def _is_still(path: Path, held: int) -> bool:
    """Whether the file that was waited for has this name; else it was made, or removed, meanwhile."""
    try:
        return path.stat().st_ino == os.fstat(held).st_ino
    except FileNotFoundError:
        return False


def _make(path: Path, held: int, make: Callable[[Path], None]) -> int:
    """Makes it beside its name, while `held` keeps the others waiting."""
    part = path.with_name(f".{path.name}.part")
    try:
        new_file(part, 0o600).close()  # the folder may be open to others, and the source need not be
        make(part)
        made = os.open(part, os.O_RDWR)
        fcntl.flock(made, fcntl.LOCK_SH)
        part.replace(path)
        return made
    except OSError:
        os.ftruncate(held, 0)
        with contextlib.suppress(OSError):
            os.pwrite(held, _FAILED, 0)
        raise
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    finally:
        part.unlink(missing_ok=True)


def _leave() -> None:
    for path, (held, process) in _in_use.items():
        if process == os.getpid():  # forks have the same lock
            _remove_unused(path, held)


def _remove_old(folder: Path) -> None:
    for path in folder.iterdir():
        with contextlib.suppress(OSError):
            if _OURS.search(path.name) and path not in _in_use and time.time() - path.lstat().st_mtime > _OLD:
                _remove_left(path)


def _remove_left(path: Path) -> None:
    """Remove a file that nobody holds. Of one that is being made its maker holds what lies under the final name."""
    final = path.with_name(path.name[1:].removesuffix(".part")) if path.name.endswith(".part") else path
    if not os.path.lexists(final):
        path.unlink()
        return
    held = os.open(final, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        if final == path:
            _remove_unused(path, held)
        elif _is_free(held):
            path.unlink()
    finally:
        os.close(held)


def _is_free(held: int) -> bool:
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _remove_unused(path: Path, held: int) -> None:
    with contextlib.suppress(OSError):
        if _is_free(held) and _is_still(path, held):
            path.unlink()


class Progress:
    """Tells the user of work that takes long."""

    def __init__(self, path: Path, what: str) -> None:
        self._path, self._what, self._next = path, what, time.monotonic() + _TELL

    def __call__(self, share: float) -> None:
        if time.monotonic() > self._next:
            self._next = time.monotonic() + 3 * _TELL
            cache.note(f"{self._path}: {self._what}, {share:.0%} done")

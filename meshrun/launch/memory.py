"""A run's folder in the node's own memory: what survives a lost rank, for as long as its launcher lives.

    with Memory(run, node) as memory:
        memory.path                      # /dev/shm/meshrun-1000/…/node-4711, for this user alone

A launcher holds a lock on its folder, which the kernel drops with it: a folder that nobody holds was left by one that
was killed, and the next launcher of this user on this machine removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from meshrun.config import RunDirectory, is_private, made_private, reserve_room
from meshrun.errors import RunFailed

LOCK = "launcher"


class Memory:
    """A folder that is there until the end of the `with`."""

    def __init__(self, run: RunDirectory, node: str) -> None:
        self._run, self._node = run, node

    def __enter__(self) -> Memory:
        for _ in range(3):  # another user may have taken the usual name just now, and cannot guess the next one
            self.path = self._run.memory_of(self._node)
            of_user = self.path.parent.parent
            if made_private(of_user):
                break
        else:
            raise RunFailed(f"no folder that this user alone can write to can be made in {of_user.parent}")
        for left in _elsewhere(of_user.parent):
            with contextlib.suppress(OSError), _alone_in(left):
                sweep(left)
        with _alone_in(of_user):  # else one launcher would find the folder of another before that could hold it
            sweep(of_user)
            for folder in (self.path.parent, self.path):
                folder.mkdir(mode=0o700, exist_ok=True)
            self._held = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(self._held, fcntl.LOCK_EX)
        reserve_room(self.path)
        return self

    def __exit__(self, *error: object) -> None:
        _remove(self.path)
        os.close(self._held)


def _elsewhere(here: Path) -> list[Path]:
    """Folders of this user in the other places where launchers put theirs: /dev/shm may have been full, or not."""
    places = {Path("/dev/shm"), Path(tempfile.gettempdir())} - {here}
    return [folder for place in places for folder in place.glob(f"meshrun-{os.getuid()}*") if is_private(folder)]


def sweep(of_user: Path) -> None:
    """Remove the folders of a user on this machine whose launchers are gone."""
    for held in of_user.glob(f"*/*/{LOCK}"):
        if not _is_held(held):
            _remove(held.parent)


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):  # other nodes of the run on this machine
        folder.parent.rmdir()


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    file = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)


def is_locked(path: Path) -> bool:
    """Whether a process holds the lock of a file; an OSError where the file cannot be opened."""
    file = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(file)
    return False


def _is_held(file: Path) -> bool:
    try:
        return is_locked(file)
    except OSError:
        return True  # the file is being removed just now

"""`--cache`: where a run keeps copies of data files on each node, and who takes them away.

    use_node(config, run, site, memory, note)            # by every rank, before it opens its data
    with kept_on_node(config, run, site, memory): …      # by whoever lives as long as the ranks of the node do

Copies are for this run and this user alone and go with the run, but those in a folder that the user has named: there
the next run finds them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from meshrun.config import MEMORY, RunConfig, RunDirectory, is_private, made_private
from meshrun.data import cache
from meshrun.errors import UserError
from meshrun.launch.memory import is_locked
from meshrun.world import disks
from meshrun.world.environment import inherited
from meshrun.world.profile import Site

HELD = ".held"
BEING_MADE = 60.0
"""Seconds in which a folder for copies that nobody holds yet may be about to be held."""
OURS = ("auto", "tmp", "memory")
"""Words of `--cache` for which the folder is found, and made, by us."""


_holding: int | None = None


def copies_of(config: RunConfig, run: RunDirectory, site: Site | None, memory: Path | None) -> Path | None:
    """The folder for copies on this node; `memory` is the run's own in it, where a launcher of ours has made one."""
    if config.cache not in OURS:
        return None if config.cache == "none" else Path(config.cache)
    listed = disks.mounts()
    found = [disks.look(*each, listed) for each in disks.node_folders(inherited(), site).items()]
    chosen = disks.choose(config.cache, found, disks.look("memory", MEMORY, listed))
    # How much room there is changes with the first copy: whoever comes later goes where the first one went.
    mine = _all_places(run, site, memory)
    return next(filter(is_private, mine.values()), None) or mine[chosen or MEMORY]


def _all_places(run: RunDirectory, site: Site | None, memory: Path | None) -> dict[Path, Path]:
    """What the folder for copies of this run is called in each folder that it may be in."""
    name = f"meshrun-{os.getuid()}-{run.memories.name}-{memory.name if memory is not None else 'node'}"
    places = [MEMORY, *disks.node_folders(inherited(), site).values()]
    # In memory a launcher removes all of a run, even that of one before it which was killed.
    return {each: memory / "copies" if each == MEMORY and memory is not None else each / name for each in places}


def use_node(
    config: RunConfig, run: RunDirectory, site: Site | None, memory: Path | None, note: Callable[[str], None]
) -> None:
    """Have data files copied to the node, and what ranks of the node can share shared, as far as it was asked for."""
    global _holding
    copies = copies_of(config, run, site, memory)
    try:
        if copies is not None and config.cache in OURS:
            leave_node()
            _holding = _held(copies)
    except OSError as error:
        note(f"data files are read where they are: cannot make {copies}: {error.strerror} (--cache)")
        copies = None
    except UserError as error:  # its name can be guessed: another user may have taken it
        note(f"data files are read where they are: {error}")
        copies = None
    cache.use(copies, memory / "shared" if memory is not None else None, note)


def leave_node() -> None:
    """After a run: nothing is copied or told any more, in a process that may go on."""
    global _holding
    cache.use(None, None)
    if _holding is not None:
        os.close(_holding)
        _holding = None


def _held(folder: Path) -> int:
    """Make the folder for copies, and hold it: the kernel lets go of it with the last process of the node's ranks."""
    while True:
        make_private(folder)
        file = os.open(folder / HELD, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        with contextlib.suppress(OSError):  # a file system without locks: copies of killed runs are never swept
            fcntl.flock(file, fcntl.LOCK_SH)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat((folder / HELD).stat(), os.fstat(file)):
                return file
        os.close(file)  # a sweep has just removed it


def sweep(folders: Iterable[Path]) -> None:
    """Remove copies of this user in these folders whose runs were killed: nobody holds them any more."""
    for folder in folders:
        for copies in folder.glob(f"meshrun-{os.getuid()}-*-node*"):
            with contextlib.suppress(OSError):
                found = copies.lstat()
                if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not _is_held(copies):
                    shutil.rmtree(copies, ignore_errors=True)


def _is_held(copies: Path) -> bool:
    try:
        return is_locked(copies / HELD)
    except FileNotFoundError:  # the folder is being made just now, or an earlier version has left it
        return time.time() - copies.stat().st_mtime < BEING_MADE


def not_copied(config: RunConfig, data: Any) -> list[str]:
    """A sentence for a training set that `--cache` does nothing for: small files are copied no faster than read."""
    if config.cache == "none":
        return []
    from meshrun.data.sources.folder import ImageFolder  # brings torch, which the launcher can do without

    while not isinstance(data, ImageFolder) and hasattr(data, "dataset"):
        data = data.dataset
    if not isinstance(data, ImageFolder):
        return []
    return [
        f"the {len(data):,} files of {data.folder} are read where they are: --cache {config.cache} copies no image "
        f"folders; meshrun convert-data makes one file of them, which it does copy"
    ]


def make_private(folder: Path) -> None:
    """Make the folder for this user alone; in a folder that all may write to, another one may have been there first."""
    if not made_private(folder):
        raise UserError(f"{folder} is not this user's alone; have it removed, or name another folder (--cache)")


@contextlib.contextmanager
def kept_on_node(config: RunConfig, run: RunDirectory, site: Site | None, memory: Path | None) -> Iterator[None]:
    """Take the copies away in the end, and those of killed runs now; who still has one open keeps it."""
    sweep(_all_places(run, site, None))
    try:
        yield
    finally:
        for folder in _all_places(run, site, memory).values() if config.cache in OURS else ():
            shutil.rmtree(folder, ignore_errors=True)

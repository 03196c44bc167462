"""`--cache`: where a run keeps copies of data files on each node, and who takes them away.

    use_node(config, run, site, memory, note)            # by every rank, before it opens its data
    with kept_on_node(config, run, site, memory): …      # by whoever lives as long as the ranks of the node do

Copies are for this run and this user alone and go with the run, but those in a folder that the user has named: there
the next run finds them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from meshrun.config import MEMORY, RunConfig, RunDirectory, made_private
from meshrun.data import cache
from meshrun.errors import UserError
from meshrun.world import disks
from meshrun.world.environment import inherited
from meshrun.world.profile import Site

OURS = ("auto", "tmp", "memory")
"""Words of `--cache` for which the folder is found, and made, by us."""


def copies_of(config: RunConfig, run: RunDirectory, site: Site | None, memory: Path | None) -> Path | None:
    """The folder for copies on this node; `memory` is the run's own in it, where a launcher of ours has made one."""
    if config.cache not in OURS:
        return None if config.cache == "none" else Path(config.cache)
    listed = disks.mounts()
    found = [disks.look(*each, listed) for each in disks.node_folders(inherited(), site).items()]
    chosen = disks.choose(config.cache, found, disks.look("memory", MEMORY, listed))
    # How much room there is changes with the first copy: whoever comes later goes where the first one went.
    mine = _all_places(run, site, memory)
    return next((each for each in mine.values() if each.is_dir()), None) or mine[chosen or MEMORY]


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
    copies = copies_of(config, run, site, memory)
    try:
        if copies is not None and config.cache in OURS:
            make_private(copies)
    except OSError as error:
        note(f"data files are read where they are: cannot make {copies}: {error.strerror} (--cache)")
        copies = None
    cache.use(copies, memory / "shared" if memory is not None else None, note)


def leave_node() -> None:
    """After a run: nothing is copied or told any more, in a process that may go on."""
    cache.use(None, None)


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
    """Take the copies away in the end; who still has one open keeps it."""
    try:
        yield
    finally:
        for folder in _all_places(run, site, memory).values() if config.cache in OURS else ():
            shutil.rmtree(folder, ignore_errors=True)

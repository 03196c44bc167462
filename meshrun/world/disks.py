"""Which folders are this node's own, and where on the node copies of data files go.

    file_system_of("/p/scratch/me", mounts())                # "gpfs"
    named = node_folders(inherited(), site)                  # {"TMPDIR": Path("/tmp/job-17"), "/tmp": Path("/tmp")}
    choose("auto", [look(*each, mounts()) for each in named.items()], look("memory", Path("/dev/shm"), mounts()))

What a folder is called says little: at some sites $TMPDIR lies on the shared disk. The kernel's list of mounts decides.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from meshrun.errors import UserError
from meshrun.world.profile import Site

Env = Mapping[str, str]

OF_THE_JOB = ("SLURM_TMPDIR", "JOB_TMPDIR", "LOCAL_SCRATCH", "LOCALSCRATCH", "LOCAL_TMPDIR", "PBS_JOBFS", "TMPDIR")
"""Variables in which sites and jobs name a folder of the node, the surest first."""
SHARED = re.compile(
    "nfs.*|lustre|gpfs|beegfs.*|ceph|fuse[.](?!overlay|squash).*|panfs|wekafs|orangefs|pvfs2|glusterfs|afs|cifs|smb3?|9p|daos"
)
"""File systems that other nodes see too; of those in user space nobody knows."""
IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")
ROOM = 4 << 30
"""Free bytes from which on `auto` takes a folder."""


@dataclass(frozen=True)
class Disk:
    """A folder as it was found: `called` is the variable that names it, or its own name."""

    called: str
    path: Path
    kind: str
    """Of its file system."""
    free: int
    """Bytes; -1 for a folder that is not there or cannot be written to."""

    @property
    def is_of_the_node(self) -> bool:
        return self.free >= 0 and not is_shared(self.kind)


def is_shared(kind: str) -> bool:
    """Whether a file system of that kind lies on servers that many nodes share."""
    return SHARED.fullmatch(kind) is not None


def mounts() -> str:
    """The kernel's list of file systems; nothing where it gives none."""
    try:
        return Path("/proc/mounts").read_text(errors="replace")
    except OSError:
        return ""


def file_system_of(path: str, mounts: str) -> str:
    """The kind of the file system that an absolute path is on, such as nfs4, lustre or tmpfs."""
    found: tuple[int, int, str] = (-1, -1, "")
    for number, line in enumerate(mounts.splitlines()):
        _, place, kind, *_ = [*line.split(" "), "", "", ""]
        place = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), place)
        if path == place or path.startswith(place.rstrip("/") + "/"):
            found = max(found, (len(place), number, kind))  # of two on one place the later one is seen
    return found[2]


def node_folders(env: Env, site: Site | None) -> dict[str, Path]:
    """Folders that should be the node's own, by what names them, the surest first."""
    found = {}
    named = site.get("node_folder") if site is not None else None
    if named is not None:
        text = re.sub(r"\$\{?(\w+)\}?", lambda name: env.get(name[1], name[0]), str(named))
        if "$" not in text:
            found[f"node_folder of {site.name}" if site is not None else ""] = Path(text)
    for name in OF_THE_JOB:
        if env.get(name, "").startswith("/"):
            found[name] = Path(env[name])
    return {**found, "/tmp": Path("/tmp")}


def look(called: str, path: Path, mounts: str) -> Disk:
    """What a folder is on, and how much room it has."""
    try:
        space = os.statvfs(path)
    except OSError:
        return Disk(called, path, "", -1)
    can = os.access(path, os.W_OK | os.X_OK)
    return Disk(
        called, path, file_system_of(str(path.resolve()), mounts), space.f_bavail * space.f_frsize if can else -1
    )


def choose(cache: str, disks: Sequence[Disk], memory: Disk) -> Path | None:
    """The folder for copies that `--cache` means, or None for none."""
    own = [each for each in disks if each.is_of_the_node]
    match cache:
        case "none":
            return None
        case "memory":
            return memory.path
        case "tmp":
            if not own:
                seen = ", ".join(f"{each.called} ({each.path}) is {_why_not(each)}" for each in disks)
                raise UserError(
                    f"cache is tmp, but this node has no folder of its own: {seen}; name one (--cache FOLDER), or use "
                    f"memory (--cache memory)"
                )
            return own[0].path
        case "auto":
            on_disk = [each for each in own if each.kind not in IN_MEMORY]
            with_room = [each for each in (*on_disk, memory, *own) if each.free >= ROOM]
            return (with_room or [*own, memory])[0].path
        case folder:
            return Path(folder)


def _why_not(disk: Disk) -> str:
    return f"on {disk.kind}" if disk.free >= 0 else "not there or not writable"

"""What is kept on the node: copies of files on its own disk, and memory that all who read there share.

    use(copies=Path("/tmp/job"), memory=Path("/dev/shm/job"))   # once a process, before the experiment is built
    path = cached(Path("train.h5"))             # the copy on the node, made by whoever comes first
    kept = shared("train pictures", 1 << 20)    # a MiB of zeros; what one process writes the others see
    kept.bytes[:4] = 1, 2, 3, 4

Without `use`, files are read where they lie, and memory is shared by a rank and the readers that it forks. Nothing here
fails a run: where there is no room for a copy, a note says so and the file itself is read.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import mmap
import os
import shutil
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakValueDictionary, finalize

import numpy as np
from numpy.typing import NDArray

from meshrun.config import all_can_exchange, made_private
from meshrun.errors import RunFailed
from meshrun.files import new_file

Note = Callable[[str], None]

AGAIN = 600.0
"""Seconds after which a copy that has failed is tried once more, by another job on the node."""
LARGE = 1 << 30
"""A copy of at least so many bytes is announced: it takes seconds in which nothing else is seen."""
MARGIN = 64 << 20
"""Bytes of a disk that copies leave free."""


def _to_stderr(text: str) -> None:
    print(f"note: {text}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class _Places:
    copies: Path | None = None
    memory: Path | None = None
    note: Note = _to_stderr


_places = _Places()
_originals: dict[Path, Path] = {}


def use(copies: Path | None, memory: Path | None, note: Note = _to_stderr) -> None:
    """Keep copies and shared memory of this process in these folders of the node, and tell `note` what is worth it.

    Both belong to one job: whoever made them takes them away after it.
    """
    global _places
    _places = _Places(copies, memory, note)


def folder() -> Path | None:
    """Where copies are kept on this node; None where they are not."""
    return _places.copies


def note(text: str) -> None:
    """Tell the user something that does not stop the run."""
    _places.note(text)


def original(copy: Path) -> Path | None:
    """The file that this one is a copy of on the node; None where it is none."""
    return _originals.get(copy)


def cached(path: Path, note: Note | None = None) -> Path:
    """The copy of a file on this node, made now if there is none; the file itself where copies are not kept."""
    folder, tell = _places.copies, note or _places.note
    if folder is None or not path.is_file():
        return path
    found = path.stat()
    key = hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:12]
    # A name for each state of the file: file systems differ in how exactly they keep times.
    state = hashlib.sha256(f"{found.st_size} {found.st_mtime_ns}".encode()).hexdigest()[:8]
    try:
        own = own_part(folder)
        copy = own / f"{path.stem}-{key}-{state}{path.suffix}"
        _originals[copy] = path
        if _is_whole(copy, found.st_size):
            return copy
        lock = os.open(own / f".{key}.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        tell(_not_copied(path, folder, error.strerror or str(error)))
        return path
    try:
        with contextlib.suppress(OSError):  # a file system without locks: the copy is made more than once, that is all
            fcntl.flock(lock, fcntl.LOCK_EX)
        if _is_whole(copy, found.st_size):
            return copy
        if _has_just_failed(lock):
            return path
        os.pwrite(lock, b"copying", 0)
        _copy(path, copy, found, tell)
        _remove_older(own, f"{path.stem}-{key}-", copy)
        return copy
    except OSError as error:
        with contextlib.suppress(OSError):
            os.pwrite(lock, b"failed ", 0)
        tell(_not_copied(path, folder, error.strerror or str(error)))
        return path
    finally:
        os.close(lock)


def own_part(folder: Path) -> Path:
    """The folder itself, where only this user can write; else a folder of this user alone in it.

    Who can write to a folder can put anything there under the name of a copy, or a link under the name of a lock. Its
    owner, and without the sticky bit whoever can write to it, can put a folder of his own in the place of this user's.
    """
    folder.mkdir(parents=True, exist_ok=True)
    found = folder.stat()
    if (above := all_can_exchange(folder)) is not None:
        raise OSError(errno.EPERM, f"others can rename what is in {above} (chmod +t keeps them from it)")
    if found.st_uid == os.getuid() and not found.st_mode & 0o022:
        return folder
    if found.st_uid not in (0, os.getuid()) or (found.st_mode & 0o022 and not found.st_mode & stat.S_ISVTX):
        raise OSError(errno.EPERM, "others can rename what is in that folder (chmod +t keeps them from it)")
    own = folder / f"meshrun-{os.getuid()}"
    if not made_private(own):
        raise OSError(errno.EPERM, f"others can write there, and {own} is not this user's alone")
    return own


def _is_whole(copy: Path, size: int) -> bool:
    """Whether a file of this user with that size is there."""
    try:
        found = copy.lstat()
    except OSError:
        return False
    return stat.S_ISREG(found.st_mode) and found.st_uid == os.getuid() and found.st_size == size


def _has_just_failed(lock: int) -> bool:
    """Whether another process of this node has just found that it does not go; it has said so."""
    return os.pread(lock, 6, 0) == b"failed" and time.time() - os.fstat(lock).st_mtime < AGAIN


def _copy(path: Path, copy: Path, found: os.stat_result, tell: Note) -> None:
    """Copies the file beside its final name, and renames it when it is whole."""
    room = _room(copy.parent)
    if room < found.st_size + MARGIN:
        raise OSError(errno.ENOSPC, f"{_readable(found.st_size)} are needed and {_readable(room)} free")
    if found.st_size >= LARGE:
        tell(f"copying {path} ({_readable(found.st_size)}) to {copy.parent} of this node")
    part = copy.with_name(f".{copy.name}.part")
    try:
        new_file(part, 0o600).close()  # the folder may be open to others, and the file itself need not be
        shutil.copyfile(path, part)
        now = path.stat()
        if (now.st_size, now.st_mtime_ns) != (found.st_size, found.st_mtime_ns):
            raise RunFailed(
                f"{path} has changed while it was being copied to {copy.parent}; start again when it is done"
            )
        if part.stat().st_size != found.st_size:
            raise OSError(errno.EIO, f"only {part.stat().st_size} of {found.st_size} bytes arrived")
        part.replace(copy)
    finally:
        part.unlink(missing_ok=True)


def _remove_older(folder: Path, prefix: str, copy: Path) -> None:
    """Copies of what the file was before; whoever still reads one is told that the file has changed.

    Also what somebody has left who was killed while he copied: nobody else copies this file now.
    """
    for each in folder.iterdir():
        if each.name.startswith((prefix, f".{prefix}")) and each != copy:
            each.unlink(missing_ok=True)


def _not_copied(path: Path, folder: Path, why: str) -> str:
    return f"{path} is not copied to {folder} but read where it is: {why} (--cache)"


def _readable(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"


def _room(folder: Path) -> int:
    """Free bytes of a folder; where it is memory, not more than is free of that."""
    free = shutil.disk_usage(folder).free
    return min(free, free_memory()) if _is_memory(folder) else free


def _is_memory(folder: Path) -> bool:
    device = folder.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return False
    return any(
        words[2] == number and words[words.index("-") + 1] in ("tmpfs", "ramfs") for words in map(str.split, lines)
    )


def free_memory() -> int:
    """Bytes that this process may still take: of the machine, and of the cgroup that it is confined to."""
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2]
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        found = [int(next(each for each in lines if each.startswith("MemAvailable:")).split()[1]) * 1024]
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        mine = Path("/sys/fs/cgroup") / next(each for each in lines if each.startswith("0::"))[3:].lstrip("/")
        for group in (mine, *mine.parents[: len(mine.parts) - 4]):
            with contextlib.suppress(OSError, ValueError):
                most = int((group / "memory.max").read_text())
                found.append(most - int((group / "memory.current").read_text()))
    return max(0, min(found))


class Shared:
    """Memory that several processes see: `bytes`, an array of bytes that begins as zeros."""

    def __init__(self, file: int, size: int) -> None:
        self.file = file
        self._had: dict[tuple[int, int], object] = {}  # places that threads have, by process: forks have a copy
        self.bytes: NDArray[np.uint8] = np.frombuffer(mmap.mmap(file, size), dtype=np.uint8)
        finalize(self, os.close, file)

    @contextlib.contextmanager
    def alone(self, number: int) -> Iterator[bool]:
        """Whether this thread has the place with that number for itself until the end of the `with`; never waits.

        A process that dies lets go of it.
        """
        place, me = (os.getpid(), number), object()
        if self._had.setdefault(place, me) is not me:  # the kernel's lock knows processes, not threads
            yield False
            return
        try:
            fcntl.lockf(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, number)
        except OSError:
            del self._had[place]
            yield False
            return
        try:
            yield True
        finally:
            fcntl.lockf(self.file, fcntl.LOCK_UN, 1, number)
            del self._had[place]


_held: WeakValueDictionary[str, Shared] = WeakValueDictionary()


def shared(key: str, size: int) -> Shared:
    """Memory of `size` bytes under this name: of this process and those that it forks, or of all on the node.

    It is taken from the machine only where it is written to, except in a folder of the node: what that has room for is
    found out here, since a write without room would end the process.
    """
    name = f"{hashlib.sha256(key.encode(errors='surrogateescape')).hexdigest()[:16]}-{size}"
    found = _held.get(name)
    if found is None:
        of_node = _of_the_node(name, size)
        found = _held[name] = Shared(_of_this_process(size) if of_node is None else of_node, size)
    return found


def _of_this_process(size: int) -> int:
    if sys.platform == "linux":
        file = os.memfd_create("meshrun")
    else:
        with tempfile.TemporaryFile() as temporary:
            file = os.dup(temporary.fileno())
    os.ftruncate(file, max(1, size))
    return file


def _of_the_node(name: str, size: int) -> int | None:
    folder = _places.memory
    if folder is None:
        return None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{name}.shared"
        if not _is_whole(path, size) and _room(folder) < size + MARGIN:
            raise OSError(errno.ENOSPC, f"{_readable(size)} are needed and {_readable(_room(folder))} free")
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(file, 0, max(1, size))
        except OSError:
            os.close(file)
            raise
        return file
    except OSError as error:
        note(
            f"ranks of this node keep {_readable(size)} each for themselves, not shared in {folder}: "
            f"{error.strerror or error} (--cache)"
        )
        return None


def fence() -> None:
    """What was written to shared memory before is seen by other processors before what is written after.

    Some processors (ARM) reorder writes and reads. Two pairs, since into one of them they may still be drawn from
    both sides; of a lock of its own, which no fork can find taken.
    """
    lock = threading.Lock()
    for _ in range(2):
        lock.acquire()
        lock.release()

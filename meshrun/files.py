"""Opening files of others: a pipe would hang the reader, and a device has no end.

with open_plain(path) as file:      # an OSError where the path is no plain file
    file.read()
read_plain(path)                    # all bytes of a plain file that is no larger than documents are
read_own(path)                      # the same of a file that belongs to this user, and is no link
with new_file(path) as file:        # to write to: never through a link, nor into what lies there already
    file.write(data)
"""

from __future__ import annotations

import errno
import io
import os
import stat
from pathlib import Path

LARGEST = 1 << 30
"""Bytes of a document; a file with holes may be said to have any number of them."""


def open_plain(path: Path | str | bytes) -> io.FileIO:
    """Open a plain file for reading; an OSError for pipes, sockets, devices and folders."""
    if stat.S_ISSOCK(os.lstat(path).st_mode):  # of which the system says what it says of a device that is gone
        raise OSError(errno.EINVAL, "it is no plain file", os.fspath(path))
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        code = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
        raise OSError(code, "it is no plain file", os.fspath(path))
    return io.FileIO(descriptor)


def read_own(path: Path) -> bytes:
    """All bytes of a plain file of this user; an OSError for a link, or for a file of another user.

    For names that others can guess in folders that they may write to.
    """
    with io.FileIO(path, opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK)) as file:
        found = os.fstat(file.fileno())
        if found.st_uid != os.getuid() or not stat.S_ISREG(found.st_mode):
            raise PermissionError(errno.EPERM, "it is no plain file of this user", os.fspath(path))
        return file.readall()


def new_file(path: Path, mode: int = 0o666) -> io.BufferedWriter:
    """A new file to write to, in the place of one that may lie there; an OSError where another user has just made one.

    To write through a link that lies there would change the file of whoever's it leads to.
    """
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    return os.fdopen(descriptor, "wb")


def read_plain(path: Path) -> bytes:
    """All bytes of a plain file of at most `LARGEST` bytes; an OSError for anything else."""
    with open_plain(path) as file:
        if os.fstat(file.fileno()).st_size > LARGEST:
            raise OSError(errno.EFBIG, f"it has more than {LARGEST:,} bytes", os.fspath(path))
        return file.readall() or b""  # nothing where the kernel has nothing to say just now

"""Opening files of others: a pipe would hang the reader, and a device has no end.

with open_plain(path) as file:      # an OSError where the path is no plain file
    file.read()
read_plain(path)                    # all bytes of a plain file
"""

from __future__ import annotations

import errno
import io
import os
import stat
from pathlib import Path


def open_plain(path: Path | str | bytes) -> io.FileIO:
    """Open a plain file for reading; an OSError for pipes, sockets, devices and folders."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        code = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
        raise OSError(code, "it is no plain file", os.fspath(path))
    return io.FileIO(descriptor)


def read_plain(path: Path) -> bytes:
    """All bytes of a plain file; an OSError for anything else."""
    with open_plain(path) as file:
        return file.readall()

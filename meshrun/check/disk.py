"""A disk that gets full, or read-only, and well again: a small file system of its own under a run directory.

disk = Disk(runs)
disk.mount()                         # False where this process may not
disk.fill(); disk.protect(); disk.heal()
disk.close()
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

REFUSED_FOR = 10.0
"""Seconds that a change may be refused."""


class Disk:
    """A file system in memory, mounted on a folder; not there until `mount`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.mounted, self._protected = folder, False, False

    def mount(self) -> bool:
        """Put it under the folder, which must be empty or not exist."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.mounted = _mount("-t", "tmpfs", "-o", "size=50%", "meshrun-chaos", str(self.folder))
        return self.mounted

    def fill(self) -> None:
        """Leave no byte free."""
        self._remount(lambda: f"size={max(self._used(), 4096)}")

    def protect(self) -> None:
        """Make it read-only for everything that is opened from now on.

        The kernel refuses to make a file system read-only in which files are open for writing, as a run's logs are: so
        a read-only view of the folder is mounted over it.
        """
        self._protected = _mount("--bind", str(self.folder), str(self.folder))
        if not self._protected or not _mount("-o", "remount,bind,ro", str(self.folder)):
            raise OSError(f"{self.folder} cannot be mounted read-only")

    def heal(self) -> None:
        if self._protected:
            subprocess.run(["umount", "-l", str(self.folder)], check=True)
            self._protected = False
        self._remount(lambda: "size=50%")

    def close(self) -> None:
        """Take it away; what it held is then in the plain folder."""
        if not self.mounted:
            return
        with contextlib.suppress(OSError):
            self.heal()
        kept = Path(tempfile.mkdtemp(dir=self.folder.parent))
        shutil.copytree(self.folder, kept, dirs_exist_ok=True)
        subprocess.run(["umount", "-l", str(self.folder)], check=True)
        self.mounted = False
        self.folder.rmdir()
        kept.rename(self.folder)

    def _used(self) -> int:
        about = os.statvfs(self.folder)
        return (about.f_blocks - about.f_bfree) * about.f_frsize

    def _remount(self, options: Callable[[], str]) -> None:
        """Refused while files have just grown: so it is tried for a while."""
        give_up = time.monotonic() + REFUSED_FOR
        while not _mount("-o", f"remount,{options()}", str(self.folder)):
            if time.monotonic() > give_up:
                raise OSError(f"{self.folder} cannot be mounted with {options()}")
            time.sleep(0.002)


def can_mount() -> bool:
    """Whether this process may mount file systems: tried, since no right says it alone."""
    with tempfile.TemporaryDirectory() as folder:
        disk = Disk(Path(folder) / "disk")
        if not disk.mount():
            return False
        disk.close()
    return True


def _mount(*words: str) -> bool:
    try:
        return subprocess.run(["mount", *words], capture_output=True, check=False).returncode == 0
    except OSError:
        return False

"""One run, one owner: whoever trains in a run directory holds its lock, and a second one is refused.

    with lock(run):
        …

The lock is a file with who holds it. On one machine, and where the file system carries locks between hosts, the
kernel's lock decides, which goes with its holder however that dies. Where it does not, the holder keeps touching the
file: one that was touched a moment ago is held. Times are those of the file system alone, since clocks of machines
differ and jump.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from meshrun import strict_json
from meshrun.config import RunDirectory
from meshrun.errors import SharedError

NAME = ".lock"
BEAT = 2.0
"""Seconds between two touches."""
STALE = 15.0
"""Seconds without a touch after which a holder on another host counts as gone."""
LEASE = 120.0
"""Seconds after which a file server gives up the lock of a host that is gone, at the latest."""
ORPHANS = 6.0
"""Seconds to wait for what a killed holder on this host has started, such as its readers: these hold the lock too."""


@contextlib.contextmanager
def lock(run: RunDirectory, note: Callable[[str], None] = lambda _text: None) -> Iterator[None]:
    """Own the run until the end of the `with`; refuses in a sentence if somebody else does.

    `note` is told why it takes its time, where it does.
    """
    path = run.path / NAME
    own = {"host": socket.gethostname(), "pid": os.getpid(), "started": time.strftime("%Y-%m-%d %H:%M:%S")}
    with _refused(path):
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o660)
    try:
        with _refused(path):
            _take(run, path, file, note)
            _write(file, own)
        over = threading.Event()
        beating = threading.Thread(target=_beat, args=(file, over), name="lock", daemon=True)
        beating.start()
        try:
            yield
        finally:
            over.set()
            beating.join()
            with contextlib.suppress(OSError):  # a full disk; the lock itself goes with the file
                _write(file, {})
    finally:
        os.close(file)


def refuse_held(run: RunDirectory) -> None:
    """Refuse in a sentence if somebody owns the run, and write nothing."""
    path = run.path / NAME
    if not path.exists():
        return
    with _refused(path):
        file = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
        try:
            _take(run, path, file, lambda _text: None)
        finally:
            os.close(file)


@contextlib.contextmanager
def _refused(path: Path) -> Iterator[None]:
    """Says which file it is that the system refuses: another user's, on a full disk or on a read-only one."""
    try:
        yield
    except OSError as error:
        raise SharedError(
            f"cannot write {path}: {error.strerror}; whoever trains a run needs to write in its directory"
        ) from error


def is_left(run: RunDirectory) -> bool:
    """Whether the last owner has let it go by itself, and nobody has taken it since."""
    return (run.path / NAME).read_bytes() == json.dumps({}).encode()


def _take(run: RunDirectory, path: Path, file: int, note: Callable[[str], None]) -> None:
    give_up = time.monotonic() + ORPHANS
    while not _flocked(file):
        holder = _holder(path)
        if _is_of_another_host(holder) and not _is_held_elsewhere(path):
            note(f"waiting for the lock of {run.path}: {holder['host']}, which held it, gives no sign of life")
            _outlast(run, path, file)
            break
        if not _has_died_here(holder) or time.monotonic() > give_up:
            raise SharedError(_refusal(run, path))
        time.sleep(0.05)
    if _is_held_elsewhere(path):
        raise SharedError(_refusal(run, path))


def _outlast(run: RunDirectory, path: Path, file: int) -> None:
    """A machine without power takes its lock along only when the file server has missed it for long enough."""
    give_up, touched = time.monotonic() + LEASE, path.stat().st_mtime
    while not _flocked(file):
        if time.monotonic() > give_up or path.stat().st_mtime > touched:
            raise SharedError(_refusal(run, path))
        time.sleep(min(BEAT, 1.0))


def _is_of_another_host(holder: dict[str, object]) -> bool:
    return bool(holder) and holder.get("host") != socket.gethostname()


def _flocked(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # a file system without locks
    return True


def _has_died_here(holder: dict[str, object]) -> bool:
    """Whether the process that took the lock is gone from this host."""
    pid = holder.get("pid")
    if holder.get("host") != socket.gethostname() or not isinstance(pid, int) or not 0 < pid < 1 << 31:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        pass  # it belongs to another user
    return False


def _is_held_elsewhere(path: Path) -> bool:
    """Whether another host holds it, on a file system whose locks end at the host."""
    if not _is_of_another_host(_holder(path)):
        return False  # on this machine the kernel's lock would have told
    touched = path.stat().st_mtime
    if _clock_of(path.parent) - touched > STALE:
        return False
    # Touched not long ago: by a holder that lives, or by one that has just died. The next touch tells.
    time.sleep(2 * BEAT)
    os.listdir(path.parent)  # noqa: PTH208 - makes NFS ask the server again
    return path.stat().st_mtime > touched


def _clock_of(folder: Path) -> float:
    """What time it is where the files are."""
    probe = folder / f"{NAME}.{socket.gethostname()}.{os.getpid()}"
    probe.touch()
    try:
        return probe.stat().st_mtime
    finally:
        probe.unlink(missing_ok=True)


def _beat(file: int, over: threading.Event) -> None:
    while not over.wait(BEAT):
        with contextlib.suppress(OSError):
            os.utime(file)


def _write(file: int, document: dict[str, object]) -> None:
    text = json.dumps(document).encode()
    os.ftruncate(file, 0)
    os.pwrite(file, text, 0)


def _holder(path: Path) -> dict[str, object]:
    try:
        return strict_json.read(path)
    except (OSError, ValueError):
        return {}


def _refusal(run: RunDirectory, path: Path) -> str:
    who, by = _holder(path), ""
    if who.keys() >= {"pid", "host", "started"}:
        by = f" by process {who['pid']} on {who['host']} since {who['started']}"
    return f"{run.path} is in use{by}; stop that first, or start a run of its own (meshrun run)"

"""Standard output and error that outlast their readers: a command goes on to its own end when nobody reads it.

    open_streams()           # first thing of the process

`meshrun run … | head -1` then ends as the training does, and with its exit status. A disk that takes no more of the
output is another matter: what a script waits for is lost, and that is an error.
"""

from __future__ import annotations

import codecs
import contextlib
import io
import os
import sys
from collections.abc import Iterator
from typing import Any

NAMES_AS_THEY_ARE = "meshrun-names-as-they-are"
"""What stands for bytes of a file's name is written as these bytes; other halves of characters, which JSON can hold,
are written out."""


def _as_they_are(error: UnicodeError) -> tuple[str | bytes, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    half = ord(error.object[error.start])
    shown = bytes([half - 0xDC00]) if 0xDC80 <= half <= 0xDCFF else f"\\u{half:04x}".encode()
    return shown, error.start + 1


codecs.register_error(NAMES_AS_THEY_ARE, _as_they_are)


class _Outlet(io.FileIO):
    """A file descriptor whose reader may go."""

    ignored: type[OSError] = BrokenPipeError

    def write(self, data: Any) -> Any:
        try:
            return super().write(data)
        except self.ignored:
            return memoryview(data).nbytes


class _Log(_Outlet):
    """A file on a disk that may take nothing more: a program must not end because it prints."""

    ignored = OSError


class _Stream(io.TextIOWrapper):
    """A standard stream that outlasts a program which closes it: what meshrun says after that is still read."""

    def close(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self.flush()


def open_streams() -> None:
    """Give this process standard streams that can be written to, also where it was started without them."""
    for number in range(3):
        with contextlib.suppress(OSError):
            os.fstat(number)
            continue
        os.open(os.devnull, os.O_RDWR)  # the lowest number that is free: else the next file would be taken for it
    sys.stdin = sys.stdin or open(0, closefd=False)  # noqa: SIM115
    for name, number in (("stdout", 1), ("stderr", 2)):
        raw = _Outlet(number, "w", closefd=False)
        _set_stream(name, raw, by_line=raw.isatty() or number == 2)


def lose_what_is_refused() -> None:
    """Let this process go on when what it prints cannot be written."""
    for name, number in (("stdout", 1), ("stderr", 2)):
        _set_stream(name, _Log(number, "w", closefd=False), by_line=True)


def _set_stream(name: str, raw: Any, by_line: bool) -> None:
    old = getattr(sys, name)
    encoding, errors = (old.encoding, old.errors) if old else ("utf-8", "backslashreplace")
    # Names of files need not be text, and a terminal need not know all text.
    if errors in ("strict", "surrogateescape"):
        errors = NAMES_AS_THEY_ARE if codecs.lookup(encoding).name == "utf-8" else "backslashreplace"
    setattr(sys, name, _Stream(io.BufferedWriter(raw), encoding, errors, line_buffering=by_line))


@contextlib.contextmanager
def put_back() -> Iterator[None]:
    """Around a program in this process, which may close standard output and error, or put something in their place."""
    streams = sys.stdout, sys.stderr
    try:
        yield
    finally:
        sys.stdout, sys.stderr = streams


def flush() -> str | None:
    """Write out what was printed; returns why that cannot be done, in which case nothing of it is tried again."""
    why = None
    for number, stream in ((1, sys.stdout), (2, sys.stderr)):
        if stream is None or stream.closed:  # by the program
            continue
        try:
            stream.flush()
        except OSError as error:
            why = f"standard {'output' if number == 1 else 'error'} cannot be written: {error.strerror}"
            with open(os.devnull, "w") as nowhere:  # noqa: PTH123
                os.dup2(nowhere.fileno(), number)
    return why

"""One file from the internet, whole or not at all: goes on where it was cut off, and is checked before it has its name.

    fetch("https://example.org/digits.npz", Path("data/my/digits.npz"), told=Quiet())     # Sum(size=…, sha256=…)

What has come so far lies in `.digits.npz.part`, with what the server called it in `.digits.npz.part.json`: another
attempt goes on from there if the server still has the same file, and begins anew if not.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import hashlib
import os
import re
import shutil
import stat
import time
import urllib.error
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from meshrun import strict_json
from meshrun.config import whole_number, write_json
from meshrun.errors import RunFailed, printable

CHUNK = 1 << 20
PATIENCE = 60.0
"""Seconds without a byte after which a connection counts as lost."""
ATTEMPTS = 4
"""Tries in a row that bring nothing."""
PAUSE = 1.0
"""Seconds before the second try; doubled before each further one."""
PASSING = (408, 425, 429, 500, 502, 503, 504)
"""Answers that may be others a moment later."""


class Told(Protocol):
    """Whoever shows how far a file is."""

    def begin(self, what: str, done: int, total: int | None) -> None: ...

    def advance(self, count: int) -> None: ...

    def line(self, text: str) -> None: ...


class Quiet:
    """Shows nothing."""

    def begin(self, what: str, done: int, total: int | None) -> None: ...

    def advance(self, count: int) -> None: ...

    def line(self, text: str) -> None: ...


@dataclass(frozen=True)
class Sum:
    """What a file must be to be the same file."""

    size: int
    sha256: str


class _CutOff(Exception):
    """The connection ended, or was refused, in a way that another try may get past."""


def fetch(url: str, path: Path, told: Told, sha256: str | None = None) -> Sum:
    """Have the file of that address at `path`; one with another sum than asked for is not kept."""
    part, note = path.with_name(f".{path.name}.part"), path.with_name(f".{path.name}.part.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        if not all(map(_is_own, (part, note))):
            _forget(part, note)
        resumed = part.exists()
        found = _attempts(url, part, note, told)
        if resumed and sha256 not in (None, found.sha256):
            # What lay here from before may have been of another file, whatever the server says.
            _forget(part, note)
            found = _attempts(url, part, note, told)
        if sha256 not in (None, found.sha256):
            _forget(part, note)
            raise RunFailed(
                f"{shown(url)} came with the sha256 {found.sha256}, but stage_data asks for {sha256}; "
                "it was not kept: the file there has changed, or the sum in stage_data is wrong"
            )
        part.replace(path)
        note.unlink(missing_ok=True)
    except OSError as error:
        raise unwritable(path, error) from error
    return found


def sum_of(path: Path, told: Told) -> Sum:
    """Size and checksum of a file, read through once."""
    told.begin(f"checking {path.name}", 0, path.stat().st_size)
    size, hashed = 0, hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            hashed.update(chunk)
            size += len(chunk)
            told.advance(len(chunk))
    return Sum(size, hashed.hexdigest())


def shown(url: str) -> str:
    """An address without what may be secret in it: the user's name and password, and what comes after `?`."""
    parts = urllib.parse.urlsplit(url)
    return urllib.parse.urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def unwritable(path: Path, error: OSError) -> RunFailed:
    """Why a file could not be written, as a sentence."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        with contextlib.suppress(OSError):
            free = shutil.disk_usage(path.parent).free
            return RunFailed(
                f"there is no space left for {path} ({free / 1e6:,.1f} MB are free there, or the quota is used up); "
                "free some, or choose a folder on another disk (--data)"
            )
    return RunFailed(f"{path} cannot be written: {error.strerror or error} (--data)")


def _attempts(url: str, part: Path, note: Path, told: Told) -> Sum:
    """Try, and try again where the last one was cut off, as long as tries bring something."""
    idle, pause = 0, PAUSE
    while True:
        before = part.stat().st_size if part.exists() else 0
        try:
            return _attempt(url, part, note, told)
        except _CutOff as cut:
            now = part.stat().st_size if part.exists() else 0
            idle, pause = (0, PAUSE) if now > before else (idle + 1, pause)
            if idle >= ATTEMPTS:
                came = f" after {now:,} bytes, which are kept for the next try" if now else ""
                raise RunFailed(
                    f"{shown(url)} cannot be fetched: {cut}{came}; "
                    "stage on a machine with internet, such as a login node"
                ) from cut
            told.line(f"{shown(url)}: {cut}; trying again in {pause:g} s")
        time.sleep(pause)
        pause *= 2


def _attempt(url: str, part: Path, note: Path, told: Told) -> Sum:
    import http.client
    import urllib.request  # here, since `meshrun --help` reads this file and must be quick

    had = _had(part, note)
    headers = {"User-Agent": "meshrun", "Accept-Encoding": "identity", **_credentials(url)}
    if had:
        headers |= {"Range": f"bytes={part.stat().st_size}-", "If-Range": had}

    class Redirects(urllib.request.HTTPRedirectHandler):
        """Follows a server that names another address, without the user's name and password unless it is its own."""

        def redirect_request(self, request: Any, *answer: Any) -> Any:
            new = super().redirect_request(request, *answer)
            if new is None:
                return None
            if not new.full_url.startswith(("http:", "https:")):
                raise ValueError(f"the server leads to {printable(shown(new.full_url))[:200]}")
            if _server_of(new.full_url) != _server_of(request.full_url):
                new.remove_header("Authorization")
            new.remove_header("Proxy-authorization")  # which urllib adds again where there is a proxy on the way
            for name, value in _credentials(new.full_url).items():
                new.add_header(name, value)
            new.full_url = _bare(new.full_url)
            return new

    opener = urllib.request.build_opener(Redirects)
    try:
        with opener.open(urllib.request.Request(_bare(url), headers=headers), timeout=PATIENCE) as answer:
            return _received(answer, url, part, note, told)
    except urllib.error.HTTPError as error:
        if error.code == 416:  # what lies here is not the beginning of what is there
            _forget(part, note)
            raise _CutOff("the server has another file now") from error
        said = f"the server answers {error.code} {printable(str(error.reason).partition(chr(10))[0])[:200]}".rstrip()
        if error.code in PASSING:
            raise _CutOff(said) from error
        raise RunFailed(
            f"{shown(url)} cannot be fetched: {said}; the address in stage_data must be one that this machine may read"
        ) from error
    except urllib.error.URLError as error:
        raise _CutOff(str(getattr(error.reason, "strerror", None) or error.reason)) from error
    except (http.client.HTTPException, ConnectionError, TimeoutError) as error:
        raise _CutOff(str(error) or type(error).__name__) from error
    except ValueError as error:  # of this address, or of one that the server leads to
        raise RunFailed(
            f"{shown(url)} cannot be fetched: it is, or leads to, no address of a web server ({error}); give another "
            f"one in stage_data"
        ) from error


def _bare(url: str) -> str:
    """An address without the user's name and password, which Python would take for a part of the host's name."""
    parts = urllib.parse.urlsplit(url)
    return urllib.parse.urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def _server_of(url: str) -> tuple[str, str | None, int | None]:
    """Who gets what is sent to an address: scheme, host and port."""
    parts = urllib.parse.urlsplit(url)
    return parts.scheme, parts.hostname, parts.port or {"http": 80, "https": 443}.get(parts.scheme)


def _credentials(url: str) -> dict[str, str]:
    parts = urllib.parse.urlsplit(url)
    if parts.username is None:
        return {}
    both = ":".join(urllib.parse.unquote(each or "") for each in (parts.username, parts.password))
    return {"Authorization": f"Basic {base64.b64encode(both.encode()).decode()}"}


def _chunks(answer: Any) -> Iterator[bytes]:
    """What comes; errors of the network are told from errors of the disk here."""
    import http.client

    try:
        while chunk := answer.read(CHUNK):
            yield chunk
    except (http.client.HTTPException, OSError) as error:
        raise _CutOff(str(error) or type(error).__name__) from error


def _received(answer: Any, url: str, part: Path, note: Path, told: Told) -> Sum:
    """Write what comes behind what is there; only a file of the length that was announced is whole."""
    hashed, size, total = hashlib.sha256(), 0, None
    if answer.status == 206 and part.exists():
        told.begin(f"{part.name[1:-5]}: what is here", 0, part.stat().st_size)
        with part.open("rb") as file:
            while chunk := file.read(CHUNK):
                hashed.update(chunk)
                size += len(chunk)
                told.advance(len(chunk))
        goes_on = re.match(
            rf"bytes {size}-[0-9]+/(?:([0-9]{{1,18}})(?![0-9])|\*)", str(answer.headers["Content-Range"])
        )
        if goes_on is None or (goes_on[1] and int(goes_on[1]) <= size):
            _forget(part, note)
            raise _CutOff("the server went on from elsewhere")
        total = int(goes_on[1]) if goes_on[1] else None
    elif answer.status != 200:
        raise RunFailed(
            f"{shown(url)} cannot be fetched: the server answers {answer.status}, which is no whole file; give another "
            f"address in stage_data"
        )
    else:
        same = answer.headers["ETag"] or answer.headers["Last-Modified"]
        _forget(part, note)
        # A weak ETag promises the same meaning, not the same bytes.
        if same and not same.startswith("W/"):
            write_json(note, {"url": shown(url), "same": same})
    announced = answer.headers["Content-Length"]
    length = whole_number(announced) if announced else None
    if announced and length is None:
        raise RunFailed(
            f"{shown(url)} cannot be fetched: the server announces a Content-Length of {announced[:80]!r}, "
            f"which is no number of bytes; give another address in stage_data"
        )
    if total is None and length is not None:
        total = size + length
    if total is not None and total - size > shutil.disk_usage(part.parent).free:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    told.begin(part.name[1:-5], size, total)
    with open(part, "ab", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW, 0o666)) as file:
        for chunk in _chunks(answer):
            file.write(chunk)
            hashed.update(chunk)
            size += len(chunk)
            told.advance(len(chunk))
        file.flush()
        os.fsync(file.fileno())
    if total is not None and size != total:
        raise _CutOff(f"the connection ended after {size:,} of {total:,} bytes")
    return Sum(size, hashed.hexdigest())


def _had(part: Path, note: Path) -> str | None:
    """What the server called the file whose beginning lies here; None where it cannot be gone on with."""
    try:
        same = strict_json.read(note).get("same") if part.stat().st_size else None
    except (OSError, ValueError):
        return None
    # What no server can have said would be refused as a header, each time anew.
    return same if isinstance(same, str) and same.isascii() and same.isprintable() else None


def _is_own(path: Path) -> bool:
    """False for a link or a file of another user, who would choose where it leads or how the file begins."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return True
    return stat.S_ISREG(found.st_mode) and found.st_uid == os.getuid()


def _forget(part: Path, note: Path) -> None:
    part.unlink(missing_ok=True)
    note.unlink(missing_ok=True)

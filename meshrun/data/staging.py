"""Files that are fetched where there is internet, and found where there is none.

    def stage_data(stage):                                       # beside `experiment` in the user's file
        stage.download("https://example.org/faces.npz", sha256="9f86d0…")
        stage.copy("/project/labels")                            # a file, or a folder with all that is in it
        if not stage.has("tokens.npy"):
            np.save(stage.folder / "tokens.npy", tokenized())
            stage.add("tokens.npy")

    def experiment() -> Experiment:
        data = np.load(meshrun.staged("faces.npz"))              # inside a function: the folder is known by then
        …

`meshrun stage TARGET` runs it on a login node. What it has brought stands in `staged.json` with sizes and checksums,
so that a second time only fetches what is missing or wrong, and so that ranks notice a file that is not all there.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import os
import re
import socket
import sys
import urllib.error
import urllib.parse
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath

from meshrun import strict_json
from meshrun.config import DATA, write_json
from meshrun.data.download import CHUNK, Quiet, Sum, Told, fetch, shown, sum_of, unwritable
from meshrun.errors import UserError
from meshrun.files import new_file

LIST = "staged.json"
FORMAT = 1


@dataclass(frozen=True)
class Staged:
    """A file that was staged."""

    name: str
    size: int
    sha256: str
    when: str
    url: str | None = None
    """Where it came from, an address or a path; None for a file that the user's own code has made."""

    @property
    def sum(self) -> Sum:
        return Sum(self.size, self.sha256)


@dataclass(frozen=True)
class Place:
    """Where the files of a target lie, and the command that brings them there."""

    folder: Path
    command: str


class Stage:
    """What `stage_data` is given: brings files into one folder, and writes down what they are."""

    def __init__(self, folder: Path, told: Told | None = None) -> None:
        self.folder = folder
        self._told: Told = told or Quiet()
        self._list = read_list(folder)
        self.kept: list[str] = []
        """Names of files that were here and right."""
        self.brought: list[str] = []
        """Names of files that were not."""

    @property
    def files(self) -> list[Staged]:
        """All that is staged in the folder, also by earlier calls with other options."""
        return list(self._list.values())

    def download(self, url: str, name: str | None = None, sha256: str | None = None) -> Path:
        """Fetch an address; `name` is what the file is called here, the last part of the address when absent."""
        try:
            parts = urllib.parse.urlsplit(url)
            is_web = isinstance(url, str) and parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except (ValueError, AttributeError):  # a port or an IPv6 address that cannot be; no text
            is_web = False
        if not is_web:
            raise UserError(f"download({_named(url)}) is no address; it must be http(s)://HOST/…, or use copy()")
        if sha256 is not None and (len(sha256) != 64 or set(sha256.lower()) - set("0123456789abcdef")):
            raise UserError(f"sha256 of {shown(url)} is {sha256!r}; it must be 64 hexadecimal digits, or absent")
        wanted = sha256.lower() if sha256 else None
        name = name or urllib.parse.unquote(PurePosixPath(parts.path).name)
        path = self._path(name, f"download({shown(url)!r})")
        self._once(name)
        known = self._list.get(name)
        if known and known.url == shown(url) and wanted in (None, known.sha256) and self._is_right(known):
            self.kept.append(name)
            return path
        self._record(name, fetch(url, path, self._told, wanted), shown(url))
        return path

    def copy(self, source: Path | str, name: str | None = None) -> Path:
        """Copy a file, or a folder with all that is in it."""
        source = Path(source).expanduser()
        if not source.exists():
            raise UserError(f"copy({str(source)!r}): there is no such file or folder on this machine")
        name = name or source.resolve().name
        path = self._path(name, f"copy({str(source)!r})")
        if source.is_dir():
            for each in sorted(each for each in source.rglob("*") if each.is_file()):
                self._copy(each, f"{name}/{each.relative_to(source).as_posix()}")
        else:
            self._copy(source, name)
        return path

    def add(self, path: Path | str) -> Path:
        """Write down a file that the user's own code has made in the folder, or all files of a folder in it."""
        found = self.folder / path
        inside = found.resolve()
        if not inside.is_relative_to(self.folder.resolve()):
            raise UserError(f"add({str(path)!r}) is not in {self.folder}; make the file there, or use copy()")
        if not found.exists():
            raise UserError(f"add({str(path)!r}): {found} does not exist; make the file first")
        name = inside.relative_to(self.folder.resolve()).as_posix()
        for each in sorted(each for each in found.rglob("*") if each.is_file()) if found.is_dir() else [found]:
            below = f"{name}/{each.relative_to(found).as_posix()}" if found.is_dir() else name
            self._path(below, f"add({str(path)!r})")
            known, now = self._list.get(below), sum_of(each, self._told)
            if known and known.sum == now:
                self.kept.append(below)
            else:
                self._record(below, now, None)
        return found

    def has(self, name: str) -> bool:
        """Whether a file is staged and as it was then: what need not be made again."""
        known = self._list.get(name)
        return known is not None and self._is_right(known)

    def note(self, text: str) -> None:
        """Say something to whoever watches."""
        self._told.line(text)

    def _copy(self, source: Path, name: str) -> None:
        path = self._path(name, f"copy({str(source)!r})")
        self._once(name)
        known = self._list.get(name)
        if known and self._is_right(known) and sum_of(source, self._told) == known.sum:
            self.kept.append(name)
            return
        part = path.with_name(f".{path.name}.part")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._told.begin(name, 0, source.stat().st_size)
            with source.open("rb") as whence, new_file(part, source.stat().st_mode & 0o666) as where:
                while chunk := whence.read(CHUNK):
                    where.write(chunk)
                    self._told.advance(len(chunk))
                where.flush()
                os.fsync(where.fileno())
            part.replace(path)
        except OSError as error:
            part.unlink(missing_ok=True)
            if not os.access(source, os.R_OK):
                raise UserError(f"copy({str(source)!r}): {error.strerror}") from error
            raise unwritable(path, error) from error
        self._record(name, sum_of(path, self._told), str(source.resolve()))

    def _path(self, name: str, asked: str) -> Path:
        if not _is_inside(name):
            raise UserError(f"{asked} would be called {name!r} here; give it a plain name (name=…)")
        return self.folder / name

    def _once(self, name: str) -> None:
        if name in self.kept or name in self.brought:
            raise UserError(f"two files are to be staged as {name!r}; give one of them another name (name=…)")

    def _is_right(self, known: Staged) -> bool:
        path = self.folder / known.name
        return path.is_file() and path.stat().st_size == known.size and sum_of(path, self._told) == known.sum

    def _record(self, name: str, found: Sum, url: str | None) -> None:
        when = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self._list[name] = Staged(name, found.size, found.sha256, when, url)
        self.brought.append(name)
        try:
            # After each file: what has come stays staged whatever happens to the next one.
            files = [asdict(each) for each in self._list.values()]
            write_json(self.folder / LIST, {"format": FORMAT, "files": files})
        except OSError as error:
            raise unwritable(self.folder / LIST, error) from error


@contextlib.contextmanager
def staging(folder: Path, told: Told | None = None) -> Iterator[Stage]:
    """A stage that nobody else fills at the same time."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        held = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o660)
    except OSError as error:
        raise unwritable(folder, error) from error
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            _take(held, folder)
        yield Stage(folder, told)
    finally:
        os.close(held)


def _take(held: int, folder: Path) -> None:
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(
            f"{folder} is being staged by another process; wait for it, or choose another folder (--data)"
        ) from None


def verified(folder: Path, told: Told | None = None) -> list[str]:
    """What is wrong with the files of a folder, a sentence each; nothing where all are as they were staged."""
    problems = []
    for each in read_list(folder).values():
        path = folder / each.name
        if not path.is_file():
            problems.append(f"{path} is not here")
        elif (size := path.stat().st_size) != each.size:
            problems.append(f"{path} has {size:,} bytes, but had {each.size:,} when it was staged")
        elif sum_of(path, told or Quiet()) != each.sum:
            problems.append(f"{path} has another checksum than when it was staged")
    return problems


def read_list(folder: Path) -> dict[str, Staged]:
    """The files that were staged in a folder, by name; none where there is no list."""
    try:
        document = strict_json.read(folder / LIST)
        if strict_json.of_type(int, document.get("format"), "format") > FORMAT:
            raise UserError(
                f"{folder / LIST} is of a newer meshrun; use that one, or stage into another folder (--data)"
            )
        files = strict_json.of_type(list[Staged], document.get("files"), "files")
        if (wrong := next((each.name for each in files if not _is_inside(each.name)), None)) is not None:
            raise ValueError(f"it names {wrong!r}, which lies outside of the folder")
        return {each.name: each for each in files}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UserError(f"{folder / LIST} cannot be read ({error}); remove it, and stage again") from None


def _is_inside(name: str) -> bool:
    """Whether a name is that of a file in the folder, other than its list."""
    parts = PurePosixPath(name).parts
    outside = not parts or name.startswith("/") or ".." in parts
    return not outside and name != LIST and not any(map(_is_control, name))


_place: Place | None = None


def use(place: Place) -> None:
    """Decide where `staged` looks, for code that only knows the names of its files."""
    global _place
    _place = place


def place() -> Place:
    """Where `staged` looks; under a plain Python script `data/` and its name, in the working directory."""
    if _place is not None:
        return _place
    script = Path(sys.argv[0] or "program")
    return Place(DATA / script.stem, f"meshrun stage {script.name}")


def staged(name: str) -> Path:
    """Where a staged file, or folder, lies; one that is not all here is a sentence that says how to get it."""
    here = place()
    path = here.folder / name
    known = read_list(here.folder).get(name)
    if not path.exists():
        why = "is not here"
    elif known is not None and (size := path.stat().st_size) != known.size:
        why = f"has {size:,} bytes here, but had {known.size:,} when it was staged"
    else:
        return path
    raise UserError(f"{path.absolute()} {why}; on a machine with internet: {here.command}")


_OF_HUBS = {
    "huggingface_hub": ("LocalEntryNotFoundError", "OfflineModeIsEnabled"),
    "datasets": ("OfflineModeIsEnabled",),
    "requests": ("ConnectionError", "ConnectTimeout"),
    "urllib3": ("MaxRetryError", "NameResolutionError", "NewConnectionError"),
    "httpx": ("ConnectError", "ConnectTimeout"),
    "aiohttp": ("ClientConnectorError", "ClientConnectorDNSError"),
}
"""Errors, by the library that raises them, which mean that something was to be fetched and could not be."""
_IN_WORDS = ("offline mode", "couldn't connect to 'https://", "couldn't reach", "hf_hub_offline", "hf_datasets_offline")
"""What hubs' libraries say in errors of Python's own types."""


def missing_of(error: BaseException) -> str | None:
    """A sentence that names the stage command, if a training failed since it wanted something from the internet."""
    for each in _chain(error):
        if isinstance(each, UserError):
            return None
        if _wants_internet(each):
            said = " ".join(str(each).split())
            said = said if len(said) <= 200 else said[:199] + "…"
            return (
                f"the program wants something from the internet, which cannot be reached from {socket.gethostname()} "
                f"({type(each).__name__}: {said}); "
                f"fetch it in stage_data, and on a machine with internet: {place().command}"
            )
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error, what it was raised from, and so on."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__


def _wants_internet(error: BaseException) -> bool:
    if isinstance(error, urllib.error.HTTPError):
        return False
    if isinstance(error, urllib.error.URLError | socket.gaierror):
        return True
    for kind in type(error).__mro__:
        if kind.__name__ in _OF_HUBS.get(kind.__module__.partition(".")[0], ()):
            return True
    words = str(error).lower()
    return isinstance(error, OSError | ValueError) and any(each in words for each in _IN_WORDS)


def _named(url: object) -> str:
    """An address, or what was given for one, without a user's name and password in it."""
    return re.sub(r"//[^/]*@", "//", repr(url))[:200]


def _is_control(letter: str) -> bool:
    return not letter.isprintable()

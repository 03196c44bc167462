"""Rows of one dataset in an HDF5 file, by number: read where they lie in the file, or by whole chunks.

    file = H5File(Path("train.h5"))
    with file.opened() as h5:
        rows = Rows(file, h5["images"])
    rows.take(np.array([7, 3, 7]), into)        # into: (3, …) of the dataset's own type

HDF5's library is asked once where the rows are. What is not compressed is then read from the file at these places, in
runs of neighbours, straight into the batch. What is compressed (or lies in several files) is read by whole chunks,
unpacked once into memory that all readers share; see `slots`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import os
import re
import resource
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from weakref import finalize

import numpy as np
from numpy.typing import NDArray

from meshrun.data.sources import chunks
from meshrun.data.sources.slots import Slots
from meshrun.data.sources.source import OncePerProcess, Watched, changed
from meshrun.errors import RunFailed, UserError, is_of_machine, unreadable_here

Numbers = NDArray[np.int64]

NEIGHBOURS = 1 << 20
"""Bytes that are worth reading in one go."""
_SECONDS_TO_LOOK = 1
"""Computing time for a look at the names, shapes and classes in a file, which takes milliseconds."""
_SECONDS_TO_OPEN = 10
"""Time for it: a link may lead to a pipe, into which nobody writes."""
_TOGETHER = 1024
"""Most buffers that the kernel fills in one call."""


class H5File:
    """An HDF5 file that must stay as it is; opened once a process."""

    def __init__(self, path: Path) -> None:
        try:
            if not path.is_file():
                raise UserError(f"HDF5 file {path} {'is a folder' if path.is_dir() else 'does not exist'}")
        except OSError as error:  # a name that is too long, a folder that may not be looked into
            raise UserError(f"HDF5 file {path!s:.200} cannot be read: {error.strerror}") from None
        self.path, self.watched = path, Watched(path)
        self.descriptor: OncePerProcess[int] = OncePerProcess(self._descriptor)
        self.library: OncePerProcess[Any] = OncePerProcess(self.opened)

    def _descriptor(self) -> int:
        try:
            found = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise RunFailed(changed(self.path, error.strerror or str(error))) from None
        finalize(self, os.close, found)
        return found

    def opened(self) -> Any:
        """The file as h5py has it, for reading, without the locks that parallel file systems often lack."""
        try:
            return _h5py().File(self.path, "r", locking=False)
        except OSError as error:
            raise UserError(self._why_not(str(error))) from None

    def _why_not(self, error: str) -> str:
        ends = re.search(r"eof = \d+, .*base_addr = (\d+), stored_eof = (\d+)", error)
        if ends:
            whole = int(ends[1]) + int(ends[2])
            return f"HDF5 file {self.path} is truncated: {self.watched.size} of {whole} bytes are there; copy it anew"
        if "signature not found" in error:
            return f"{self.path} is not an HDF5 file, or is cut off within its first bytes ({self.watched.size} bytes)"
        return f"HDF5 file {self.path} cannot be opened: {error}"

    def check(self) -> None:
        """RunFailed if the file has changed since it was first opened."""
        self.watched.check(self.descriptor())

    def try_out(self, look: Callable[[Any], object]) -> None:
        """Have a forked process look into the file first; a sentence where that process does not survive it.

        HDF5's library loops for ever, or crashes, on some damages to its metadata, such as a heap of texts whose sizes
        are wrong. What else is wrong with a file, this process finds by itself afterwards.
        """
        h5py = _h5py()
        with h5py._objects.phil:  # the library's lock: another thread that held it would not let go in the child
            pid = os.fork()
            if pid == 0:
                with contextlib.suppress(BaseException):
                    faulthandler.disable()  # its crash is an answer
                    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
                    resource.setrlimit(resource.RLIMIT_CPU, (_SECONDS_TO_LOOK, _SECONDS_TO_LOOK + 1))
                    signal.signal(signal.SIGXCPU, signal.SIG_DFL)
                    signal.signal(signal.SIGALRM, signal.SIG_DFL)
                    signal.alarm(_SECONDS_TO_OPEN)
                    with h5py.File(self.path, "r", locking=False) as file:
                        look(file)
                os._exit(0)
        _, status = os.waitpid(pid, 0)
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM:
            raise UserError(
                f"HDF5 file {self.path}, or a file that its links name, does not open within {_SECONDS_TO_OPEN} s; it "
                f"may be a pipe, or lie on a disk that does not answer"
            )
        if os.WIFSIGNALED(status):
            how = "has no end with" if os.WTERMSIG(status) == signal.SIGXCPU else "crashes on"
            raise UserError(
                f"HDF5 file {self.path} is damaged: the HDF5 library {how} what it says of its datasets; "
                f"copy or write it again"
            )

    @contextlib.contextmanager
    def sentences(self) -> Iterator[None]:
        """Turns what h5py and numpy raise for damaged metadata, of many types and without the file's name, into a
        sentence that has it."""
        try:
            yield
        except (OSError, RuntimeError, LookupError, ValueError, TypeError, AttributeError, ArithmeticError) as error:
            self.watched.look()
            if is_of_machine(error):
                raise unreadable_here(self.path, str(error)) from None
            why = " ".join(str(error.args[-1] if error.args else type(error).__name__).split())
            raise UserError(f"HDF5 file {self.path} is damaged: {why}; copy or write it again") from None
        except MemoryError:
            raise UserError(f"HDF5 file {self.path} has rows that are larger than memory; write it again") from None


class Rows:
    """The rows of a dataset, each of `shape` and `dtype`; `chunk` of them are best read together."""

    def __init__(self, file: H5File, dataset: Any) -> None:
        self.file, self.name = file, str(dataset.name)
        self.shape, self.dtype = tuple(dataset.shape[1:]), dataset.dtype
        self.size = self.dtype.itemsize * int(np.prod(self.shape, dtype=np.int64))
        self.count = int(dataset.shape[0])
        self.unit = int(dataset.chunks[0]) if dataset.chunks else max(1, NEIGHBOURS // self.size)
        self.chunk = self.unit * max(1, NEIGHBOURS // (self.unit * self.size))
        self._starts = self._checked(dataset, _starts(file, dataset, self.unit))
        self._slots, self._packing = None, chunks.Packing.of(dataset)
        if self._starts is None:
            self.unit = self.unit if dataset.chunks else max(1, self.unit // 4)
            key = f"{file.watched.key} {self.name}"
            self._slots = Slots(key, -(-self.count // self.unit), (self.unit, *self.shape), self.dtype, self._load)

    def _checked(self, dataset: Any, starts: Numbers | None) -> Numbers | None:
        """The places in the file, if the first and the last row are really there."""
        if starts is None:
            return None
        self._starts = starts
        ends = np.array([0, self.count - 1])
        found = np.empty((2, *self.shape), self.dtype)
        try:
            self._take_from_file(ends, found)
        except RunFailed:
            return None
        wanted = np.empty_like(found)
        wanted[0], wanted[1] = dataset[0], dataset[self.count - 1]
        return starts if found.tobytes() == wanted.tobytes() else None

    def take(self, ids: Numbers, into: NDArray[Any]) -> None:
        """Writes the rows of these numbers, in their order. ValueError(number, why) where one cannot be read."""
        self.file.check()
        unique, first, inverse = np.unique(ids, return_index=True, return_inverse=True)
        if self._slots is None:
            self._take_from_file(unique, into, first)
        else:
            self._slots.take(unique, first, into)
        if len(unique) < len(ids):
            again = np.flatnonzero(first[inverse] != np.arange(len(ids)))
            into[again] = into[first[inverse[again]]]

    def span(self, start: int, stop: int) -> bytes:
        """Neighbouring rows as bytes. The file is not checked: whoever asks for many does that once."""
        into = np.empty((stop - start, *self.shape), self.dtype)
        if self._slots is not None:
            self._slots.span(start, stop, into)
            return into.tobytes()
        assert self._starts is not None
        view, row = memoryview(into.reshape(-1).view(np.uint8).data), start
        while row < stop:
            unit, inside = divmod(row, self.unit)
            many = min(stop - row, self.unit - inside)
            begin = (row - start) * self.size
            offset = int(self._starts[unit]) + inside * self.size
            self._fill(self.file.descriptor(), view[begin : begin + many * self.size], offset)
            row += many
        return into.tobytes()

    def _take_from_file(self, unique: Numbers, into: NDArray[Any], places: Numbers | None = None) -> None:
        """Reads sorted rows to these places of `into`, a run of neighbours in the file at a time."""
        assert self._starts is not None
        where = self._starts[unique // self.unit] + unique % self.unit * self.size
        places = np.arange(len(unique)) if places is None else places
        apart = (np.diff(where) != self.size) | (np.diff(places) != 1)
        runs = [0, *(np.flatnonzero(apart) + 1).tolist(), len(unique)]
        view = memoryview(into.reshape(-1).view(np.uint8).data)
        file, offsets, to = self.file.descriptor(), where[runs[:-1]].tolist(), places[runs[:-1]].tolist()
        for number, offset in enumerate(offsets):
            begin = to[number] * self.size
            self._fill(file, view[begin : begin + (runs[number + 1] - runs[number]) * self.size], offset)

    def _fill(self, file: int, view: memoryview, offset: int) -> None:
        read = os.preadv(file, [view], offset)
        while read < len(view):  # the kernel gives at most 2 GiB at once, a network file system sometimes less
            more = os.preadv(file, [view[read:]], offset + read)
            if not more:
                self.file.watched.look()
                raise RunFailed(changed(self.file.path, f"it ends before byte {offset + len(view)}"))
            read += more

    def _load(self, unit: int, into: NDArray[Any]) -> int:
        """Reads a whole chunk of rows, and says how many it has; OSError if it cannot be unpacked."""
        start, stop = unit * self.unit, min(self.count, (unit + 1) * self.unit)
        try:
            chunks.read(self.file.library()[self.name], self._packing, start, stop, into)
        except OSError as error:
            self.file.watched.look()
            if is_of_machine(error):
                raise unreadable_here(self.file.path, str(error)) from None
            raise ValueError(start, stop, f"{self.name} cannot be read there ({error})") from None
        return stop - start


def _starts(file: H5File, dataset: Any, unit: int) -> Numbers | None:
    """Where in the file each chunk begins; None if rows cannot be read from there as they are."""
    starts = chunks.places(dataset)
    alone = dataset.file.filename == str(file.path) and not dataset.is_virtual and dataset.external is None
    if not alone or dataset.file.userblock_size:
        return None
    units = -(-dataset.shape[0] // unit)
    if dataset.chunks is None:
        offset = dataset.id.get_offset()
        if offset is None or offset + dataset.nbytes > file.watched.size:
            return None
        size = dataset.dtype.itemsize * int(np.prod(dataset.shape[1:], dtype=np.int64))
        return offset + np.arange(units) * unit * size
    plain = dataset.id.get_create_plist().get_nfilters() == 0
    return starts if plain and dataset.chunks[1:] == dataset.shape[1:] else None


def _h5py() -> Any:
    try:
        return importlib.import_module("h5py")
    except ImportError:
        raise UserError("HDF5 files are read by h5py, which is not installed; pip install 'meshrun[images]'") from None

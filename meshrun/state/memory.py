"""A rank's state in its node's memory: where a save is staged, and the spare copy that outlives the process.

    staging = Staging(run.memory_of(node) / "rank-00000.safetensors")
    room = staging.room(size)            # bytes to fill; what was there before is no longer valid
    staging.mark(index)                  # and now it is, also after kill -9
    memory_files(run.memory_of(node))    # what is complete there, newest step first

The file is an image of what goes to disk. Beside it lies its index, which is there only while the image is whole.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshrun.state.manifest import Entry, Index, Unfit, content
from meshrun.state.region import Region
from meshrun.state.shards import bytes_of, write_buffers


@dataclass(frozen=True)
class MemoryFile:
    """A complete file in a node's memory."""

    path: Path
    index: Index

    @property
    def step(self) -> int:
        return self.index.step

    @property
    def rank(self) -> int:
        return self.index.rank

    @property
    def state(self) -> dict[str, Any]:
        return self.index.state

    @property
    def pieces(self) -> list[Entry]:
        return self.index.entries


def memory_files(folder: Path) -> list[MemoryFile]:
    """Snapshots and last words that are whole, newest step first; what cannot be read is passed over."""
    found: list[MemoryFile] = []
    # Anybody may make folders in memory: one of somebody else is not where our ranks left anything.
    if not folder.is_dir() or folder.stat().st_uid != os.getuid():
        return found
    for path in sorted(folder.glob("*-*.json")):
        try:
            index = Index.decode(content(path))
            image = (folder / index.name).stat()
            if path.with_suffix(".safetensors").name == index.name and image.st_size >= index.file.bytes:
                found.append(MemoryFile(folder / index.name, index))
        except (OSError, Unfit):
            continue
    return sorted(found, key=lambda file: (-file.step, file.rank))


def of_one_moment(folders: Sequence[Path], step: int) -> list[MemoryFile]:
    """The files of a step, by rank, that fit together: of one mesh, and after the same batches.

    A run that went on from this step on another mesh, or a second time, may have left a few of its own already; those
    that hold most are the state that it went on from.
    """
    files: dict[str, MemoryFile] = {}
    for file in (file for folder in folders for file in memory_files(folder) if file.step == step):
        files.setdefault(file.index.name, file)
    together = {index.name for index in fitting([file.index for file in files.values()])}
    return sorted((file for name, file in files.items() if name in together), key=lambda file: file.rank)


def fitting(indices: Sequence[Index]) -> list[Index]:
    """Of the indices of one step, those of one mesh and of the same batches: the group that holds most.

    Evaluating changes buffers, so that before and after it are two moments of the same step.
    """
    groups: dict[str, list[Index]] = {}
    for index in indices:
        way = (index.world, index.layout, index.state.get("skipped"), index.state.get("evaluated"))
        groups.setdefault(repr(way), []).append(index)
    return max(groups.values(), key=lambda group: sum(index.file.bytes for index in group), default=[])


def write_image(path: Path, header: bytes, regions: Sequence[Region], index: Index) -> None:
    """Write regions that lie anywhere, as an image with its index."""
    forget(path)
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    in_order = sorted(zip(index.entries, regions, strict=True), key=lambda pair: pair[0].offset)
    write_buffers(path, [memoryview(header), *(bytes_of(region.tensor) for _, region in in_order)], sync=False)
    mark(path, index)


def mark(path: Path, index: Index) -> None:
    """Say that an image is whole."""
    beside = path.with_name(f".{path.stem}.json.{os.getpid()}")
    beside.write_bytes(index.encode())
    beside.replace(path.with_suffix(".json"))


def forget(path: Path) -> None:
    """Say that an image is no longer whole."""
    path.with_suffix(".json").unlink(missing_ok=True)


class Staging:
    """Room in host memory for one rank's image, kept for the next one."""

    def __init__(self, path: Path | None, cuda: bool = False) -> None:
        self.path, self.notes = path, list[str]()
        self._cuda = cuda
        self._room = torch.empty(0, dtype=torch.uint8)
        self._pinned = 0

    def room(self, size: int) -> Tensor:
        """So many bytes to fill. An image that was there before is no longer valid."""
        if self.path is not None:
            with contextlib.suppress(OSError):
                forget(self.path)
        if self._room.numel() < size:
            self.release()
            self._room = self._mapped(size)
            self._pin()
        return self._room[:size]

    def filled(self, size: int) -> Tensor:
        """The bytes that were filled last."""
        return self._room[:size]

    def mark(self, index: Index) -> None:
        """Say that the image is whole; without a file there is nobody to tell."""
        if self.path is not None:
            mark(self.path, index)

    def release(self) -> None:
        """Give the memory back; the file stays."""
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._pinned)
            self._pinned = 0
        self._room = torch.empty(0, dtype=torch.uint8)

    def _mapped(self, size: int) -> Tensor:
        if self.path is not None:
            try:
                return torch.frombuffer(_map(self.path, size), dtype=torch.uint8)
            except OSError as error:
                self.notes.append(
                    f"no spare copy of the state is kept in memory: {self.path.parent} has no room for "
                    f"{size / 1e9:.2f} GB: {error.strerror} (--no-spare)"
                )
                with contextlib.suppress(OSError):
                    self.path.unlink(missing_ok=True)
                self.path = None
        return torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)

    def _pin(self) -> None:
        """Let a GPU copy into it by itself, beside the host; where that is refused, the driver copies in between."""
        if self._cuda and self._room.numel():
            address = self._room.data_ptr()
            status = torch.cuda.cudart().cudaHostRegister(address, self._room.numel(), 0)
            self._pinned = address if int(status) == 0 else 0


def _map(path: Path, size: int) -> mmap.mmap:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        # Memory that is not there must be an error now, and not a signal at the first byte that is written to it.
        os.posix_fallocate(file, 0, size)
        os.ftruncate(file, size)
        return mmap.mmap(file, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    finally:
        os.close(file)

"""A checkpoint: the state of a run at a step, of which any rank of any layout reads what it needs.

    checkpoint = Checkpoint.open(run.checkpoints / "step-00000120")
    checkpoint.step, checkpoint.state, checkpoint.tensors
    checkpoint.read(region)                  # fills this rank's rectangle, whoever wrote which part of it
    checkpoint.verify()                      # [] when every byte is as it was written

A folder holds `manifest.json` and one safetensors file a rank. Nothing in it is trusted: what does not fit together, or
is not what was written, is a BadCheckpoint. The same code reads what ranks keep in their nodes' memory (`memory`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshrun.errors import UserError
from meshrun.state.manifest import Index, Info, Manifest, Piece, Unfit, content
from meshrun.state.memory import of_one_moment
from meshrun.state.region import Box, Region
from meshrun.state.shards import CHUNK, Damaged, Reader, memory_of

__all__ = ["BadCheckpoint", "Checkpoint", "Region"]

MANIFEST = "manifest.json"
MOST_OPEN = 64
"""Files that are held open at a time."""


class BadCheckpoint(UserError):
    """A checkpoint that cannot be used: which one, which file of it, and why."""


class Checkpoint:
    """State on disk or in memory; see the module."""

    def __init__(self, path: Path, manifest: Manifest, folders: dict[str, Path]) -> None:
        self.path, self.manifest = path, manifest
        self._folders = folders
        self._readers: dict[str, Reader] = {}
        self._scratch: Tensor | None = None

    @classmethod
    def open(cls, folder: Path) -> Checkpoint:
        """Read what the checkpoint says of itself."""
        path = folder / MANIFEST
        try:
            manifest = Manifest.decode(content(path))
        except OSError as error:
            raise BadCheckpoint(f"cannot read checkpoint {folder}: {MANIFEST}: {error.strerror}") from None
        except Unfit as unfit:
            raise BadCheckpoint(f"cannot use checkpoint {folder}: {MANIFEST} {unfit}") from None
        return cls(folder, manifest, dict.fromkeys(manifest.files, folder))

    @classmethod
    def from_memory(cls, folders: Sequence[Path], step: int) -> Checkpoint:
        """The state of a step as ranks left it in the memory of their nodes; maybe not all of it (`covers`)."""
        files = of_one_moment(folders, step)
        if not files:
            raise BadCheckpoint(f"there is nothing of step {step} in {', '.join(map(str, folders))}")
        found = cls.of_indices(folders[0], [file.index for file in files])
        found._folders = {file.index.name: file.path.parent for file in files}
        return found

    @classmethod
    def of_indices(cls, folder: Path, indices: Sequence[Index]) -> Checkpoint:
        """What these files hold, wherever they are: to be looked at, not read."""
        try:
            return cls(folder, Manifest.of(indices), {index.name: folder for index in indices})
        except Unfit as unfit:
            raise BadCheckpoint(f"cannot use step {indices[0].step} in {folder}: {unfit}") from None

    @property
    def step(self) -> int:
        return self.manifest.step

    @property
    def layout(self) -> str:
        return self.manifest.layout

    @property
    def world(self) -> int:
        return self.manifest.world

    @property
    def state(self) -> dict[str, Any]:
        return self.manifest.state

    @property
    def tensors(self) -> dict[str, Info]:
        return self.manifest.tensors

    @property
    def bytes(self) -> int:
        """Of all files."""
        return sum(file.bytes for file in self.manifest.files.values())

    def read(self, region: Region) -> None:
        """Fill a region's memory; numbers of another type are converted."""
        tensor = region.tensor.detach()
        if tensor.numel() == 0:
            return
        info = self._info(region.name)
        if info.shape != tuple(region.shape):
            raise BadCheckpoint(
                f"cannot use checkpoint {self.path}: {region.name!r} has the shape {list(info.shape)} in it "
                f"and {list(region.shape)} in this run"
            )

        def fill(piece: Piece, part: Box) -> None:
            at = tuple(
                slice(begin - origin, begin - origin + extent)
                for begin, extent, origin in zip(*part, region.start, strict=True)
            )
            corner = tuple(begin - origin for begin, origin in zip(part.start, piece.box.start, strict=True))
            try:
                self._copy(self._reader(piece.file), info.dtype, piece.offset, piece.box.size, corner, tensor[at])
            except Damaged as damage:
                raise BadCheckpoint(f"checkpoint {self.path} is damaged: {damage}") from None

        if _each_part(region.box, info.pieces, fill):
            raise BadCheckpoint(f"checkpoint {self.path} has only a part of {region.name!r}")

    def whole(self, name: str) -> Tensor:
        """A tensor, all of it."""
        info = self._info(name)
        try:
            for file in self.files_for(name, (0,) * len(info.shape), info.shape):
                self._reader(file)  # before any memory is asked for: a missing file has no tensor to hold
        except Damaged as damage:
            raise BadCheckpoint(f"checkpoint {self.path} is damaged: {damage}") from None
        if not self.covers(name, (0,) * len(info.shape), info.shape):  # nor has a shape that no file holds
            raise BadCheckpoint(f"checkpoint {self.path} has only a part of {name!r}")
        try:
            tensor = torch.empty(info.shape, dtype=info.dtype)
        except RuntimeError:
            raise BadCheckpoint(f"there is no memory for {name!r} of checkpoint {self.path}") from None
        self.read(Region.whole(name, tensor))
        return tensor

    def covers(self, name: str, start: Sequence[int], size: Sequence[int]) -> bool:
        """Whether this rectangle of a tensor is in it."""
        if math.prod(size) == 0:
            return True
        info = self.tensors.get(name)
        if info is None or len(info.shape) != len(size):
            return False
        return not _each_part(Box(tuple(start), tuple(size)), info.pieces, lambda *_: None)

    def files_for(self, name: str, start: Sequence[int], size: Sequence[int]) -> set[str]:
        """The files that this rectangle is read from."""
        found: set[str] = set()
        _each_part(Box(tuple(start), tuple(size)), self.tensors[name].pieces, lambda piece, _: found.add(piece.file))
        return found

    def verify(self, progress: Callable[[int], None] = lambda _: None) -> list[str]:
        """Every problem of every file; `progress` hears how many bytes were done."""
        found = []
        for name, file in self.manifest.files.items():
            try:
                reader = Reader(self._folders[name] / name, file.bytes, file.blocks)
            except Damaged as damage:
                found.append(str(damage))
                progress(file.bytes)
                continue
            found += reader.problems(progress)
            reader.close()
        return found

    def close(self) -> None:
        """Give files and memory back; reading again opens them again."""
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()
        self._scratch = None

    def _info(self, name: str) -> Info:
        if name not in self.tensors:
            raise BadCheckpoint(f"checkpoint {self.path} has no tensor {name!r}")
        return self.tensors[name]

    def _reader(self, name: str) -> Reader:
        reader = self._readers.pop(name, None)
        if reader is None:
            if len(self._readers) >= MOST_OPEN:
                self._readers.pop(next(iter(self._readers))).close()
            file = self.manifest.files[name]
            reader = Reader(self._folders[name] / name, file.bytes, file.blocks)
        self._readers[name] = reader
        return reader

    def _copy(
        self,
        reader: Reader,
        dtype: torch.dtype,
        offset: int,
        size: tuple[int, ...],
        corner: tuple[int, ...],
        into: Tensor,
    ) -> None:
        """Fill a tensor with the rectangle at a corner of a piece, which has a size and lies at an offset."""
        if not into.dim():
            into, size, corner = into.reshape(1), (1,), (0,)
        row = math.prod(size[1:]) * dtype.itemsize
        begin = offset + corner[0] * row
        in_one_run = tuple(into.shape[1:]) == size[1:]
        if in_one_run and into.device.type == "cpu" and into.is_contiguous() and into.dtype == dtype:
            reader.read_into(begin, memory_of(into))
        elif row <= CHUNK:
            inner = (slice(None), *(slice(at, at + n) for at, n in zip(corner[1:], into.shape[1:], strict=True)))
            rows = max(1, CHUNK // row)
            for first in range(0, into.shape[0], rows):
                count = min(rows, into.shape[0] - first)
                found = self._read_rows(reader, begin + first * row, count * row, into.device)
                into[first : first + count].copy_(found.view(dtype).view(count, *size[1:])[inner])
        elif into.dim() == 1 or not in_one_run or not into.is_contiguous():
            for number in range(into.shape[0]):
                self._copy(reader, dtype, begin + number * row, size[1:], corner[1:], into[number])
        else:
            flat = into.view(-1)
            self._copy(reader, dtype, begin, (flat.numel(),), (0,), flat)

    def _read_rows(self, reader: Reader, offset: int, length: int, device: torch.device) -> Tensor:
        if self._scratch is None:
            # The chunk that a GPU copies from is pinned, else the driver copies it once more.
            self._scratch = torch.empty(CHUNK, dtype=torch.uint8, pin_memory=device.type == "cuda")
        found = self._scratch[:length]
        reader.read_into(offset, found.numpy().data)
        return found


def _each_part(wanted: Box, pieces: Iterable[Piece], fill: Callable[[Piece, Box], None]) -> list[Box]:
    """Hand out a rectangle to the pieces that have parts of it, each part once; returns what no piece has."""
    left = [wanted]
    for piece in pieces:
        rest: list[Box] = []
        for box in left:
            part = box.common(piece.box)
            if part is None:
                rest.append(box)
            else:
                fill(piece, part)
                rest += box.without(part)
        left = rest
        if not left:
            break
    return left

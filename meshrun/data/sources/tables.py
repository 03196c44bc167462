"""Tables: rows by number, from files of any size in the formats that people keep them in.

    train = Table("news.jsonl", columns=["document", "summary"], transform=lambda row: encode(row["document"], …))
    train = Table("parts/", transform=sample)          # part-0000.parquet, part-0001.parquet, …: one table
    train = Table("saved/train", transform=sample)     # what `datasets` has saved with save_to_disk

A row is a dict by column; `transform` makes the sample of it. Numbers come as numbers, texts as str, lists as lists,
lists of a fixed size as arrays. Files are mapped and nothing is kept a row: a billion rows start as fast as a thousand.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from meshrun.data.sources.lines import Lines
from meshrun.errors import UserError

KINDS = {
    ".jsonl": "lines",
    ".ndjson": "lines",
    ".jsonl.gz": "lines",
    ".ndjson.gz": "lines",
}
"""What a file is, by how its name ends."""
_READ_TOGETHER = 1 << 20
"""Bytes of neighbouring rows that are best read one after the other."""

Row = dict[str, Any]


class Part(Protocol):
    """The rows of one file, by their number in it."""

    path: Path
    size: int

    def __len__(self) -> int: ...

    def rows(self, ids: NDArray[np.int64]) -> list[Row]: ...

    def lengths(self, column: str, ids: NDArray[np.int64]) -> Sequence[int] | NDArray[np.int64]: ...


class Table:
    """Rows of a file or of a folder of them. `lengths` names the column whose length a sample's is taken for."""

    def __init__(
        self,
        path: Path | str,
        *,
        columns: Sequence[str] | None = None,
        transform: Callable[[Row], Any] | None = None,
        lengths: str | None = None,
    ) -> None:
        if isinstance(columns, str):
            raise UserError(f"columns of Table({str(path)!r}) is the text {columns!r}; it must be a list of names")
        self.path = Path(path).expanduser()
        self.columns = None if columns is None else tuple(columns)
        self.transform, self.length_of = transform, lengths
        self.light = transform is None
        self._parts: list[Part] = []
        self._open()

    def _open(self) -> None:
        kind, files = files_of(self.path)
        first = 0
        for file in files:
            part = Lines(file, first, self.columns)
            first += len(part)
            self._parts.append(part)
        self._ends = np.cumsum([len(part) for part in self._parts], dtype=np.int64)
        if not first:
            raise UserError(f"{self.path} has no rows; a table must have at least one")
        bytes_a_row = max(1, sum(part.size for part in self._parts) // first)
        self.chunk = max(1, _READ_TOGETHER // bytes_a_row)
        meant = ([(part.path.name, part.size, len(part)) for part in self._parts], self.columns)
        self.fingerprint = hashlib.sha256(repr(meant).encode()).hexdigest()[:16]

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> Any:
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)} of {self.path}")
        return self.__getitems__([index % len(self)])[0]

    def __getitems__(self, ids: Sequence[int] | NDArray[np.int64]) -> list[Any]:
        rows: list[Any] = [None] * len(ids)
        for part, places, within in self._placed(ids):
            for place, row in zip(places, part.rows(within), strict=True):
                rows[place] = row
        return rows if self.transform is None else [self.transform(row) for row in rows]

    def lengths(self, ids: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
        """How long the samples are: elements of a list, bytes of a text."""
        if self.length_of is None:
            raise UserError(f"Table({str(self.path)!r}) does not know how long samples are; name a column, lengths=…")
        found = np.empty(len(ids), np.int64)
        for part, places, within in self._placed(ids):
            found[places] = part.lengths(self.length_of, within)
        return found

    def _placed(self, ids: Sequence[int] | NDArray[np.int64]) -> list[tuple[Part, Sequence[int], NDArray[np.int64]]]:
        """Each part that has some of these rows, with their places among the ids and their numbers in the part."""
        wanted = np.asarray(ids, np.int64)
        if len(self._parts) == 1:
            return [(self._parts[0], range(len(wanted)), wanted)]
        of_part = np.searchsorted(self._ends, wanted, side="right")
        found = []
        for number in np.unique(of_part).tolist():
            part, places = self._parts[number], np.flatnonzero(of_part == number)
            first = int(self._ends[number]) - len(part)
            found.append((part, places.tolist(), wanted[places] - first))
        return found


def files_of(path: Path) -> tuple[str, list[Path]]:
    """What kind of files these are, and which: the one itself, or those of a folder by their names."""
    if path.is_file():
        kind = kind_of(path)
        if kind is None:
            raise UserError(f"{path} is no table that is known; its name must end with {', '.join(KINDS)}")
        return kind, [path]
    if not path.is_dir():
        raise UserError(f"there is no table {path}; give a file, or a folder with parts of a table")
    files = sorted(each for each in path.iterdir() if each.name[0] not in "._" and kind_of(each))
    kinds = sorted({kind_of(each) or "" for each in files})
    if not files:
        raise UserError(f"{path} has no parts of a table; their names must end with {', '.join(KINDS)}")
    if len(kinds) > 1:
        raise UserError(f"{path} has parts of several kinds, {' and '.join(kinds)}; give a folder with one kind")
    return kinds[0], files


def kind_of(path: Path) -> str | None:
    """By the end of its name; None for what is no table."""
    name = path.name.lower()
    return next((kind for end, kind in KINDS.items() if name.endswith(end)), None)

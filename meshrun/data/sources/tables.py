"""Tables: rows by number, from files of any size in the formats that people keep them in.

    train = Table("news.jsonl", columns=["document", "summary"], transform=lambda row: encode(row["document"], …))
    train = Table("parts/", transform=sample)          # part-0000.parquet, part-0001.parquet, …: one table
    train = Table("saved/train", transform=sample)     # what `datasets` has saved with save_to_disk

A row is a dict by column; `transform` makes the sample of it. Numbers come as numbers, texts as str, lists as lists,
lists of a fixed size as arrays. Files are mapped and nothing is kept a row: a billion rows start as fast as a thousand.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from meshrun.data.sources.lines import Lines
from meshrun.data.sources.mapped import fingerprint
from meshrun.data.sources.saved import is_saved, saved
from meshrun.data.sources.source import changed, inside, refuse_missing
from meshrun.errors import RunFailed, UserError

KINDS = {
    ".jsonl": "lines",
    ".jsonl.gz": "lines",
    ".ndjson": "lines",
    ".ndjson.gz": "lines",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".csv": "csv",
    ".csv.gz": "csv",
    ".tsv": "csv",
    ".tsv.gz": "csv",
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

    def names(self) -> list[str]: ...

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
        self._open()

    @property
    def draws(self) -> bool:
        """Whether a sample may be drawn at random."""
        return self.transform is not None

    def _open(self) -> None:
        kind, files, picked = files_of(self.path)
        self._parts = parts_of(self.path, kind, files, self.columns)
        self._ends = np.cumsum([len(part) for part in self._parts], dtype=np.int64)
        rows = int(self._ends[-1])
        self._picked = _numbers(picked, rows) if picked else None
        if len(self) == 0:
            raise UserError(f"{self.path} has no rows; a table must have at least one")
        self._refuse_missing()
        self.chunk = max(1, _READ_TOGETHER * rows // max(1, sum(part.size for part in self._parts)))
        self.fingerprint = fingerprint([*files, *picked], str(rows))

    def _refuse_missing(self) -> None:
        first = next(part for part in self._parts if len(part))
        if there := first.names():
            asked = (*(self.columns or ()), *((self.length_of,) if self.length_of is not None else ()))
            refuse_missing(first.path, asked, there)

    def __getstate__(self) -> dict[str, Any]:
        opened = ("_parts", "_ends", "_picked")
        return {name: value for name, value in self.__dict__.items() if name not in opened}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()
        if self.fingerprint != state["fingerprint"]:
            raise RunFailed(changed(self.path, "another process finds other rows"))

    def __len__(self) -> int:
        return int(self._ends[-1]) if self._picked is None else len(self._picked)

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

    def _placed(
        self, ids: Sequence[int] | NDArray[np.int64]
    ) -> list[tuple[Part, Sequence[int] | NDArray[np.int64], NDArray[np.int64]]]:
        """Each part that has some of these rows, with their places among the ids and their numbers in the part."""
        wanted = inside(ids, len(self))
        if self._picked is not None:
            wanted = self._picked[wanted]
        if len(self._parts) == 1:
            return [(self._parts[0], range(len(wanted)), wanted)]
        of_part = np.searchsorted(self._ends, wanted, side="right")
        found: list[tuple[Part, Sequence[int] | NDArray[np.int64], NDArray[np.int64]]] = []
        for number in np.unique(of_part).tolist():
            part, places = self._parts[number], np.flatnonzero(of_part == number)
            found.append((part, places, wanted[places] - (int(self._ends[number]) - len(part))))
        return found


def files_of(path: Path) -> tuple[str, list[Path], list[Path]]:
    """What kind of files these are; which: the one itself, or those of a folder by their names; and files that
    pick rows of them, if not all are meant."""
    try:
        is_file = path.is_file()
    except OSError as error:  # a name that is too long, a folder that may not be looked into
        raise UserError(f"table {path!s:.200} cannot be read: {error.strerror}") from None
    if is_file:
        kind = kind_of(path)
        if kind is None:
            raise UserError(f"{path} is no table of a known kind; its name must end with {', '.join(KINDS)}")
        return kind, [path], []
    if not path.is_dir():
        raise UserError(f"there is no table {path}; give a file, or a folder with the parts of a table")
    if is_saved(path):
        return "arrow", *saved(path)
    files = sorted(each for each in path.iterdir() if each.name[0] not in "._" and kind_of(each))
    kinds = {kind_of(each): "".join(each.suffixes[-2:]) for each in files}
    if not files:
        raise UserError(f"folder {path} has no parts of a table; their names must end with {', '.join(KINDS)}")
    if (odd := next((each for each in files if not each.is_file()), None)) is not None:
        raise UserError(f"{odd} is no plain file, or a link to nothing; remove it: each part of a table must be a file")
    if len(kinds) > 1:
        raise UserError(f"folder {path} has parts of several kinds, {' and '.join(kinds.values())}; keep them apart")
    return kind_of(files[0]) or "", files, []


def kind_of(path: Path) -> str | None:
    """By the end of its name; None for what is no table."""
    name = path.name.lower()
    return next((kind for end, kind in KINDS.items() if name.endswith(end)), None)


def parts_of(table: Path, kind: str, files: Sequence[Path], columns: Sequence[str] | None) -> list[Part]:
    """The files, opened, with the numbers of their rows running on from one to the next."""
    first = 0
    if kind == "lines":
        lines: list[Part] = []
        for file in files:
            lines.append(Lines(file, first, columns))
            first += len(lines[-1])
        return lines
    if importlib.util.find_spec("pyarrow") is None:
        raise UserError(f"{table} can only be read with pyarrow; pip install 'meshrun[tables]'")
    from meshrun.data.sources.columns import Columns, NotPlain, refuse_others
    from meshrun.data.sources.turned import SMALL, turned

    opened: list[Columns] = []
    small = sum(file.stat().st_size for file in files) <= SMALL
    for file in files:
        try:
            part = Columns(file, first, columns, None if kind == "arrow" else turned(file, kind, columns, small))
        except NotPlain:
            part = Columns(file, first, columns, turned(file, kind, columns, small))
        refuse_others(part, opened[0] if opened else part)
        opened.append(part)
        first += len(part)
    return list[Part](opened)


def _numbers(files: Sequence[Path], rows: int) -> NDArray[np.int64]:
    """The rows that are meant, as `datasets` saves them: tables of one column of numbers."""
    from meshrun.data.sources.columns import Columns

    numbers = np.concatenate([Columns(file, 0, None).numbers() for file in files])
    if len(numbers) and numbers.dtype.kind not in "iu":
        raise UserError(f"{files[0]} picks rows by {numbers.dtype} and not by whole numbers; save the dataset again")
    if len(numbers) and not 0 <= int(numbers.min()) <= int(numbers.max()) < rows:
        raise UserError(f"{files[0]} picks rows beyond the {rows:,} that there are; save the dataset again")
    return numbers.astype(np.int64)

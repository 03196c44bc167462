"""Folders that Hugging Face `datasets` has saved with `save_to_disk`, read without that library.

    files, picked = saved(Path("xsum/train"))          # its Arrow files, and the rows of them that it has, if not all

`state.json` names the Arrow files. Older versions may have saved, beside them, files with the numbers of the rows that
were selected. A folder with several splits has one such folder a split.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from meshrun import strict_json
from meshrun.errors import UserError
from meshrun.files import read_plain

STATE = "state.json"
SPLITS = "dataset_dict.json"


def is_saved(folder: Path) -> bool:
    """Whether `datasets` has saved something there."""
    return (folder / STATE).is_file() or (folder / SPLITS).is_file()


def saved(folder: Path) -> tuple[list[Path], list[Path]]:
    """The files with its rows, and those with the numbers of the rows that count: none, where all do."""
    if (folder / SPLITS).is_file():
        splits = _read(folder / SPLITS).get("splits")
        if not isinstance(splits, list):
            raise UserError(f"'splits' in {folder / SPLITS} is no list of names; save the dataset again")
        names = ", ".join(repr(str(folder / str(name)[:80]))[1:-1] for name in splits[:20])
        raise UserError(f"{folder} has several sets; name one of them: {names or 'it lists none'}")
    state = _read(folder / STATE)
    files = _files(folder, state, "_data_files")
    if not files:
        raise UserError(f"{folder / STATE} names no files; save the dataset again with save_to_disk")
    return files, _files(folder, state, "_indices_files") or _files(folder, state, "_indices_data_files")


def _files(folder: Path, state: dict[str, Any], key: str) -> list[Path]:
    found = state.get(key) or []
    try:
        files = [folder / Path(str(each["filename"])).name for each in found]
    except (TypeError, KeyError):
        raise UserError(f"{key!r} in {folder / STATE} is no list of file names; save the dataset again") from None
    for file in files:
        try:
            there = file.is_file()
        except (OSError, ValueError):  # a name that no file can have
            there = False
        if not there:
            raise UserError(f"{folder} is not all there: {file.name}, which {STATE} names, is missing; copy it again")
    return files


def _read(path: Path) -> dict[str, Any]:
    try:
        found = strict_json.loads(read_plain(path))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise UserError(f"{path} is no list of what a dataset has; save the dataset again with save_to_disk")
    return found

"""The end of a conversion: the result gets its name when it is whole, with its checksum beside it.

    free_to_write([Path("news.tokens")], overwrite=False)
    made = finished(parts, dest, {made_file: dest}, "tokens", totals, told)
    problems = checked(Path("news.tokens"), told)         # later: nothing, or what is wrong

`news.tokens.sha256` is what `sha256sum --check` reads.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from meshrun.config import write_whole
from meshrun.data.convert.parts import Parts, unwritable
from meshrun.data.convert.work import Totals
from meshrun.data.download import Told, sum_of
from meshrun.data.sources.token_format import ENDING, read_layout, sha256_of_numbers
from meshrun.errors import UserError
from meshrun.files import read_plain


@dataclass(frozen=True)
class Converted:
    """What was made."""

    destination: Path
    kind: str
    samples: int
    bytes: int
    tokens: int | None
    sha256: str
    bad: int
    resumed: int
    """Parts that an earlier start had left."""
    empty: int
    why: list[str]
    """The first bad samples."""


LONGEST_NAME = 255
"""Bytes of a file's name, on every file system that there is."""


def free_to_write(paths: Iterable[Path], overwrite: bool) -> None:
    """Refuse to write over what is there, unless asked to."""
    for path in paths:
        if path.is_dir():
            raise UserError(f"{path} is a folder; give the name of a file (DEST)")
        if path.exists() and not overwrite:
            raise UserError(f"{path} is there already; give another DEST, or write over it (--overwrite)")


def finished(parts: Parts, dest: Path, files: Mapping[Path, Path], kind: str, totals: Totals, told: Told) -> Converted:
    """Give what was made its names, the result last, and remove its parts."""
    sums = {name: sum_of(made, told) for made, name in files.items()}
    try:
        for made, name in files.items():
            if name != dest:
                made.replace(name)
        write_whole(_sums_beside(dest), "".join(f"{found.sha256}  {name.name}\n" for name, found in sums.items()))
        whole = next(made for made, name in files.items() if name == dest)
        with whole.open("rb") as file:
            os.fsync(file.fileno())
        whole.replace(dest)
    except OSError as error:
        raise unwritable(dest, error, parts.folder) from error
    parts.remove()
    return Converted(
        destination=dest,
        kind=kind,
        samples=totals.samples,
        bytes=sums[dest].size,
        tokens=totals.tokens if kind == "tokens" else None,
        sha256=sums[dest].sha256,
        bad=totals.bad,
        resumed=totals.resumed,
        empty=totals.empty,
        why=totals.why,
    )


def checked(dest: Path, told: Told) -> list[str]:
    """What is wrong with a result and what lies beside it, a sentence each; nothing where all is as it was made."""
    if not dest.is_file():
        raise UserError(f"there is no file {dest} to be checked (--check)")
    sums = _sums_beside(dest)
    try:
        lines = [line.partition("  ") for line in read_plain(sums).decode().splitlines()]
    except FileNotFoundError:
        if not dest.name.endswith(ENDING):
            raise UserError(f"{sums} is not here, which says what {dest} should be (--check)") from None
        return _checked_by_itself(dest)
    except (OSError, ValueError) as error:
        raise UserError(f"{sums} cannot be read: {error} (--check)") from None
    problems = []
    for sha256, _, name in lines:
        if not name or "/" in name or "\0" in name or len(os.fsencode(name)) > LONGEST_NAME:
            raise UserError(f"{sums} names {name!r}, which is no file beside {dest.name} (--check)")
        path = dest.with_name(name)
        if not path.is_file():
            problems.append(f"{path} is not here")
        elif sum_of(path, told).sha256 != sha256:
            problems.append(f"{path} is not as it was made: its sha256 is another than in {sums.name}")
    if dest.name not in {name for _, _, name in lines}:
        problems.append(f"{sums} says nothing of {dest.name}")
    return problems


def _checked_by_itself(dest: Path) -> list[str]:
    """A token file says what the sum of its numbers is."""
    layout = read_layout(dest)
    return (
        [] if sha256_of_numbers(dest, layout) == layout.sha256 else [f"{dest} is not as it was made: its sum is wrong"]
    )


def _sums_beside(dest: Path) -> Path:
    return dest.with_name(f"{dest.name}.sha256")

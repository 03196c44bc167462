"""The list of planted mistakes: which text of which file becomes what, and the tests that are to notice.

    for mutant in planted(ROOT): mutant.applied(source)      # the text of the file with the mistake in it

The list is `*.toml` in this folder, one file a room. A room names the tests of each of its files once, under [tests];
a mutant with `tests` of its own has those instead. Tests are files or node ids, few and fast.
"""

from __future__ import annotations

import difflib
import tomllib
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent


class Stale(Exception):
    """An entry that does not fit the tree: one sentence that names it."""


@dataclass(frozen=True)
class Mutant:
    """One planted mistake."""

    id: str
    room: str
    file: str
    old: str
    new: str
    unnoticed: str
    """What nobody would notice if no test failed."""
    tests: tuple[str, ...]

    def applied(self, source: str) -> str:
        """The file's text with the mistake in it; refuses an entry that does not match exactly once."""
        count = source.count(self.old)
        if count != 1:
            raise Stale(f"{self.id}: its old text is {count} times in {self.file}; it must be there once")
        if self.old == self.new:
            raise Stale(f"{self.id}: its new text is the old one")
        return source.replace(self.old, self.new)

    def difference(self, source: str) -> str:
        """What is changed, as a diff shows it."""
        lines = difflib.unified_diff(
            source.splitlines(), self.applied(source).splitlines(), self.file, self.file, n=1, lineterm=""
        )
        return "\n".join(lines)


def planted(folder: Path = FOLDER) -> list[Mutant]:
    """All mutants, room by room."""
    found: list[Mutant] = []
    for path in sorted(folder.glob("*.toml")):
        document = tomllib.loads(path.read_text())
        for entry in document["mutant"]:
            tests = entry.pop("tests", None) or document["tests"].get(entry["file"])
            if not tests:
                raise Stale(f"{entry['id']}: neither it nor [tests] of {path.name} says which tests are to notice")
            found.append(Mutant(room=path.stem, tests=tuple(tests), **entry))
    return found

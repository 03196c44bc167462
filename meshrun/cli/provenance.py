"""Where a run comes from, for its record: every option with its value, the program's text, and its git commit.

options_used(target.function(), {"width": 256})      # {"width": 256, "lr": 0.001}: defaults too
program_of(target.path)                              # {"path": …, "sha256": …, "text": …, "git": {…}}
name_of(experiment.schedule)                         # "<lambda> in digits.py, line 31": no address in memory
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import re
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from meshrun.cli.options import to_document

MOST_TEXT = 256 << 10
"""Bytes of a program that are kept as text."""
GIT_WITHIN = 2.0
"""Seconds in which git answers, on a disk that may be slow; the run starts all the same."""


def options_used(function: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The value of every parameter of an experiment function, as config.json holds it."""
    found = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if name in given:
            found[name] = given[name]
        elif parameter.default is not parameter.empty:
            value = parameter.default
            is_plain = value is None or isinstance(value, bool | int | float | str | list | tuple | Path)
            found[name] = to_document(value) if is_plain or hasattr(value, "value") else name_of(value)
    return found


def name_of(value: Any) -> str:
    """What a function, a class or an object is called, and where it is written; the same in every process."""
    if isinstance(value, functools.partial):
        return f"partial of {name_of(value.func)}"
    code = getattr(value, "__code__", None)
    if code is not None:
        name = value.__qualname__.rpartition(".")[2]
        return f"{name} in {Path(code.co_filename).name}, line {code.co_firstlineno}"
    if isinstance(value, type) or hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))[:500]


def program_of(path: Path) -> dict[str, Any]:
    """The file of a program as it is now, with the commit of the repository that it lies in."""
    try:
        data = path.read_bytes()
    except OSError:
        return {"path": str(path)}
    text = data.decode(errors="replace") if len(data) <= MOST_TEXT else None
    return {"path": str(path), "sha256": hashlib.sha256(data).hexdigest(), "text": text, "git": _git(path)}


def _git(path: Path) -> dict[str, Any] | None:
    """The commit that is checked out, and whether files that git knows differ from it; None outside of git."""
    commit = _asked_git(path.parent, "rev-parse", "HEAD")
    if commit is None or commit[0]:
        return None
    differs = _asked_git(path.parent, "diff-index", "--quiet", "HEAD", "--")
    known = _asked_git(path.parent, "ls-files", "--error-unmatch", path.name)
    return {
        "commit": commit[1].strip(),
        "modified": bool(differs[0]) if differs is not None else None,
        "tracked": not known[0] if known is not None else None,
    }


def _asked_git(folder: Path, *words: str) -> tuple[int, str] | None:
    """Exit status and output of git there; None where it is missing, or does not answer in time."""
    try:
        ran = subprocess.run(
            ["git", "--no-optional-locks", *words],
            cwd=folder,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=GIT_WITHIN,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return ran.returncode, ran.stdout

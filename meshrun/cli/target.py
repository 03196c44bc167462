"""TARGET: `file.py`, `file.py:function`, or the name of a shipped recipe.

    target = find("digits")              # nothing is imported yet
    function = target.function()         # imports the file
    experiment = make(target, {"width": 256})

A file without an experiment is a plain script, which is found out by reading it, not by running it.
"""

from __future__ import annotations

import ast
import difflib
import functools
import importlib
import importlib.util
import shlex
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import meshrun.recipes
from meshrun.cli.options import options_of
from meshrun.config import DATA
from meshrun.data.staging import Place, missing_of, use
from meshrun.errors import RunFailed, UserError
from meshrun.experiment import Experiment

ENTRY = "experiment"


@dataclass(frozen=True)
class Target:
    """Where a training is written down."""

    text: str
    path: Path
    entry: str | None
    """The function that returns the experiment; None for a plain script."""
    recipe: bool = False

    @property
    def label(self) -> str:
        return self.text if self.recipe else self.path.name

    def module(self) -> Any:
        """The imported file."""
        return importlib.import_module(f"meshrun.recipes.{self.text}") if self.recipe else _imported(self.path)

    def function(self) -> Callable[..., Any]:
        """The experiment function, from the imported file."""
        assert self.entry is not None
        found = getattr(self.module(), self.entry, None)
        if not callable(found):
            raise UserError(f"{self.label} has no function {self.entry!r}; it must have one that returns an Experiment")
        return found


@functools.cache
def _imported(path: Path) -> Any:
    """The user's file as a module; whoever asks again gets the same one, so that the file runs once."""
    # A file called json.py must not stand in for the module of that name.
    name = path.stem if importlib.util.find_spec(path.stem) is None else f"target_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    except ImportError as error:
        raise UserError(f"{path} cannot be imported: {error}; install it where meshrun runs") from error
    except SyntaxError as error:
        raise UserError(f"{path} is not valid Python: line {error.lineno}: {error.msg}") from error
    return module


def recipes() -> dict[str, str]:
    """The shipped recipes, with the first line of what each says of itself."""
    folder = Path(meshrun.recipes.__file__).parent
    found = {}
    for path in sorted(folder.glob("[!_]*.py")):
        text = ast.get_docstring(ast.parse(path.read_text())) or ""
        found[path.stem] = text.partition("\n")[0]
    return found


def find(text: str) -> Target:
    """The target of that name; nothing of it runs."""
    known = Path(meshrun.recipes.__file__).parent / f"{text}.py"
    if text.isidentifier() and known.exists():
        return Target(text, known, ENTRY, recipe=True)
    stem, colon, entry = text.rpartition(":") if ":" in text else (text, "", "")
    path = Path(stem)
    if path.suffix != ".py":
        close = difflib.get_close_matches(text, recipes(), 1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise UserError(
            f"target {text!r} is neither a Python file nor a recipe; {hint}recipes are: {', '.join(recipes())}"
        )
    if not path.is_file():
        raise UserError(f"target {stem!r} does not exist; give a Python file, file.py:function, or a recipe's name")
    if colon and not entry:
        raise UserError(f"target {text!r} names no function; give file.py, or file.py:function")
    return Target(text, path.resolve(), entry or _entry_of(path))


def _entry_of(path: Path) -> str | None:
    """`experiment` if the file defines or imports it at its top level."""
    try:
        tree = ast.parse(path.read_text())
    except SyntaxError as error:
        raise UserError(f"{path} is not valid Python: line {error.lineno}: {error.msg}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not valid Python: {error}") from error
    for node in tree.body:
        match node:
            case ast.FunctionDef(name=name) if name == ENTRY:
                return ENTRY
            case ast.ImportFrom(names=names) if any((each.asname or each.name) == ENTRY for each in names):
                return ENTRY
            case ast.Assign(targets=targets) if any(isinstance(t, ast.Name) and t.id == ENTRY for t in targets):
                return ENTRY
    return None


def make(target: Target, given: dict[str, Any], data: Path = DATA) -> Experiment:
    """Call the experiment function with the options given, as config.json holds them; staged files lie in `data`."""
    use(place_of(target, given, data))
    function = target.function()
    try:
        made = function(**values_of(function, given))
    except SystemExit as error:
        raise RunFailed(failed_in(target, error)) from error
    except FileNotFoundError as error:
        missing = error.filename or error
        raise UserError(f"{target.entry}() of {target.label} needs {str(missing)!r}, which does not exist") from error
    except Exception as error:
        if offline := missing_of(error):
            raise UserError(offline) from error
        raise
    if not isinstance(made, Experiment):
        raise UserError(
            f"{target.entry}() of {target.label} returned {type(made).__name__}; it must return an Experiment"
        )
    return made


def failed_in(target: Target, error: BaseException) -> str:
    """A sentence on an error of the target's own code: which, and in which line."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(target.path)]
    where = f" in line {lines[-1]}" if lines else ""
    if isinstance(error, SystemExit):
        return f"{target.entry}() of {target.label} ended the program{where}: {error.code}"
    said = f"{type(error).__name__}: {str(error).strip() or 'no message'}"
    return f"{target.entry}() of {target.label} failed{where}: {said}"


def values_of(function: Callable[..., Any], given: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a function from options as config.json holds them."""
    known = {option.name: option for option in options_of(function)}
    return {name: known[name].from_document(value) for name, value in given.items()}


def place_of(target: Target, given: dict[str, Any], data: Path) -> Place:
    """Where the files of a target are staged, and the command for it."""
    words = ["meshrun", "stage", target.text]
    for name, value in given.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            words.append(f"--{flag}={','.join(map(str, value)) if isinstance(value, list) else value}")
    if data != DATA:
        words += ["--data", str(data)]
    return Place(data / target.path.stem, shlex.join(words))

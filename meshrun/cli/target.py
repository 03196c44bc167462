"""TARGET: `file.py`, `file.py:function`, or the name of a shipped recipe.

    target = find("digits")              # nothing is imported yet
    function = target.function()         # imports the file
    experiment = make(target, {"width": 256})

A file without an experiment is a plain script, which is found out by reading it, not by running it. A file that only
imports a function `experiment` is one too, unless it does nothing else.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import importlib
import importlib.util
import re
import shlex
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import meshrun.recipes
from meshrun.cli.options import options_of
from meshrun.config import DATA, without_secrets
from meshrun.data.staging import Place, missing_of, use
from meshrun.errors import RunFailed, UserError, described
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
        if found is None:
            raise UserError(f"{self.label} has no function {self.entry!r}; it must have one that returns an Experiment")
        if isinstance(found, type) or not callable(found):
            raise UserError(
                f"{self.entry} in {self.label} is {'a class' if isinstance(found, type) else type(found).__name__}; it "
                f"must be a function that returns an Experiment: def {self.entry}(): return …"
            )
        return found


@functools.cache
def _imported(path: Path) -> Any:
    """The user's file as a module; whoever asks again gets the same one, so that the file runs once."""
    # A file called json.py must not stand in for the module of that name, and net.v2.py is no part of a package.
    stem = path.stem.replace(".", "_")
    name = f"target_{stem}" if stem in sys.modules or importlib.util.find_spec(stem) is not None else stem
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    except ModuleNotFoundError as error:
        raise UserError(f"{path} cannot be imported: {error}; install it where meshrun runs") from error
    except SyntaxError as error:
        file = error.filename or path
        raise UserError(f"{file} is not valid Python: line {error.lineno}: {error.msg}") from error
    except (UserError, RunFailed, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise RunFailed(f"{path.name}, when it is imported, {_failed_in(path, error)}") from error
    return module


def recipes() -> dict[str, str]:
    """The shipped recipes, with the first line of what each says of itself."""
    folder = Path(meshrun.recipes.__file__).parent
    found = {}
    for path in sorted(folder.glob("[!_]*.py")):
        text = ast.get_docstring(ast.parse(path.read_bytes())) or ""
        found[path.stem] = text.partition("\n")[0]
    return found


def find(text: str) -> Target:
    """The target of that name; nothing of it runs."""
    known = Path(meshrun.recipes.__file__).parent / f"{text}.py"
    if text.isidentifier() and known in known.parent.glob("[!_]*.py"):
        return Target(text, known, ENTRY, recipe=True)
    stem, colon, entry = text.rpartition(":") if ":" in text else (text, "", "")
    path = Path(stem)
    if path.suffix != ".py":
        close = difflib.get_close_matches(text, recipes(), 1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise UserError(
            f"target {text!r} is neither a Python file nor a recipe; {hint}recipes are: {', '.join(recipes())}"
        )
    try:
        there = path.is_file()
    except OSError as error:  # a name that is too long, a folder that may not be looked into
        raise UserError(f"target {stem!r:.200} cannot be read: {error.strerror}") from None
    if not there:
        raise UserError(f"target {stem!r} does not exist; give a Python file, file.py:function, or a recipe's name")
    if colon and not entry:
        raise UserError(f"target {text!r} names no function; give file.py, or file.py:function")
    return Target(text, path.resolve(), entry or _entry_of(path))


def _entry_of(path: Path) -> str | None:
    """`experiment` if the file defines it at its top level, or imports it and does nothing else; None for a script."""
    try:
        tree = ast.parse(path.read_bytes())
    except SyntaxError as error:
        raise UserError(f"{path} is not valid Python: line {error.lineno or 1}: {error.msg}") from error
    except (ValueError, RecursionError, MemoryError) as error:  # zeros in it; nested too deep
        raise UserError(f"{path} is not valid Python: {error or 'it is nested too deep'}") from error
    acting = [node for node in tree.body if _acts(node)]
    imported = False
    for node in _defining(tree.body):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name) if (
                name == ENTRY
            ):
                _refuse_training_twice(path, acting)
                return ENTRY
            case ast.ImportFrom(names=names) if any((each.asname or each.name) == ENTRY for each in names):
                imported = True
            case ast.Assign(targets=targets, value=value) if any(
                isinstance(t, ast.Name) and t.id == ENTRY for t in targets
            ):
                if acting == [node] or not _is_logger(value, tree):
                    return ENTRY
    if not acting:
        if imported:
            return ENTRY
        _refuse_misnamed(path, tree)
        if any(each.name == "*" for node in tree.body if isinstance(node, ast.ImportFrom) for each in node.names):
            return ENTRY
    _refuse_untrained(path, tree)
    return None


def _defining(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a file, with those in conditions and in what may fail, but for what only runs as a program."""
    for node in body:
        yield node
        if isinstance(node, ast.Try):
            yield from _defining([*node.body, *(each for handler in node.handlers for each in handler.body)])
        elif isinstance(node, ast.If) and "__name__" not in ast.unparse(node.test):
            yield from _defining([*node.body, *node.orelse])


def _is_logger(value: ast.expr, tree: ast.Module) -> bool:
    """Whether a script has a value called `experiment` for its own use: experiment = Experiment(api_key=…)."""
    if not isinstance(value, ast.Call):
        return False
    uses = (node for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load))
    return ast.unparse(value.func).endswith("Experiment") or any(node.id == ENTRY for node in uses)


def _acts(node: ast.stmt) -> bool:
    """Whether a statement does more than to define names: whether a file with nothing else does nothing when run."""
    match node:
        case ast.Import() | ast.ImportFrom() | ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef() | ast.Pass():
            return False
        case ast.Expr(value=ast.Constant()):
            return False
        case ast.Assign(value=value) | ast.AnnAssign(value=value):
            return value is not None and any(isinstance(each, ast.Call) for each in ast.walk(value))
    return True


def _refuse_training_twice(path: Path, acting: list[ast.stmt]) -> None:
    """Refuse a file that defines `experiment` and trains it by itself whenever it is imported."""
    for node in acting:
        if isinstance(node, ast.If):  # such as under `if __name__ == "__main__"`
            continue
        for call in ast.walk(node):
            match call:
                case ast.Call(
                    func=ast.Name(id=("Trainer" | "experiment") as name) | ast.Attribute(attr="Trainer" as name)
                ):
                    raise UserError(
                        f"{path} defines a function 'experiment' for meshrun to train, and line {node.lineno} calls "
                        f'{name}() by itself; put that under `if __name__ == "__main__":`, or rename the function to '
                        f"run the file as a plain script"
                    )


def _refuse_untrained(path: Path, tree: ast.Module) -> None:
    """Refuse a script that makes an Experiment and drops it: nothing would be trained."""
    makers = {each.name for each in tree.body if isinstance(each, ast.FunctionDef) and _makes_experiment(each)}
    used = {each.id for each in ast.walk(tree) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load)}
    blocks = [tree.body, *(node.body for node in tree.body if isinstance(node, ast.If))]
    for node in (node for block in blocks for node in block):
        match node:
            case ast.Expr(value=ast.Call(func=function)):
                dropped = True
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call(func=function)):
                dropped = name not in used
            case _:
                continue
        called = ast.unparse(function)
        if dropped and (called in makers or called in _names_of_experiment(tree)):
            hint = f", or give {path}:{called}" if called in makers else ""
            raise UserError(
                f"line {node.lineno} of {path} makes an Experiment that nothing trains; let a function experiment() "
                f"return it, which meshrun calls{hint}"
            )


def _names_of_experiment(tree: ast.Module) -> Iterator[str]:
    """What a file calls the Experiment of meshrun; other libraries have a class of that name too."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (f"{each.asname or each.name}.Experiment" for each in names if each.name == "meshrun")
            case ast.ImportFrom(module="meshrun", names=names):
                yield from (each.asname or "Experiment" for each in names if each.name in ("Experiment", "*"))


def _refuse_misnamed(path: Path, tree: ast.Module) -> None:
    """Refuse a file that only defines names, and say which of its functions looks like an experiment."""
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    makes = [each for each in functions if _makes_experiment(each)]
    names = [each.name for each in makes] or difflib.get_close_matches(ENTRY, [each.name for each in functions], 1)
    if names:
        raise UserError(
            f"{path} has no function 'experiment' and does nothing when it is run; {names[0]}() looks like one: rename "
            f"it to experiment, or give {path}:{names[0]}"
        )
    if not all(isinstance(node, ast.Import | ast.ImportFrom) for node in tree.body) or not tree.body:
        raise UserError(
            f"{path} has no function 'experiment' and does nothing when it is run; write a function experiment() that "
            f"returns an Experiment, or call what the file defines"
        )


def _makes_experiment(function: ast.FunctionDef) -> bool:
    returns = ast.unparse(function.returns) if function.returns is not None else ""
    returned = [each.value for each in ast.walk(function) if isinstance(each, ast.Return)]
    made = any(isinstance(value, ast.Call) and ast.unparse(value.func).endswith("Experiment") for value in returned)
    return returns.rpartition(".")[2].strip("'") == "Experiment" or made


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
        if isinstance(error, TypeError) and str(error).startswith("Experiment.__init__() "):
            raise UserError(_of_fields(target, error)) from error
        raise
    if not isinstance(made, Experiment):
        raise UserError(
            f"{target.entry}() of {target.label} returned {type(made).__name__}; it must return an Experiment"
        )
    return made


def _of_fields(target: Target, error: TypeError) -> str:
    """A sentence on an Experiment that was given a field that it has not, or too few or too many of those it has."""
    fields = [each.name for each in dataclasses.fields(Experiment)]
    wrong = str(error).removeprefix("Experiment.__init__() ")
    unknown = re.search(r"unexpected keyword argument '(\w+)'", wrong)
    hint = ""
    if unknown is not None:
        wrong = f"has no field {unknown[1]!r}"
        if near := difflib.get_close_matches(unknown[1], fields, 1):
            hint = f"; did you mean {near[0]}?"
        elif unknown[1] in ("lr", "learning_rate", "weight_decay"):
            hint = f"; the optimizer has it: optimizer=lambda parameters: AdamW(parameters, {unknown[1]}={unknown[1]})"
    return f"the Experiment of {target.entry}() in {target.label} {wrong}{hint}; its fields are {', '.join(fields)}"


def failed_in(target: Target, error: BaseException) -> str:
    """A sentence on an error of the target's own code: which, and in which line."""
    return f"{target.entry}() of {target.label} {_failed_in(target.path, error)}"


def _failed_in(path: Path, error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == str(path)]
    where = f" in line {lines[-1]}" if lines else ""
    if lines and frames[-1].filename != str(path):
        where += f" (at {frames[-1].filename}:{frames[-1].lineno})"
    if isinstance(error, SystemExit):
        return f"ends the program{where}, with sys.exit({'' if error.code is None else repr(error.code)})"
    return f"failed{where}: {described(error)}"


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
    # The command stands in sentences, which logs and reports keep.
    return Place(data / target.path.stem, shlex.join(without_secrets(words)))

"""`meshrun use RUN FUNCTION`: the model that a run has trained, given to a function of the run's own program.

meshrun use runs/llama-1                                              # lists the functions that there are
meshrun use runs/llama-1 generate --prompt "My fellow citizens"
meshrun use runs/llama-1 generate --weights last --device cpu --json

The function gets the model as its first argument, in evaluation mode and with the best weights; its other parameters
are options, and one called `run_folder` gets the run's directory. What it returns is printed.
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import inspect
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from meshrun import strict_json
from meshrun.cli.command import GENERAL, options_in, refuse_changeable, run_at
from meshrun.cli.options import REQUIRED, Option, options_of, to_document
from meshrun.cli.target import Target, find, make
from meshrun.config import RunConfig, RunDirectory
from meshrun.errors import RunFailed, UserError, printable

MODEL = "model"
"""What the first parameter of a function for models is called."""
RUN_FOLDER = "run_folder"
OWN = [
    Option("weights", ("best", "last"), "best", "Which weights of the run: those that scored best, or the last ones."),
    Option("device", ("auto", "cpu", "cuda"), "auto", "Where to compute; auto takes a GPU where there is one."),
    *(option for option in GENERAL if option.name != "config"),
]
HELP = "Call FUNCTION of the program of RUN with the model that it has trained; without FUNCTION, list those it has."


def use_command(words: list[str]) -> int:
    """Returns the exit status."""
    if not words or words[0].startswith("-"):
        if "--help" not in words:
            raise UserError("use needs a RUN first: the directory of a run, such as runs/digits-1")
        options_in(["--help"], [("General", OWN)], HELP, "meshrun use RUN FUNCTION")
        return 0
    run, config = run_at(Path(words[0]))
    target = find(config.target)
    if target.entry is None:
        raise UserError(f"{words[0]} is a run of the plain script {target.label}, whose model meshrun does not know")
    if len(words) == 1 or words[1].startswith("-"):
        return _list(run, target, words[1:])
    refuse_changeable(run.path)
    with contextlib.redirect_stdout(sys.stderr) if "--json" in words else contextlib.nullcontext():
        found = _used(run, config, target, words[1], words[2:])
    if found is None:
        return 0
    (result,) = found
    if "--json" in words:
        print(strict_json.dumps({"run": str(run.path), "function": words[1], "result": result}))
    elif result is not None:
        print(result if isinstance(result, str) else json.dumps(result, indent=2, ensure_ascii=False))
    return 0


def functions_for_models(target: Target) -> dict[str, str]:
    """The public functions of a program whose first parameter is called `model`, and what each says of itself.

    Nothing of it runs.
    """
    found = {}
    for node in ast.parse(target.path.read_bytes()).body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            first = next(iter([*node.args.posonlyargs, *node.args.args]), None)
            if first is not None and first.arg == MODEL:
                found[node.name] = (ast.get_docstring(node) or "").partition("\n")[0]
    return found


def _list(run: RunDirectory, target: Target, words: list[str]) -> int:
    if options_in(words, [("General", OWN)], HELP, f"meshrun use {run.path}") is None:
        return 0
    found = functions_for_models(target)
    if "--json" in words:
        print(strict_json.dumps({"run": str(run.path), "functions": found}))
        return 0
    for name, does in found.items():
        print(printable(f"{name:<16} {does}".rstrip()))
    if not found:
        print(f"{target.label} has nothing to call; write a function whose first parameter is `model`")
    return 0


def _used(run: RunDirectory, config: RunConfig, target: Target, name: str, words: list[str]) -> tuple[Any] | None:
    """What the function returns, as JSON has it; None when the words only asked for help."""
    function = _function(target, name)
    own = options_of(function, but=(next(iter(inspect.signature(function).parameters)), RUN_FOLDER))
    for option in own:
        if option.name in {each.name for each in OWN} | {"help"}:
            raise UserError(
                f"parameter {option.name!r} of {name}() in {target.label} has the name of an option of meshrun use "
                f"({option.flag}); rename it"
            )
    does = (inspect.getdoc(function) or f"Call {name}() of {target.label}.").partition("\n\n")[0]
    panels = [(f"Options of {name}", own), ("General", OWN)]
    given = options_in(words, panels, does, f"meshrun use {run.path} {name}")
    if given is None:
        return None
    values = _values(own, given, name, target)
    if RUN_FOLDER in inspect.signature(function).parameters:
        values[RUN_FOLDER] = run.path
    import torch

    from meshrun.cli.after import as_json, trained_model, where_and_why

    device = _device(given["device"] or "auto", torch.cuda.is_available())
    experiment = make(target, config.options, config.data)
    model = trained_model(experiment, run, given["weights"] or "best", torch.device(device))
    try:
        return (as_json(function(model, **values)),)
    except (UserError, RunFailed):
        raise
    except Exception as error:
        raise RunFailed(f"{name}() of {target.label} failed{where_and_why(error)}") from error


def _function(target: Target, name: str) -> Callable[..., Any]:
    found = getattr(target.module(), name, None)
    if inspect.isfunction(found) and inspect.signature(found).parameters:
        return found
    known = functions_for_models(target)
    close = difflib.get_close_matches(name, known, 1)
    meant = f"did you mean {close[0]!r}? " if close else ""
    those = f"those for its model are: {', '.join(known)}" if known else "none of its functions takes a `model` first"
    raise UserError(f"{target.label} has no function {name!r} that takes a model; {meant}{those}")


def _values(own: list[Option], given: Mapping[str, Any], name: str, target: Target) -> dict[str, Any]:
    for option in own:
        if option.default is REQUIRED and given[option.name] is None:
            raise UserError(f"{option.name} has no default in {name}() of {target.label}; give it ({option.flag})")
    # By the way that options of an experiment take too, so that a list is what the function says.
    return {
        option.name: option.from_document(to_document(given[option.name]))
        for option in own
        if given[option.name] is not None
    }


def _device(asked: str, has_gpu: bool) -> str:
    if asked == "cuda" and not has_gpu:
        raise UserError("device is cuda but this machine has no GPU that torch can use; use cpu (--device)")
    return "cuda" if has_gpu and asked != "cpu" else "cpu"

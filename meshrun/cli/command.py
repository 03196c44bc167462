"""From the words of a command line to what they ask for, with the options that the target itself brings.

    asked = parse_run(["digits", "--width", "256", "--procs", "2"])
    asked.target, asked.config, asked.as_json

typer reads the words and prints the help; the parameters that it sees are put together here, since an experiment
function is only known once TARGET is.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from meshrun.cli.options import REQUIRED, Option, options_of, run_options, to_document
from meshrun.cli.target import Target, find
from meshrun.config import RunConfig, read_file
from meshrun.errors import UserError

GENERAL = [
    Option("config", Path, None, "TOML or JSON file of options; the command line wins."),
    Option("json", bool, False, "Print one JSON document on standard output, nothing else."),
    Option("debug", bool, False, "Show tracebacks."),
]
SHADOWABLE = ("steps", "epochs", "batch", "micro", "seed", "clip", "precision")
"""Options of a run that an experiment function may have as parameters of its own, which then get the value."""
FOR_SCRIPTS = ("procs", "layout", "device", "backend", "threads", "port", "timeout", "name", "runs")
"""Options of a run that make sense for a plain script; all other words are the script's."""


@dataclass(frozen=True)
class Asked:
    """What a command line asks for."""

    target: Target
    config: RunConfig
    as_json: bool


def parse_run(words: list[str]) -> Asked | None:
    """Read the words after `run`; None when they only asked for help, which is then printed."""
    text = _target_in(words)
    if text is None:
        if "--help" in words:
            of_any = [("Options of the run", run_options()), ("General", GENERAL)]
            invoke(_app(_help(None), of_any, False, dict), ["--help"], "meshrun run TARGET")
            return None
        raise UserError("run needs a TARGET: a Python file, file.py:function, or a recipe's name (meshrun recipes)")
    target = find(text)
    own = options_of(target.function()) if target.entry is not None else []
    _refuse_clashes(target, own)
    names = {option.name for option in own}
    of_run = [each for each in run_options() if each.name not in names]
    if target.entry is None:
        of_run = [each for each in of_run if each.name in FOR_SCRIPTS]
    panels = [(f"Options of {target.label}", own), ("Options of the run", of_run), ("General", GENERAL)]
    seen: list[Asked] = []

    def collect(given: dict[str, Any], rest: list[str]) -> None:
        seen.append(_asked(target, own, of_run, given, rest))

    rest = list(words)
    rest.remove(text)
    invoke(_app(_help(target), panels, target.entry is None, collect), rest, f"meshrun run {text}")
    return seen[0] if seen else None


def invoke(app: typer.Typer, words: list[str], name: str = "meshrun") -> Any:
    """Run a typer application so that errors come back as exceptions."""
    return typer.main.get_command(app).main(args=words, prog_name=name, standalone_mode=False)


def _asked(target: Target, own: list[Option], of_run: list[Option], given: dict[str, Any], rest: list[str]) -> Asked:
    general = {option.name: given.pop(option.name) for option in GENERAL}
    options = {option.name: option for option in (*own, *of_run)}
    from_file = _from_file(general["config"], options) if general["config"] is not None else {}
    values = {**from_file, **{name: value for name, value in given.items() if value is not None}}
    for option in own:
        if option.default is REQUIRED and option.name not in values:
            raise UserError(f"{option.name} has no default in {target.label}; give it a value ({option.flag})")
    own_names = {option.name for option in own}
    config = RunConfig(
        target=target.text if target.recipe else str(target.path) + (f":{target.entry}" if target.entry else ""),
        options={name: to_document(value) for name, value in values.items() if name in own_names},
        arguments=tuple(rest),
        **{name: value for name, value in values.items() if name not in own_names},
    )
    return Asked(target, config, bool(general["json"]))


def _from_file(path: Path, options: dict[str, Option]) -> dict[str, Any]:
    values = read_file(path)
    for name in values:
        if name not in options:
            raise UserError(f"{path} sets {name!r}, which is no option of this target (--config)")
    return {name: options[name].from_document(value) for name, value in values.items() if value is not None}


def _target_in(words: list[str]) -> str | None:
    """The first word that is neither an option of the run nor the value of one."""
    options = {option.flag: option for option in (*run_options(), *GENERAL)}
    skip = False
    for word in words:
        if skip:
            skip = False
        elif not word.startswith("-"):
            return word
        elif word in options and options[word].kind is not bool:
            skip = True
        elif word not in options and "=" not in word and not word.startswith("--no-") and word != "--help":
            raise UserError(f"{word!r} stands before TARGET; give the target first: meshrun run TARGET {word} …")
    return None


def _refuse_clashes(target: Target, own: list[Option]) -> None:
    taken = {option.name for option in (*run_options(), *GENERAL)} - set(SHADOWABLE) | {"help"}
    for option in own:
        if option.name in taken:
            raise UserError(
                f"parameter {option.name!r} of {target.entry}() in {target.label} has the name of an option of "
                f"meshrun run ({option.flag}); rename it"
            )


def _help(target: Target | None) -> str:
    if target is None:
        return "Train TARGET: a Python file, file.py:function, or a recipe; after TARGET, --help lists its options too."
    return f"Train {target.label}." if target.entry else f"Start the script {target.label}; other words are its own."


def _app(help: str, panels: list[tuple[str, list[Option]]], passes_on: bool, call: Callable[..., Any]) -> typer.Typer:
    """A typer application of one command with these options; `call` gets what was given and what was left."""

    def command(_context: typer.Context, **given: Any) -> None:
        call({name: _flat(value) for name, value in given.items()}, list(_context.args))

    kind = inspect.Parameter.KEYWORD_ONLY
    # With an underscore, since an experiment function may well have a parameter called context.
    parameters = [inspect.Parameter("_context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)]
    for panel, options in panels:
        for option in options:
            annotation = _annotation(option, panel)
            parameters.append(inspect.Parameter(option.name, kind, default=None, annotation=annotation))
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    passing = {"ignore_unknown_options": True, "allow_extra_args": True} if passes_on else {}
    made = typer.Typer(add_completion=False, rich_markup_mode="rich")
    made.command(help=help, context_settings=passing)(command)
    return made


def _flat(value: Any) -> Any:
    """One list, of a list option that may be given several times and is a list each time."""
    return [each for part in value for each in part] if isinstance(value, list) else value


def _annotation(option: Option, panel: str) -> Any:
    default = "required" if option.default is REQUIRED else option.shown_default and f"default {option.shown_default}"
    # A bracket would begin rich's markup.
    help = (option.help + (f" ({default})" if default else "")).replace("[", "\\[")
    if option.kind is bool:
        names = f"{option.flag}/--no-{option.flag[2:]}"
        return Annotated[bool | None, typer.Option(names, help=help, show_default=False, rich_help_panel=panel)]
    return Annotated[
        list[str] | None if option.many else str | None,
        typer.Option(
            option.flag,
            parser=option.convert,
            metavar=option.shape,
            help=help,
            show_default=False,
            rich_help_panel=panel,
        ),
    ]

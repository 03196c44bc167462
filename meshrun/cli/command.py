"""From the words of a command line to what they ask for, with the options that the target itself brings.

    asked = parse_run(["digits", "--width", "256", "--procs", "2"])
    asked.target, asked.config, asked.as_json

    asked = parse_verify(["digits", "--layouts", "dp=2; fsdp=2", "--width", "256"])
    asked.beyond["layouts"]

    asked = parse_resume(["runs/digits-1", "--procs", "4"])
    asked.run, asked.config

typer reads the words and prints the help; the parameters that it sees are put together here, since an experiment
function is only known once TARGET is.
"""

from __future__ import annotations

import inspect
import os
import re
import shlex
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from meshrun.cli.options import REQUIRED, Option, options_of, run_options, to_document
from meshrun.cli.target import Target, find
from meshrun.config import RunConfig, RunDirectory, option_fields, read_file, refuse_exchangeable, without_secrets
from meshrun.errors import UserError

GENERAL = [
    Option("config", Path, None, "TOML or JSON file of options; the command line wins."),
    Option("json", bool, False, "Print one JSON document on standard output, nothing else."),
    Option("debug", bool, False, "Show tracebacks."),
]
SHADOWABLE = ("steps", "epochs", "batch", "micro", "seed", "clip", "precision", "data", "eval_first")
"""Options of a run that an experiment function may have as parameters of its own, which then get the value."""
FOR_SCRIPTS = (
    *("procs", "layout", "device", "backend", "threads", "port", "timeout", "name", "runs", "restarts"),
    *("nodes", "join", "site", "hang_after", "on_hang"),
)
"""Options of a run that make sense for a plain script; all other words are the script's."""
BEHIND = "; an option of the script's own that has the name of one of meshrun's stands behind --"
OF_VERIFY = [
    Option(
        "layouts",
        str,
        None,
        'What to compare with one process, such as "dp=2; fsdp=2,tp=2"; a covering set when absent.',
    ),
    Option("steps", int, 20, "Updates of each training."),
    Option(
        "tolerance",
        float,
        None,
        "Largest relative difference, where the model itself rounds by no more: 1e-5, in bf16 1e-3, in float8 1e-2.",
    ),
    Option("resume", bool, True, "Save a checkpoint on the way, and compare what resumes from it."),
    Option("timeout", float, 120.0, "Seconds that a rank waits for the others before it gives up."),
    Option("keep", Path, None, "Folder to keep logs, weights and all that was compared in."),
]
NOT_FOR_RESUME = ("name", "runs")
"""Options of a run that decide its directory, which is there already."""
OF_ONE_START = ("join", "port", "from_start")
"""Options that hold for one start of a run, and not for the next: where nodes meet, and how it begins."""
BEYOND_A_RUN = ("layouts", "tolerance", "keep", "resume")
"""Options of `verify` that say nothing on a single run."""
NOT_FOR_VERIFY = (
    *("procs", "layout", "epochs", "eval_every", "workers", "prefetch", "port", "name", "runs", "tensorboard"),
    *("steps", "timeout", "allow_tp_across_nodes", "compress"),
    *("checkpoint", "keep", "mtbf", "spare", "restarts", "on_hang", "hang_after", "on_nan", "on_spike", "spike"),
    *("record_ids", "nodes", "join", "deadline", "site", "cache", "skip_bad_samples"),
)
"""Options of a run that `verify` decides by itself, or has with other defaults; compression changes numbers."""
OF_CHAOS = [
    Option("faults", int, 200, "Faults to strike."),
    Option("seed", int, 1, "Decides which faults strike when, and where."),
    Option("kinds", str, None, "Kinds of faults, such as kill-update,disk-full; all of them when absent."),
    Option("cluster", bool, False, "Run as jobs on virtual nodes of a real Slurm, and break these (as root)."),
    Option("keep", Path, None, "Folder to keep all runs in; else only those that failed are kept."),
]
NOT_FOR_CHAOS = (
    *("seed", "keep", "port", "name", "runs", "tensorboard", "timeout"),
    *("restarts", "on_hang", "record_ids", "spare", "nodes", "join", "deadline", "site"),
)
"""Options of a run that `chaos` decides by itself, or has with another meaning."""
OF_RESUME = [
    Option("from_start", bool, False, "Begin at step 0 if the run has no checkpoint, which is refused otherwise.")
]
OF_STAGE = [Option("verify", bool, False, "Fetch nothing; check that all is as it was staged.")]


@dataclass(frozen=True)
class Asked:
    """What a command line asks for."""

    target: Target
    config: RunConfig
    as_json: bool
    beyond: dict[str, Any] = field(default_factory=dict)
    """The command's own options, which are none of a run."""
    run: RunDirectory | None = None
    """The run to go on with."""
    document: dict[str, Any] = field(default_factory=dict)
    """The config.json of that run, as it was when the command line was read."""


@dataclass(frozen=True)
class Command:
    """A command that takes a TARGET, with the options that it has whatever the target is."""

    name: str
    does: str
    options: list[Option]
    scripts: bool = False
    """Whether a plain script can be its target."""
    beyond: tuple[str, ...] = ()
    """Options that are none of a run, though a run may have some of the same name."""
    own: Callable[[Target], list[Option]] = lambda target: options_of(target.function())
    """Finds the options that the target brings."""


def parse_run(words: list[str]) -> Asked | None:
    """Read the words after `run`; None when they only asked for help, which is then printed."""
    return parse_words(Command("run", "Train", run_options(), scripts=True), words)


def parse_verify(words: list[str]) -> Asked | None:
    """Read the words after `verify`; None when they only asked for help."""
    of_run = [each for each in run_options() if each.name not in NOT_FOR_VERIFY]
    return parse_words(
        Command("verify", "Verify that every mesh computes the same for", [*OF_VERIFY, *of_run], beyond=BEYOND_A_RUN),
        words,
    )


def parse_chaos(words: list[str]) -> Asked | None:
    """Read the words after `chaos`; None when they only asked for help."""
    of_run = [each for each in run_options() if each.name not in NOT_FOR_CHAOS]
    beyond = tuple(each.name for each in OF_CHAOS)
    return parse_words(Command("chaos", "Inject faults into runs of", [*OF_CHAOS, *of_run], beyond=beyond), words)


def parse_stage(words: list[str]) -> Asked | None:
    """Read the words after `stage`; None when they only asked for help."""
    of_run = [each for each in run_options() if each.name == "data"]
    return parse_words(Command("stage", "Fetch the data of", [*OF_STAGE, *of_run], beyond=("verify",)), words)


def parse_resume(words: list[str]) -> Asked | None:
    """Read the words after `resume`; None when they only asked for help."""
    options = [each for each in run_options() if each.name not in NOT_FOR_RESUME]
    beyond = tuple(option.name for option in OF_RESUME)
    command = Command("resume", "Go on with", [*OF_RESUME, *options], beyond=beyond)
    text = _target_in(command, words)
    if text is None:
        if "--help" not in words:
            raise UserError("resume needs a RUN: the directory of a run, such as runs/digits-1")
        of_run = ("Options of the run, which stay as they were when absent", options)
        of_any = [("Options of resume", OF_RESUME), of_run, ("General", GENERAL)]
        what = "Go on with RUN, a run directory, from its newest checkpoint; after RUN, --help lists all its options."
        invoke(_app(what, of_any, False, dict), ["--help"], "meshrun resume RUN")
        return None
    path = Path(text)
    refuse_foreign(path)
    document = RunDirectory(path).document() if path.is_dir() else {}
    run, before = run_at(path)
    target = find(before.target)
    if target.entry is None:
        raise UserError(f"{text} is a run of the plain script {target.label}, which keeps no state that meshrun knows")
    asked = _read(command, target, text, words, before)
    return asked and replace(asked, run=run, document=document)


def refuse_foreign(path: Path) -> None:
    """Refuse a run directory of another user, unless that one shares it with a group of this user's.

    Its config.json decides which program is executed, and links in it which files are written.
    """
    refuse_changeable(path)
    try:
        found = path.stat()
    except OSError:  # told by whoever reads it
        return
    is_shared = found.st_mode & stat.S_IWGRP and found.st_gid in (os.getgid(), *os.getgroups())
    if found.st_uid != os.getuid() and not is_shared:
        raise UserError(
            f"{path} belongs to another user, whose number is {found.st_uid}, and decides which program is executed; "
            f"look at its config.json, and go on with a copy of your own (cp -r {shlex.quote(str(path))} …)"
        )


def refuse_changeable(path: Path) -> None:
    """Refuse a run directory that every user may write to, or may put one of his own in the place of."""
    try:
        found = path.stat()
        refuse_exchangeable(path.absolute().parent)
    except OSError:  # told by whoever reads it
        return
    if found.st_mode & stat.S_IWOTH:
        raise UserError(
            f"every user of the machine may write to {path}, which decides which program is executed: "
            f"chmod -R o-w {shlex.quote(str(path))}"
        )


def run_at(path: Path) -> tuple[RunDirectory, RunConfig]:
    """The run in that directory, and what was asked for when it was started."""
    if not path.is_dir():
        raise UserError(f"there is no run {str(path)!r}; give the directory of one, such as runs/digits-1")
    run = RunDirectory(path)
    return run, run.config()


def parse_words(command: Command, words: list[str]) -> Asked | None:
    """Read the words after a command that takes a TARGET; None when they only asked for help."""
    text = _target_in(command, words)
    if text is None:
        if "--help" in words:
            of_any = [*_panels(command, command.options), ("General", GENERAL)]
            invoke(_app(_help(command, None), of_any, False, dict), ["--help"], f"meshrun {command.name} TARGET")
            return None
        raise UserError(
            f"{command.name} needs a TARGET: a Python file, file.py:function, or a recipe's name (meshrun recipes)"
        )
    target = find(text)
    if target.entry is None and not command.scripts:
        raise UserError(f"{target.label} is a plain script; {command.name} needs a function that returns an Experiment")
    return _read(command, target, text, words, None)


def _read(command: Command, target: Target, text: str, words: list[str], before: RunConfig | None) -> Asked | None:
    """What the words ask for, with the options of the target; others are as `before`, or as usual."""
    own = command.own(target) if target.entry is not None else []
    _refuse_clashes(command, target, own)
    names = {option.name for option in own}
    others = [each for each in command.options if each.name not in names]
    if target.entry is None:
        others = [each for each in others if each.name in FOR_SCRIPTS]
    panels = [(f"Options of {target.label}", own), *_panels(command, others), ("General", GENERAL)]
    seen: list[Asked] = []

    def collect(given: dict[str, Any], rest: list[str]) -> None:
        asked = _asked(command, target, own, others, given, rest, before)
        seen.append(
            replace(asked, config=replace(asked.config, command=("meshrun", command.name, *without_secrets(words))))
        )

    rest = list(words)
    rest.remove(text)
    invoke(_app(_help(command, target), panels, target.entry is None, collect), rest, f"meshrun {command.name} {text}")
    return seen[0] if seen else None


def _panels(command: Command, options: list[Option]) -> list[tuple[str, list[Option]]]:
    """Options under the heading of the command, or of the run that it is about."""
    beyond = [each for each in options if each.name in command.beyond]
    of_run = [each for each in options if each.name not in command.beyond]
    return [each for each in ((f"Options of {command.name}", beyond), ("Options of the run", of_run)) if each[1]]


def invoke(app: typer.Typer, words: list[str], name: str = "meshrun") -> Any:
    """Run a typer application so that errors come back as exceptions."""
    found = typer.main.get_command(app).main(args=words, prog_name=name, standalone_mode=False)
    if found == 130:  # what typer makes of CTRL-C, without a word
        raise KeyboardInterrupt
    return found


def options_in(words: list[str], panels: list[tuple[str, list[Option]]], help: str, name: str) -> dict[str, Any] | None:
    """The values that words give these options, None where they give none; nothing when they only asked for help."""
    seen: list[dict[str, Any]] = []
    invoke(_app(help, panels, False, lambda given, _: seen.append(given)), words, name)
    return seen[0] if seen else None


def _asked(
    command: Command,
    target: Target,
    own: list[Option],
    others: list[Option],
    given: dict[str, Any],
    rest: list[str],
    before: RunConfig | None,
) -> Asked:
    general = {option.name: given.pop(option.name) for option in GENERAL}
    options = {option.name: option for option in (*own, *others)}
    try:
        from_file = _from_file(general["config"], options) if general["config"] is not None else {}
    except UserError as error:
        raise UserError(f"{error}{BEHIND * (target.entry is None)}") from None
    usual = {option.name: option.default for option in others if option.default is not None}
    chosen = {**from_file, **{name: value for name, value in given.items() if value is not None}}
    values = {**usual, **(_as_before(before, own, others, chosen) if before else {}), **chosen}
    for option in own:
        if option.default is REQUIRED and option.name not in values:
            raise UserError(f"{option.name} has no default in {target.label}; give it a value ({option.flag})")
    own_names = {option.name for option in own}
    of_run = {each.name for each in option_fields()} - set(command.beyond)
    config = RunConfig(
        target=target.text if target.recipe else str(target.path) + (f":{target.entry}" if target.entry else ""),
        options={name: to_document(value) for name, value in values.items() if name in own_names},
        arguments=tuple(rest),
        **{name: value for name, value in values.items() if name in of_run - own_names},
    )
    beyond = {name: value for name, value in values.items() if name not in of_run | own_names}
    return Asked(target, config, bool(general["json"]), beyond)


def _as_before(before: RunConfig, own: list[Option], others: list[Option], chosen: dict[str, Any]) -> dict[str, Any]:
    """The values that a run had; a length that was chosen now replaces one that was chosen in other terms."""
    kept = {each.name: getattr(before, each.name) for each in others if each.name not in OF_ONE_START}
    if "epochs" in chosen and "steps" not in chosen:
        kept["steps"] = None
    kept |= {name: getattr(before, name) for name in NOT_FOR_RESUME}
    known = {option.name: option for option in own}
    return kept | {name: known[name].from_document(value) for name, value in before.options.items() if name in known}


def _from_file(path: Path, options: dict[str, Option]) -> dict[str, Any]:
    values = read_file(path)
    for name in values:
        if name not in options:
            raise UserError(f"{path} sets {name!r}, which is no option of this target (--config)")
    return {name: options[name].from_document(value) for name, value in values.items() if value is not None}


def own_words(words: Sequence[str]) -> list[str]:
    """The words that are meshrun's: those behind `--` are a plain script's, whatever they say."""
    return list(words[: words.index("--")] if "--" in words else words)


def shared_with(script: Path, words: Sequence[str]) -> list[str]:
    """The options among these words that are meshrun's, and that the text of a plain script names as well."""
    text = script.read_text(errors="replace")
    own = {word.partition("=")[0] for word in own_words(words)}
    flags = [each.flag for each in (*run_options(), *GENERAL) if each in GENERAL or each.name in FOR_SCRIPTS]
    return [flag for flag in flags if flag in own and re.search(rf"""["']{flag}["']""", text)]


def _target_in(command: Command, words: list[str]) -> str | None:
    """The first word that is neither an option of the command nor the value of one."""
    options = {option.flag: option for option in (*command.options, *GENERAL)}
    skip = False
    for word in words:
        if skip:
            skip = False
        elif not word.startswith("-"):
            return word
        elif word in options and options[word].kind is not bool:
            skip = True
        elif word not in options and "=" not in word and not word.startswith("--no-") and word != "--help":
            raise UserError(
                f"{word!r} stands before TARGET; give the target first: meshrun {command.name} TARGET {word} …"
            )
    return None


def _refuse_clashes(command: Command, target: Target, own: list[Option]) -> None:
    taken = {option.name for option in (*command.options, *GENERAL)} - set(SHADOWABLE) | {"help"}
    for option in own:
        if option.name in taken:
            raise UserError(
                f"parameter {option.name!r} of {target.entry}() in {target.label} has the name of an option of "
                f"meshrun {command.name} ({option.flag}); rename it"
            )


def _help(command: Command, target: Target | None) -> str:
    if target is None:
        return (
            f"{command.does} TARGET: a Python file, file.py:function, or a recipe; "
            f"after TARGET, --help lists its options too."
        )
    if target.entry is None:
        return f"Start the script {target.label}; other words are its own."
    return f"{command.does} {target.label}."


def _app(help: str, panels: list[tuple[str, list[Option]]], passes_on: bool, call: Callable[..., Any]) -> typer.Typer:
    """A typer application of one command with these options; `call` gets what was given and what was left."""

    def command(_of_typer: typer.Context, **given: Any) -> None:
        call({name: _flat(value) for name, value in given.items()}, list(_of_typer.args))

    kind = inspect.Parameter.KEYWORD_ONLY
    # Not called context or ctx, which parameters of an experiment function may well be.
    parameters = [inspect.Parameter("_of_typer", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)]
    for _, options in panels:
        for option in options:
            annotation = _annotation(option)
            parameters.append(inspect.Parameter(option.name, kind, default=None, annotation=annotation))
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    passing = {"ignore_unknown_options": True, "allow_extra_args": True} if passes_on else {}

    class Shown(TyperCommand):
        def format_help(self, ctx: Any, formatter: Any) -> None:
            from rich.console import Console

            from meshrun.cli.help import show

            del formatter
            show(" ".join([ctx.command_path, *self.collect_usage_pieces(ctx)]), help, panels, Console())

    made = typer.Typer(add_completion=False)
    made.command(cls=Shown, help=help, context_settings=passing)(command)
    return made


def _flat(value: Any) -> Any:
    """One list, of a list option that may be given several times and is a list each time."""
    return [each for part in value for each in part] if isinstance(value, list) else value


def _annotation(option: Option) -> Any:
    if option.kind is bool:
        names = f"{option.flag}/--no-{option.flag[2:]}"
        return Annotated[bool | None, typer.Option(names)]
    return Annotated[
        list[str] | None if option.many else str | None,
        typer.Option(option.flag, parser=option.convert, metavar=option.shape),
    ]

"""The command `meshrun`: finds the command, gives it its options, and ends with a sentence and an exit status.

Exit status: 0 when it worked, 2 for what the user gave, 1 for what failed, 75 for a run that was cut off and may go
well another time. `--debug` shows the traceback as well.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import os
import re
import sys
import sysconfig
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from meshrun import __version__, strict_json
from meshrun.cli import collecting
from meshrun.cli.command import (
    Asked,
    invoke,
    own_words,
    parse_chaos,
    parse_resume,
    parse_run,
    parse_stage,
    parse_verify,
)
from meshrun.cli.convert_data import convert_data_command
from meshrun.cli.doctor import doctor_command
from meshrun.cli.export import export_command
from meshrun.cli.inspect import inspect_command
from meshrun.cli.jobs import cancel_command, follow_command, jobs_command
from meshrun.cli.sites import sites_app
from meshrun.cli.streams import flush, open_streams, put_back
from meshrun.cli.target import recipes
from meshrun.config import whole_number
from meshrun.errors import (
    CutOff,
    RunFailed,
    SharedError,
    StoppedByHand,
    UserError,
    brief,
    cure_of,
    described,
    printable,
)
from meshrun.launch.job import WORTH_A_RESTART
from meshrun.world import World, detect
from meshrun.world.bytecode import keep_bytecode
from meshrun.world.environment import forget_terminals_beyond_reason, keep_temporary_files_safe

GIVEN_WRONG = frozenset(
    (errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT)
)
"""What a system says of a path that cannot be used, whoever waits for it to change."""
PATIENCE = 3.0
"""Seconds that a rank with nothing to say waits for the one that has."""

app = typer.Typer(
    add_completion=False,
    help="Starts training: the same model to the same losses on one device or a thousand.",
)


@app.command()
def run(target: Annotated[str, typer.Argument(metavar="TARGET")]) -> None:
    """Train: here, on local processes, or as a rank under another launcher."""
    # Only for the list of commands: `run` takes its options from the target, and is met in `_dispatch`.
    del target


@app.command()
def verify(target: Annotated[str, typer.Argument(metavar="TARGET")]) -> None:
    """Train on several layouts, and prove that all compute the same as one process."""
    del target  # as `run`


@app.command()
def bench(target: Annotated[str, typer.Argument(metavar="TARGET")]) -> None:
    """Measure a training: beside other tools, against what the device can do, as one rank of many."""
    del target  # as `run`


@app.command()
def chaos(target: Annotated[str, typer.Argument(metavar="TARGET")]) -> None:
    """Inject faults, and check that training ends with the same weights as without them."""
    del target  # as `run`


@app.command()
def resume(run: Annotated[str, typer.Argument(metavar="RUN")]) -> None:
    """Go on with a run, on any mesh, from its newest checkpoint."""
    del run  # as `run`


@app.command()
def use(run: Annotated[str, typer.Argument(metavar="RUN")]) -> None:
    """Call a function of a run's program with the model that it has trained."""
    del run  # as `run`


@app.command()
def stage(target: Annotated[str, typer.Argument(metavar="TARGET")]) -> None:
    """Fetch the data of a training where there is internet, for jobs that have none."""
    del target  # as `run`


@app.command()
def rehearse(target: Annotated[str, typer.Argument(metavar="TARGET")]) -> None:
    """Play a job on this machine as it would be submitted, so that mistakes show before the queue."""
    del target  # as `run`


app.command("doctor")(doctor_command)


@app.command()
def submit(target: Annotated[str, typer.Argument(metavar="TARGET")]) -> None:
    """Train as a Slurm job: write its script, submit it, and follow it."""
    del target  # as `run`


app.command("convert-data")(convert_data_command)
app.command("export")(export_command)
app.command("inspect")(inspect_command)
app.command("jobs")(jobs_command)
app.command("follow")(follow_command)
app.command("cancel")(cancel_command)
app.add_typer(sites_app, name="sites")


@app.command("recipes")
def list_recipes(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False) -> None:
    """List the trainings that come with meshrun."""
    found = recipes()
    if as_json:
        print(strict_json.dumps({"recipes": found}))
    else:
        for name, text in found.items():
            print(f"{name:<12} {text}")


@app.command()
def version(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False) -> None:
    """Print the version."""
    print(strict_json.dumps({"version": __version__}) if as_json else __version__)


def main(argv: list[str] | None = None) -> NoReturn:
    """Run a command line, and exit."""
    if argv is None:
        open_streams()
        forget_terminals_beyond_reason()
        keep_temporary_files_safe()
    words = list(sys.argv[1:] if argv is None else argv)
    own = ["--help" if word == "-h" else word for word in own_words(words)]
    words[: len(own)] = own
    as_json, debug = "--json" in own, "--debug" in own
    keep_bytecode()
    try:
        with put_back():
            status = _dispatch(words)
    except (UserError, RunFailed) as error:
        by_rank_0 = isinstance(error, SharedError) and _world().rank != 0
        status = _give_up(error, "" if by_rank_0 else str(error), as_json, debug)
    except KeyboardInterrupt as error:
        status = _give_up(error, "stopped by CTRL-C", as_json, debug=False)
    except OSError as error:
        kind = UserError if error.errno in GIVEN_WRONG else RunFailed
        status = _give_up(kind(_of_system(error)), _of_system(error), as_json, debug)
    except SystemExit:
        raise
    except BaseException as error:
        usage, place = getattr(error, "format_message", None), _place_in_program(error)
        if usage is not None:
            wrong = UserError(_of_usage(error, usage()))
            status = _give_up(wrong, str(wrong), as_json, debug)
        elif place is not None:
            status = _give_up(error, f"{described(error)} ({place}; --debug shows the traceback)", as_json, debug)
        else:  # meshrun's own mistake
            status = _give_up(error, described(error), as_json, debug=True)
    if why := flush():
        with contextlib.suppress(OSError):  # standard error may be on the same full disk
            print(f"meshrun: {why}", file=sys.stderr, flush=True)
        flush()
        status = status or 1
    if status and _world().size > 1:
        # Without the clean-up at the end of a process: it waits for ranks that may be gone.
        os._exit(status)
    if argv is None:  # else this process may have more to do
        collecting.end()
    sys.exit(status)


def _place_in_program(error: BaseException) -> str | None:
    """The innermost line of the user's own program that led to an error; None where there is none."""
    libraries = (str(Path(__file__).parents[1]), sysconfig.get_path("stdlib"), "<")
    frames = traceback.extract_tb(error.__traceback__)
    own = [each for each in frames if not each.filename.startswith(libraries) and "-packages" not in each.filename]
    return f"{own[-1].filename}:{own[-1].lineno} in {own[-1].name}" if own else None


def _world() -> World:
    """The place of this process among the ranks of its launcher, for the end of a command that has failed.

    Launcher variables that contradict each other may be why it has failed; such a process is alone.
    """
    try:
        return detect(os.environ)
    except UserError:
        return detect({})


def _dispatch(words: list[str]) -> int:
    match words:
        case ["nursery", fd, launcher, *target] if _are_numbers(fd, launcher):
            from meshrun.cli.nursery import nursery_command

            return _dispatch(nursery_command(int(fd), int(launcher), next(iter(target), None)))
        case ["cold-nursery", fd, launcher] if _are_numbers(fd, launcher):
            from meshrun.launch.local import die_with_launcher
            from meshrun.launch.nursery import serve

            die_with_launcher(int(launcher))
            serve(int(fd))
        case ["rank", folder, launcher, *memory] if _are_numbers(launcher):
            from meshrun.cli.rank import rank_command

            rank_command(Path(folder), int(launcher), *map(Path, memory))
        case ["probe", folder, launcher, *words] if _are_numbers(launcher):
            from meshrun.cli.verify import probe_command

            probe_command(Path(folder), int(launcher), *words)
        case ["run", *rest]:
            return _run(rest)
        case ["resume", *rest]:
            return _resume(rest)
        case ["verify", *rest]:
            return _verify(rest)
        case ["chaos", *rest]:
            return _chaos(rest)
        case ["next", folder, "--status", status, *rest] if whole_number(status) is not None:
            from meshrun.cli.next import next_command

            return next_command(Path(folder), int(status), "--json" in rest)
        case ["submit", *rest]:
            return _submit(rest)
        case ["stage", *rest]:
            return _stage(rest)
        case ["bench", *rest]:
            from meshrun.cli.bench import bench_command

            return bench_command(rest)
        case ["use", *rest]:
            from meshrun.cli.use import use_command

            return use_command(rest)
        case ["rehearse", *rest]:
            from meshrun.cli.rehearse import rehearse_command

            return rehearse_command(rest)
        case ["stand-in", folder, *rest]:
            from meshrun.launch.stand_in import stand_in

            return stand_in(Path(folder), rest)
        case ["--version"]:
            print(__version__)
        case [] | ["--help"]:
            from rich.console import Console

            from meshrun.cli.help import overview

            overview(app, Console())
        case _:
            return int(invoke(app, words) or 0)
    return 0


def _are_numbers(*words: str) -> bool:
    """Whether a launcher has written these words: people who type one of its commands are told that there is none."""
    return all(whole_number(word) is not None for word in words)


def _parsed(parse: Callable[[list[str]], Asked | None], words: list[str]) -> Asked | None:
    """What the words ask for. Reading the options imports the user's file, which may print."""
    own = own_words(words)
    keeps_stdout = "--json" in own and "--help" not in own
    quiet = contextlib.redirect_stdout(sys.stderr) if keeps_stdout else contextlib.nullcontext()
    with quiet, collecting.importing():
        return parse(words)


def _verify(words: list[str]) -> int:
    asked = _parsed(parse_verify, words)
    if asked is None:
        return 0
    from meshrun.cli.verify import verify_command

    return verify_command(asked)


def _chaos(words: list[str]) -> int:
    asked = _parsed(parse_chaos, words)
    if asked is None:
        return 0
    from meshrun.cli.chaos import chaos_command

    return chaos_command(asked)


def _stage(words: list[str]) -> int:
    asked = _parsed(parse_stage, words)
    if asked is None:
        return 0
    from meshrun.cli.stage import stage_command

    return stage_command(asked)


def _submit(words: list[str]) -> int:
    from meshrun.cli.submit import submit_command

    return submit_command(words)


def _run(words: list[str]) -> int:
    if "--help" in own_words(words):  # without what starts ranks
        parse_run(words)
        return 0
    from meshrun.cli.nursery import nursery_for

    with nursery_for(words, next(iter(words), None)) as nursery:
        asked = _parsed_by_all(parse_run, words)
        if asked is None:
            return 0
        from meshrun.cli.run import run_command

        with put_back():
            result = run_command(asked, nursery)
        return _trained(asked, result)


def _resume(words: list[str]) -> int:
    from meshrun.cli.resume import nursery_of_run, refuse_unseen, resume_command

    refuse_unseen(words)
    with nursery_of_run(words) as nursery:
        asked = _parsed_by_all(parse_resume, words)
        if asked is None:
            return 0
        with put_back():
            result = resume_command(asked, nursery)
        return _trained(asked, result)


def _parsed_by_all(parse: Callable[[list[str]], Asked | None], words: list[str]) -> Asked | None:
    """All ranks were given the same words, so one of them says what is wrong with them."""
    try:
        return _parsed(parse, words)
    except Exception as error:
        _tell_other_nodes(words, parse is parse_resume, str(error))
        if _world().rank != 0:
            raise UserError("") from None
        raise


def _tell_other_nodes(words: list[str], resumes: bool, why: str) -> None:
    """Where one task a node was started: nobody is to wait for this one, which fails, perhaps here alone."""
    world = _world()
    if world.nodes == 1 or world.size > world.nodes or world.source == "torchrun":
        return
    from meshrun.launch import agents

    given = re.search(r"(?:^|\0)--runs[=\0]([^\0]+)", "\0".join(words))
    runs = Path(words[0]).parent if resumes and words else Path(given[1] if given else "runs")
    if world.node == 0:
        agents.give_up(world, runs)
    else:
        agents.excuse(world, runs, why)


def _trained(asked: Asked, result: dict[str, Any] | None) -> int:
    """Show what a training has reached, on the one process that was given it."""
    if result is None:
        return 0
    if asked.as_json:
        print(strict_json.dumps(result))
    elif asked.target.entry is not None:
        _summary(result)
    return 0


def _summary(result: dict[str, Any]) -> None:
    from meshrun.observe.chosen import in_a_line
    from meshrun.observe.story import of_scores, stopped_in_time

    if stopped := result.get("stopped"):
        print(stopped_in_time(stopped, result["run"]))
        return
    for name, scores in result["eval"].items():
        print(f"{name}: {of_scores(scores)}")
    rate = result["samples_per_s"]
    speed = f", {rate:,.0f} samples/s" if rate else ""
    starts = f"in {len(result['legs'])} starts, the last " if result.get("legs") else ""
    count = f"{result['steps']:,} step{'s' * (result['steps'] != 1)}"
    print(f"{count} in {result['seconds']:.1f} s {starts}on {result['layout']}{speed}")
    if how := in_a_line(result.get("chosen", {})):
        print(f"each step: {how}")
    print(f"report: {result['run']}/report.html")


def _of_usage(error: BaseException, text: str) -> str:
    """What typer says of the words, on one line, and where the right ones are found."""
    if near := getattr(error, "possibilities", None):
        # Its own list has all that is remotely alike, in the order of the alphabet.
        meant = difflib.get_close_matches(getattr(error, "option_name", ""), near, 1, cutoff=0.75)
        text = getattr(error, "message", text).rstrip(".") + (f"; did you mean {meant[0]}?" if meant else "")
    command = getattr(getattr(error, "ctx", None), "command_path", None)
    return " ".join(text.split()).rstrip(".") + (f" ({command} --help lists what is valid)" if command else "")


def _of_system(error: OSError) -> str:
    """What the system has refused, of which file: full or read-only disks, missing rights, names that are too long."""
    files = " and ".join(str(each) for each in (error.filename, error.filename2) if each is not None)
    return f"{f'{files}: ' * bool(files)}{error.strerror or error}{cure_of(error)}"


def _give_up(error: BaseException, text: str, as_json: bool, debug: bool) -> int:
    """Say why, where people and where scripts look for it; returns the exit status."""
    statuses = {UserError: 2, CutOff: WORTH_A_RESTART, KeyboardInterrupt: 130, StoppedByHand: 130}
    status = next((status for kind, status in statuses.items() if isinstance(error, kind)), 1)
    text = brief(text)
    if debug:
        traceback.print_exception(error)
    if not text:
        # Another rank says it, and must get that far before the launcher ends it because of this one.
        time.sleep(PATIENCE)
        return status
    with contextlib.suppress(OSError):  # where nobody can be told, the exit status still says it
        print(f"meshrun: {printable(text)}", file=sys.stderr)
    if as_json:
        print(strict_json.dumps({"error": text, "status": status}))
    return status

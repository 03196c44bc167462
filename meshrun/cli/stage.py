"""`meshrun stage TARGET`: run the target's `stage_data` where there is internet, and check what it has brought.

meshrun stage my.py                      # into data/my/, with staged.json; a second time fetches only what is wrong
meshrun stage my.py --size large         # the target's own options, for a stage_data that has them as parameters
meshrun stage my.py --verify             # all checksums, no network
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn

from meshrun import strict_json
from meshrun.cli.command import Asked
from meshrun.cli.inspect import size
from meshrun.cli.target import Target, make, place_of, values_of
from meshrun.data.staging import Place, Stage, read_list, staging, use, verified
from meshrun.errors import RunFailed, UserError, described, printable

ENTRY = "stage_data"


class Shown:
    """How far the file is that is being fetched or checked, one bar at a time."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task: TaskID | None = None

    def __enter__(self) -> Shown:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def begin(self, what: str, done: int, total: int | None) -> None:
        if self._task is not None:
            self._bar.remove_task(self._task)
        self._task = self._bar.add_task(what, completed=done, total=total)

    def advance(self, count: int) -> None:
        if self._task is not None:
            self._bar.advance(self._task, count)

    def line(self, text: str) -> None:
        self._console.print(printable(text), markup=False, highlight=False)


def stage_command(asked: Asked) -> int:
    """Returns the exit status: 1 where files are not as they were staged."""
    place = place_of(asked.target, asked.config.options, asked.config.data)
    use(place)
    with Shown(Console(stderr=True)) as shown:
        return _verify(asked, place, shown) if asked.beyond.get("verify") else _stage(asked, place, shown)


def _stage(asked: Asked, place: Place, shown: Shown) -> int:
    began = time.monotonic()
    with contextlib.redirect_stdout(sys.stderr) if asked.as_json else contextlib.nullcontext():
        work = _work_of(asked)
        if work is None:
            text = f"{asked.target.label} has no stage_data: it needs nothing from the internet that meshrun knows of"
        else:
            with staging(place.folder, shown) as stage, _named(asked.target):
                work(stage)
            text = _told(stage, place)
    files = [] if work is None else [_described(stage, each.name) for each in stage.files]
    document = {
        "target": asked.config.target,
        "folder": str(place.folder) if work is not None else None,
        "files": files,
        "bytes": sum(each["size"] for each in files),
        "brought": [] if work is None else stage.brought,
        "kept": [] if work is None else stage.kept,
        "seconds": time.monotonic() - began,
    }
    print(strict_json.dumps(document) if asked.as_json else text)
    return 0


def _told(stage: Stage, place: Place) -> str:
    if not stage.files:
        return "stage_data has run; it has put no files of its own into staged.json"
    here = {each.name: each.size for each in stage.files}
    brought, kept = sum(here[name] for name in stage.brought), sum(here[name] for name in stage.kept)
    parts = [f"{len(stage.brought)} brought ({size(brought)})"] if stage.brought else []
    parts += [f"{len(stage.kept)} here and right ({size(kept)})"] if stage.kept else []
    return f"{place.folder}: {', '.join(parts) or 'nothing to do'}"


def _described(stage: Stage, name: str) -> dict[str, Any]:
    return next(dataclasses.asdict(each) for each in stage.files if each.name == name)


def _verify(asked: Asked, place: Place, shown: Shown) -> int:
    files = read_list(place.folder)
    if not files:
        raise UserError(f"nothing is staged in {place.folder}; on a machine with internet: {place.command}")
    problems = verified(place.folder, shown)
    total = sum(each.size for each in files.values())
    if asked.as_json:
        listed = [dataclasses.asdict(each) for each in files.values()]
        document = {"folder": str(place.folder), "ok": not problems, "problems": problems, "files": listed}
        print(strict_json.dumps(document))
    elif not problems:
        print(f"{place.folder}: {len(files)} files ({size(total)}) are as they were staged")
    for problem in problems:
        print(f"meshrun: {problem}", file=sys.stderr)
    if problems:
        print(f"meshrun: to bring them again, on a machine with internet: {place.command}", file=sys.stderr)
    return 1 if problems else 0


def _work_of(asked: Asked) -> Callable[[Stage], Any] | None:
    """What is to be run: the function beside `experiment`, else the experiment's own, else nothing."""
    target, given = asked.target, asked.config.options
    beside = getattr(sys.modules[target.function().__module__], ENTRY, None)
    if beside is not None:
        return _called(beside, target, given)
    try:
        found = make(target, given, asked.config.data).stage_data
    except (UserError, FileNotFoundError) as error:
        raise UserError(
            f"{target.entry}() of {target.label} could not be called to find its stage_data: {error}; if it reads what "
            f"is to be staged, write a function stage_data(stage) beside it in the same file"
        ) from error
    return None if found is None else _called(found, target, given)


def _called(function: Any, target: Target, given: dict[str, Any]) -> Callable[[Stage], Any]:
    """With the stage as its first argument, if it has any, and with the options whose names it has as well."""
    if not callable(function):
        raise UserError(f"stage_data of {target.label} is {type(function).__name__}; it must be a function")
    names = list(inspect.signature(function).parameters)
    if not names:
        return lambda _: function()
    # Values are those that the experiment gets, whose types are known.
    values = values_of(target.function(), given)
    return lambda stage: function(stage, **{name: values[name] for name in names[1:] if name in values})


@contextlib.contextmanager
def _named(target: Target) -> Iterator[None]:
    """An error in the user's own code names where it happened."""
    try:
        yield
    except (UserError, RunFailed):
        raise
    except Exception as error:
        last = error.__traceback__
        while last is not None and last.tb_next is not None:
            last = last.tb_next
        where = f"{last.tb_frame.f_code.co_filename}:{last.tb_lineno}" if last is not None else target.label
        raise RunFailed(f"stage_data of {target.label} failed at {where}: {described(error)}") from error

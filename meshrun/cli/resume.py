"""`meshrun resume RUN`: go on with a run from its newest checkpoint, on the mesh that it had or on another.

meshrun resume runs/digits-1
meshrun resume runs/digits-1 --procs 4 --layout fsdp=2,tp=2 --epochs 10
torchrun --nproc-per-node=2 -m meshrun resume runs/digits-1

Options are those of `run` and of the experiment; what is not given stays as it was. config.json keeps all that it was.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path
from typing import Any

from meshrun.cli.command import Asked, refuse_foreign
from meshrun.cli.nursery import nursery_for
from meshrun.config import RunDirectory
from meshrun.errors import SharedError, UserError, printable
from meshrun.launch.agents import refuse_blindness
from meshrun.launch.lock import refuse_held
from meshrun.launch.ranks import Nursery
from meshrun.world import detect

BEGUN = 20.0
"""Seconds in which the first node has begun with a run that is there."""


def nursery_of_run(words: list[str]) -> contextlib.AbstractContextManager[Nursery | None]:
    """The process that ranks will be forked from, if the first word is a run; what is wrong with it is said later."""
    try:
        refuse_foreign(Path(words[0]))
        before = RunDirectory(Path(words[0])).config()
    except (IndexError, UserError):
        return contextlib.nullcontext()
    return nursery_for(words, before.target, before)


def refuse_unseen(words: list[str]) -> None:
    """On a node with one task, other than the first: a run that is there, but not here, is on no shared disk.

    Where the first node does not find it either, it says so for all.
    """
    world = detect(os.environ)
    if not world.node or world.size > world.nodes or not words or words[0].startswith("-"):
        return
    path, give_up = Path(words[0]) / "config.json", time.monotonic() + BEGUN
    try:
        while not path.is_file() and time.monotonic() < give_up:
            time.sleep(0.2)
            refuse_blindness(world)
    except UserError as error:
        print(f"meshrun: {printable(str(error))}", file=sys.stderr)  # beside the first node, whose standard output is
        raise UserError("") from error


def resume_command(asked: Asked, nursery: Nursery | None = None) -> dict[str, Any] | None:
    """Returns the result on the one process that should print it."""
    run = asked.run
    assert run is not None
    _refuse_complete(run, asked, asked.document)
    if not asked.beyond["from_start"]:
        _refuse_without_checkpoint(run)
    from meshrun.cli.run import run_command

    return run_command(asked, nursery)


def _refuse_without_checkpoint(run: RunDirectory) -> None:
    """A run that has kept no checkpoint would begin again at step 0, and replace all that it has reached."""
    if run.saved_step() is None:
        refuse_held(run)
        raise SharedError(
            f"{run.path} has no checkpoint to go on from; to begin it again at step 0, and replace what it has "
            f"reached, give --from-start"
        )


def _refuse_complete(run: RunDirectory, asked: Asked, before: dict[str, Any]) -> None:
    """A run that has reached its end has nothing to go on with, unless the end was moved."""
    result = run.result()
    if result is None:
        return
    reached: int = result["steps"]
    now, then = asked.config.to_json(), before["config"]
    if asked.config.steps is None:
        same = all(then.get(name) == now[name] for name in ("epochs", "batch", "options"))
        complete = same and before.get("resolved", {}).get("steps") == reached
    else:
        complete = asked.config.steps <= reached
    if complete:
        more = "to go on, give more of them (--steps, --epochs)"
        raise SharedError(f"{run.path} has reached its {reached:,} steps; {more}")

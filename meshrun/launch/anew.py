"""The directory of a new run; for a command that is started anew, the one that it had.

    run = run_of(config, world, inherited())

torchrun starts lost ranks anew, and Slurm a whole job, with the same words both times: `meshrun run` in them is not to
begin from nothing. What has the same place in its job, or the same launch of torchrun, leaves a note beside the runs,
in a folder of its user: others may have runs there too.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote

from meshrun import strict_json
from meshrun.config import RunConfig, RunDirectory, write_json
from meshrun.errors import printable
from meshrun.files import read_own
from meshrun.world import World
from meshrun.world.slurm import place_in_job, restart_count

FOLDER = f".jobs-{os.getuid()}"


def run_of(config: RunConfig, world: World, env: Mapping[str, str]) -> RunDirectory:
    """Its directory, with a note for the next start. Each start takes what one before it has noted, and only once."""
    starts = {world.job: world.attempt} if world.job else {}
    if (place := place_in_job(env)) is not None:
        # One script may train several things, one after the other.
        asked = {**config.to_json(), "command": None}
        digest = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:16]
        starts[f"{place}-{digest}"] = restart_count(env)
    named = {quote(name, safe="", errors="surrogateescape"): start for name, start in starts.items()}
    notes = {config.runs / FOLDER / name: start for name, start in named.items()}
    had = next(filter(None, (_noted(note, start) for note, start in notes.items())), None)
    run = had or RunDirectory.create(config)
    try:
        for note, start in notes.items():
            note.parent.mkdir(mode=0o700, exist_ok=True)
            write_json(note, {"run": str(run.path), "start": start}, mode=0o600)
    except OSError as error:
        told = f"cannot write in {config.runs / FOLDER} ({error.strerror}), so this command, started anew, begins anew"
        print(f"meshrun: {printable(told)}", file=sys.stderr, flush=True)
    return run


def _noted(note: Path, start: int) -> RunDirectory | None:
    """The run that an earlier start than this one had, if it is still there."""
    if not start:
        return None
    try:
        # Others may be able to write there: the config.json of a run decides what its ranks execute.
        found = strict_json.loads(read_own(note))
        run = RunDirectory(Path(found["run"]))
        own = run.path.stat().st_uid == os.getuid()
        return run if found["start"] < start and own and (run.path / "config.json").is_file() else None
    except (OSError, ValueError, KeyError, TypeError):
        return None

"""`meshrun jobs`, `meshrun follow`, `meshrun cancel`: what has been submitted, live, and ended.

meshrun jobs                         # this user's, and those of the runs here
meshrun follow runs/digits-3         # or a job's number, or a run's name
meshrun cancel digits-3
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from meshrun import strict_json
from meshrun.config import RUNS
from meshrun.errors import UserError, printable

Which = Annotated[str, typer.Argument(metavar="RUN", help="A run directory, a run's name, or the number of a job.")]
Runs = Annotated[Path, typer.Option("--runs", help="Folder that run directories are in.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks.")]


def jobs_command(runs: Runs = RUNS, as_json: AsJson = False, debug: Debug = False) -> int:
    """List submitted runs: where their jobs stand, and how far they are."""
    del debug  # for `main`
    from meshrun.cli.listing import rows
    from meshrun.launch.slurm import Slurm

    found = rows(Slurm.here(), runs)
    if as_json:
        print(strict_json.dumps({"jobs": [vars(row) for row in found]}))
    else:
        for row in found:
            print(printable(row.line()))  # of run directories that anybody may have made
        if not found:
            print("no job of yours was submitted with meshrun, and no run here either")
    return 0


def follow_command(which: Which, runs: Runs = RUNS, as_json: AsJson = False, debug: Debug = False) -> int:
    """Show a submitted run live, until its end."""
    del debug  # for `main`
    from meshrun.cli.following import follow
    from meshrun.cli.listing import found_run
    from meshrun.launch.slurm import Slurm

    slurm = Slurm.here()
    run = found_run(slurm, which, runs)
    return follow(slurm, run, {} if as_json else None)


def cancel_command(which: Which, runs: Runs = RUNS, as_json: AsJson = False, debug: Debug = False) -> int:
    """End a submitted run: its job, and the chain that would go on."""
    del debug  # for `main`
    from meshrun.cli.listing import called_off, found_run
    from meshrun.launch.slurm import Slurm

    slurm = Slurm.here()
    run = found_run(slurm, which, runs)
    alive = called_off(slurm, run)
    if not alive:
        raise UserError(f"{run} has no job that is pending or running; meshrun jobs lists those that are")
    # An array's own number stands for all its elements; those of later links have numbers of their own.
    cancelled = [id for id in alive if id.partition("_")[0] not in alive or id == id.partition("_")[0]]
    for id in cancelled:
        slurm.cancel(id)
    print(
        json.dumps({"run": str(run), "cancelled": cancelled})
        if as_json
        else f"cancelled {' and '.join(f'job {id}' for id in cancelled)} of {run}; what was saved is kept"
    )
    return 0

"""`meshrun doctor`: is this machine, or this allocation, fit for training?

    meshrun doctor                                        # this machine
    srun -N2 --ntasks-per-node=4 python -m meshrun doctor # all ranks of an allocation; also torchrun, mpirun, mpiexec
    meshrun doctor --quick --json                         # without measuring

Exit status 0: nothing was found; 1: something was.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshrun import strict_json
from meshrun.config import RUNS
from meshrun.errors import UserError
from meshrun.world import detect

if TYPE_CHECKING:
    from rich.table import Table

    from meshrun.check.doctor.case import Finding
    from meshrun.check.doctor.examine import Seen

MOST_COLUMNS = 6
MARKS = {True: "[green]✓[/]", False: "[red]✗[/]", None: "[dim]·[/]"}


def doctor_command(
    runs: Annotated[Path, typer.Option(help="Folder that run directories are made in.")] = RUNS,
    site: Annotated[str | None, typer.Option(help="Site whose rules for addresses and networks hold.")] = None,
    port: Annotated[int | None, typer.Option(help="A port that you mean to give to run --port.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for ranks that do not answer.")] = 30.0,
    quick: Annotated[bool, typer.Option("--quick", help="Do not measure: no torch, a second at most.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> int:
    """Examine this machine, or an allocation on all its ranks: what is wrong, where, why it matters, what mends it."""
    del debug  # for `main`
    if not timeout > 0:
        raise UserError(f"timeout is {timeout}; it must be above 0 seconds (--timeout)")
    if port is not None and not 0 < port < 65536:
        raise UserError(f"port is {port}; it must be between 1 and 65535 (--port)")
    from meshrun.check.doctor.examine import Asked, examine

    world = detect(os.environ)
    seen = examine(world, runs, Asked(site, quick, port, timeout))
    if seen is None:
        return 0
    if world.rank != 0:
        # Rank 0 was never heard, so nobody else will say it; standard output stays rank 0's.
        for finding in seen.findings:
            print(f"meshrun: {finding.what} ({finding.fix})", file=sys.stderr)
        return 1
    if as_json:
        print(strict_json.dumps(document(seen)))
    else:
        _show(seen)
    return 1 if seen.findings else 0


def document(seen: Seen) -> dict[str, Any]:
    """All that there is to say, as JSON."""
    from meshrun.check.doctor.figures import checked

    return {
        "ok": not seen.findings,
        "findings": [finding.to_json() for finding in seen.findings],
        "ranks": seen.case.size,
        "nodes": checked(seen.case),
        "seconds": round(seen.seconds, 2),
    }


def _show(seen: Seen) -> None:
    from rich.console import Console

    from meshrun.check.doctor.figures import lines

    console = Console()
    console.print(_marks(seen))
    print()
    for line in lines(seen.case):
        print(line)
    for number, finding in enumerate(seen.findings, 1):
        _print(number, finding)
    ranks, nodes = seen.case.size, len(seen.case.nodes())
    world = f"{ranks} rank{'s' * (ranks != 1)} on {nodes} node{'s' * (nodes != 1)}"
    found = f"{len(seen.findings)} finding{'s' * (len(seen.findings) != 1)}" if seen.findings else "nothing found"
    print(f"\n{world}: {found} in {seen.seconds:.1f} s")


def _print(number: int, finding: Finding) -> None:
    print(f"\n{number}. {finding.what}")
    for name, text in (("where", finding.where), ("why", finding.why), ("fix", finding.fix)):
        print(f"   {name:<6} {text}")


def _marks(seen: Seen) -> Table:
    """Checks and nodes; nodes of which the same is to be said are one column."""
    from rich.table import Table
    from rich.text import Text

    from meshrun.check.doctor.case import CHECKS
    from meshrun.check.doctor.figures import looked_at

    columns: dict[tuple[str, ...], list[str]] = {}
    for host in seen.case.nodes():
        wrong = {each.check for each in seen.findings if host in each.hosts or not each.hosts}
        marks = (MARKS[None if not looked_at(seen.case, name) else name not in wrong] for name in CHECKS)
        columns.setdefault(tuple(marks), []).append(host)
    worst = sorted(columns, key=lambda marks: -marks.count(MARKS[False]))[:MOST_COLUMNS]
    shown = {marks: hosts for marks, hosts in columns.items() if marks in worst}
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("check", no_wrap=True)
    table.add_column("")
    for hosts in shown.values():
        table.add_column(Text(hosts[0] if len(hosts) == 1 else f"{hosts[0]} … ({len(hosts)})"), justify="center")
    for row, (name, text) in enumerate(CHECKS.items()):
        table.add_row(name, Text(text, style="dim"), *(marks[row] for marks in shown))
    return table

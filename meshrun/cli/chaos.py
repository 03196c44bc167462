"""`meshrun chaos TARGET`: strike faults into runs of it, and prove that each ends as the run without faults.

    meshrun chaos digits --faults 200 --seed 1
    meshrun chaos llama --layout fsdp=2 --kinds kill-update,disk-full,launcher --faults 30 --json
    meshrun chaos digits --cluster --faults 10

Every run is a real `meshrun run` on this machine. As root, disks are really full and the kernel really kills for want
of memory; else ranks are told to behave as if it were so. With --cluster, runs are jobs that are submitted to the real
Slurm on virtual nodes, and it is nodes, the network between them and Slurm itself that fail.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from meshrun import strict_json
from meshrun.check import cluster_faults  # noqa: F401 - adds its kinds
from meshrun.check.chaos import Chaos, Outcome, Place
from meshrun.check.cluster import Cluster
from meshrun.check.cluster_scene import NODES, PROCS, SPARE, scene_on
from meshrun.check.faults import KINDS, plan
from meshrun.check.plans import NEEDS, Need
from meshrun.cli.command import Asked
from meshrun.cli.nursery import imports_of, is_installed
from meshrun.cli.target import Target
from meshrun.errors import UserError
from meshrun.world import detect

USUAL = {"procs": 2, "steps": 240, "checkpoint": "5", "hang_after": 2.0}
"""Options of the runs, where the user does not choose: short runs that save often."""
USUAL_ON_CLUSTER = {**USUAL, "steps": 600, "hang_after": 5.0, "procs": PROCS}
"""The same on nodes, where all takes longer."""
MOST_FAULTS = 1_000_000
FIXED = {"record_ids": True, "restarts": 1000, "keep": 3, "tensorboard": False, "timeout": 60.0}

PACE_ON_CLUSTER = 0.05
AT_ONCE_ON_CLUSTER = 3
NEAR = 1e-4
"""How near a run must come that had fewer ranks for a while, and so added in another order: AdamW magnifies that."""

ARMED = '''"""{target}, on ranks that fail when they are told to."""

from pathlib import Path

{imports}
from meshrun.check.armed import arm
from meshrun.cli.target import find

arm(Path(__file__).parent / "control")
experiment = find({target!r}).function()
'''


def chaos_command(asked: Asked) -> int:
    """Returns the exit status: 0 if all faults were survived, 1 if one was not."""
    world = detect(os.environ)
    if world.size > 1:
        raise UserError(f"chaos starts its own processes, but {world.source} has started {world.size}; start it once")
    count, seed, keep = asked.beyond["faults"], asked.beyond.get("seed", 1), asked.beyond.get("keep")
    if not 1 <= count <= MOST_FAULTS:
        raise UserError(f"faults is {count}; it must be at least 1 and at most {MOST_FAULTS:,} (--faults)")
    on_cluster = asked.beyond["cluster"]
    document = _document(asked, USUAL_ON_CLUSTER if on_cluster else USUAL)
    kinds = asked.beyond["kinds"].split(",") if asked.beyond.get("kinds") else None
    if on_cluster:
        _check_cluster(asked, kinds)
        kinds = kinds or [each.name for each in KINDS.values() if each.needs == "cluster" for _ in range(each.weight)]
        ranks = NODES * PROCS
    else:
        ranks = document["procs"]
        if ranks < 2:
            raise UserError(f"procs is {ranks}; chaos needs ranks that a launcher starts, at least 2 (--procs)")
    # Refuses what there is not, before anything runs; what the target has, the run without faults will show.
    plan(seed, count, ranks, kinds, [need for need in NEEDS if need != "cluster" or on_cluster])
    folder = _folder(keep)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # runs are ended and disks healed on the way out
    console, began = Console(stderr=True), time.monotonic()
    with _Shown(asked.target.label, count, console) as shown, _place(folder, ranks, on_cluster) as place:
        chaos = Chaos(asked.config.target, armed_text(asked.target), document, folder, place, keep is not None)
        chaos.reference()
        there: dict[Need, object] = {
            "readers": document.get("workers"),
            "evaluation": chaos.evaluates,
            "cluster": on_cluster,
        }
        faults = plan(seed, count, ranks, kinds, [need for need, found in there.items() if found])
        outcome = chaos.strike(faults, shown.tell)
    found = {**outcome.document(), "seed": seed, "seconds": round(time.monotonic() - began, 1)}
    if asked.as_json:
        print(strict_json.dumps(found))
    else:
        _show(found, asked.target.label, console)
    if not outcome.failures and keep is None:
        shutil.rmtree(folder, ignore_errors=True)
    return 1 if outcome.failures else 0


def _check_cluster(asked: Asked, kinds: list[str] | None) -> None:
    if why := Cluster.missing():
        raise UserError(f"chaos cannot make a virtual cluster: {why} (--cluster)")
    if asked.config.procs not in (None, PROCS):
        raise UserError(f"procs is {asked.config.procs}; on a virtual cluster a node has {PROCS} ranks (--procs)")
    for name in kinds or ():
        if name in KINDS and KINDS[name].needs != "cluster":
            there = ", ".join(each.name for each in KINDS.values() if each.needs == "cluster")
            raise UserError(f"{name} does not strike on a virtual cluster; there are {there} (--kinds)")


@contextlib.contextmanager
def _place(folder: Path, ranks: int, on_cluster: bool) -> Iterator[Place]:
    if not on_cluster:
        yield Place(ranks)
        return
    with Cluster(folder / "cluster", nodes=NODES + SPARE, gpus=PROCS) as cluster:
        yield Place(ranks, scene_on(cluster), PACE_ON_CLUSTER, AT_ONCE_ON_CLUSTER, NEAR)


class _Shown:
    """How far it is: a bar on a terminal, a line a run elsewhere."""

    def __init__(self, label: str, faults: int, console: Console) -> None:
        self._label, self._faults, self._console = label, faults, console
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._progress.add_task("the run without faults", total=faults)

    def __enter__(self) -> _Shown:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def tell(self, outcome: Outcome) -> None:
        done = len(outcome.records)
        failed = done - outcome.survived
        text = f"{outcome.survived} survived" + (f", {failed} not" if failed else "")
        self._progress.update(self._task, completed=done, description=text)
        if not self._console.is_terminal:
            line = f"chaos {self._label}: {done} of {self._faults} faults after run {outcome.runs}, {text}"
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def armed_text(target: Target) -> str:
    """A file with the same experiment, options and imports; ranks that read it carry out orders."""
    real = target.text if target.recipe else f"{target.path}:{target.entry}"
    names = sorted({name for name in imports_of(target.path) if is_installed(name)} - {"__future__"})
    return ARMED.format(target=real, imports="\n".join(f"import {name}" for name in names))


def _document(asked: Asked, usual: dict[str, Any]) -> dict[str, Any]:
    """The options of the runs, as a file has them."""
    config = asked.config.to_json()
    given = {
        name: value
        for name, value in config.items()
        if name not in ("target", "options", "arguments", "command", "runs")
    }
    given = {name: value for name, value in given.items() if value is not None and name not in FIXED}
    if given.get("checkpoint") == "auto":
        del given["checkpoint"]
    steps = given.get("steps", usual["steps"])
    return {**usual, "eval_every": max(1, steps // 8), **given, **FIXED, **asked.config.options}


def _folder(keep: Path | None) -> Path:
    if keep is None:
        return Path(tempfile.mkdtemp(prefix="meshrun-chaos-"))
    try:
        keep.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make the folder {keep}: {error.strerror} (--keep)") from None
    if any(keep.iterdir()):
        raise UserError(f"{keep} is not empty; give a folder that is empty or does not exist (--keep)")
    return keep


def _show(document: dict[str, Any], label: str, console: Console) -> None:
    table = Table(
        title=f"{label}: {document['survived']} of {document['faults']} faults survived", title_justify="left"
    )
    table.add_column("fault", no_wrap=True)
    table.add_column("what it does")
    for name in ("faults", "survived", "goes on after"):
        table.add_column(name, justify="right")
    for name, found in document["by_kind"].items():
        seconds = "-" if found["seconds"] is None else f"{found['seconds']:.2f} s"
        survived = f"[{'green' if found['survived'] == found['faults'] else 'red'}]{found['survived']}[/]"
        table.add_row(name, KINDS[name].does, str(found["faults"]), survived, seconds)
    console.print(table)
    for failure in document["failures"]:
        console.print(failure, markup=False, highlight=False, soft_wrap=True)
    runs = f"{document['runs']} run{'s' * (document['runs'] != 1)}"
    console.print(
        f"{runs}; samples lost {document['ids_lost']}, used twice {document['ids_repeated']}; "
        f"weights {'equal' if document['weights_equal'] else 'differ'}",
        highlight=False,
    )

"""`meshrun inspect`: what a checkpoint holds, and whether every byte of it is as it was written.

meshrun inspect runs/digits-1                    # its newest checkpoint
meshrun inspect runs/digits-1 --step 120
meshrun inspect runs/digits-1/checkpoints/step-00000120 --json
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshrun import strict_json
from meshrun.config import whole_number

if TYPE_CHECKING:
    from meshrun.state.checkpoint import Checkpoint

SHOWN = 12
"""Values of the state that are printed; all are in the JSON document."""
KINDS = ("model", "buffer", "optimizer", "rng", "totals")
"""The first parts of tensors' names, in the order in which they are listed."""
INTERNAL = ("step", "layout", "world", "habits", "kept", "groups", "totals", "draws")
"""Values that are printed above the others, or that only a resumed run can use."""


def inspect_command(
    path: Annotated[Path, typer.Argument(metavar="RUN_OR_CHECKPOINT", help="A run directory, or a checkpoint in it.")],
    step: Annotated[int | None, typer.Option(help="Of a run: the checkpoint of this step instead of the last.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> int:
    """List what a checkpoint holds, and verify its checksums."""
    del debug  # for `main`
    from meshrun.state import catalog
    from meshrun.state.checkpoint import BadCheckpoint, Checkpoint

    folder = catalog.find(path, step)
    try:
        checkpoint = Checkpoint.open(folder)
    except BadCheckpoint as error:
        catalog.refuse_deleted(folder)
        if as_json:
            print(strict_json.dumps({"checkpoint": str(folder), "ok": False, "problems": [str(error)]}))
        else:
            print(f"meshrun: {error}", file=sys.stderr)
        return 1
    problems = _verified(checkpoint, quiet=as_json)
    if problems:
        catalog.refuse_deleted(folder)
    if as_json:
        print(strict_json.dumps(document(checkpoint, problems)))
    else:
        _print(checkpoint, problems)
    return 1 if problems else 0


def document(checkpoint: Checkpoint, problems: list[str]) -> dict[str, Any]:
    """All that there is to say, as JSON."""
    from meshrun.state.manifest import plain

    tensors = [
        {"name": name, "dtype": str(info.dtype).removeprefix("torch."), "shape": list(info.shape), "bytes": info.bytes}
        for name, info in sorted(checkpoint.tensors.items(), key=lambda item: _place(item[0]))
    ]
    return {
        "checkpoint": str(checkpoint.path),
        "ok": not problems,
        "problems": problems,
        "step": checkpoint.step,
        "layout": checkpoint.layout,
        "world": checkpoint.world,
        "bytes": checkpoint.bytes,
        "files": len(checkpoint.manifest.files),
        "tensors": tensors,
        "state": plain(checkpoint.state),
    }


def _place(name: str) -> tuple[int, list[tuple[int, str]]]:
    """Where a tensor is listed: kind after kind, and numbers in names by their value."""
    kind = name.partition("/")[0]
    parts = re.split(r"(\d+)", name)
    numbers = [(-1, part) if (number := whole_number(part)) is None else (number, "") for part in parts]
    return KINDS.index(kind) if kind in KINDS else len(KINDS), numbers


def _verified(checkpoint: Checkpoint, quiet: bool) -> list[str]:
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True, disable=quiet) as bar:
        task = bar.add_task("verifying", total=checkpoint.bytes)
        return checkpoint.verify(lambda count: bar.advance(task, count))


def _print(checkpoint: Checkpoint, problems: list[str]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title, side in (("tensor", "left"), ("type", "left"), ("shape", "left"), ("size", "right")):
        table.add_column(title, justify=side, overflow="fold")  # type: ignore[arg-type]
    for tensor in document(checkpoint, problems)["tensors"]:
        shape = " x ".join(map(str, tensor["shape"])) or "-"
        # As text: a bracket in a name would begin rich's markup.
        table.add_row(Text(_printable(tensor["name"])), tensor["dtype"], shape, size(tensor["bytes"]))
    console.print(table)
    files = len(checkpoint.manifest.files)
    ranks = f"{checkpoint.world} rank{'s' * (checkpoint.world != 1)}"
    print(f"\nstep {checkpoint.step:,}, saved on {_printable(checkpoint.layout)} by {ranks}")
    print(f"{len(checkpoint.tensors):,} tensors, {size(checkpoint.bytes)} in {files} file{'s' * (files != 1)}")
    for name, value in [each for each in checkpoint.state.items() if each[0] not in INTERNAL][:SHOWN]:
        text = json.dumps(value)
        print(f"  {_printable(name)}: {text if len(text) <= 100 else text[:97] + '…'}")
    if problems:
        for problem in problems:
            print(f"meshrun: {problem}", file=sys.stderr)
        print(f"damaged: {len(problems)} problem{'s' * (len(problems) != 1)}")
    else:
        print("all checksums are right")


def _printable(text: str) -> str:
    """Without what would move the cursor, or worse."""
    return "".join(each if each.isprintable() else "?" for each in text)


def size(count: int) -> str:
    """Bytes for people."""
    for unit, width in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= width:
            return f"{count / width:.2f} {unit}"
    return f"{count} B"

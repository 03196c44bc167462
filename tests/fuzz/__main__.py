"""python -m tests.fuzz [FORMAT …] [--inputs 10000] [--seed 1] [--input FILE]: damaged inputs for every format.

Exit status 1 where something was found; each finding comes with the command that repeats it.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import importlib
import json
import os
import sys
import tempfile
import time
import traceback
from pathlib import Path

import torch

from meshrun.errors import RunFailed, UserError
from tests.fuzz.engine import Format, Tally, fuzz, judged
from tests.fuzz.table import FORMATS


def main() -> int:
    asked = _asked()
    unknown = next((name for name in asked.formats if name not in FORMATS), None)
    if unknown is not None:
        near = difflib.get_close_matches(unknown, FORMATS, 1) or sorted(FORMATS)
        print(f"there is no format {unknown!r}; there are {', '.join(near)}", file=sys.stderr)
        return 2
    torch.set_num_threads(1)
    for name in ("h5py", "PIL.Image", "pyarrow.csv", "pyarrow.parquet", "safetensors.torch"):
        importlib.import_module(name)  # once, before processes are forked
    formats = [FORMATS[name] for name in asked.formats or FORMATS]
    if asked.input is not None:
        return _again(formats[0], asked.input)
    began = time.monotonic()
    tell = (lambda _: None) if asked.json else (lambda line: print(line, flush=True))
    tallies = fuzz(formats, asked.inputs, asked.seed, asked.jobs, asked.out, tell)
    if asked.json:
        print(json.dumps([dataclasses.asdict(each) for each in tallies]))
    else:
        _summary(tallies, time.monotonic() - began)
    return int(any(each.findings for each in tallies))


def _asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="Damaged inputs for every format.")
    parser.add_argument("formats", nargs="*", metavar="FORMAT", help="formats; all when absent")
    parser.add_argument("--inputs", type=int, default=10_000, help="damaged inputs a format")
    parser.add_argument("--seed", type=int, default=1, help="another seed draws other inputs")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at a time")
    parser.add_argument("--input", type=Path, help="read this one file as FORMAT, and show what happens")
    parser.add_argument("--out", type=Path, default=Path("fuzz-findings"), help="folder for inputs that were found")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    return parser.parse_args()


def _again(format: Format, path: Path) -> int:
    """One input once more, in this process, with the whole traceback."""
    data = path.read_bytes()
    with tempfile.TemporaryDirectory() as folder:
        _, what, where = judged(format, data, Path(folder))
        try:
            print(f"read: {str(format.read(data, Path(folder)))[:2000]}")
        except (UserError, RunFailed) as error:
            print(f"refused: {error}")
        except Exception:
            traceback.print_exc()
    if what:
        print(f"{what}\n{where}", end="")
    return int(bool(what))


def _summary(tallies: list[Tally], seconds: float) -> None:
    inputs, found = sum(each.inputs for each in tallies), sum(len(each.findings) for each in tallies)
    print(f"{len(tallies)} formats, {inputs:,} inputs in {seconds:.0f} s: {found} findings")


if __name__ == "__main__":
    sys.exit(main())

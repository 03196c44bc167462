"""How fast data comes, beside the loaders that people write by hand and beside webdataset, litdata and `datasets`.

    python benchmarks/data.py --rounds 7                     # `make bench` installs the peers first
    python benchmarks/data.py --only images,hdf5 --json

Every side reads the same samples into batches of the same shape with two reader processes (meshrun's sources that cost
next to nothing are read without any, as `meshrun run` does). Sides take turns, a fresh epoch each, in an order that is
drawn anew every round; a round counts from the first batch to the last, so that starting readers counts for nobody. A
ratio is the median over rounds of (meshrun's samples/s / the other's in the same round), with its quartiles. CPU time
is that of all processes, starting them included. All files are small enough for the page cache: this measures what
software costs, and no disk.

- images: JPEGs of 500 x 375, scaled and cut to 224 x 224. The plain side decodes whole pictures, as everybody does.
- hdf5, hdf5-gzip: rows of 3 x 64 x 64 bytes in chunks of 64; `sequential` and `window` are both meshrun's.
- tokens: windows of 1,024 tokens, against tokenising the same text on the fly, and against a memory map by hand.
- lines, parquet, saved: rows of a table as (length of the document, length of the summary).
- ids: a dataset of a billion samples: time and memory to start and to know any step's ids.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import resource
import statistics
import sys
import tempfile
import time
import tracemalloc
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import print_table
from benchmarks.data_sides import CASES, MESHRUN, Case, Side
from meshrun.data.order import Order

WARM_UP = 1


def main() -> int:
    options = parsed()
    chosen = options.only.split(",") if options.only else [*CASES, "ids"]
    if unknown := set(chosen) - {*CASES, "ids"}:
        print(f"--only has {', '.join(sorted(unknown))}; it must be of {', '.join([*CASES, 'ids'])}", file=sys.stderr)
        return 2
    torch.set_num_threads(1)
    result: dict[str, Any] = {"setting": {"rounds": options.rounds, "load_before": os.getloadavg()[0]}}
    result |= {"rows": [], "ratios": {}, "left_out": {}}
    with tempfile.TemporaryDirectory(prefix="meshrun-data-") as folder:
        for name in chosen:
            if name != "ids":
                compare(name, CASES[name](Path(folder)), options.rounds, result)
    if "ids" in chosen:
        result["ids"] = a_billion_ids()
    if options.json:
        print(json.dumps(result, indent=2))
    else:
        show(result)
    return 0


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7, help="times that every side has its turn (7)")
    parser.add_argument("--only", help=f"some of {','.join([*CASES, 'ids'])}")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    return parser.parse_args()


@dataclass(frozen=True)
class Turn:
    """One side's turn of a round."""

    rate: float
    """Samples a second."""
    cpu: float
    """CPU seconds of all processes for a thousand samples."""


def compare(name: str, case: Case, rounds: int, result: dict[str, Any]) -> None:
    """Let all sides of a case take turns, and add what came of it."""
    result["left_out"] |= {f"{name}: {side}": why for side, why in case.left_out.items()}
    turns: dict[str, list[Turn]] = {side: [] for side in case.sides}
    for number in range(WARM_UP + rounds):
        for side in random.sample(list(case.sides), len(case.sides)):
            turn = taken(case.sides[side], case.samples)
            if number >= WARM_UP:
                turns[side].append(turn)
            print(f"{name}: round {number + 1 - WARM_UP}: {side}: {turn.rate:,.0f} samples/s", file=sys.stderr)
    for side, all_turns in turns.items():
        rates, cpu = [turn.rate for turn in all_turns], [turn.cpu for turn in all_turns]
        row = {"case": name, "side": side, "samples_per_s": statistics.median(rates), "cpu": statistics.median(cpu)}
        if side != MESHRUN:
            ours = [turn.rate for turn in turns[MESHRUN]]
            row |= spread([mine / other for mine, other in zip(ours, rates, strict=True)])
            result["ratios"][f"{name}: {MESHRUN} / {side}"] = row["ratio"]
        result["rows"].append(row)


def taken(side: Side, samples: int) -> Turn:
    """Read so many samples; the clock runs from the first batch on, which waits for readers to start."""
    gc.collect()
    before, read = cpu_seconds(), 0
    batches = side()
    first = next(batches)
    began = time.perf_counter()
    for count in batches:
        read += count
        if read >= samples:
            break
    seconds = time.perf_counter() - began
    batches.close()
    gc.collect()  # readers end, and their time is known
    return Turn(read / seconds, (cpu_seconds() - before) / (first + read) * 1000)


def cpu_seconds() -> float:
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in used)


def spread(ratios: list[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return {"ratio": middle, "low": low, "high": high}


def a_billion_ids() -> dict[str, float]:
    """Milliseconds and megabytes for a dataset of 10^9 samples: to start, and for a step far away."""
    found: dict[str, float] = {}
    for shuffle in ("full", "window"):
        starts, steps = [], []
        for number in range(21):
            began = time.perf_counter()
            order = Order.of(Billion(), 256, number, shuffle)
            order.batch_ids(0)
            starts.append(time.perf_counter() - began)
            began = time.perf_counter()
            order.batch_ids(random.randrange(3 * order.steps_per_epoch))
            steps.append(time.perf_counter() - began)
        tracemalloc.start()
        Order.of(Billion(), 256, 99, shuffle).batch_ids(1_000_000)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        found |= {f"{shuffle}_start_ms": statistics.median(starts) * 1e3, f"{shuffle}_mb": peak / 1e6}
        found |= {f"{shuffle}_step_ms": statistics.median(steps) * 1e3}
    return found


class Billion:
    """As many samples as nobody has."""

    chunk = 256

    def __len__(self) -> int:
        return 10**9

    def __getitem__(self, index: int) -> int:
        return index


def show(result: dict[str, Any]) -> None:
    rows = []
    for row in result["rows"]:
        ratio = f"{row['ratio']:.3f} ({row['low']:.3f}-{row['high']:.3f})" if "ratio" in row else ""
        rows.append((row["case"], row["side"], f"{row['samples_per_s']:,.0f}", f"{row['cpu']:.3f}", ratio))
    print_table(["case", "side", "samples/s", "CPU s / 1,000", "meshrun is so many times as fast (quartiles)"], rows)
    for side, why in result["left_out"].items():
        print(f"left out: {side}: {why}")
    for name, value in result.get("ids", {}).items():
        print(f"10^9 ids: {name} {value:.3f}")


if __name__ == "__main__":
    sys.exit(main())

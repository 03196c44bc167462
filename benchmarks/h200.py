"""How fast meshrun trains on one H200, beside its peers and beside what the card can do.

    python benchmarks/h200.py                               # all of it: some 15 minutes
    python benchmarks/h200.py --parts llama,t5              # some of it; results of other parts in --out stay
    python benchmarks/h200.py --tiny --parts llama,resnet   # the same code on a CPU, in a minute; figures mean nothing

Sides take turns, each in a process of its own, `--steps` updates at a time, in an order that is drawn anew each round;
a ratio is the median over rounds of what meshrun does in a second over what the other does in the same round. `of_peak`
is the share of what large matrix products reach, which have their turns too, for some milliseconds; `of_lasting` of
what they reach for a second on end, when the card is at its limit of power. Parts:

- llama: 1.1 billion parameters, 2,048 tokens, batch 16, AdamW: bf16 and float8 beside Fabric, Accelerate (as their
  documentation shows them, transformers' Llama), Fabric + compile, and bare torch, compiled, with fused AdamW.
- t5: the base size, documents of 512 tokens to summaries of 150, batch 32, beside Lightning and bare torch, compiled.
- resnet: ResNet-50 at 224 pixels, batch 256, beside Lightning and bare torch, channels last, compiled.
- image: the image job of image_job.py, end to end.
- start: from the command to the end of the first step of the billion, with an empty and with a filled compile cache.
- rank: one rank of 64 of the Llama of 8 billion, whose other ranks are made up (`meshrun bench rank`).
- largest: a step of about the largest Llama that one card can train, with all that saves memory.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.util
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import print_table
from h200_sides import EXPERIMENTS, PACKAGES, SIDES, device_of, imports_of, largest, products

from meshrun.check.bench_count import count
from meshrun.check.bench_process import Process
from meshrun.check.bench_rank import tokens_of
from meshrun.check.bench_roofline import measured, product_size
from meshrun.check.bench_side import Entry, Taken
from meshrun.check.bench_turns import ratios, take_turns
from meshrun.check.nan_safe import exceeds
from meshrun.check.nan_safe import largest as largest_of
from meshrun.config import write_json

HERE = Path(__file__).parent
LAYOUTS = ("fsdp=64", "dp=8,fsdp=8", "fsdp=8,tp=8")
TINY_LAYOUTS = ("fsdp=8", "dp=2,fsdp=4", "fsdp=4,tp=2")
PATIENCE = 300.0
"""Seconds that a start, or a rank, may take."""
GIB = float(1 << 30)
PRODUCTS = "matrix products"
Found = tuple[list[dict[str, Any]], dict[str, float | None]]
"""Rows and ratios of a part."""


def main() -> int:
    options = parsed()
    failed = []
    for name in options.parts:
        began = time.perf_counter()
        try:
            rows, found = PARTS[name](options)
        except Exception as error:
            traceback.print_exception(error)
            failed.append(name)
            continue
        seconds = time.perf_counter() - began
        document = merged(options.out, name, rows, found, seconds)
        write_json(options.out, document)
        show(name, rows, found, seconds)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--parts", type=parts_of, default=list(PARTS), help=f"some of {','.join(PARTS)} (all)")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each side (3)")
    parser.add_argument("--steps", type=int, default=10, help="updates a turn (10)")
    parser.add_argument("--warm-up", type=int, default=5, help="updates before the first turn (5)")
    parser.add_argument("--sides", help="only these sides of llama, t5 and resnet, beside meshrun; with commas")
    parser.add_argument("--tiny", action="store_true", help="tiny models on a CPU: tries the code, measures nothing")
    parser.add_argument("--out", type=Path, help="JSON file that results are put into (results/h200-DATE.json)")
    options = parser.parse_args()
    if options.out is None:
        kind = "tiny" if options.tiny else "h200"
        options.out = HERE / "results" / f"{kind}-{datetime.date.today().isoformat()}.json"
    options.out.parent.mkdir(parents=True, exist_ok=True)
    return options


def parts_of(text: str) -> list[str]:
    names = [each.strip() for each in text.split(",") if each.strip()]
    for name in names:
        if name not in PARTS:
            raise argparse.ArgumentTypeError(f"{name!r} is no part; parts are {', '.join(PARTS)}")
    return names


def merged(out: Path, part: str, rows: list[dict[str, Any]], found: dict[str, float | None], seconds: float) -> Any:
    """What was in the file before, with the results of a part in place of older ones."""
    document = json.loads(out.read_text()) if out.exists() else {"rows": [], "ratios": {}, "seconds": {}}
    kept = [row for row in document["rows"] if row["part"] != part]
    return {
        **document,
        "date": datetime.date.today().isoformat(),
        "versions": versions(),
        "rows": [*kept, *({"part": part, **row} for row in rows)],
        "ratios": {**document["ratios"], **found},
        "seconds": {**document["seconds"], part: round(seconds, 1)},
    }


def versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": sys.version.split()[0]}
    for name in ("torch", "triton", "lightning", "accelerate", "transformers", "torchvision"):
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


# Parts whose sides take turns


def in_turns(part: str, options: argparse.Namespace) -> tuple[dict[str, Taken], dict[str, Any]]:
    """All sides of a part after their turns, and what the step consists of."""
    sides = SIDES[part]
    wanted = options.sides.split(",") if options.sides else list(sides)
    missing = [name for name, package in PACKAGES.items() if importlib.util.find_spec(package) is None]
    chosen = [name for name in sides if (name in wanted or name == "meshrun") and name not in missing]
    device = device_of(options.tiny)
    with Process(device) as process:
        about: dict[str, Any] = process.ask(about_of, part, options.tiny)
    entries = [
        Entry(name, partial(sides[name], tiny=options.tiny), about["batch"], imports_of(part, name, options.tiny))
        for name in chosen
    ]
    entries.append(Entry(PRODUCTS, partial(products, options.tiny), 1))
    say: Callable[[str], None] = lambda text: print(f"{part}: {text}", file=sys.stderr, flush=True)  # noqa: E731
    return take_turns(entries, options.rounds, options.steps, device, options.warm_up, say), about


def about_of(part: str, tiny: bool) -> dict[str, Any]:
    """What a step consists of, and what the device can do."""
    experiment = EXPERIMENTS[part](tiny)
    device = measured(device_of(tiny), "bf16")
    return {
        "batch": experiment.batch,
        "tokens": tokens_of(experiment.train[0][0]),
        "flops": count(experiment, torch.device("cpu")).flops / experiment.batch,
        "product": 2 * product_size(device_of(tiny)) ** 3,
        "lasting": device.lasting or device.products,
    }


def rows_of(taken: dict[str, Taken], about: dict[str, Any]) -> list[dict[str, Any]]:
    rows = []
    for name, side in taken.items():
        if name == PRODUCTS:
            continue
        beside, peak = ratios(taken["meshrun"], side), ratios(side, taken[PRODUCTS])
        rows.append(
            {
                "side": name,
                "samples_per_s": side.rate,
                "tokens_per_s": side.rate * about["tokens"] if side.rate and about["tokens"] else None,
                "of_peak": peak[0] * about["flops"] / about["product"] if peak else None,
                "of_lasting": side.rate * about["flops"] / about["lasting"] if side.rate else None,
                "peak_gib": side.built.peak / GIB if side.built is not None and side.built.peak else None,
                "first_step_s": side.built.first_step_s if side.built is not None else None,
                "cpu_s_per_sample": side.cpu_s,
                "meshrun_is_times": beside and beside[0],
                "quartiles": beside and [beside[1], beside[2]],
                "losses": side.built.losses if side.built is not None else [],
                "chosen": side.built.chosen if side.built is not None else {},
                "error": side.error,
            }
        )
    return rows


def times(taken: dict[str, Taken], one: str, *others: str) -> float | None:
    """How many times as fast one side is as the fastest of the others."""
    found = [ratios(taken[one], taken[other]) for other in others if one in taken and other in taken]
    return min((each[0] for each in found if each is not None), default=None)


def llama_part(options: argparse.Namespace) -> Found:
    taken, about = in_turns("llama", options)
    rows, rate = rows_of(taken, about), taken[PRODUCTS].rate
    ours = next(row for row in rows if row["side"] == "meshrun")
    theirs = next((row for row in rows if row["side"] == "fabric"), None)
    share = ours["peak_gib"] / theirs["peak_gib"] if theirs and ours["peak_gib"] and theirs["peak_gib"] else None
    return rows, {
        "bf16_vs_fabric": times(taken, "meshrun", "fabric"),
        "bf16_vs_accelerate": times(taken, "meshrun", "accelerate"),
        "bf16_vs_fabric_compile": times(taken, "meshrun", "fabric compile"),
        "bf16_vs_bare": times(taken, "meshrun", "bare bf16 compiled", "bare autocast compiled"),
        "bf16_vs_bare_bf16": times(taken, "meshrun", "bare bf16 compiled"),
        "bf16_vs_bare_autocast": times(taken, "meshrun", "bare autocast compiled"),
        "float8_vs_bf16": times(taken, "meshrun float8", "meshrun"),
        "float8_vs_fabric": times(taken, "meshrun float8", "fabric"),
        "memory_vs_fabric": share,
        "of_peak": ours["of_peak"],
        "of_lasting": ours["of_lasting"],
        "peak_tflops": rate * about["product"] / 1e12 if rate else None,
        "lasting_tflops": about["lasting"] / 1e12,
    }


def t5_part(options: argparse.Namespace) -> Found:
    taken, about = in_turns("t5", options)
    return rows_of(taken, about), {
        "t5_vs_lightning": times(taken, "meshrun", "lightning"),
        "t5_vs_bare_compiled": times(taken, "meshrun", "bare compiled", "bare transformers compiled"),
    }


def resnet_part(options: argparse.Namespace) -> Found:
    taken, about = in_turns("resnet", options)
    return rows_of(taken, about), {
        "resnet50_vs_lightning": times(taken, "meshrun", "lightning"),
        "resnet50_vs_bare_compiled": times(taken, "meshrun", "bare compiled"),
    }


# Parts that are commands of their own


def image_part(options: argparse.Namespace) -> Found:
    """What image_job.py finds; Lightning with readers of its own, since without it takes twice as long."""
    words = ["--sides", "meshrun,lightning-8", *(["--tiny"] if options.tiny else [])]
    ended = subprocess.run(
        [sys.executable, str(HERE / "image_job.py"), "--json", *words], stdout=subprocess.PIPE, text=True, check=True
    )
    document = json.loads(ended.stdout)
    return document["rows"], document["ratios"]


def start_part(options: argparse.Namespace) -> Found:
    """From the command to the end of its first step, twice with the same compile cache, which is empty at first."""
    with tempfile.TemporaryDirectory(prefix="meshrun-h200-") as folder:
        cold, warm = (started(Path(folder), number, options.tiny) for number in range(2))
    rows = [
        {"side": "meshrun, cold cache", "first_step_s": cold},
        {"side": "meshrun, warm cache", "first_step_s": warm},
    ]
    return rows, {"start_cold_s": cold, "start_warm_s": warm}


def started(folder: Path, number: int, tiny: bool) -> float:
    size = ["--preset", "tiny", "--device", "cpu"] if tiny else ["--preset", "1b", "--batch", "16", "--compile"]
    runs = folder / f"runs-{number}"
    command = [sys.executable, "-m", "meshrun", "run", "llama", *size, "--precision", "bf16", "--steps", "20"]
    command += ["--checkpoint", "none", "--no-tensorboard", "--runs", str(runs)]
    unset = {"TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"}
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    environment["XDG_CACHE_HOME"] = str(folder / "cache")
    began = time.time()
    process = subprocess.Popen(command, env=environment, start_new_session=True, stdout=subprocess.DEVNULL)
    try:
        return first_step_of(runs, process, began) - began
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def first_step_of(runs: Path, process: subprocess.Popen[bytes], began: float) -> float:
    """When the first step had ended."""
    while time.time() - began < PATIENCE:
        for path in runs.glob("*/events/rank-00000.jsonl"):
            for line in path.read_bytes().splitlines(keepends=True):
                if line.endswith(b"\n") and json.loads(line)["kind"] == "step":
                    return float(json.loads(line)["time"])
        if process.poll() is not None:
            raise RuntimeError(f"meshrun run ended with status {process.returncode} before its first step")
        time.sleep(0.02)
    raise RuntimeError(f"no step after {PATIENCE:.0f} s")


def rank_part(options: argparse.Namespace) -> Found:
    """One rank of 64, on each layout."""
    rows: list[dict[str, Any]] = []
    preset, of = ("tiny", 8) if options.tiny else ("8b", 64)
    found: dict[str, float | None] = {}
    for layout in TINY_LAYOUTS if options.tiny else LAYOUTS:
        words = ["llama", "--preset", preset, "--precision", "bf16", "--micro", "1", "--of", str(of), "--json"]
        words += ["--device", "cpu"] if options.tiny else []
        command = [sys.executable, "-m", "meshrun", "bench", "rank", *words, "--layout", layout]
        ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=PATIENCE, check=False)
        document = json.loads(ended.stdout or "{}")
        if "rows" not in document:
            rows.append({"side": layout, "error": document.get("error", f"status {ended.returncode}")})
            continue
        row = document["rows"][0]
        rows.append({"side": layout, **row})
        found[f"rank_of_{of}_gib {layout}"] = row["peak_gib"]
    return rows, found


def largest_part(options: argparse.Namespace) -> Found:
    with Process(device_of(options.tiny)) as process:
        row: dict[str, Any] = process.ask(largest, options.tiny, options.steps)
    return [{"side": "meshrun", **row}], {"largest_parameters": row["parameters"]}


PARTS: dict[str, Callable[[argparse.Namespace], Found]] = {
    "llama": llama_part,
    "t5": t5_part,
    "resnet": resnet_part,
    "image": image_part,
    "start": start_part,
    "rank": rank_part,
    "largest": largest_part,
}


def show(part: str, rows: list[dict[str, Any]], found: dict[str, float | None], seconds: float) -> None:
    """A part as a table, and its ratios."""
    columns = {
        "parameters": "{:,}",
        "tokens_per_s": "{:,.0f}",
        "samples_per_s": "{:,.1f}",
        "of_peak": "{:.3f}",
        "of_lasting": "{:.3f}",
        "peak_gib": "{:.1f}",
        "first_step_s": "{:.1f}",
        "seconds": "{:.3f}",
        "train_loss": "{:.4f}",
        "accuracy": "{:.3f}",
        "meshrun_is_times": "{:.2f}",
    }
    used = [name for name in columns if any(isinstance(row.get(name), int | float) for row in rows)]

    def cell(row: dict[str, Any], name: str) -> str:
        value = row.get(name)
        return columns[name].format(value) if isinstance(value, int | float) else "-"

    print(f"\n{part} ({seconds:.0f} s)")
    print_table(["side", *used], [[str(row["side"]), *(cell(row, name) for name in used)] for row in rows])
    for row in rows:
        if row.get("error"):
            print(f"{row['side']}: {row['error']}")
    apart = spread([row["losses"][0] for row in rows if row.get("losses")])
    if exceeds(apart, 0.05):
        print(f"first losses differ by {apart:.0%}: do all sides train the same?")
    for name, value in found.items():
        print(f"  {name:<28} {value:.3f}" if value is not None else f"  {name:<28} -")
    sys.stdout.flush()


def spread(values: list[float]) -> float:
    """How far the furthest is from the middle one, relatively."""
    middle = statistics.median(values) if values else 0.0
    return largest_of(abs(each - middle) / abs(middle) for each in values if middle)


if __name__ == "__main__":
    sys.exit(main())

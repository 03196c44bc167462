"""Saving and loading a gigabyte of state, against torch's own ways and against `dd`.

    python benchmarks/checkpoint.py                       # 2 and 4 ranks, in a folder of the current disk
    python benchmarks/checkpoint.py --ranks 4 --rounds 7 --json

The state is that of a Llama with AdamW, cut into rows as fsdp does. In every round each way runs once, in turn; of the
ranks the slowest counts, and of the rounds the median, for the times and for the ratios. After every save the disk is
left to finish (`sync`), which counts for none.

- stall is how long a step waits for a save: our snapshot; `torch.save` of each rank's part, with and without a wait for
  the disk, of all of the state by rank 0, and of all of it after rank 0 has gathered it, which is what a program with
  sharded state does; and `dcp.async_save` with a stager that keeps its buffer, as ours does
- write is from the end of the stall to a checkpoint that has its name, with checksums and fsync; `dd` writes as many
  zeros into one file, with conv=fsync
- load is into tensors that are there, from the page cache, ours with every checksum verified; `dcp.load` verifies none.
  Cold is with an empty page cache, as on a node that has never seen the checkpoint
- resharded is the same checkpoint, of fsdp=4, loaded on tp=2,pp=2: half of the layers, each weight cut as the recipe's
  plan cuts it. In its worst case, where every weight is cut into columns, a rank reads twice its part to verify it
- memory is what a rank's resident memory grows by at most while it saves and loads, over the size of its part
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from common import on_ranks, print_table
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.tensor import DTensor, Shard

from meshrun.mesh import Here
from meshrun.state.checkpoint import Checkpoint
from meshrun.state.region import Region
from meshrun.state.saver import Saver
from meshrun.world.cores import granted, share, topology

HIDDEN, FFN, VOCABULARY = 1024, 2816, 8192
LAYER = {
    "attention.wq": ((HIDDEN, HIDDEN), 0),
    "attention.wk": ((HIDDEN // 2, HIDDEN), 0),
    "attention.wv": ((HIDDEN // 2, HIDDEN), 0),
    "attention.wo": ((HIDDEN, HIDDEN), 1),
    "ffn.gate": ((FFN, HIDDEN), 0),
    "ffn.up": ((FFN, HIDDEN), 0),
    "ffn.down": ((HIDDEN, FFN), 1),
}
"""The weights of a layer, and the dimension that tensor parallelism cuts."""
LAYERS = 6
KINDS = ("model/{}", "optimizer/{}/exp_avg", "optimizer/{}/exp_avg_sq")

BARS = {
    "stall / torch.save, gathered": 0.15,
    "stall / dcp.async_save": 1.0,
    "dd / write": 0.9,
    "load / dcp.load": 1.0,
    "resharded / load": 1.5,
    "memory of a save / part": 1.1,
}
"""All are at most, but for that of `dd`, which is at least."""


def main() -> int:
    options = parsed()
    rows = []
    for ranks in options.ranks:
        with (
            tempfile.TemporaryDirectory(prefix=".checkpoint-", dir=options.folder) as folder,
            tempfile.TemporaryDirectory(prefix="meshrun-checkpoint-", dir="/dev/shm") as spare,
        ):
            rows.append(summary(ranks, on_ranks(f"fsdp={ranks}", measured, folder, spare, options.rounds)))
    result = {"rows": rows, "bars": BARS}
    if options.json:
        print(json.dumps(result, indent=2))
    else:
        show(rows)
    return 0


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, default=Path(), help="on the disk to measure")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    return parser.parse_args()


def shapes() -> Iterator[tuple[str, tuple[int, ...], int]]:
    """Every tensor of the state: name, shape, and the dimension that tensor parallelism cuts."""
    weights = {"embed.weight": ((VOCABULARY, HIDDEN), 0), "head.weight": ((VOCABULARY, HIDDEN), 0)}
    for layer in range(LAYERS):
        weights |= {f"blocks.{layer}.{name}.weight": each for name, each in LAYER.items()}
    for name, (shape, dim) in weights.items():
        yield from ((kind.format(name), shape, dim) for kind in KINDS)


def rows_of(rank: int, ranks: int) -> list[Region]:
    """A rank's part of the state under fsdp."""
    torch.manual_seed(rank)
    found = []
    for name, shape, _ in shapes():
        first, end = (shape[0] * number // ranks for number in (rank, rank + 1))
        found.append(Region(name, torch.randn(end - first, *shape[1:]), shape, (first, *(0 for _ in shape[1:]))))
    return found


def by_stage_and_plan(rank: int, columns_only: bool) -> list[Region]:
    """A rank's part under tp=2,pp=2."""
    stage, half = divmod(rank, 2)
    found = []
    for name, shape, planned in shapes():
        layer = int(name.split(".")[1]) if "blocks." in name else (0 if "embed" in name else LAYERS - 1)
        if layer * 2 // LAYERS != stage:
            continue
        dim = 1 if columns_only else planned
        size = [extent // 2 if at == dim else extent for at, extent in enumerate(shape)]
        start = tuple(half * size[dim] if at == dim else 0 for at in range(len(shape)))
        found.append(Region(name, torch.zeros(size), shape, start))
    return found


def measured(here: Here, folder: str, spare: str, rounds: int) -> dict[str, Any]:
    """One rank: every way, once a round."""
    # As the launcher binds ranks to cores.
    os.sched_setaffinity(0, share(granted(), here.rank, here.size, topology()))
    place = Place(here, Path(folder), Path(spare))
    found: dict[str, list[float]] = {}
    for number in range(rounds + 1):
        for name, seconds in place.one_round(number).items():
            # The first round asks for the memory that the others use again.
            if number:
                found.setdefault(name, []).append(seconds)
    return {"seconds": found, "bytes": place.bytes, "memory": place.memory}


class Place:
    """A rank with its part of the state, and every way to save and load it."""

    def __init__(self, here: Here, folder: Path, spare: Path) -> None:
        self.here, self.folder = here, folder
        self.regions = rows_of(here.rank, here.size)
        self.bytes = sum(region.tensor.nbytes for region in self.regions)
        self.group = dist.new_group(backend="gloo")
        self.stager = DefaultStager(StagingOptions(False, False, False, False))
        self.memory: dict[str, float] = {}
        with self._grown("save"):
            self.saver = Saver(folder / "ours", here, spare, keep=1)
            self._save()

    def one_round(self, number: int) -> dict[str, float]:
        """Every way once, in seconds; each round begins with another one of them."""
        found: dict[str, float] = {}
        for way in turned(self._saves(), number):
            found |= way()
            self._settle()
        for way in turned([self._load, self._dcp_load, *self._resharded()], number):
            found |= way()
        if number == 0:
            with self._grown("load"):
                self._read(self.regions)
        return found

    def _saves(self) -> list[Callable[[], dict[str, float]]]:
        ordinary = [self._torch_save, self._durable_torch_save, self._whole_torch_save, self._gathered_torch_save]
        return [self._ours, *ordinary, self._dcp_save, self._dd]

    def _ours(self) -> dict[str, float]:
        stall, write = self._save()
        return {"stall": stall, "write": write}

    def _save(self) -> tuple[float, float]:
        self._meet()
        stall = self.saver.snapshot(self.regions, 1, {})
        self._meet()
        began = time.perf_counter()
        self.saver.begin()
        self.saver.wait()
        write = time.perf_counter() - began
        (outcome,) = self.saver.finished()
        assert outcome.error is None, outcome.error
        return stall, write

    def _torch_save(self) -> dict[str, float]:
        return {"torch.save": self._timed(self._save_with_torch, self._torch_file)}

    def _durable_torch_save(self) -> dict[str, float]:
        """The same until it is on the disk, as a step must wait that wants to rely on it."""

        def save(path: Path) -> None:
            self._save_with_torch(path)
            with path.open("rb") as file:
                os.fsync(file.fileno())

        return {"torch.save, fsync": self._timed(save, self._torch_file)}

    def _whole_torch_save(self) -> dict[str, float]:
        """Rank 0 writes all of the state, which it has already, and all wait."""
        count = self.here.size if self.here.rank == 0 else 0
        state = {f"{number}/{each.name}": each.tensor for number in range(count) for each in self._others(number)}
        seconds = self._timed(lambda path: torch.save(state, path) if state else None, self._torch_file)
        return {"torch.save of rank 0": seconds}

    def _gathered_torch_save(self) -> dict[str, float]:
        """As a program with sharded state does it: rank 0 gathers all of it and writes it, and all wait."""

        def save(path: Path) -> None:
            state = {}
            for each in self.regions:
                parts = [torch.empty_like(each.tensor) for _ in range(self.here.size)] if self.here.rank == 0 else None
                dist.gather(each.tensor, parts)
                if parts is not None:
                    state[each.name] = torch.cat(parts)
            if state:
                torch.save(state, path)

        return {"torch.save, gathered": self._timed(save, self._torch_file)}

    def _others(self, number: int) -> list[Region]:
        """Another rank's part: of the same size, and in memory of its own, else torch would write it once."""
        return self.regions if number == 0 else [replace(each, tensor=each.tensor.clone()) for each in self.regions]

    @property
    def _torch_file(self) -> Path:
        path = self.folder / f"torch-{self.here.rank}.pt"
        path.unlink(missing_ok=True)
        return path

    def _save_with_torch(self, path: Path) -> None:
        torch.save({region.name: region.tensor for region in self.regions}, path)

    def _state(self, regions: list[Region]) -> dict[str, Any]:
        mesh = self.here.submesh("fsdp")
        assert mesh is not None
        return {each.name: DTensor.from_local(each.tensor, mesh, [Shard(0)], run_check=False) for each in regions}

    def _dcp_save(self) -> dict[str, float]:
        path, futures = self.folder / "dcp", []
        if self.here.rank == 0:
            shutil.rmtree(path, ignore_errors=True)

        def save(path: Path) -> None:
            state = self._state(self.regions)
            futures.append(
                dcp.async_save(state, checkpoint_id=path, process_group=self.group, async_stager=self.stager)
            )

        seconds = self._timed(save, path)
        futures[0].result()
        return {"dcp.async_save": seconds}

    def _dcp_load(self) -> dict[str, float]:
        state = self._state(self.regions)
        return {"dcp.load": self._timed(lambda path: dcp.load(state, checkpoint_id=path), self.folder / "dcp")}

    def _dd(self) -> dict[str, float]:
        """As many bytes as all ranks wrote, by rank 0 alone."""
        self._meet()
        seconds = 0.0
        if self.here.rank == 0:
            target, blocks = self.folder / "dd", -(-self.bytes * self.here.size // (8 << 20))
            command = ["dd", "if=/dev/zero", f"of={target}", "bs=8M", f"count={blocks}", "conv=fsync"]
            began = time.perf_counter()
            subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
            seconds = time.perf_counter() - began
            target.unlink()
        self._meet()
        return {"dd": seconds}

    def _load(self) -> dict[str, float]:
        found = {"load": self._timed(self._read, self.regions)}
        self._forget()
        return found | {"load, cold": self._timed(self._read, self.regions)}

    def _resharded(self) -> list[Callable[[], dict[str, float]]]:
        return [self._by_plan, self._by_columns] if self.here.size == 4 else []

    def _by_plan(self) -> dict[str, float]:
        regions = by_stage_and_plan(self.here.rank, columns_only=False)
        found = {"resharded": self._timed(self._read, regions)}
        self._forget()
        return found | {"resharded, cold": self._timed(self._read, regions)}

    def _by_columns(self) -> dict[str, float]:
        regions = by_stage_and_plan(self.here.rank, columns_only=True)
        return {"resharded, all columns": self._timed(self._read, regions)}

    def _read(self, regions: list[Region]) -> None:
        (path,) = (self.folder / "ours").glob("step-*")
        checkpoint = Checkpoint.open(path)
        for region in regions:
            checkpoint.read(region)
        checkpoint.close()

    def _forget(self) -> None:
        """Empty the page cache of the checkpoint's files."""
        self._meet()
        for path in (self.folder / "ours").glob("step-*/rank-*"):
            file = os.open(path, os.O_RDONLY)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)

    def _timed(self, action: Callable[[Any], object], argument: Any) -> float:
        self._meet()
        began = time.perf_counter()
        action(argument)
        return time.perf_counter() - began

    def _meet(self) -> None:
        dist.barrier(self.group)

    def _settle(self) -> None:
        self._meet()
        if self.here.rank == 0:
            os.sync()
        self._meet()

    @contextlib.contextmanager
    def _grown(self, name: str) -> Iterator[None]:
        """By how much the most that was resident exceeds what was before."""
        Path("/proc/self/clear_refs").write_text("5")
        before = _resident("VmRSS")
        yield
        self.memory[name] = (_resident("VmHWM") - before) / self.bytes


def _resident(which: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(which))
    return int(line.split()[1]) * 1024


RATIOS = {
    "stall / torch.save, fsync": ("stall", "torch.save, fsync"),
    "stall / torch.save of rank 0": ("stall", "torch.save of rank 0"),
    "stall / torch.save, gathered": ("stall", "torch.save, gathered"),
    "stall / torch.save": ("stall", "torch.save"),
    "stall / dcp.async_save": ("stall", "dcp.async_save"),
    "dd / write": ("dd", "write"),
    "load / dcp.load": ("load", "dcp.load"),
    "resharded / load": ("resharded", "load"),
    "resharded, cold / load, cold": ("resharded, cold", "load, cold"),
    "resharded, all columns / load": ("resharded, all columns", "load"),
}


def summary(ranks: int, found: list[dict[str, Any]]) -> dict[str, Any]:
    """The slowest rank of each round, and of the rounds the median: of the times, and of what each is to its peer."""
    slowest = {
        name: [max(each) for each in zip(*(each["seconds"][name] for each in found), strict=True)]
        for name in found[0]["seconds"]
    }
    ratios = {
        name: statistics.median(a / b for a, b in zip(slowest[one], slowest[other], strict=True))
        for name, (one, other) in RATIOS.items()
        if one in slowest
    }
    ratios["memory of a save / part"] = max(each["memory"]["save"] for each in found)
    ratios["memory of a load / part"] = max(each["memory"]["load"] for each in found)
    seconds = {name: statistics.median(each) for name, each in slowest.items()}
    return {"ranks": ranks, "bytes": sum(each["bytes"] for each in found), "seconds": seconds, "ratios": ratios}


def turned(ways: list[Any], turn: int) -> list[Any]:
    """The same, beginning with another one."""
    first = turn % len(ways)
    return [*ways[first:], *ways[:first]]


def show(rows: list[dict[str, Any]]) -> None:
    names = list(dict.fromkeys(name for row in rows for name in row["seconds"]))
    columns = [f"{row['ranks']} ranks" for row in rows]
    print(f"{rows[0]['bytes'] / 1e9:.2f} GB of state")
    print_table(
        ["seconds", *columns],
        [[name, *(f"{row['seconds'][name]:.3f}" if name in row["seconds"] else "" for row in rows)] for name in names],
    )
    print()
    names = list(dict.fromkeys(name for row in rows for name in row["ratios"]))
    bars = {name: f"{'at least' if name.startswith('dd ') else 'at most'} {bar}" for name, bar in BARS.items()}
    print_table(
        ["ratio", *columns, "bar"],
        [
            [name, *(f"{row['ratios'][name]:.2f}" if name in row["ratios"] else "" for row in rows), bars.get(name, "")]
            for name in names
        ],
    )


if __name__ == "__main__":
    raise SystemExit(main())

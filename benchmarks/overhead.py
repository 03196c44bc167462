"""What meshrun costs beside a loop written by hand, and beside Lightning Fabric and Accelerate.

    python benchmarks/overhead.py --rounds 30                    # `make bench` installs the peers first
    python benchmarks/overhead.py --optimizer sgd --batch 256 --json

Two CPU ranks, bound to one core each with one thread, train the digits model on the same data through all sides, in
the same two processes and on one gloo group. Each side is written as its own documentation shows it and holds a model
and an optimizer of its own; they take turns, `--steps` updates at a time, in an order that is drawn anew every round.
A ratio is the median over rounds of (this side's samples/s / the other's in the same round), so that a machine that
is slower for some seconds is so for all sides. CPU time is that of both ranks with all their threads. Other work on
the same cores still widens the quartiles: `load_before` says whether the machine was idle.

- bare DDP is DistributedSampler, DataLoader, DDP and the optimizer as the PyTorch tutorials write them, nothing else.
- bare DDP + fused differs in `fused=True`: meshrun turns that on by itself, so this row says how much of a difference
  to bare DDP is only that.
- meshrun does all that a user of `meshrun run` gets: global loss and gradient norm of every step, checked for being
  finite, in an events file a rank and in TensorBoard, while the launcher reads the events to show the progress;
  checkpoints as often as pays, and marks of what the rank is at for whoever watches it.
"""

from __future__ import annotations

import argparse
import atexit
import gc
import importlib.util
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.table import Column, Table
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader, DistributedSampler

from meshrun import Experiment, Trainer, cross_entropy, mesh
from meshrun.cli.recorder import Recorder
from meshrun.config import MEMORY, RunConfig, RunDirectory, write_json
from meshrun.launch.local import Job, die_with_launcher, launch
from meshrun.observe.board import Board
from meshrun.observe.pulse import Pulse
from meshrun.observe.story import Follow, Story
from meshrun.recipes.digits import Digits, Net
from meshrun.train.interval import parse as parse_interval
from meshrun.train.recovery import Keeping
from meshrun.world.cores import granted, share, topology

RANKS, WIDTH, WARM_UP = 2, 128, 3
BARE, FUSED, FABRIC, ACCELERATE, MESHRUN = "bare DDP", "bare DDP + fused", "Lightning Fabric", "Accelerate", "meshrun"


def main() -> int:
    options = parsed()
    missing = [name for name in ("lightning", "accelerate", "tensorboard") if importlib.util.find_spec(name) is None]
    if missing:
        print(f"{' and '.join(missing)} must be installed to compare with; make bench installs them", file=sys.stderr)
        return 2
    if options.batch < RANKS or options.batch % RANKS or min(options.rounds, options.steps) < 1:
        print(f"--rounds and --steps must be at least 1, and --batch a multiple of {RANKS}", file=sys.stderr)
        return 2
    if options.rank is not None:
        work(options, RunDirectory(Path(options.rank)))
        return 0
    with tempfile.TemporaryDirectory(prefix="meshrun-overhead-") as folder:
        result = launched(Path(folder))
    if result is None:
        return 1
    if options.json:
        print(json.dumps(result, indent=2))
    else:
        show(result, Console())
    return 0


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=30, help="times that every side has its turn (30)")
    parser.add_argument("--steps", type=int, default=20, help="updates a turn (20)")
    parser.add_argument("--batch", type=int, default=64, help="the global batch (64)")
    parser.add_argument("--optimizer", choices=("adamw", "sgd"), default="adamw", help="of all sides (adamw)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    return parser.parse_args()


def launched(folder: Path) -> dict[str, Any] | None:
    """Start the ranks as `meshrun run` does, its story on the terminal included; returns what rank 0 has measured."""
    load = os.getloadavg()[0]
    os.environ["OMP_NUM_THREADS"] = "1"
    run = RunDirectory.create(RunConfig("digits", procs=RANKS, runs=folder))
    job = Job([__file__, *sys.argv[1:], "--rank", str(run.path)], RANKS)
    with Story(Console(stderr=True)) as story, Follow(story, run.events_of(0), run.log_of(0)):
        failures = launch(job)
    if failures:
        print(f"rank {failures[0].rank} {failures[0].how}; what it wrote is above", file=sys.stderr)
        return None
    result: dict[str, Any] = json.loads((run.path / "result.json").read_text())
    result["setting"]["load_before"] = load
    return result


def work(options: argparse.Namespace, run: RunDirectory) -> None:
    """One of the two ranks: prepare all sides, let them take turns, compare."""
    die_with_launcher(os.getppid())
    os.dup2(2, 1)  # libraries greet on standard output, which is for the result
    os.sched_setaffinity(0, {min(share(granted(), int(os.environ["LOCAL_RANK"]), RANKS, topology()))})
    mesh.use(mesh.Meeting(device="cpu", threads=1, runs=run.path))
    task = Task(options.batch, options.optimizer, (WARM_UP + options.rounds) * options.steps)
    sides = {
        BARE: bare(task),
        FUSED: bare(task, fused=True),
        FABRIC: fabric(task),
        ACCELERATE: accelerate(task),
        MESHRUN: meshrun(task, run),
    }
    torch.set_num_threads(1)  # a peer may have thought otherwise
    rounds = taken_turns(sides, options.rounds, options.steps)
    for name, side in sides.items():
        refuse_different_weights(name, side.model)
    if mesh.start().rank == 0:
        write_json(run.path / "result.json", summary(rounds, options))
    mesh.finish()


class Side(NamedTuple):
    """A way to train: a model, and an iterator that does one update of it each time and gives its loss."""

    model: nn.Module
    updates: Iterator[Tensor | float]


@dataclass(frozen=True)
class Task:
    """What all sides train, from the same initial weights."""

    batch: int
    kind: str
    steps: int

    def data(self) -> Any:
        """The training digits, cut so that every batch of every side is full."""
        digits = Digits("train")
        length = len(digits) // self.batch * self.batch
        digits.images, digits.labels = digits.images[:length], digits.labels[:length]
        return digits

    def net(self) -> nn.Module:
        torch.manual_seed(0)
        return Net(WIDTH)

    def optimizer(self, parameters: Iterable[nn.Parameter], fused: bool | None = None) -> Optimizer:
        if self.kind == "sgd":
            return torch.optim.SGD(parameters, lr=0.01, momentum=0.9, fused=fused)
        return torch.optim.AdamW(parameters, lr=1e-3, fused=fused)


def loop(model: nn.Module, optimizer: Any, loader: Any, backward: Callable[[Tensor], None]) -> Iterator[Tensor]:
    """The loop of every tutorial; `backward` is what bare torch, Fabric and Accelerate differ in."""
    for epoch in count():
        if isinstance(loader, DataLoader) and isinstance(loader.sampler, DistributedSampler):
            loader.sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            backward(loss)
            optimizer.step()
            yield loss.detach()


def bare(task: Task, fused: bool | None = None) -> Side:
    """https://docs.pytorch.org/tutorials/beginner/ddp_series_multigpu.html"""
    mesh.start()
    data = task.data()
    loader: Any = DataLoader(data, batch_size=task.batch // RANKS, sampler=DistributedSampler(data))
    model = DistributedDataParallel(task.net())
    return Side(model, loop(model, task.optimizer(model.parameters(), fused), loader, Tensor.backward))


def fabric(task: Task) -> Side:
    """https://lightning.ai/docs/fabric/stable/fundamentals/convert.html"""
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=RANKS, strategy="ddp")
    fabric.launch()
    net = task.net()
    model, optimizer = fabric.setup(net, task.optimizer(net.parameters()))
    own: Any = DataLoader(task.data(), batch_size=task.batch // RANKS, shuffle=True)
    loader: Any = fabric.setup_dataloaders(own)
    refuse_other_world(FABRIC, fabric.world_size, model._forward_module, len(own), len(loader))
    return Side(model, loop(model, optimizer, loader, fabric.backward))


def accelerate(task: Task) -> Side:
    """https://huggingface.co/docs/accelerate/basic_tutorials/migration"""
    from accelerate import Accelerator

    accelerator, net = Accelerator(cpu=True), task.net()
    own: Any = DataLoader(task.data(), batch_size=task.batch // RANKS, shuffle=True)
    model, optimizer, loader = accelerator.prepare(net, task.optimizer(net.parameters()), own)
    refuse_other_world(ACCELERATE, accelerator.num_processes, model, len(own), len(loader))
    return Side(model, loop(model, optimizer, loader, accelerator.backward))


def meshrun(task: Task, run: RunDirectory) -> Side:
    """As meshrun/cli/training.py trains: the same recorder with the same listeners, checkpoints, and a pulse."""
    here = mesh.start()
    recorder = Recorder(run, here.rank, None)
    memory = Path(tempfile.mkdtemp(prefix="meshrun-overhead-", dir=MEMORY))
    atexit.register(shutil.rmtree, memory, ignore_errors=True)
    pulse = Pulse.open(memory, here.rank, 0)
    mesh.listen(pulse.waiting)
    keeping = Keeping(run.checkpoints, memory, parse_interval("auto"))
    experiment = Experiment(task.net, task.data(), cross_entropy, task.optimizer, task.batch, steps=task.steps)
    trainer = Trainer(experiment, here, record=recorder, keeping=keeping, life=pulse)
    recorder.board = Board.open(run.path / "tensorboard") if here.rank == 0 else None
    about = {"world": RANKS, "layout": str(here.layout), "device": str(here.device), "run": str(run.path)}
    recorder("start", target="meshrun's turns", total_steps=task.steps, **about)
    return Side(trainer.model, (update.loss for update in trainer.steps()))


def refuse_other_world(name: str, ranks: int, model: nn.Module, batches: int, batches_of_rank: int) -> None:
    """A peer that did not find the other rank would train alone, and fast."""
    if ranks != RANKS or not isinstance(model, DistributedDataParallel) or batches_of_rank * RANKS != batches:
        raise SystemExit(
            f"{name} has set up {type(model).__name__} on {ranks} ranks with {batches_of_rank} of {batches} batches "
            f"each; it must be DDP on {RANKS} ranks with a half each"
        )


def refuse_different_weights(name: str, model: nn.Module) -> None:
    weights = nn.utils.parameters_to_vector(model.parameters()).detach()
    if not torch.equal(weights, mesh.start().from_rank_0(weights)):
        raise SystemExit(f"{name}: the ranks have trained different models, so its speed says nothing")


class Turn(NamedTuple):
    """What a side did in one round; CPU seconds are those of all ranks, the loss is that of its last update."""

    seconds: float
    cpu_seconds: float
    loss: float


def taken_turns(sides: dict[str, Side], rounds: int, steps: int) -> list[dict[str, Turn]]:
    """Every side's turn in every round after those that warm up; all ranks draw the same order."""
    draw, turns = random.Random(0), []
    for number in range(WARM_UP + rounds):
        if number == WARM_UP:
            # What all these libraries have imported is not the business of any side's garbage collection.
            gc.collect()
            gc.freeze()
        turns.append({name: turn(sides[name].updates, steps) for name in draw.sample(list(sides), len(sides))})
    return turns[WARM_UP:]


def turn(updates: Iterator[Tensor | float], steps: int) -> Turn:
    loss: Tensor | float = 0.0
    # Each side has the process's generators for itself, as it would in a process of its own.
    drawn = torch.get_rng_state(), random.getstate(), np.random.get_state()
    dist.barrier()
    began, cpu_began = time.perf_counter(), time.process_time()
    for _ in range(steps):
        loss = next(updates)
    dist.barrier()
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
    torch.set_rng_state(drawn[0])
    random.setstate(drawn[1])
    np.random.set_state(drawn[2])
    shared = torch.tensor([cpu_seconds, float(loss) / RANKS], dtype=torch.float64)
    dist.all_reduce(shared)
    return Turn(seconds, *shared.tolist())


def summary(rounds: list[dict[str, Turn]], options: argparse.Namespace) -> dict[str, Any]:
    """The rows of the table, and the ratios that are claimed."""
    samples = options.steps * options.batch

    def rows() -> Iterator[dict[str, Any]]:
        for side in (BARE, FUSED, FABRIC, ACCELERATE, MESHRUN):
            ratios = [turns[BARE].seconds / turns[side].seconds for turns in rounds]
            low, middle, high = np.percentile(ratios, (25, 50, 75)).tolist()
            yield {
                "side": side,
                "samples_per_s": statistics.median(samples / turns[side].seconds for turns in rounds),
                "vs_bare": middle,
                "vs_bare_quartiles": [low, high],
                "cpu_ms_per_sample": statistics.median(turns[side].cpu_seconds * 1e3 / samples for turns in rounds),
                "cpu_vs_bare": statistics.median(turns[side].cpu_seconds / turns[BARE].cpu_seconds for turns in rounds),
                "loss": statistics.mean(turns[side].loss for turns in rounds[-5:]),
            }

    def meshrun_vs(other: str) -> float:
        return statistics.median(turns[other].seconds / turns[MESHRUN].seconds for turns in rounds)

    peers = {"bare": BARE, "fabric": FABRIC, "accelerate": ACCELERATE, "fused": FUSED}
    return {
        "rows": list(rows()),
        "ratios": {f"meshrun_vs_{short}": meshrun_vs(name) for short, name in peers.items()},
        "setting": {name: getattr(options, name) for name in ("rounds", "steps", "batch", "optimizer")},
    }


def show(result: dict[str, Any], console: Console) -> None:
    columns = ("side", "samples/s", "vs bare (quartiles)", "CPU ms/sample", "vs bare", "loss")
    table = Table(*(Column(name, no_wrap=True) for name in columns), box=None, pad_edge=False)
    for row in result["rows"]:
        low, high = row["vs_bare_quartiles"]
        speed = (f"{row['samples_per_s']:,.0f}", f"{row['vs_bare']:.3f} ({low:.3f}-{high:.3f})")
        cpu = (f"{row['cpu_ms_per_sample']:.4f}", f"{row['cpu_vs_bare']:.3f}")
        table.add_row(row["side"], *speed, *cpu, f"{row['loss']:.3f}")
    console.print(table)
    for about in (result["ratios"], result["setting"]):
        pairs = (
            f"{name} {value:.3f}" if isinstance(value, float) else f"{name} {value}" for name, value in about.items()
        )
        console.print(*pairs, sep=", ", highlight=False, soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())

"""The speed of every axis against a script that is written by hand, with torch's own parts, for that very layout.

    python benchmarks/axes.py
    python benchmarks/axes.py --layouts "tp=2; pp=4" --rounds 40 --json

CPU ranks train a small Llama through both sides, in the same processes and on the same groups, from the same initial
weights, with fused AdamW, gradients clipped by their global norm, and the same micro-batches. The sides take turns,
`--steps` updates at a time, in an order that is drawn anew every round. A ratio is the median over rounds of (meshrun's
samples/s / the script's in the same round), so that a machine that is slower for some seconds is so for both. CPU time
is that of all ranks with all their threads.

- dp: DistributedDataParallel. fsdp: `fully_shard` of every block and of the model. tp: `parallelize_module` with
  sequence parallelism and a loss over the split vocabulary, as torchtitan's plan for Llama has it.
- pp: PipelineStage and Schedule1F1B, cut where meshrun cuts.
- The scripts report what their authors would: the loss that the rank has at hand. meshrun reports the loss and gradient
  norm of the global batch, and checks both, in every update.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Iterator
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import Tokens, adamw, on_ranks, print_table, training
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm
from torch.utils.data import DataLoader, DistributedSampler

from meshrun import Trainer
from meshrun.mesh import Here
from meshrun.parallel.placed import Placed
from meshrun.recipes.llama import Llama, Shape
from meshrun.recipes.llama import segments as segments_of
from meshrun.world.cores import granted

SHAPE = Shape(2048, 128, layers=6, heads=8, kv_heads=4, ffn=352, context=128)
BATCH, WARM_UP, CLIP = 16, 2, 1.0
LAYOUTS = "dp=2; fsdp=2; tp=2; pp=2; dp=4; fsdp=4; tp=4; pp=4"
HAND, MESHRUN = "by hand", "meshrun"
BAR = 0.97


def main() -> int:
    options = parsed()
    if min(options.rounds, options.steps) < 1:
        print("--rounds and --steps must be at least 1", file=sys.stderr)
        return 2
    load = os.getloadavg()[0]
    rows = []
    for layout in options.layouts.split(";"):
        rounds = on_ranks(layout.strip(), compared, options.rounds, options.steps)[0]
        rows.append(summary(layout.strip(), rounds, options.steps))
    result = {
        "rows": rows,
        "ratios": {row["layout"]: row["vs_hand"] for row in rows},
        "bar": BAR,
        "setting": {"rounds": options.rounds, "steps": options.steps, "batch": BATCH, "load_before": load},
    }
    if options.json:
        print(json.dumps(result, indent=2))
    else:
        show(result)
    return 0


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=24, help="times that both sides have their turn (24)")
    parser.add_argument("--steps", type=int, default=2, help="updates a turn (2)")
    parser.add_argument("--layouts", default=LAYOUTS, help="of one axis each, separated by semicolons")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    return parser.parse_args()


Updates = Iterator[Tensor | float]
"""Does one update each time, and gives its loss."""


def compared(here: Here, rounds: int, steps: int) -> list[dict[str, Turn]]:
    """One rank: prepare both sides, and let them take turns."""
    cores = sorted(granted())
    os.sched_setaffinity(0, {cores[here.rank % len(cores)]})
    experiment = training(SHAPE, BATCH, (WARM_UP + rounds) * steps, clip=CLIP)
    trainer = Trainer(experiment, here)
    (axis,) = (axis for axis, degree in here.layout.degrees.items() if degree > 1)
    by_hand = {"dp": replicated, "fsdp": sharded, "tp": split, "pp": staged}[axis]
    sides: dict[str, Updates] = {
        HAND: by_hand(here, trainer.placed),
        MESHRUN: (update.loss for update in trainer.steps()),
    }
    draw, turns = random.Random(0), []
    for number in range(WARM_UP + rounds):
        if number == WARM_UP:
            gc.collect()
            gc.freeze()
        turns.append({name: turn(sides[name], steps) for name in draw.sample(list(sides), len(sides))})
    return turns[WARM_UP:]


def net() -> Llama:
    torch.manual_seed(0)
    return Llama(SHAPE)


def batches(replica: int = 0, replicas: int = 1) -> Iterator[tuple[Tensor, Tensor]]:
    """Epoch after epoch, shuffled; every replica has its part of each batch."""
    data: Any = Tokens(SHAPE.vocabulary, SHAPE.context, 4 * BATCH)
    sampler: Any = DistributedSampler(data, replicas, replica, shuffle=True)
    loader: Any = DataLoader(data, batch_size=BATCH // replicas, sampler=sampler)
    for epoch in count():
        sampler.set_epoch(epoch)
        yield from loader


def replicated(here: Here, _: Placed) -> Updates:
    return updates_of(DistributedDataParallel(net(), gradient_as_bucket_view=True), here)


def sharded(here: Here, _: Placed) -> Updates:
    assert here.mesh is not None
    model = net()
    for block in model.blocks:
        fully_shard(block, mesh=here.mesh)
    fully_shard(model, mesh=here.mesh)
    return updates_of(model, here)


def updates_of(model: nn.Module, here: Here) -> Updates:
    """The loop that every rank with a part of the batch has."""
    optimizer = adamw(model.parameters())
    for tokens, targets in batches(here.rank, here.size):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        yield loss.item()


def split(here: Here, _: Placed) -> Updates:
    assert here.mesh is not None
    model = net()
    parallelize_module(
        model,
        here.mesh,
        {
            "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
        },
    )
    for block in model.blocks:
        parallelize_module(
            block,
            here.mesh,
            {
                "attention_norm": SequenceParallel(),
                "attention": PrepareModuleInput(
                    input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)
                ),
                "attention.wq": ColwiseParallel(),
                "attention.wk": ColwiseParallel(),
                "attention.wv": ColwiseParallel(),
                "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
                "ffn_norm": SequenceParallel(),
                "ffn": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
                "ffn.gate": ColwiseParallel(),
                "ffn.up": ColwiseParallel(),
                "ffn.down": RowwiseParallel(output_layouts=Shard(1)),
            },
        )
    optimizer = adamw(model.parameters())
    for tokens, targets in batches():
        optimizer.zero_grad()
        with loss_parallel():
            loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
            loss.backward()
        clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        yield loss.item()


def staged(here: Here, placed: Placed) -> Updates:
    model = net()
    held = {each.name for each in placed.shards}
    names = {id(module): name for name, module in model.named_modules()}
    own = [each for each in segments_of(model) if any(name.startswith(names[id(each)] + ".") for name in held)]
    stage = PipelineStage(
        nn.Sequential(*own), stage_index=here.rank, num_stages=here.size, device=here.device, group=dist.group.WORLD
    )
    pieces = min(placed.cutting.pieces, BATCH)

    def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    schedule = Schedule1F1B(stage, n_microbatches=pieces, loss_fn=loss_of)
    parameters = list(stage.submod.parameters())
    optimizer = adamw(parameters)
    for tokens, targets in batches():
        optimizer.zero_grad()
        losses: list[Tensor] = []
        if stage.is_first:
            schedule.step(tokens)
        elif stage.is_last:
            schedule.step(target=targets, losses=losses)
        else:
            schedule.step()
        square = get_total_norm([each.grad for each in parameters if each.grad is not None]) ** 2
        dist.all_reduce(square)
        clip_grads_with_norm_(parameters, CLIP, square.sqrt())
        optimizer.step()
        yield torch.stack(losses).mean().item() if stage.is_last else 0.0


class Turn(NamedTuple):
    """What a side did in one round; CPU seconds are those of all ranks, the loss is that of its last update."""

    seconds: float
    cpu_seconds: float
    loss: float


def turn(updates: Updates, steps: int) -> Turn:
    loss: Tensor | float = 0.0
    dist.barrier()
    began, cpu_began = time.perf_counter(), time.process_time()
    for _ in range(steps):
        loss = next(updates)
    dist.barrier()
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
    # A stage that sees no loss says 0.
    shared = torch.tensor([cpu_seconds, float(loss), float(loss != 0)], dtype=torch.float64)
    dist.all_reduce(shared)
    cpu_seconds, total, ranks = shared.tolist()
    return Turn(seconds, cpu_seconds, total / ranks)


def summary(layout: str, rounds: list[dict[str, Turn]], steps: int) -> dict[str, Any]:
    """The row of a layout."""
    samples = steps * BATCH
    ratios = [turns[HAND].seconds / turns[MESHRUN].seconds for turns in rounds]
    low, middle, high = np.percentile(ratios, (25, 50, 75)).tolist()
    row: dict[str, Any] = {"layout": layout, "vs_hand": middle, "vs_hand_quartiles": [low, high]}
    row["cpu_vs_hand"] = statistics.median(turns[MESHRUN].cpu_seconds / turns[HAND].cpu_seconds for turns in rounds)
    for side, short in ((HAND, "hand"), (MESHRUN, "meshrun")):
        row[f"{short}_samples_per_s"] = statistics.median(samples / turns[side].seconds for turns in rounds)
        row[f"{short}_cpu_ms_per_sample"] = statistics.median(
            1e3 * turns[side].cpu_seconds / samples for turns in rounds
        )
        row[f"{short}_loss"] = rounds[-1][side].loss
    return row


def show(result: dict[str, Any]) -> None:
    rows = []
    for row in result["rows"]:
        low, high = row["vs_hand_quartiles"]
        rows.append(
            (
                row["layout"],
                f"{row['hand_samples_per_s']:.1f}",
                f"{row['meshrun_samples_per_s']:.1f}",
                f"{row['vs_hand']:.3f} ({low:.3f}-{high:.3f})",
                "ok" if row["vs_hand"] >= result["bar"] else "MISSED",
                f"{row['hand_cpu_ms_per_sample']:.2f}",
                f"{row['meshrun_cpu_ms_per_sample']:.2f}",
                f"{row['cpu_vs_hand']:.3f}",
                f"{row['hand_loss']:.3f} {row['meshrun_loss']:.3f}",
            )
        )
    speed = ("by hand, samples/s", "meshrun", "ratio (quartiles)", f">= {result['bar']}")
    print_table(("layout", *speed, "CPU ms/sample", "meshrun", "ratio", "losses"), rows)
    print(", ".join(f"{name} {value}" for name, value in result["setting"].items()))


if __name__ == "__main__":
    sys.exit(main())

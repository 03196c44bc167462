"""What `meshrun bench` compares: the training that the user named, as meshrun and as peers train it.

    names, left_out = peers_of("bare,fabric", device_of(config))
    about, taken = measured(asked, [MESHRUN, *names], rounds=5)       # every side has had its turns

Nothing of the training is built in this process: it would hold memory, and switch things on, beside those measured.
"""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from meshrun.cli.command import Asked
from meshrun.cli.target import find, make
from meshrun.config import RunConfig
from meshrun.errors import RunFailed, UserError
from meshrun.experiment import sample_of

if TYPE_CHECKING:
    import torch

    from meshrun.check.bench_count import Counts
    from meshrun.check.bench_roofline import Device
    from meshrun.check.bench_side import Taken
    from meshrun.check.bench_task import Side, Task

MESHRUN = "meshrun"


@dataclass(frozen=True)
class About:
    """What is known of a training before any side of it has had a turn."""

    batch: int
    tokens: float
    """Of a sample of the first batch, in the mean; 0 where inputs are no tokens."""
    precision: str
    draws: bool
    """Whether the model has dropout."""
    counts: Counts | None
    uncounted: str
    """Why there are no counts."""
    device: Device


def peers_of(given: str | None, device: torch.device) -> tuple[list[str], dict[str, str]]:
    """The peers to compare with, and why the others are left out."""
    from meshrun.check.bench_peers import PEERS

    asked = [each.strip() for each in given.split(",") if each.strip()] if given is not None else list(PEERS)
    left_out: dict[str, str] = {}
    names = []
    for name in asked:
        if asked.count(name) > 1:
            raise UserError(f"peer {name!r} is named {asked.count(name)} times; name each once (--peers)")
        if name not in PEERS:
            raise UserError(f"peer {name!r} is not known; peers are {', '.join(PEERS)} (--peers)")
        if (why := PEERS[name].missing) is not None:
            if given is not None:
                raise UserError(f"cannot compare with {name}: {why} (--peers)")
            left_out[name] = why
        elif given is None and PEERS[name].compiles and device.type == "cpu":
            left_out[name] = f"compiling seldom pays on a CPU; --peers {name} compares with it all the same"
        else:
            names.append(name)
    return names, left_out


def device_of(config: RunConfig) -> torch.device:
    """Where sides compute, found without touching it."""
    import torch

    gpus = torch.cuda.device_count() if config.device != "cpu" else 0
    if config.device == "cuda" and not gpus:
        raise UserError("no GPU is visible; --device cpu measures without")
    return torch.device("cuda", 0) if gpus else torch.device("cpu")


def measured(asked: Asked, names: list[str], rounds: int) -> tuple[About, dict[str, Taken]]:
    """Have every side take its turns."""
    from meshrun.check.bench_peers import COMPILER, PEERS
    from meshrun.check.bench_process import Process, Refused, SideFailed
    from meshrun.check.bench_side import Entry
    from meshrun.check.bench_turns import take_turns

    config, steps = asked.config, asked.beyond["steps"]
    device, needed = device_of(config), (steps + 8) * (rounds + 1)
    with Process(device) as process:
        try:
            about: About = process.ask(_about, config, device)
        except Refused as error:
            raise UserError(str(error)) from None
        except SideFailed as error:
            raise RunFailed(f"{asked.target.label} cannot be measured: {error}") from error
    entries = [
        Entry(
            name,
            functools.partial(_side, config, device, name, needed),
            about.batch,
            PEERS[name].packages if name in PEERS else COMPILER if device.type == "cuda" else (),
            needed=name == MESHRUN,
        )
        for name in names
    ]
    say = functools.partial(print, file=sys.stderr, flush=True)
    try:
        return about, take_turns(entries, rounds, steps, device, say=lambda text: say(f"bench: {text}"))
    except Refused as error:
        raise UserError(str(error)) from None
    except SideFailed as error:
        raise RunFailed(f"{asked.target.label} cannot be trained: {error}") from error


def _side(config: RunConfig, device: torch.device, name: str, steps: int) -> Side:
    """In a side's process: its training."""
    from meshrun.check.bench_peers import MESHRUN as OURS
    from meshrun.check.bench_peers import PEERS

    return iter({MESHRUN: OURS, **PEERS}[name].make(task_of(config, device).lasting(steps)))


def task_of(config: RunConfig, device: torch.device) -> Task:
    """What all sides train, as the user's options have it."""
    import torch

    from meshrun.check.bench_task import Task
    from meshrun.cli.configured import how_of, override
    from meshrun.train.reading import readers_for
    from meshrun.world import detect
    from meshrun.world.environment import inherited

    if config.threads is not None:
        torch.set_num_threads(config.threads)
    experiment, scale, _ = override(make(find(config.target), config.options, config.data), config)
    if experiment.micro is not None and experiment.micro < experiment.batch:
        # Peers divide by what is in a micro-batch, meshrun by what is in the batch: that is not the same training.
        experiment = replace(experiment, micro=None)
    workers = config.workers
    if workers is None:
        workers = readers_for(experiment.train, detect(inherited()), device)
    return Task(experiment, how_of(config), device, workers, scale)


def _about(config: RunConfig, device: torch.device) -> About:
    """In a process of its own: what the training is, and what the device can do."""
    import torch
    from torch import nn

    from meshrun.check import bench_roofline
    from meshrun.check.bench_count import count
    from meshrun.check.bench_rank import tokens_of
    from meshrun.parallel.demands import demands_of

    task = task_of(config, device)
    experiment = task.experiment
    model = demands_of(experiment).model
    draws = any(isinstance(each, nn.Dropout) and each.p > 0 for each in model.modules())
    ids = task.order.batch_ids(0).tolist()[:32]
    tokens = sum(tokens_of(sample_of(experiment.train, number)[0]) for number in ids) / len(ids)
    counts, uncounted = None, ""
    for where in dict.fromkeys((device, torch.device("cpu"))):  # kernels of a GPU may want real tensors
        try:
            counts = count(experiment, where, task.how.states)
            break
        except Exception as error:  # a model that must see numbers: all else can be measured
            why = str(error).partition("\n")[0]
            uncounted = f"the step cannot be counted without values: {type(error).__name__}: {why}"
    can = bench_roofline.measured(device, experiment.precision)
    return About(experiment.batch, tokens, experiment.precision, draws, counts, uncounted, can)

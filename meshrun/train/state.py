"""All that a training is, as named tensors and plain values; `restore.py` is the way back.

    now = moment(trainer)            # what changes while a step is computed, copied
    regions(trainer, now)            # this rank's parts of weights, buffers, optimizer state, random numbers
    values(trainer, now)             # the rest: cursor, best score, sums, what the optimizer keeps in its groups

Names say whose a tensor is: `model/W`, `optimizer/W/exp_avg`, `buffer/B@REPLICA`, `rng/RANK/torch`, `totals/losses`.
Weights and optimizer state belong to the model, so any layout finds its part of them. Running statistics and generators
of random numbers belong to a rank: the same layout gets them back as they were, another one the mean of the former and
new ones of the latter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from meshrun.data.drawn import Drawn
from meshrun.errors import UserError
from meshrun.kernels.eightbit import Eight
from meshrun.mesh import Here
from meshrun.parallel.placed import Shard
from meshrun.state.checkpoint import Region

if TYPE_CHECKING:
    from meshrun.train.loop import Trainer

NUMBERS = {"int": int, "float": float, "bool": bool}
"""Plain numbers of an optimizer's state are kept as tensors whose names end in #int and so on."""
SUMS = ("samples", "timed_samples", "seconds", "data_wait")
"""What is added up over the steps of a run."""
Writer = Callable[[tuple[int, ...]], int]
"""Which of several ranks that hold the same writes what cannot be shared out."""


@dataclass(frozen=True)
class Moment:
    """What changes while a step is computed, as it was before: a step that is cut off must leave no trace."""

    step: int
    evaluated: int
    random: Drawn
    buffers: Mapping[str, Tensor]


def moment(trainer: Trainer) -> Moment:
    """The present one."""
    buffers = trainer.copier(trainer.placed.own_buffers())
    return Moment(trainer.step, trainer.evaluated, Drawn.now(trainer.here.device), buffers)


def regions(trainer: Trainer, now: Moment, writer: Writer = min) -> list[Region]:
    """What this rank holds; of what several hold, each names all of it."""
    here = trainer.here
    found = [region_of(here, "model/", shard, shard.parameter.detach()) for shard in weights(trainer)]
    for shard in trainer.placed.shards:
        kept = trainer.optimizer.state.get(shard.parameter, {})
        found += (each for key, value in kept.items() for each in _of_optimizer(trainer, shard, key, value, writer))
    found += passing(trainer, now)
    if here.rank == writer(tuple(range(here.size))):
        losses, norms = (each[: now.step] for each in (trainer.totals.losses, trainer.totals.grad_norms))
        found.append(Region.whole("totals/losses", torch.tensor(losses, dtype=torch.float64)))
        found.append(Region.whole("totals/grad_norms", torch.tensor(norms, dtype=torch.float64)))
    return found


def passing(trainer: Trainer, now: Moment) -> list[Region]:
    """What belongs to this rank and is lost with it; buffers outside of segments are on other pipeline stages too."""
    here = trainer.here
    found = [Region.whole(f"rng/{here.rank}/{name}", each) for name, each in now.random.tensors().items()]
    if here.place("tp") == 0 and here.place("cp") == 0:
        for name, buffer in now.buffers.items():
            stages = trainer.placed.stages_with(name)
            copy = stages.index(here.place("pp"))
            found.append(Region.whole(f"buffer/{name}@{here.replica}", buffer, copy, len(stages)))
    return found


def weights(trainer: Trainer) -> list[Shard]:
    return [*trainer.placed.shards, *trainer.placed.frozen]


def region_of(here: Here, prefix: str, shard: Shard, tensor: Tensor, suffix: str = "") -> Region:
    copy = shard.holders.index(here.rank)
    return Region(f"{prefix}{shard.name}{suffix}", tensor, shard.shape, shard.start, copy, shard.copies)


def _of_optimizer(trainer: Trainer, shard: Shard, key: str, value: Any, writer: Writer) -> Iterator[Region]:
    if value is None:
        return
    if isinstance(value, Eight):  # on the host: all of them in fp32 may be more than a GPU has left
        value = value.read(shard.parameter).cpu()
    if isinstance(value, Tensor) and value.shape == shard.parameter.shape:
        yield region_of(trainer.here, "optimizer/", shard, value.detach(), f"/{key}")
        return
    kind = type(value).__name__
    if not isinstance(value, Tensor) and kind not in NUMBERS:
        raise UserError(
            f"the optimizer {type(trainer.optimizer).__name__} keeps {key!r} as a {kind}, which a checkpoint cannot "
            f"hold; use one that keeps tensors and numbers, or train without checkpoints (--checkpoint none)"
        )
    first = not any(shard.start)
    if isinstance(value, Tensor) and value.dim() and shard.parameter.shape != shard.shape:
        raise UserError(
            f"the optimizer {type(trainer.optimizer).__name__} keeps {key!r} of shape {tuple(value.shape)} for a part "
            f"of {shard.name}: no other layout could use it; train without checkpoints (--checkpoint none)"
        )
    # The same number on all ranks that hold a part of the parameter: one that holds the first part writes it.
    if first and trainer.here.rank == writer(shard.holders):
        tensor = value.detach() if isinstance(value, Tensor) else torch.tensor(value)
        yield Region.whole(f"optimizer/{shard.name}/{_key(key, value)}", tensor)


def values(trainer: Trainer, now: Moment) -> dict[str, Any]:
    """What is no tensor."""
    totals = trainer.totals
    return {
        "step": now.step,
        "evaluated": now.evaluated,
        "layout": str(trainer.here.layout),
        "world": trainer.here.size,
        "best": totals.best or None,
        "scores": totals.scores,
        "totals": {name: getattr(totals, name) for name in SUMS},
        "skipped": totals.skipped,
        "habits": trainer.placed.habits(),
        "optimizer": type(trainer.optimizer).__name__,
        "kept": _kept_keys(trainer),
        "groups": [
            {"made": made, "now": plain(group)}
            for made, group in zip(trainer.made_groups, trainer.optimizer.param_groups, strict=True)
        ],
        "data": data_of(trainer),
    }


def data_of(trainer: Trainer) -> dict[str, Any]:
    """All that decides which samples a step has, and whether they are the same ones."""
    experiment = trainer.experiment
    fingerprint = getattr(experiment.train, "fingerprint", None)
    return {
        "batch": experiment.batch,
        "seed": experiment.seed,
        "train_samples": len(experiment.train),
        "shuffle": str(trainer.order.shuffle),
        "fingerprint": str(fingerprint) if fingerprint is not None else None,
    }


def _kept_keys(trainer: Trainer) -> dict[str, list[str]]:
    """What the optimizer keeps of a parameter, and those that it keeps nothing of."""
    keys: set[str] = set()
    without: list[str] = []
    for shard in trainer.placed.shards:
        kept = trainer.optimizer.state.get(shard.parameter, {})
        keys |= {_key(key, value) for key, value in kept.items() if value is not None}
        without += [] if kept else [shard.name]
    return {"keys": sorted(keys), "without": without}


def _key(key: str, value: Any) -> str:
    return key if isinstance(value, Tensor | Eight) else f"{key}#{type(value).__name__}"


def plain(group: Mapping[str, Any]) -> dict[str, Any]:
    """The values of an optimizer's group that are numbers and words."""
    found: dict[str, Any] = {}
    for key, value in group.items():
        if isinstance(value, Tensor) and value.numel() == 1:
            value = value.item()
        if isinstance(value, tuple | list) and all(isinstance(each, int | float) for each in value):
            found[key] = list(value)
        elif value is None or isinstance(value, int | str) or (isinstance(value, float) and math.isfinite(value)):
            found[key] = value
    return found

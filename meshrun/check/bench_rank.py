"""One real rank of a job of any size, on this one device: what it holds, needs and computes.

    found = measured(experiment, how, parse("fsdp=64"), place=0, device=torch.device("cuda"), steps=5)
    found.seconds, found.peak_gib, found.parameters

The other ranks are made up by torch's fake process group, which sends nothing and hands a rank its own values back. So
memory and computation are those of the rank in the whole mesh, what ranks say to each other costs nothing, and the
losses mean nothing. A pipeline's stage would wait for shapes that nobody sends: layouts with pp are refused.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from meshrun import mesh
from meshrun.errors import RunFailed, UserError
from meshrun.experiment import Experiment
from meshrun.layout import Layout, nearest
from meshrun.parallel.demands import demands_of
from meshrun.parallel.how import How
from meshrun.train.bad_steps import Policy, Verdict
from meshrun.train.loop import Trainer
from meshrun.train.refusals import refuse

WARM_UP = 3
"""Steps before those that are timed: the first compiles, the second makes the optimizer's state."""
GIB = float(1 << 30)


@dataclass(frozen=True)
class OneRank:
    """What one rank of a mesh was measured to need."""

    layout: str
    device: str
    precision: str
    of: int
    place: int
    batch: int
    """The global one."""
    micro: int
    """Samples of it that this rank computes at once."""
    parameters: int
    """Of the model that this rank holds, for good."""
    seconds: float
    """Of a step, without communication: the median."""
    first_step_s: float
    samples_per_s: float
    tokens_per_s: float | None
    """Both without communication, of the samples that this rank works on, alone or with others along tp and cp: not of
    the whole job."""
    peak_gib: float | None
    reserved_gib: float | None
    """What tensors took at most, and what torch had taken of the device for them; None on a CPU."""
    chosen: dict[str, Any]
    """What of how a step is computed was left to us."""
    notes: tuple[str, ...] = ()


class Unjudged(Policy):
    """Goes on whatever the numbers are."""

    def judge(self, loss: float, norm: float, history: Sequence[float]) -> Verdict | None:
        del loss, norm, history
        return None


def fitted(experiment: Experiment, layout: Layout, batch: int | None, steps: int) -> Experiment:
    """The experiment with one micro-batch a rank, unless a batch is asked for."""
    replicas = layout.dp * layout.fsdp
    batch = batch or (experiment.micro or 1) * replicas
    if batch > len(experiment.train):
        raise UserError(
            f"{replicas} replicas of {experiment.micro or 1} samples are a batch of {batch}, but the training set has "
            f"only {len(experiment.train)} samples; make samples shorter, or give a smaller --micro or --batch"
        )
    # As many as make compiling pay, where that is left to us: of a long run, these are the first ones.
    return replace(experiment, batch=batch, steps=max(1000, steps), epochs=None, evals={}, after=None)


def resolved(asked: Layout, of: int) -> Layout:
    """The layout for so many ranks, with its open axis filled."""
    if of % asked.size if asked.star else of != asked.size:
        multiple = "a multiple of " if asked.star else ""
        near = _told("layouts near it", nearest(asked, of, works=lambda each: _not_alone(each) is None))
        raise UserError(f"layout '{asked}' needs {multiple}{asked.size} ranks, but the job has {of} (--of){near}")
    return asked.resolve(of)


def measured(experiment: Experiment, how: How, layout: Layout, place: int, device: torch.device, steps: int) -> OneRank:
    """Train some steps as that rank."""
    if not 0 <= place < layout.size:
        raise UserError(f"place is {place}; it must be a rank from 0 to {layout.size - 1} (--place)")
    if (why := _not_alone(layout)) is not None:
        raise UserError(f"{why} (--layout)")
    _refuse(experiment, layout, how)
    here = mesh.one_of(layout, place, device)
    try:
        return _trained(experiment, how, here, steps)
    except torch.OutOfMemoryError as error:
        raise RunFailed(
            f"rank {place} of '{layout}' does not fit into this device: {str(error).partition('. ')[0]}"
        ) from error
    finally:
        mesh.finish()


def _not_alone(layout: Layout) -> str | None:
    """Why one rank of this layout is not measured by itself, or None."""
    if layout.pp > 1:
        return (
            f"layout '{layout}' cuts the model into stages, which wait for shapes that only other ranks can send; "
            f"use one of dp, fsdp, tp and cp"
        )
    if layout.dp == layout.size:
        return (
            f"on layout '{layout}' every rank computes the whole model, as one process does: meshrun bench TARGET "
            f"measures that; use a layout with fsdp, tp or cp"
        )
    return None


def _refuse(experiment: Experiment, layout: Layout, how: How) -> None:
    """As a run does, but what is proposed instead can be measured here."""
    try:
        refuse(experiment, layout, how)
    except UserError:
        demands = demands_of(experiment)
        if (why := demands.objection(layout)) is None:
            raise

        def works(near: Layout) -> bool:
            return _not_alone(near) is None and demands.objection(near) is None

        near = _told(f"layouts of {layout.size} ranks that work", nearest(layout, layout.size, works=works))
        raise UserError(f"{why.removesuffix(' (--layout)')}{near} (--layout)") from None


def _told(what: str, layouts: list[Layout]) -> str:
    return f"; {what}: {'; '.join(map(str, layouts))}" if layouts else ""


def _trained(experiment: Experiment, how: How, here: mesh.Here, steps: int) -> OneRank:
    on_gpu = here.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    trainer = Trainer(experiment, here, how=how, workers=0, policy=Unjudged())
    samples, tokens = _sizes(trainer)
    times: list[float] = []
    mark = time.perf_counter()
    for number, _ in enumerate(trainer.steps(), 1):
        if on_gpu:
            torch.cuda.synchronize()
        now = time.perf_counter()
        times.append(now - mark)
        mark = now
        if number == WARM_UP + steps:
            break
    seconds = statistics.median(times[WARM_UP:])
    return OneRank(
        layout=str(here.layout),
        device=torch.cuda.get_device_name() if on_gpu else "cpu",
        precision=experiment.precision,
        of=here.size,
        place=here.rank,
        batch=experiment.batch,
        micro=min(samples, experiment.micro or samples),
        parameters=sum(each.parameter.numel() for each in (*trainer.placed.shards, *trainer.placed.frozen)),
        seconds=seconds,
        first_step_s=times[0],
        samples_per_s=samples / seconds,
        tokens_per_s=tokens / seconds if tokens else None,
        peak_gib=torch.cuda.max_memory_allocated() / GIB if on_gpu else None,
        reserved_gib=torch.cuda.max_memory_reserved() / GIB if on_gpu else None,
        chosen=dict(trainer.placed.chosen),
        notes=tuple(trainer.placed.notes),
    )


def _sizes(trainer: Trainer) -> tuple[int, int]:
    """How many samples of a batch this rank computes, and how many tokens they have: 0 where inputs are none."""
    here = trainer.here
    ids = trainer.order.batch_ids(0)
    samples = len(ids) // here.replicas
    return samples, samples * tokens_of(trainer.experiment.train[int(ids[0])][0])


def tokens_of(inputs: object) -> int:
    """How many tokens a sample's inputs have: the longest row of whole numbers; 0 where there is none."""
    rows = [each for each in tree_leaves(inputs) if isinstance(each, torch.Tensor) and each.dim() == 1]
    return max((len(each) for each in rows if each.dtype == torch.int64), default=0)

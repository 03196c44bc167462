"""The loop around the updates, for `meshrun run` and for whoever writes the loop around `steps()` themselves.

    trainer = Trainer(experiment)
    for update in trainer.steps():
        print0(update.step, update.loss)
    print0(trainer.evaluate())

What happens in `train()`, in this order:

    start
    for every step:       read -> update -> (lagging by one update on a GPU) check that it is finite -> record
        at an epoch's end, or every `eval_every` steps:   evaluate -> record -> keep the best weights
    evaluate once more if the last step was not evaluated -> keep the last weights -> end
"""

from __future__ import annotations

import hashlib
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshrun.data.loader import Loader, Reading, StepData
from meshrun.data.order import Cut, Order
from meshrun.errors import RunFailed
from meshrun.experiment import Experiment
from meshrun.layout import Layout
from meshrun.mesh import Here, start
from meshrun.parallel.build import How, build, demands_of, refuse_how
from meshrun.state.weights import save_weights
from meshrun.train.evaluate import Scores, evaluate
from meshrun.train.optim import make, refuse_unless_by_element, set_learning_rate
from meshrun.train.step import Inspect, Stepper
from meshrun.world.cores import granted

Record = Callable[..., None]


@dataclass
class Update:
    """One finished update. On a GPU its numbers may still be under way: asking for one waits for it."""

    step: int
    samples: int
    learning_rate: float
    data_wait: float
    pieces: list[list[int]]
    """This rank's samples of the step, a list a micro-batch."""
    values: list[float] | Tensor
    ready: torch.cuda.Event | None
    seconds: float = 0.0
    """Since the update before, less what the caller of `steps` did in between."""

    def _numbers(self) -> list[float]:
        if self.ready is not None:
            self.ready.synchronize()
            self.ready = None
        if isinstance(self.values, Tensor):
            self.values = self.values.tolist()
        return self.values

    @property
    def loss(self) -> float:
        """The mean over the global batch."""
        total, count, _, _ = self._numbers()
        return total / count if count else math.nan

    @property
    def grad_norm(self) -> float:
        """The norm of the global gradient before clipping."""
        return self._numbers()[2]

    @property
    def own_total(self) -> float:
        """The part of the loss's sum that this rank has computed."""
        return self._numbers()[3]


@dataclass
class Totals:
    """What a run has reached so far."""

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    samples: int = 0
    seconds: float = 0.0
    data_wait: float = 0.0
    ids: Any = field(default_factory=hashlib.sha256)
    timed_samples: int = 0
    scores: Scores = field(default_factory=dict)
    best: dict[str, float] = field(default_factory=dict)

    def add(self, update: Update) -> None:
        self.losses.append(update.loss)
        self.grad_norms.append(update.grad_norm)
        self.samples += update.samples
        # The first update pays for allocations and for making DDP: it says nothing about the speed.
        if len(self.losses) > 1:
            self.timed_samples += update.samples
            self.seconds += update.seconds
            self.data_wait += update.data_wait

    def result(self) -> dict[str, Any]:
        """The run in numbers, under the names that scripts rely on."""
        return {
            "steps": len(self.losses),
            "losses": self.losses,
            "grad_norms": self.grad_norms,
            "eval": self.scores,
            "best": self.best or None,
            "samples": self.samples,
            "samples_per_s": self.timed_samples / self.seconds if self.seconds else None,
            "data_wait": self.data_wait / self.seconds if self.seconds else None,
            "sample_ids_sha256": self.ids.hexdigest(),
        }


class Trainer:
    """An experiment on this rank's place in the mesh."""

    def __init__(
        self,
        experiment: Experiment,
        here: Here | None = None,
        *,
        workers: int | None = None,
        prefetch: int = 2,
        eval_every: int | None = None,
        lr_scale: float = 1.0,
        weights: Path | None = None,
        record: Record | None = None,
        how: How | None = None,
        inspect: Inspect | None = None,
    ) -> None:
        """`record(kind, **fields)` is told of every step and evaluation; `weights` is where the best and last go."""
        self.experiment, self.here = experiment, here or start()
        self.order = Order(len(experiment.train), experiment.batch, experiment.seed)
        self.total_steps = experiment.steps or max(1, round((experiment.epochs or 0) * self.order.steps_per_epoch))
        self.eval_every = eval_every or self.order.steps_per_epoch
        self.weights, self.record = weights, record
        if experiment.precision == "fp32":
            # Convolutions on a GPU would round to 10 bits by default, and fp32 is to mean fp32.
            torch.backends.cudnn.conv.fp32_precision = "ieee"  # type: ignore[attr-defined]
        how = how or How()
        _refuse_settings(experiment, self.here.layout, how)
        self.placed = build(experiment, self.here, how)
        self.reading = Reading(
            cut=Cut(experiment.micro, **asdict(self.placed.cutting)),
            workers=_workers(self.here) if workers is None else workers,
            prefetch=prefetch,
            pin=self.here.device.type == "cuda",
            collate=experiment.collate,
        )
        self.model = self.placed.model
        self.optimizer = make(experiment.optimizer, [each.parameter for each in self.placed.shards], lr_scale)
        self.step = 0
        """The cursor: how many updates were done. It is all the state that the data has."""
        self.totals = Totals()
        self._update = Stepper(self.here, self.placed, self.optimizer, experiment.loss, experiment.clip, inspect)

    def steps(self) -> Iterator[Update]:
        """Train, yielding after every update."""
        self.placed.train(True)
        loader = Loader(self.experiment.train, self.order, self.here.replica, self.here.replicas, self.reading)
        unsettled: deque[Update] = deque()
        lag = 1 if self.here.device.type == "cuda" else 0
        mark = time.perf_counter()
        for data in loader.steps(self.step, self.total_steps):
            update = self._one(data)
            now = time.perf_counter()
            update.seconds, mark = now - mark, now
            self.step = data.step + 1
            unsettled.append(update)
            while len(unsettled) > lag:
                self._settle(unsettled.popleft())
            paused = time.perf_counter()
            yield update
            mark += time.perf_counter() - paused
        while unsettled:
            self._settle(unsettled.popleft())

    def evaluate(self) -> Scores:
        """Loss and metrics of every evaluation set, every sample once."""
        began = time.perf_counter()
        self.totals.scores = evaluate(self.here, self.placed, self.experiment, self.reading)
        self._tell("eval", step=self.step, scores=self.totals.scores, seconds=time.perf_counter() - began)
        return self.totals.scores

    def train(self) -> dict[str, Any]:
        """The whole run: train, evaluate, keep the best and the last weights."""
        for _ in self.steps():
            if self.step % self.eval_every == 0 or self.step == self.total_steps:
                self._evaluate_and_keep()
        if not self.experiment.evals:
            self.placed.agree_on_buffers()
        self._keep("last", {"step": self.step})
        return self.totals.result()

    def _one(self, data: StepData) -> Update:
        rate = set_learning_rate(self.optimizer, self.experiment.schedule, data.step, self.total_steps)
        values, ready = self._update(data), None
        if isinstance(values, Tensor):
            # Copied beside the computation: the host reads the numbers one update later, without making the GPU wait.
            values = values.to("cpu", non_blocking=True)
            ready = torch.cuda.Event()
            ready.record()
        self.totals.ids.update(data.ids.astype("<i8", copy=False))
        own = [piece[:real] for piece, real in zip(data.pieces, data.real, strict=True)]
        return Update(data.step, len(data.ids), rate, data.waited, own, values, ready)

    def _settle(self, update: Update) -> None:
        if not (math.isfinite(update.loss) and math.isfinite(update.grad_norm)):
            raise RunFailed(self._not_finite(update))
        self.totals.add(update)
        self._tell(
            "step",
            step=update.step + 1,
            loss=update.loss,
            grad_norm=update.grad_norm,
            lr=update.learning_rate,
            samples=update.samples,
            seconds=round(update.seconds, 6),
            data_wait=round(update.data_wait, 6),
        )

    def _not_finite(self, update: Update) -> str:
        """Say where a loss that is not a number came from: all ranks ask each other, as all have seen it."""
        own = update.pieces if not math.isfinite(update.own_total) else []
        found = [(rank, pieces) for rank, pieces in enumerate(self.here.gathered(own)) if pieces]
        step = update.step + 1
        if math.isfinite(update.loss):
            return (
                f"the gradient norm is {update.grad_norm} at step {step} while the loss is {update.loss:.6g}; "
                f"a smaller learning rate may help"
            )
        if not found:
            return f"loss is {update.loss} at step {step}: the counts of all ranks add up to 0"
        rank, pieces = found[0]
        ids = [str(number) for piece in pieces for number in piece]
        named = ", ".join(ids[:8]) + (f" and {len(ids) - 8} more" if len(ids) > 8 else "")
        return f"loss is {update.loss} at step {step}, on rank {rank}, with the training samples {named}"

    def _evaluate_and_keep(self) -> None:
        if not self.experiment.evals:
            return
        scores = self.evaluate()
        first = next(iter(scores))
        loss = scores[first]["loss"]
        if loss < self.totals.best.get("loss", math.inf):
            self.totals.best = {"step": self.step, **scores[first]}
            self._keep("best", self.totals.best)

    def _keep(self, name: str, about: dict[str, Any]) -> None:
        """Write the weights, under the model's own names; ranks that hold parts of them send these to rank 0."""
        if self.weights is not None:
            whole = dict(self.placed.weights())
            if self.here.rank == 0:
                save_weights(whole, self.weights / f"{name}.safetensors", about)

    def _tell(self, kind: str, **fields: Any) -> None:
        if self.record is not None:
            self.record(kind, **fields)


def refuse(experiment: Experiment, layout: Layout, how: How) -> None:
    """Say what of an experiment cannot work on a layout, before anything runs there."""
    demands_of(experiment).refuse(layout)
    _refuse_settings(experiment, layout, how)


def _refuse_settings(experiment: Experiment, layout: Layout, how: How) -> None:
    """What can be told without the model, which `build` asks itself."""
    refuse_how(experiment, layout, how)
    if layout.fsdp * layout.tp > 1:
        refuse_unless_by_element(experiment.optimizer, str(layout))


def _workers(here: Here) -> int:
    """Readers beside the computing: none on a rank with one core, where they would only take it away."""
    cores = len(granted()) // (here.world.local_size if here.world.source == "none" else 1)
    return min(4, cores - 1) if here.device.type == "cuda" else 0

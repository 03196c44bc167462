"""The loop around the updates, for `meshrun run` and for whoever writes the loop around `steps()` themselves.

    trainer = Trainer(experiment)
    for update in trainer.steps():
        print0(update.step, update.loss)
    print0(trainer.evaluate())

What happens in `train()`, in this order:

    start, or resume: go on from the newest state that is whole
    for every step:       read -> update -> (lagging by one update on a GPU) judge its numbers -> record
        when any rank is asked to stop:                   stop, all after the same step
        at an epoch's end, or every `eval_every` steps:   evaluate -> record -> keep the best weights
        when it is time:                                  checkpoint
    evaluate once more if the last step was not evaluated -> keep the last weights -> end
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from meshrun.data.feed import on
from meshrun.data.loader import Loader, StepData
from meshrun.data.order import Order
from meshrun.data.together import coming
from meshrun.errors import RunFailed, SharedError, UserError
from meshrun.experiment import Experiment, in_halves
from meshrun.kernels import products
from meshrun.mesh import Here, start
from meshrun.parallel.build import build
from meshrun.parallel.how import How
from meshrun.parallel.placed import Placed
from meshrun.train import graphs
from meshrun.train.bad_samples import BadSamples
from meshrun.train.bad_steps import Policy, Verdict, where_from
from meshrun.train.copies import Copier
from meshrun.train.data_wait import Tally
from meshrun.train.evaluate import Scores, at_once, evaluate, fitting_on
from meshrun.train.in_backward import refuse_in_backward
from meshrun.train.keeper import Keeper
from meshrun.train.optim import make, set_learning_rate, trained_by
from meshrun.train.reading import reading_for
from meshrun.train.recovery import Keeping
from meshrun.train.refusals import refuse_settings
from meshrun.train.state import plain
from meshrun.train.states import in_eight_bits
from meshrun.train.step import COUNT, Inspect, Stepper, is_count
from meshrun.train.totals import Totals, Update
from meshrun.train.weight_files import WeightFiles
from meshrun.world.caches import keep_compiled_code

Record = Callable[..., None]


class Life(Protocol):
    """Who is told what this rank is at."""

    def mark(self, phase: str, step: int) -> None: ...

    def finished(self, step: int, seconds: float, data_wait: float) -> None: ...


class Ending(Protocol):
    """Who knows whether this rank is asked to stop, and how much time there is."""

    def asked(self, evaluates: bool) -> float:
        """1 if it is, else 0; `evaluates` says that an evaluation follows the step that is being computed."""

    def stepped(self, seconds: float) -> None:
        """A step took so long."""

    def evaluated(self, seconds: float) -> None:
        """An evaluation took so long."""


class Stopped(RunFailed):
    """Some rank was asked to stop, and all have done so between two steps."""


class Trainer:
    """An experiment on this rank's place in the mesh."""

    step: int = 0
    """The cursor: how many updates were done. It is all the state that the data has."""
    evaluated: int = 0
    """The last step whose scores are known."""
    unwritten: list[str]
    """Why files of weights could not be written at the end, a sentence each; on rank 0."""
    drew: bool = False
    """Whether the program had drawn random numbers of its own when its state was saved."""
    ending: Ending | None = None
    """Set from outside, where somebody may ask this training to stop."""
    _is_asked: bool = False
    _back: tuple[int, int] = (0, 0)
    """The step that was last gone back to, and from where."""
    _first: float = math.inf
    """The step that this process began with, once it has."""
    _fitting: int = 0
    """Samples of an evaluation that fit into memory at once, when that is known."""

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
        keeping: Keeping | None = None,
        policy: Policy | None = None,
        life: Life | None = None,
        record_ids: bool = False,
        skip_bad: bool = False,
        bad: Path | None = None,
    ) -> None:
        """`record(kind, **fields)` is told of every step and evaluation; `weights` is where the best and last go.

        With `keeping`, all state is saved now and then, and `resume()` goes on from it. With `skip_bad`, samples that
        cannot be read are left out, and written down in the folder `bad`.
        """
        self.experiment, self.here = experiment, here or start()
        self.order = Order.of(experiment.train, experiment.batch, experiment.seed, experiment.shuffle)
        self.total_steps = experiment.steps or max(1, round((experiment.epochs or 0) * self.order.steps_per_epoch))
        self.eval_every = eval_every or self.order.steps_per_epoch
        self.record, self.life, self.record_ids = record, life, record_ids
        self.policy, how = policy or Policy(), how or How()
        refuse_settings(experiment, self.here.layout, how)
        refuse_in_backward(experiment, self.here.layout, how, inspect is not None, self.policy.looks_first)
        self.placed = _built(experiment, self.here, how)
        self.model = self.placed.model
        self.optimizer = make(experiment.optimizer, trained_by(self.placed, self.here), lr_scale)
        if how.states == "8bit":
            in_eight_bits(self.optimizer)
        self.made_groups = [plain(group) for group in self.optimizer.param_groups]
        self.reading = reading_for(experiment, self.here, self.placed.cutting, workers, prefetch, skip_bad)
        self.totals, self.tally, self.copier = Totals(), Tally(prefetch + 1), Copier()
        self.unwritten = []
        self._bad = BadSamples(bad, self.here.rank)
        self._files = WeightFiles(weights, self.here, self.placed, self.tell, self.at)
        self._unsettled: deque[Update] = deque()
        self.keeper = Keeper(self, keeping) if keeping is not None else None
        self._update = self._stepper(how, inspect)

    def _stepper(self, how: How, inspect: Inspect | None) -> Stepper:
        """What does one update; steps are recorded and replayed where nothing speaks against it."""
        device, shown = self.here.device, inspect is not None
        why = graphs.objection(how.graphs, device, self.here.size, self.total_steps, shown, how.update_in_backward)
        if why is not None and how.graphs:
            self.placed.notes.append(graphs.refused(why))
        stepper = Stepper(
            self.here,
            self.placed,
            self.optimizer,
            self.experiment.loss,
            self.experiment.clip,
            inspect,
            accept=self._accept,
            looks_first=self.policy.looks_first,
            updating=self.keeper.updating if self.keeper is not None else nullcontext,
            asked=self._asked,
            augment=self.experiment.augment,
            seed=self.experiment.seed,
            steps_per_epoch=self.order.steps_per_epoch,
            recorder=graphs.recorder_on(device) if why is None else None,
            graphs=how.graphs,
            total_steps=self.total_steps,
            note=self._without_graphs,
            in_backward=how.update_in_backward,
        )
        graphed = {"graphs": "auto"} if why is None else {"graphs": False, "graphs_why": why}
        self.placed.chosen.update({**stepper.chosen(), **graphed})
        return stepper

    def resume(self) -> dict[str, Any] | None:
        """Go on from the newest state that is whole; returns from where, or None for a run that begins."""
        return self.keeper.resume() if self.keeper is not None else None

    def steps(self) -> Iterator[Update]:
        """Train, yielding after every update."""
        self._refuse_other_length()
        self.placed.train(True)
        self._first = self.step
        loader = Loader(self.experiment.train, self.order, self.here.replica, self.here.replicas, self.reading)
        lag = 1 if self.here.device.type == "cuda" and not self.policy.looks_first else 0
        read = coming(loader, self.step, self.total_steps, on(self.here.device), self._update.augmented)
        # Closed at the end, whatever that is: else readers stay, and who waits for them waits long.
        with closing(read):
            yield from self._updates(read, lag)

    def _updates(self, coming: Iterator[StepData], lag: int) -> Iterator[Update]:
        mark = time.perf_counter()
        while (data := self._next(coming)) is not None:
            update = self._one(data)
            products.time_them(False)  # only a first step may take as long as that
            now = time.perf_counter()
            update.seconds, mark = now - mark, now
            self.step = data.step + 1
            if self.ending is not None:
                self.ending.stepped(update.seconds)
            self._unsettled.append(update)
            # Who evaluates must know that there is time for it.
            self.settle(0 if self._to_be_evaluated(self.step) else lag)
            paused = time.perf_counter()
            if self.keeper is not None:
                self.keeper.remember()
            yield update
            if self.step % self.order.steps_per_epoch == 0:
                self._refuse_other_length()
            if self._is_asked:
                raise Stopped(f"rank {self.here.rank} on {self.here.world.host} stopped after step {self.step}")
            if self.keeper is not None:
                self.keeper.after_step()
            mark += time.perf_counter() - paused
        self.settle()

    def _refuse_other_length(self) -> None:
        """The order of samples is of one length: with another, some would be left out, or not be there."""
        if (now := len(self.experiment.train)) != self.order.length:
            raise UserError(
                f"len(train) was {self.order.length} when the training began and is {now} after step {self.step}; the "
                f"length of a dataset must stay the same"
            )

    def _asked(self) -> float:
        return self.ending.asked(self._to_be_evaluated(self.step + 1)) if self.ending is not None else 0.0

    def _next(self, coming: Iterator[StepData]) -> StepData | None:
        self.at("reading", 1)
        data = next(coming, None)
        self.at("computing", 1)
        return data

    def at(self, phase: str, ahead: int = 0) -> None:
        """Tell who watches what this rank is at."""
        if self.life is not None:
            self.life.mark(phase, self.step + ahead)

    def settle(self, but: int = 0) -> None:
        """Look at the numbers of all finished updates but the last ones; if all, also end what is being written."""
        while len(self._unsettled) > but:
            self._settle(self._unsettled.popleft())
        if not but and (written := self._files.finish()) is not None:
            # Not before: a state that is saved from here on says that these weights are there.
            self.totals.best = written

    def write_late_weights(self) -> None:
        """Try again to write the best weights, where the disk has refused them."""
        self._files.write_late()

    def try_a_step(self) -> None:
        """Compute the first step once more, for what that settles, and forget its gradients."""
        reading = replace(self.reading, workers=0, pin=False)
        loader = Loader(self.experiment.train, self.order, self.here.replica, self.here.replicas, reading)
        self.placed.train(True)
        self._update.compute(next(loader.steps(0, 1)))
        self._update.update.forget()

    def evaluate(self) -> Scores:
        """Loss and metrics of every evaluation set, every sample once."""
        began = time.perf_counter()
        # Asked once, after the first steps: later, evaluations themselves are part of what memory was taken for.
        if not self._fitting and self.step > self._first:
            self._fitting = fitting_on(self.here.device, at_once(self.here, self.placed, self.experiment))
        self.totals.scores = evaluate(
            self.here,
            self.placed,
            self.experiment,
            self.reading,
            self._mark_evaluating,
            self._note_bad,
            self._fitting,
        )
        self.evaluated = self.step
        seconds = time.perf_counter() - began
        self.tell("eval", step=self.step, scores=self.totals.scores, seconds=seconds)
        if self.ending is not None:
            self.ending.evaluated(seconds)
        return self.totals.scores

    def _mark_evaluating(self) -> None:
        self.at("evaluating")

    def _note_bad(self, name: str, samples: tuple[tuple[int, str], ...]) -> None:
        self._bad.add(name, self.step, samples)

    def train(self) -> dict[str, Any]:
        """The whole run: train, evaluate, keep the best and the last weights."""
        if self.step and self.evaluated != self.step and self._to_be_evaluated(self.step):
            self._evaluate_and_keep()  # what a run before this one did not come to
        for _ in self.steps():
            if self._to_be_evaluated(self.step) and not self._is_asked:
                self._evaluate_and_keep()
        if not self.experiment.evals:
            self.placed.agree_on_buffers()
        self.unwritten = self._files.keep_last({"step": self.step})
        if self.placed.chosen["graphs"] == "auto":
            self.placed.chosen |= {"graphs": False, "graphs_why": "it would not pay, or no step could be recorded"}
        if self.keeper is not None:
            self.keeper.finish()
        return self.totals.result()

    def _to_be_evaluated(self, step: int) -> bool:
        return step % self.eval_every == 0 or step == self.total_steps

    def _one(self, data: StepData) -> Update:
        rate = set_learning_rate(self.optimizer, self.experiment.schedule, data.step, self.total_steps)
        own = [piece[:real] for piece, real in zip(data.pieces, data.real, strict=True)]
        if self.record_ids:  # before they are used: a rank that is killed after that says no more
            self.tell("ids", step=data.step + 1, ids=[number for piece in own for number in piece])
        self._bad.add("train", data.step + 1, data.bad)
        values, ready = self._update(data), None
        if isinstance(values, Tensor):
            # Copied beside the computation: the host reads the numbers one update later, without making the GPU wait.
            values, on_gpu = values.to("cpu", non_blocking=True, copy=True), values.is_cuda
            ready = torch.cuda.Event() if on_gpu else None
            if ready is not None:
                ready.record()
        self.totals.ids.add(data.ids)
        return Update(data.step, len(data.ids), rate, data.waited, own, values, ready, effort=data.effort)

    def _without_graphs(self, text: str) -> None:
        """Steps are computed as always from now on, and `text` says why."""
        self.placed.chosen |= {"graphs": False, "graphs_why": text}
        self.tell("note", text=text)

    def _accept(self, values: list[float]) -> bool:
        """Whether an update goes into the weights: not where it would be skipped, or undone at once."""
        total, count, norm, *_ = values
        return self.policy.judge(total / count if count else math.nan, norm, self.totals.losses) is None

    def _settle(self, update: Update) -> None:
        if not is_count(update.count):  # on a GPU, where nobody has looked at it before
            raise SharedError(
                f"the counts of the loss add up to {update.count:g} at step {update.step + 1}; each: {COUNT}"
            )
        verdict = self.policy.judge(update.loss, update.grad_norm, self.totals.losses)
        if verdict is not None and verdict.action == "stop":
            finite = math.isfinite(update.loss) and math.isfinite(update.grad_norm)
            if finite:
                raise RunFailed(f"{verdict.why} at step {update.step + 1}")
            raise RunFailed(where_from(update, self.here, self.reading.skip_bad))
        self._is_asked = self._is_asked or update.asked
        self.totals.add(update)
        self.tally.add(update)
        self.tell(
            "step",
            step=update.step + 1,
            loss=update.loss,
            grad_norm=update.grad_norm,
            lr=update.learning_rate,
            samples=update.samples,
            seconds=round(update.seconds, 6),
            data_wait=round(update.data_wait, 6),
        )
        if self.life is not None:
            self.life.finished(update.step + 1, update.seconds, update.data_wait)
        if verdict is not None:
            self._without(update.step + 1, verdict)

    def _without(self, step: int, verdict: Verdict) -> None:
        """Go on as if a step had not been; or, where the weights may be bad already, all steps since a checkpoint."""
        if verdict.action == "skip" or self.keeper is None:
            self.totals.skipped.append(step)
            self.tell("skipped", step=step, why=verdict.why)
            return
        since, back_at = self._back
        # A step that is bad right after going back says that it was not far enough.
        before = since - 1 if set(range(back_at + 1, step)) <= set(self.totals.skipped) and back_at else step - 1
        reached = self.keeper.go_back(before)
        self._back = reached, step
        self.totals.skipped = sorted({*self.totals.skipped, *range(reached + 1, step + 1)})
        self.tell("rollback", from_step=step, to_step=reached, why=verdict.why)

    def _evaluate_and_keep(self) -> None:
        if not self.experiment.evals:
            return
        scores = self.evaluate()
        first = next(iter(scores))
        loss = scores[first]["loss"]
        if loss < self.totals.best.get("loss", math.inf):
            best = {"step": self.step, **scores[first]}
            if self._files.keep_best(best):
                self.totals.best = best
        if self.keeper is not None:
            self.keeper.remember()

    def tell(self, kind: str, **fields: Any) -> None:
        if self.record is not None:
            self.record(kind, **fields)


def _built(experiment: Experiment, here: Here, how: How) -> Placed:
    if not in_halves(experiment.precision):
        # Convolutions on a GPU would round to 10 bits by default, and fp32 is to mean fp32.
        rounds = experiment.precision == "tf32"
        torch.backends.cudnn.conv.fp32_precision = "tf32" if rounds else "ieee"  # type: ignore[attr-defined]
        torch.set_float32_matmul_precision("high" if rounds else "highest")
    placed = build(experiment, here, how)
    if placed.chosen["compile"] and (lost := keep_compiled_code()) is not None:
        placed.notes.append(lost)
    return placed

"""What all sides of a benchmark train: the same model from the same weights, the same batches, loss and optimizer.

    task = Task(experiment, how, device, workers=0)
    model, optimizer = task.model(), ...
    for step, batch in enumerate(task.loader()): loss = task.loss(model, step, *batch)

Sides differ in who runs the loop. A `Side` is an iterator that does one update each time and gives its loss.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, default_collate

from meshrun.data.draws import SampleDraws
from meshrun.data.order import Order
from meshrun.experiment import Experiment, Schedule, in_halves
from meshrun.parallel.how import How
from meshrun.parallel.placed import call

Side = Iterator[Any]
"""Does one update each time it is asked, and gives its mean loss: a number, or a tensor that may still be computed."""


@dataclass(frozen=True)
class Task:
    """One training in one process."""

    experiment: Experiment
    how: How
    device: torch.device
    workers: int
    """Processes that read, on every side."""
    scale: float = 1.0
    """Factor for learning rates."""
    backend: str = "inductor"
    """What compiles on sides that compile."""

    @property
    def bf16(self) -> bool:
        """Whether peers compute in bfloat16; none of them has float8 without other packages."""
        return in_halves(self.experiment.precision)

    @cached_property
    def order(self) -> Order:
        experiment = self.experiment
        return Order.of(experiment.train, experiment.batch, experiment.seed, experiment.shuffle)

    @property
    def total_steps(self) -> int:
        return self.experiment.steps or max(1, round((self.experiment.epochs or 0) * self.order.steps_per_epoch))

    def lasting(self, steps: int) -> Task:
        """The same, long enough for so many updates, and for compiling to pay where that is left to us."""
        return replace(self, experiment=replace(self.experiment, steps=max(self.total_steps, steps, 1000)))

    def model(self) -> nn.Module:
        torch.manual_seed(self.experiment.seed)
        return self.experiment.model()

    def compiled(self, model: nn.Module) -> Any:
        return torch.compile(model, backend=self.backend)

    def optimizer(self, model: nn.Module) -> Optimizer:
        made = self.experiment.optimizer(model.parameters())
        for group in made.param_groups:
            group["lr"] *= self.scale
        return made

    def schedule(self, optimizer: Optimizer) -> LambdaLR:
        return LambdaLR(optimizer, self.factor)

    def factor(self, step: int) -> float:
        """The learning rate of a step, of the highest."""
        schedule = self.experiment.schedule
        if schedule is None:
            return 1.0
        return (schedule.factor if isinstance(schedule, Schedule) else schedule)(step, self.total_steps)

    def loader(self) -> Iterable[Any]:
        """Batches of the same samples in the same order as meshrun takes them."""
        order, steps = self.order, self.total_steps
        return DataLoader(
            self.experiment.train,  # type: ignore[arg-type]
            batch_sampler=_Batches(order, steps),
            collate_fn=self.experiment.collate or default_collate,
            num_workers=self.workers,
            pin_memory=self.device.type == "cuda",
        )

    def autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16)

    def loss(self, model: Callable[..., Any], step: int, inputs: Any, targets: Any) -> Tensor:
        """The mean loss of a batch that is on the device."""
        experiment = self.experiment
        if experiment.augment is not None:
            order = self.order
            ids = order.batch_ids(step).tolist()
            draws = SampleDraws(experiment.seed, step // order.steps_per_epoch, ids, self.device)
            with torch.no_grad():
                inputs = experiment.augment(inputs, draws)
        loss = experiment.loss(call(model, inputs), targets)  # type: ignore[arg-type]
        return loss.total / loss.count


class _Batches:
    """The numbers of the samples of each batch."""

    def __init__(self, order: Order, steps: int) -> None:
        self.order, self.steps = order, steps

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[list[int]]:
        for step in range(self.steps):
            yield self.order.batch_ids(step).tolist()


class OwnLoop:
    """A trainer that runs the loop itself, as a side: it waits after each update until it is asked for the next.

    `body(tell)` trains, on a thread of its own, and calls `tell(loss)` after each update; false says to stop.
    """

    def __init__(self, body: Callable[[Callable[[Any], bool]], None]) -> None:
        self._asked, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._loss: Any = None
        self._error: BaseException | None = None
        self._over = False
        self._thread = threading.Thread(target=self._run, args=(body,), daemon=True)
        self._started = False

    def __iter__(self) -> OwnLoop:
        return self

    def __next__(self) -> Any:
        if self._started:
            self._asked.release()
        else:
            self._started = True
            self._thread.start()
        self._done.acquire()
        if self._error is not None:
            raise self._error
        if self._over:
            raise StopIteration
        return self._loss

    def close(self) -> None:
        """Have it stop."""
        self._over = True
        self._asked.release()
        if self._started:
            self._thread.join()

    def _run(self, body: Callable[[Callable[[Any], bool]], None]) -> None:
        try:
            body(self._tell)
        except BaseException as error:  # which the one who asks is to see
            self._error = error
        self._over = True
        self._done.release()

    def _tell(self, loss: Any) -> bool:
        self._loss = loss
        self._done.release()
        self._asked.acquire()
        return not self._over

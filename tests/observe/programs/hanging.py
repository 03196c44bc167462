"""A straight line through 200 points, and each way in which one rank of its training can come to a halt.

Its lines have comments that tests find them by.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshrun import Experiment, Loss

FOREVER = 1000.0


def own_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


class Points:
    """Sample i is at (i / 200, 1) with the target 2 i / 200; one of them may never come."""

    def __init__(self, lost: int | None, pause: float, slow: float) -> None:
        """`slow`: seconds that rank 1 takes for each sample beyond the others' pause."""
        self.lost, self.pause, self.slow = lost, pause, slow

    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index == self.lost and own_rank() == 1:
            time.sleep(FOREVER)  # the dataset
        time.sleep(self.pause + self.slow * (own_rank() == 1))
        return torch.tensor([index / 200, 1.0]), torch.tensor([2 * index / 200])


class Line(nn.Linear):
    """May sleep in the forward pass of a step on rank 1."""

    def __init__(self, width: int, out: int, fault: str, step: int, pause: float) -> None:
        super().__init__(width, out)
        self.fault, self.step, self.pause, self.calls = fault, step, pause, 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += self.training
        if self.training and own_rank() == 1 and self.calls == self.step:
            if self.fault == "forward":
                time.sleep(FOREVER)  # the forward pass
            if self.fault == "loop":
                spin()
        time.sleep(self.pause if self.training or self.fault != "long evaluation" else 0.75)
        return super().forward(inputs)


def spin() -> None:
    while True:
        pass  # the loop


class Stuck(torch.optim.SGD):
    """Sleeps in an update of rank 1."""

    def __init__(self, parameters: Any, fault: str, step: int) -> None:
        super().__init__(parameters, lr=0.1)
        self.fault, self.at, self.calls = fault, step, 0

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        self.calls += 1
        if self.fault == "optimizer" and own_rank() == 1 and self.calls == self.at:
            time.sleep(FOREVER)  # the update
        return super().step(closure)


class Sum:
    """A loss that asks all ranks for something, but for one of them at one step."""

    def __init__(self, fault: str, step: int) -> None:
        self.fault, self.step, self.calls = fault, step, 0
        self.group: dist.ProcessGroup | None = None

    def __call__(self, outputs: Tensor, targets: Tensor) -> Loss:
        self.calls += 1
        if self.calls == 1 and self.fault == "skipped sum":
            self.group = dist.new_group()
        if not (own_rank() == 1 and self.calls == self.step):
            if self.fault == "skipped sum":
                dist.all_reduce(torch.ones(3), group=self.group)  # the skipped sum
            if self.fault == "skipped barrier":
                dist.barrier()  # the skipped barrier
        return Loss(((outputs - targets) ** 2).sum(), len(targets))


def experiment(
    fault: str = "none", step: int = 6, pause: float = 0.0, lost: int | None = None, slow: float = 0.0
) -> Experiment:
    return Experiment(
        model=lambda: nn.Sequential(Line(2, 4, fault, step, pause), Line(4, 1, fault, step, pause)),
        train=Points(lost, pause, slow),
        evals={"val": Points(None, 0.0, 0.0)} if fault == "long evaluation" else {},
        loss=Sum(fault, step),
        optimizer=lambda parameters: Stuck(parameters, fault, step),
        batch=6,
        steps=100_000,
    )

"""At its third step one rank fills /dev/shm, which must be a mount of this run alone, and is killed."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from meshrun import Experiment, mean_squared_error

FILL = Path("/dev/shm/fill")


class Line(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        self.calls = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 3 and dist.get_rank() == 1 and not FILL.exists():
            with contextlib.suppress(OSError), FILL.open("wb", buffering=0) as file:
                while file.write(bytes(512)):
                    pass
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(inputs)


def experiment() -> Experiment:
    data = TensorDataset(torch.ones(8, 4), torch.ones(8, 4))
    sgd = lambda parameters: torch.optim.SGD(parameters, lr=1e-3)  # noqa: E731
    return Experiment(Line, data, loss=mean_squared_error, optimizer=sgd, batch=4, steps=8)

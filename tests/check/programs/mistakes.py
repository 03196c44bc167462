"""Programs that train in one process as they should, each with a mistake that shows on a mesh."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset, default_collate

from meshrun import Experiment, Loss, cross_entropy


def ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def points(length: int = 40) -> TensorDataset:
    """Points of five coordinates in three classes."""
    inputs = 2 * torch.randn(length, 5, generator=torch.Generator().manual_seed(0))
    return TensorDataset(inputs, (inputs[:, 0] > 0).long() + (inputs[:, 1] > 1).long())


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 3))


def small(**changes: Any) -> Experiment:
    fields = {
        "model": net,
        "train": points(),
        "evals": {"val": points(13)},
        "loss": cross_entropy,
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.3, momentum=0.9),
        "batch": 12,
        "steps": 5,
    }
    return Experiment(**{**fields, **changes})


def mean_loss() -> Experiment:
    def mean(outputs: Tensor, targets: Tensor) -> Loss:
        return Loss(F.cross_entropy(outputs, targets), len(targets))

    return small(loss=mean)


def mean_of_means() -> Experiment:
    """Wrong only where micro-batches are uneven: 11 samples are 6 and 5."""

    def mean(outputs: Tensor, targets: Tensor) -> Loss:
        return Loss(F.cross_entropy(outputs, targets), 1)

    return small(loss=mean, batch=11)


class Scaled(nn.Module):
    def __init__(self, layers: nn.Module | None = None) -> None:
        super().__init__()
        self.layers = layers or net()
        for parameter in self.layers.parameters():
            parameter.register_hook(lambda gradient: gradient * ranks())

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def scaled_gradient() -> Experiment:
    return small(model=Scaled)


class Sines(nn.Module):
    """So steep that rounding grows sixfold in a step, to the size of the loss itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.out = nn.Linear(5, 16), nn.Linear(16, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.sin(6 * self.second(torch.sin(6 * self.first(x)))))


def scaled_sines() -> Experiment:
    return small(model=lambda: Scaled(Sines()), steps=20)


def scaled_and_clipped_gradient() -> Experiment:
    """After clipping, all gradients have the same norm again."""
    return small(model=Scaled, clip=0.01)


class Repeating:
    """Every rank reads the samples of the first in its place."""

    def __init__(self) -> None:
        self.points = points()

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.points[index // ranks() * ranks()]


def repeated_shard() -> Experiment:
    return small(train=Repeating())


class Sharded(Repeating):
    def __len__(self) -> int:
        return 40 // ranks()

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.points[index * ranks() + rank()]


def sharded_dataset() -> Experiment:
    return small(train=Sharded())


class Augmented(Repeating):
    """Draws from a generator of its own, which nobody else can seed."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(0)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, target = self.points[index]
        return inputs + 0.1 * torch.randn(5, generator=self.generator), target


def augmented_data() -> Experiment:
    return small(train=Augmented())


def noisy_collate() -> Experiment:
    def collate(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        inputs, targets = default_collate(samples)
        return inputs + 0.1 * torch.randn_like(inputs), targets

    return small(collate=collate)


def mixing_collate() -> Experiment:
    def collate(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        inputs, targets = default_collate(samples)
        return 0.9 * inputs + 0.1 * inputs.roll(1, 0), targets

    return small(collate=collate)


def noisy_augment() -> Experiment:
    return small(augment=lambda inputs, _: inputs + 0.1 * torch.randn_like(inputs))


def changing_evaluation() -> Experiment:
    return small(evals={"val": Augmented()})


class Clipping(torch.optim.SGD):
    """Clips what its rank holds, later than any trial of the optimizer goes."""

    count = 0

    def step(self, closure: Any = None) -> Any:
        self.count += 1
        for group in self.param_groups:
            nn.utils.clip_grad_norm_(group["params"], 0.2 if self.count > 3 else 1e6)
        return super().step(closure)


def local_clipping() -> Experiment:
    return small(optimizer=lambda parameters: Clipping(parameters, lr=0.3))


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = net()

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x + 0.3 * torch.randn_like(x) if self.training else x)


def own_noise() -> Experiment:
    return small(model=Noisy)


def batchnorm() -> Experiment:
    return small(model=lambda: nn.Sequential(nn.Linear(5, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3)))


class Twisted(nn.Module):
    """Its forward pass is another one on a mesh, and nothing gives away why."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = net()

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) * (1 + 0.01 * (ranks() - 1))


def unknown_cause() -> Experiment:
    return small(model=Twisted)


class Failing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = net()

    def forward(self, x: Tensor) -> Tensor:
        if rank() == 1:
            raise ValueError("bad luck")
        return self.layers(x)


def failing_rank() -> Experiment:
    return small(model=Failing)


class NanOnRanks(nn.Module):
    """Trains as it should; in evaluation, or in a buffer, there is a NaN as soon as there are several ranks."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.net, self.where = net(), where
        self.register_buffer("first", torch.zeros(2))
        self.register_buffer("second", torch.zeros(2))

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = self.net(inputs)
        if ranks() > 1 and self.where == "second":
            self.second[1] = float("nan")
        if ranks() > 1 and self.where == "evaluation" and not self.training:
            return outputs * float("nan")
        return outputs


def nan_evaluation() -> Experiment:
    return small(model=lambda: NanOnRanks("evaluation"))


def nan_buffer() -> Experiment:
    return small(model=lambda: NanOnRanks("second"))


class Slowing(torch.optim.SGD):
    """Takes smaller and smaller steps, by a count that no checkpoint holds."""

    count = 0

    def step(self, closure: Any = None) -> Any:
        self.count += 1
        for group in self.param_groups:
            group["lr"] = 0.3 / self.count
        return super().step(closure)


def slowing_optimizer() -> Experiment:
    """Trains the same on every mesh, and another way once it is resumed."""
    return small(optimizer=lambda parameters: Slowing(parameters, lr=0.3))

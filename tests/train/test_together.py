"""Trainings of small steps whose samples come together: the losses, the samples and the end that they had alone."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from meshrun import Here, random_crop, random_flip
from meshrun.data import together
from meshrun.data.draws import SampleDraws
from meshrun.parallel.how import How
from meshrun.train.loop import Trainer
from tests.data.test_together import Way, pictures
from tests.train.small import difference, points, small, trained

SEEN: list[int] = []


def noisy(inputs: Tensor, draws: Any) -> Tensor:
    """Moves all points."""
    assert isinstance(draws, SampleDraws)
    SEEN.append(len(draws.ids))
    return inputs + 0.1 * draws.uniform(5)


@pytest.fixture
def way(monkeypatch: pytest.MonkeyPatch) -> Way:
    """To a device that is told to be apart from the host."""
    made = Way()
    monkeypatch.setattr("meshrun.train.loop.on", lambda _: made)
    return made


def one_by_one(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> Any:
    with monkeypatch.context() as within:
        within.setattr(together, "MOST_SAMPLES", 0)
        return trained(trainer)


@pytest.mark.parametrize("batch", [1, 3])
def test_losses_and_weights_are_those_of_steps_that_come_alone(
    alone: Here, way: Way, monkeypatch: pytest.MonkeyPatch, batch: int
):
    SEEN.clear()
    experiment = small(47, batch, steps=120, augment=noisy, optimizer=lambda each: torch.optim.SGD(each, lr=0.05))
    expected = one_by_one(Trainer(experiment, alone), monkeypatch)
    assert len(way.arrivals) == len(SEEN) == 120 and max(SEEN) == batch
    way.arrivals.clear()
    SEEN.clear()
    trainer = Trainer(experiment, alone)
    assert difference(trained(trainer), expected) == 0
    assert len(way.arrivals) < 30 and len(SEEN) == len(way.arrivals) + 2


def test_a_training_that_stops_and_goes_on_within_a_group_sees_every_sample_once(alone: Here, way: Way):
    experiment = small(60, 1, steps=60)
    first, pieces = Trainer(experiment, alone), []
    with closing(first.steps()) as steps:
        pieces += [next(steps).pieces for _ in range(31)]
    assert first.step == 31 and sum(way.arrivals) > 31
    later = Trainer(experiment, alone)
    later.step = 31
    pieces += [update.pieces for update in later.steps()]
    assert sorted(number for step in pieces for piece in step for number in piece) == list(range(60))


def test_what_a_training_waited_is_counted_once(alone: Here, way: Way):
    updates = list(Trainer(small(60, 1, steps=60), alone).steps())
    assert sum(update.data_wait > 0 for update in updates) == len(way.arrivals) < 15


def test_large_batches_come_as_they_did(alone: Here, way: Way):
    trainer = Trainer(small(200, 64, steps=6, train=points(200)), alone)
    assert len(list(trainer.steps())) == len(way.arrivals) == 6


def cropped(images: Tensor, draws: Any) -> Tensor:
    return random_flip(random_crop(images, 16, draws), draws).float() / 128 - 1


def convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 49, 2))


@pytest.mark.gpu
@pytest.mark.parametrize("replayed", [False, True])
def test_pictures_on_a_gpu_give_the_losses_of_steps_that_come_alone(
    on_gpu: Here, monkeypatch: pytest.MonkeyPatch, replayed: bool
):
    images = pictures(40).tensors[0]
    data = TensorDataset(images, (images.float().mean((1, 2, 3)) > 127.5).long())
    experiment = small(
        40, 1, steps=100, train=data, model=convolutions, augment=cropped,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
    )  # fmt: skip
    expected = one_by_one(Trainer(experiment, on_gpu, how=How(graphs=replayed)), monkeypatch)
    found = trained(Trainer(experiment, on_gpu, how=How(graphs=replayed)))
    assert found.losses == pytest.approx(expected.losses, rel=1e-6, abs=1e-6)

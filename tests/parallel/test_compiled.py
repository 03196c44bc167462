"""What compilation is worth for, and the order of memory of images; `tests/train/test_compiled.py` compiles."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshrun.parallel import compiled


@pytest.mark.parametrize(("steps", "epochs", "found"), [(30, None, 30), (None, 2, 20), (None, 0.5, 5), (30, 2, 30)])
def test_the_steps_of_a_run_are_those_of_its_epochs_unless_they_are_given(
    steps: int | None, epochs: float | None, found: int
):
    experiment: Any = SimpleNamespace(steps=steps, epochs=epochs, train=range(100), batch=10)
    assert compiled.steps_of(experiment) == found


class Own(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.tanh()


def test_single_layers_of_torch_are_kernels_and_what_is_made_of_them_is_not():
    assert compiled._is_kernel(nn.Linear(2, 2))
    assert not compiled._is_kernel(nn.Sequential(nn.Linear(2, 2)))
    assert not compiled._is_kernel(Own())


def test_images_come_with_their_channels_last_and_all_else_as_it_is():
    model = nn.Identity()
    compiled.channels_last(model)
    images, video, rows = torch.zeros(2, 3, 4, 4), torch.zeros(2, 3, 2, 4, 4), torch.zeros(2, 3)
    assert model(images).is_contiguous(memory_format=torch.channels_last)
    assert model(video) is video and model(rows) is rows


def test_work_is_parameters_times_samples():
    assert compiled.is_much(4, compiled.ENOUGH_WORK // 4) and not compiled.is_much(4, compiled.ENOUGH_WORK // 4 - 1)
    assert compiled.is_long(4, compiled.AN_HOUR / 4) and not compiled.is_long(4, compiled.AN_HOUR / 4 - 1)

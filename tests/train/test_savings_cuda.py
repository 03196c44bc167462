"""What is done for memory, on a GPU: the training is the same, and the memory is really less."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from meshrun import Here
from meshrun.kernels.eightbit import Eight
from meshrun.parallel.how import How
from meshrun.train.loop import Trainer
from tests.train.small import small

pytestmark = pytest.mark.gpu

WIDTH, LAYERS = 1024, 8


def net() -> nn.Module:
    hidden = [part for _ in range(LAYERS) for part in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return nn.Sequential(nn.Linear(5, WIDTH), *hidden, nn.Linear(WIDTH, 3))


def trained(here: Here, how: How, precision: Any) -> tuple[list[float], list[float], int, Trainer]:
    """Losses, norms, and the most memory that was taken once the optimizer had its state."""
    experiment = small(
        48, 8, 8, model=net, optimizer=lambda given: AdamW(given, lr=1e-4), clip=None, precision=precision
    )
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    trainer = Trainer(experiment, here, how=how, workers=0)
    for update in trainer.steps():
        if update.step == 1:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
    return trainer.totals.losses, trainer.totals.grad_norms, torch.cuda.max_memory_allocated() - before, trainer


@pytest.mark.parametrize("precision, bytes_each", [("fp32", 4), ("bf16", 2)])
def test_weights_updated_in_the_backward_pass_leave_no_room_taken_by_gradients(
    on_gpu: Here, precision: str, bytes_each: int
):
    losses, norms, most, plain = trained(on_gpu, How(), precision)
    del plain
    mine, my_norms, less, _ = trained(on_gpu, How(update_in_backward=True), precision)
    assert mine == pytest.approx(losses, rel=1e-3)
    assert my_norms == pytest.approx(norms, rel=1e-2)
    assert most - less > 0.6 * LAYERS * WIDTH**2 * bytes_each


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("in_backward", [False, True])
def test_moments_in_8_bits_take_a_quarter(on_gpu: Here, precision: str, in_backward: bool):
    losses, _, most, plain = trained(on_gpu, How(update_in_backward=in_backward), precision)
    del plain
    mine, _, less, trainer = trained(on_gpu, How(states="8bit", update_in_backward=in_backward), precision)
    assert mine == pytest.approx(losses, rel=0.02)
    assert most - less > 0.7 * 0.75 * 8 * LAYERS * WIDTH**2
    moments = [each["exp_avg"] for each in trainer.optimizer.state.values()]
    assert sum(isinstance(each, Eight) for each in moments) == LAYERS + 1  # and the first one, of 5 x WIDTH

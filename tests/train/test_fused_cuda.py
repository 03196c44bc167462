"""The short way to torch's fused kernels on a GPU, also where gradients lie in the memory of a recorded step."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from meshrun import Here
from meshrun.parallel.how import How
from meshrun.train.fused import Fused
from meshrun.train.loop import Trainer
from meshrun.train.update import Plain
from tests.train.small import small
from tests.train.test_fused import OPTIMIZERS

pytestmark = pytest.mark.gpu
SHAPES = (64, 3, 7, 7), (1000,), (33, 65)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_is_torchs_step_to_the_last_bit_on_a_gpu(on_gpu: Here, name: str):
    generator = torch.Generator(on_gpu.device).manual_seed(0)
    start = [torch.randn(shape, generator=generator, device=on_gpu.device) for shape in SHAPES]
    sides = [[nn.Parameter(each.clone()) for each in start] for _ in range(2)]
    own, other = (OPTIMIZERS[name](each) for each in sides)
    short = Fused(other)
    for step in range(20):
        for pair in zip(*sides, strict=True):
            gradient = torch.randn(pair[0].shape, generator=generator, device=on_gpu.device)
            for each in pair:
                each.grad = None if step == 7 and each.dim() == 1 else gradient.clone()
        own.step()
        short()
    assert all(torch.equal(one, two) for one, two in zip(*sides, strict=True))
    for one, two in zip(*sides, strict=True):
        assert own.state[one].keys() == other.state[two].keys()
        values = zip(own.state[one].values(), other.state[two].values(), strict=True)
        assert all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in values)


@pytest.mark.parametrize("graphs", [False, True])
def test_a_training_takes_the_short_way_and_goes_where_the_long_one_goes(on_gpu: Here, graphs: bool):
    reached = []
    for short in (True, False):
        trainer = Trainer(small(20, 5, steps=30), on_gpu, workers=0, how=How(graphs=graphs))
        update = trainer._update.update
        assert isinstance(update, Plain) and update.fused is not None
        if not short:
            object.__setattr__(update, "fused", None)
        trainer.train()
        assert (update.fused is not None and update.fused._seen is not None) == short
        reached.append([each.parameter.detach().clone() for each in trainer.placed.shards])
    assert all(torch.equal(one, two) for one, two in zip(*reached, strict=True))

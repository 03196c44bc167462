"""bf16 on a GPU: updates in one pass over memory, from bf16 gradients, with numbers that the host never looks at."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from meshrun import Experiment, Here
from meshrun.parallel.placed import norms
from meshrun.train.interval import Every
from meshrun.train.loop import Trainer
from meshrun.train.recovery import Keeping
from meshrun.train.update import InOnePass, Plain
from tests.train.small import plainly, small

pytestmark = pytest.mark.gpu


def wide() -> nn.Module:
    """One matrix is large enough for a kernel of its own."""
    return nn.Sequential(nn.Linear(5, 512), nn.Tanh(), nn.Linear(512, 256), nn.Tanh(), nn.Linear(256, 3))


def with_adamw(steps: int = 20, **changes: Any) -> Experiment:
    fields = {"model": wide, "optimizer": lambda p: torch.optim.AdamW(p, lr=3e-3, weight_decay=0.1)}
    return small(40, 12, steps, **{**fields, **changes})


def test_gradients_in_bf16_have_norms_in_fp32(on_gpu: Here):
    gradients = [torch.randn(300, 70, device=on_gpu.device) * 10.0**power for power in (-4, 0, 3)]
    mixed = [gradients[0].bfloat16(), gradients[1], gradients[2].bfloat16()]
    wanted = [torch.linalg.vector_norm(each.double()) for each in mixed]
    torch.testing.assert_close(norms(mixed), torch.stack(wanted), rtol=1e-5, atol=0)


def test_an_update_in_one_pass_is_torchs_own_fused_one(on_gpu: Here):
    trainers = [Trainer(with_adamw(precision="bf16"), on_gpu) for _ in range(2)]
    updates = Plain.of(trainers[0].optimizer, trainers[0].placed), trainers[1]._update.update
    assert isinstance(updates[1], InOnePass)
    generator = torch.Generator(on_gpu.device).manual_seed(0)
    for step in range(20):
        for plain, at_once in zip(*(each.placed.shards for each in trainers), strict=True):
            drawn = torch.randn(plain.shape, generator=generator, device=on_gpu.device)
            for each in (plain, at_once):
                each.computed.grad = drawn.to(each.computed.dtype).clone()
        factor = torch.tensor(0.5 + step / 10, dtype=torch.float64, device=on_gpu.device)
        for update in updates:
            update(factor)
            update.forget()
    for plain, at_once in zip(*(each.placed.shards for each in trainers), strict=True):
        torch.testing.assert_close(at_once.parameter, plain.parameter, rtol=1e-5, atol=1e-6)
        assert at_once.copy is None or torch.equal(at_once.copy, at_once.parameter.bfloat16())
        kept, wanted = (t.optimizer.state[s.parameter] for t, s in zip(trainers[::-1], (at_once, plain), strict=True))
        assert list(kept) == list(wanted)
        for key, value in wanted.items():
            assert kept[key].dtype == value.dtype and kept[key].device == value.device
            torch.testing.assert_close(kept[key], value, rtol=1e-5, atol=1e-6)


def test_bf16_on_a_gpu_trains_as_fp32_in_plain_torch_does(on_gpu: Here):
    trainer = Trainer(with_adamw(precision="bf16"), on_gpu)
    list(trainer.steps())
    assert isinstance(trainer._update.update, InOnePass)
    wanted = plainly(with_adamw())
    assert max(wanted.grad_norms) > 0.5, "the clipping must be seen"
    assert trainer.totals.losses == pytest.approx(wanted.losses, rel=5e-2, abs=2e-2)
    assert trainer.totals.grad_norms[:3] == pytest.approx(wanted.grad_norms[:3], rel=3e-2)


def test_fp32_on_a_gpu_is_as_it_was(on_gpu: Here):
    trainer = Trainer(with_adamw(), on_gpu)
    list(trainer.steps())
    assert isinstance(trainer._update.update, Plain)
    assert trainer.totals.losses == pytest.approx(plainly(with_adamw()).losses, rel=1e-3)


def test_a_bf16_training_on_a_gpu_goes_on_bit_by_bit(on_gpu: Here, tmp_path: Path):
    whole = Trainer(with_adamw(8, precision="bf16"), on_gpu)
    list(whole.steps())
    first = Trainer(with_adamw(4, precision="bf16"), on_gpu, keeping=Keeping(tmp_path, every=Every(steps=4)))
    first.train()
    second = Trainer(with_adamw(8, precision="bf16"), on_gpu, keeping=Keeping(tmp_path, every=Every(never=True)))
    assert second.resume() is not None
    list(second.steps())
    assert second.totals.losses == whole.totals.losses and second.totals.grad_norms == whole.totals.grad_norms
    kept = dict(second.placed.weights())
    assert all(torch.equal(value, kept[name]) for name, value in whole.placed.weights())


def test_masters_of_frozen_weights_are_no_load_for_the_gpu(on_gpu: Here):
    def half_frozen() -> nn.Module:
        model = wide()
        model[2].requires_grad_(False)
        return model

    trainer = Trainer(with_adamw(3, model=half_frozen, precision="bf16"), on_gpu)
    list(trainer.steps())
    matrix = next(each for each in trainer.placed.frozen if each.copy is not None)
    assert matrix.parameter.is_cpu and matrix.copy is not None and matrix.copy.is_cuda
    trainer.placed.spread()
    assert torch.equal(matrix.copy.cpu(), matrix.parameter.bfloat16())

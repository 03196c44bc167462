"""The loop on a GPU: numbers that are read one update later, and the group's two backends."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import TensorDataset

from meshrun import Here, RunFailed, accuracy
from meshrun.mesh import _backend
from meshrun.train.loop import Trainer
from tests.train.small import plainly, points, small

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("workers", [0, 2])
def test_the_gpu_trains_as_plain_torch_on_the_cpu_does(on_gpu: Here, workers: int):
    told = []
    experiment = small(20, 7, micro=3, evals={"val": points(11, seed=9)}, metrics={"accuracy": accuracy})
    trainer = Trainer(
        experiment, on_gpu, workers=workers, record=lambda kind, **fields: told.append((kind, fields["step"]))
    )
    result = trainer.train()
    plain = plainly(experiment)
    assert result["losses"] == pytest.approx(plain.losses, rel=1e-4)
    assert result["grad_norms"] == pytest.approx(plain.grad_norms, rel=1e-4)
    for name, value in trainer.model.state_dict().items():
        assert value.device.type == "cuda"
        torch.testing.assert_close(value.cpu(), plain.weights[name], rtol=1e-3, atol=1e-5)
    assert [step for kind, step in told if kind == "step"] == [1, 2, 3, 4, 5, 6]
    assert result["eval"]["val"]["count"] == 11


def test_whoever_asks_an_update_for_its_loss_gets_that_of_this_update(on_gpu: Here):
    experiment = small(20, 7)
    plain = plainly(experiment)
    losses = [update.loss for update in Trainer(experiment, on_gpu).steps()]
    assert losses == pytest.approx(plain.losses, rel=1e-4)


def test_updates_kept_until_the_end_still_have_their_own_numbers(on_gpu: Here):
    trainer = Trainer(small(20, 7), on_gpu)
    updates = list(trainer.steps())
    assert [update.loss for update in updates] == trainer.totals.losses
    assert [update.grad_norm for update in updates] == trainer.totals.grad_norms
    assert len(set(trainer.totals.losses)) == 6


def test_a_loss_that_is_not_a_number_is_found_one_update_later_and_named_right(on_gpu: Here):
    inputs, targets = points(24).tensors
    trainer = Trainer(small(24, 6), on_gpu)
    bad = int(trainer.order.batch_ids(2)[3])
    inputs[bad, 2] = math.nan
    trainer = Trainer(small(24, 6, train=TensorDataset(inputs, targets)), on_gpu)
    with pytest.raises(RunFailed, match="loss is nan at step 3, on rank 0, with the training samples"):
        list(trainer.steps())
    assert len(trainer.totals.losses) == 2 and trainer.step <= 4


def test_a_last_loss_that_is_not_a_number_is_found_before_the_end(on_gpu: Here):
    inputs, targets = points(24).tensors
    bad = int(Trainer(small(24, 6), on_gpu).order.batch_ids(3)[0])
    inputs[bad, 2] = math.nan
    trainer = Trainer(small(24, 6, steps=4, train=TensorDataset(inputs, targets)), on_gpu)
    with pytest.raises(RunFailed, match="loss is nan at step 4"):
        trainer.train()


def test_a_group_carries_words_of_both_devices():
    """The way in which ranks with GPUs form theirs, here with one rank: NCCL for the GPU, gloo beside it."""
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    store = dist.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)
    dist.init_process_group(_backend(device, "auto"), store=store, rank=0, world_size=1, device_id=device)
    try:
        for where in ("cuda", "cpu"):
            values = torch.ones(3, device=where)
            dist.all_reduce(values)
            assert values.tolist() == [1, 1, 1]
        heard = [None]
        dist.all_gather_object(heard, "word")
        assert heard == ["word"]
        dist.broadcast_object_list(heard, src=0, device=torch.device("cpu"))
    finally:
        dist.destroy_process_group()

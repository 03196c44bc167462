"""Steps replayed as CUDA graphs on a GPU: the same training, and none where a step cannot be recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from meshrun import Here, Schedule, accuracy
from meshrun.parallel.how import How
from meshrun.recipes import images
from meshrun.train.interval import parse as parse_interval
from meshrun.train.loop import Trainer
from meshrun.train.recording import Recording
from meshrun.train.recovery import Keeping
from tests.train.small import difference, noting, small, trained

pytestmark = pytest.mark.gpu


def pictures(length: int) -> TensorDataset:
    drawn = torch.randint(0, 256, (length, 3, 40, 40), generator=torch.Generator().manual_seed(0))
    return TensorDataset(drawn.float() / 128 - 1, (drawn.float().mean((1, 2, 3)) > 127.5).long())


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2), nn.BatchNorm2d(16),
        nn.ReLU(), nn.Conv2d(16, 16, 3, stride=2), nn.Flatten(), nn.Linear(256, 2),
    )  # fmt: skip


def both(experiment: Any, here: Here, compile: bool = False) -> tuple[Trainer, Trainer, list[str]]:
    record, notes = noting()
    replayed = Trainer(experiment, here, workers=0, how=How(graphs=True, compile=compile), record=record)
    return replayed, Trainer(experiment, here, workers=0, how=How(graphs=False)), notes


def recording(trainer: Trainer) -> Recording | None:
    return trainer._update.graphed._recording


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("micro", [None, 3])
def test_replayed_steps_train_as_steps_that_are_computed_each_time(on_gpu: Here, precision: str, micro: int | None):
    experiment = small(
        41, 6, steps=40, train=pictures(41), model=convolutions, precision=precision, micro=micro,
        schedule=Schedule("cosine", warmup=4), evals={"val": pictures(11)}, metrics={"accuracy": accuracy},
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.02, momentum=0.9),
    )  # fmt: skip
    replayed, eager, notes = both(experiment, on_gpu)
    replayed.train()
    eager.train()
    assert notes == [] and recording(replayed) is not None
    tolerance = 1e-3 if precision == "fp32" else 0.1
    assert replayed.totals.losses == pytest.approx(eager.totals.losses, rel=tolerance, abs=tolerance)
    assert replayed.totals.grad_norms[:8] == pytest.approx(eager.totals.grad_norms[:8], rel=tolerance)
    counts = [each.num_batches_tracked.item() for each in replayed.model.modules() if isinstance(each, nn.BatchNorm2d)]
    pieces = sum(-(-len(replayed.order.batch_ids(step)) // (micro or 6)) for step in range(40))
    assert counts == [pieces, pieces], "the recorded step counts once"
    for (name, one), other in zip(replayed.model.named_buffers(), eager.model.buffers(), strict=True):
        torch.testing.assert_close(one, other, rtol=10 * tolerance, atol=10 * tolerance, msg=name)


def test_adamw_and_a_clipped_norm_go_with_a_recording(on_gpu: Here):
    experiment = small(
        64, 1, steps=60, train=pictures(64), model=convolutions, clip=0.1,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    )  # fmt: skip
    replayed, eager, notes = both(experiment, on_gpu)
    assert difference(trained(replayed), trained(eager)) < 2e-2 and notes == []
    assert recording(replayed) is not None


class Looks(nn.Module):
    """A model that makes the host wait, which cannot be recorded; and that draws on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        scale = 2.0 if float(x.sum()) > 0 else 1.0
        return self.net(nn.functional.dropout(x, 0.1)) * scale


def test_a_step_that_cannot_be_recorded_is_computed_as_always_and_generators_still_work(on_gpu: Here):
    experiment = small(21, 7, steps=12, model=Looks)
    replayed, eager, notes = both(experiment, on_gpu)
    torch.cuda.manual_seed(5)
    found = trained(replayed)
    torch.cuda.manual_seed(5)
    assert difference(found, trained(eager)) < 1e-4
    assert len(notes) == 1 and "it cannot be recorded" in notes[0]
    assert torch.rand(3, device="cuda").sum() > 0


def test_numbers_that_the_device_draws_are_new_in_every_replay(on_gpu: Here):
    class Drops(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(nn.functional.dropout(input, 0.5))

    experiment = small(21, 7, steps=16, model=lambda: Drops(5, 3))
    replayed, eager, notes = both(experiment, on_gpu)
    torch.cuda.manual_seed(5)
    found = trained(replayed)
    torch.cuda.manual_seed(5)
    assert difference(found, trained(eager)) < 1e-4 and notes == [] and recording(replayed) is not None


def test_the_images_recipe_is_replayed_with_readers_and_checkpoints(on_gpu: Here, tmp_path: Path):
    made = images.experiment(size=32)
    keeping = Keeping(tmp_path, None, parse_interval("20"))
    experiment = small(
        0, 4, steps=60, train=made.train, model=made.model, augment=made.augment, evals=made.evals,
        optimizer=made.optimizer, metrics=made.metrics, segments=made.segments,
    )  # fmt: skip
    trainer = Trainer(experiment, on_gpu, workers=2, how=How(graphs=None), keeping=keeping, eval_every=20)
    trainer.train()
    assert recording(trainer) is not None and len(trainer.totals.losses) == 60
    again = Trainer(experiment, on_gpu, workers=0, how=How(graphs=False), eval_every=20)
    again.train()
    assert trainer.totals.losses[:20] == pytest.approx(again.totals.losses[:20], rel=1e-2, abs=1e-3)


class Encoder(nn.Module):
    """Blocks with dropout inside and outside of attention, and one dropout that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.drop, self.head = nn.Linear(5, 4 * 32), nn.Dropout(0.2), nn.Linear(32, 3)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(32, 2, 64, dropout=0.1, batch_first=True) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(self.embed(x).unflatten(1, (4, 32)))
        for block in self.blocks:
            h = block(h)
        return self.head(self.drop(h).mean(1))


@pytest.mark.parametrize(("compile", "micro"), [(False, None), (False, 3), (True, None)])
def test_a_transformer_with_dropout_is_replayed_with_the_masks_of_its_steps(
    on_gpu: Here, compile: bool, micro: int | None
):
    if compile:
        pytest.importorskip("triton")
    experiment = small(
        42, 7, steps=10, model=Encoder, micro=micro,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.02, momentum=0.9),
    )  # fmt: skip
    replayed, eager, notes = both(experiment, on_gpu, compile)
    replayed.train()
    eager.train()
    assert not [each for each in notes if "CUDA graphs" in each]
    assert recording(replayed) is not None and replayed.placed.chosen["graphs"] is True
    assert replayed.totals.losses == pytest.approx(eager.totals.losses, rel=1e-3, abs=1e-3)
    assert replayed.totals.grad_norms[:8] == pytest.approx(eager.totals.grad_norms[:8], rel=1e-2)

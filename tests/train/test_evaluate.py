"""Evaluation: every sample once on any number of ranks, with the statistics of all of them."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from meshrun import Loss, UserError, accuracy, cross_entropy, token_cross_entropy
from meshrun.data.loader import Reading
from meshrun.parallel.placed import Cutting
from meshrun.train import evaluate as evaluate_module
from meshrun.train.evaluate import at_once, wider
from meshrun.train.loop import Trainer
from tests.train.small import on_ranks, points, small, start_on_cpu

SAMPLES = points(11, seed=9)


def confident(outputs: Tensor, targets: Tensor) -> Loss:
    """How often the model is right among those samples where it is sure: a count of its own."""
    sure = outputs.softmax(-1).amax(-1) > 0.5
    return Loss((outputs.argmax(-1) == targets)[sure].sum(), sure.sum())


def test_small_batches_are_made_wider_where_there_is_room():
    assert wider(2, 153, fitting=1000) == 51, "three batches of one size"
    assert wider(2, 153, fitting=20) == 20 and wider(2, 30, fitting=1000) == 30
    assert wider(2, 153, fitting=0) == 2 and wider(64, 153, fitting=1000) == 64 and wider(2, 0, fitting=1000) == 2
    assert [wider(2, share, 64) for share in (64, 65, 1)] == [64, 33, 2]


def test_as_many_samples_fit_as_half_of_the_free_memory_has_room_for(monkeypatch: pytest.MonkeyPatch):
    for taken, fitting in ((10, 20), (0, 0)):
        monkeypatch.setattr(evaluate_module, "room", lambda _, taken=taken: (100, taken))
        assert evaluate_module.fitting_on(torch.device("cuda"), 4) == fitting
        assert evaluate_module.fitting_on(torch.device("cpu"), 4) == 0


@on_ranks(1, 2, 3, 4)
def test_eleven_samples_are_counted_once_on_any_number_of_ranks(ranks: int):
    metrics = {"accuracy": accuracy, "confident": confident}
    for micro in (None, 1, 2):
        experiment = small(20, 6, micro=micro, evals={"val": SAMPLES, "one": points(1)}, metrics=metrics)
        trainer = Trainer(experiment, start_on_cpu(ranks))
        list(trainer.steps())
        scores = trainer.evaluate()
        inputs, targets = SAMPLES.tensors
        with torch.no_grad():
            outputs = trainer.model(inputs)
        sure = outputs.softmax(-1).amax(-1) > 0.5
        hits = outputs.argmax(-1) == targets
        assert 0 < sure.sum() < 11 and hits.sum() > 0, "the metrics must have something to tell"
        assert scores["val"] == {
            "loss": pytest.approx(F.cross_entropy(outputs, targets).item(), rel=1e-6),
            "count": 11,
            "accuracy": hits.sum().item() / 11,
            "confident": hits[sure].sum().item() / sure.sum().item(),
        }
        assert scores["one"]["count"] == 1


@pytest.mark.ranks(1)
def test_a_target_that_is_no_class_is_told_with_its_sample():
    inputs, targets = (each.clone() for each in SAMPLES.tensors)
    targets[7] = 17
    data = TensorDataset(inputs, targets)
    trainer = Trainer(small(20, 6, evals={"val": data}, loss=cross_entropy), start_on_cpu(1))
    with pytest.raises(UserError, match=r"in evals\['val'\], the target of sample 7 is 17; the model tells"):
        trainer.evaluate()
    trainer = Trainer(replace(small(20, 6, loss=cross_entropy), train=data), trainer.here)
    with pytest.raises(UserError, match=r"^the target of sample 7 is 17; the model tells"):
        list(trainer.steps())


@pytest.mark.ranks(3)
def test_all_ranks_have_the_same_scores():
    experiment = small(20, 6, evals={"val": SAMPLES}, metrics={"accuracy": accuracy})
    here = start_on_cpu(3)
    trainer = Trainer(experiment, here)
    assert len({str(scores) for scores in here.gathered(trainer.evaluate())}) == 1


@pytest.mark.ranks(2)
def test_ragged_tokens_are_averaged_over_tokens():
    tokens = torch.arange(24).reshape(4, 6) % 7
    targets = tokens.clone()
    targets[0, 1:] = targets[1, 2:] = -100
    data = [(tokens[row], targets[row]) for row in range(4)]
    model = nn.Sequential(nn.Embedding(7, 5), nn.Linear(5, 7))
    experiment = small(
        4, 4, train=data, evals={"val": data}, loss=token_cross_entropy, model=lambda: model, optimizer=torch.optim.SGD
    )
    scores = Trainer(experiment, start_on_cpu(2)).evaluate()["val"]
    assert scores["count"] == 15
    with torch.no_grad():
        wanted = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
    assert scores["loss"] == pytest.approx(wanted.item(), rel=1e-6)


def with_statistics() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 3))


@pytest.mark.ranks(3)
def test_running_statistics_are_the_same_on_all_ranks_in_evaluation():
    here = start_on_cpu(3)
    trainer = Trainer(small(24, 12, model=with_statistics, evals={"val": SAMPLES}), here)
    list(trainer.steps())
    norm = trainer.model[1]
    own = torch.tensor(here.gathered(norm.running_mean.tolist()))
    assert not torch.equal(own[0], own[1]), "each rank has seen samples of its own"
    scores = trainer.evaluate()
    together = torch.tensor(here.gathered(norm.running_mean.tolist()))
    assert torch.equal(together[0], together[1]) and torch.equal(together[0], together[2])
    torch.testing.assert_close(together[0], own.mean(0))
    assert int(norm.num_batches_tracked) == 6
    with torch.no_grad():
        outputs = trainer.model.eval()(SAMPLES.tensors[0])
    assert scores["val"]["loss"] == pytest.approx(F.cross_entropy(outputs, SAMPLES.tensors[1]).item(), rel=1e-6)


@pytest.mark.ranks(3)
def test_evaluation_changes_neither_the_mode_nor_tables_that_all_ranks_have():
    class WithTable(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 3)
            self.register_buffer("table", torch.randn(1000, generator=torch.Generator().manual_seed(3)))

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x)

    trainer = Trainer(small(20, 6, model=WithTable, evals={"val": SAMPLES}), start_on_cpu(3))
    before = trainer.model.table.clone()
    trainer.model.train()
    trainer.evaluate()
    assert trainer.model.training
    assert torch.equal(trainer.model.table, before), "a mean of three equal numbers must not round them"
    trainer.model.eval()
    trainer.evaluate()
    assert not trainer.model.training


@pytest.mark.ranks(2)
def test_evaluating_between_steps_does_not_change_the_training():
    here = start_on_cpu(2)
    losses = []
    for eval_every in (1, 100):
        experiment = small(20, 6, evals={"val": SAMPLES})
        losses.append(Trainer(experiment, here, eval_every=eval_every).train()["losses"])
    assert losses[0] == losses[1]
    dist.barrier()


@pytest.mark.parametrize(
    ("total", "count", "loss", "shown"), [(0.0, 0.0, math.nan, 0), (5.0, 2.5, 2.0, 2.5), (6.0, 2.0, 3.0, 2)]
)
def test_a_loss_over_nothing_is_none_and_weighed_counts_stay_whole(
    total: float, count: float, loss: float, shown: float, monkeypatch: pytest.MonkeyPatch
):
    sums = torch.tensor([[total, count], [0, 0]], dtype=torch.float64)
    monkeypatch.setattr(evaluate_module, "_own_sums", lambda *_: sums)
    here: Any = SimpleNamespace(waiting=lambda _: nullcontext(), sum=lambda _: None)
    placed: Any = None
    found = evaluate_module._evaluate_one(
        here, placed, small(4, 2), Reading(), "val", lambda: None, lambda *_: None, fitting=0
    )
    assert found == pytest.approx({"loss": loss, "count": shown}, nan_ok=True)


@pytest.mark.parametrize(("axis", "skipped"), [("none", 1), ("dp", 1), ("pp", 0), ("cp", 0), ("tp", 0)])
def test_a_sample_that_was_skipped_counts_once_for_all_ranks_that_share_it(axis: str, skipped: int):
    """Each tells of it but for the first of them on each axis, whose place there is 0."""

    class Torn(list[tuple[Tensor, Tensor]]):
        def __getitem__(self, number: Any) -> Any:
            if number == 2:
                raise ValueError("torn")
            return super().__getitem__(number)

    data = Torn([(torch.zeros(5), torch.tensor(1))] * 4)
    here: Any = SimpleNamespace(
        replica=0, replicas=1, device=torch.device("cpu"), place=lambda each: 1 if each == axis else 0
    )
    placed: Any = SimpleNamespace(
        cutting=Cutting(), scores=lambda pieces, _: torch.tensor([[float(sum(each.real for each in pieces)), 0]])
    )
    sums = evaluate_module._own_sums(
        here, placed, small(4, 4, evals={"val": data}), Reading(skip_bad=True), "val", {}, lambda: None, print, 0
    )
    assert sums.tolist() == [[3, 0], [skipped, 0]]


def test_a_rank_computes_a_sample_at_a_time_at_least():
    here: Any = SimpleNamespace(replicas=2)
    placed: Any = SimpleNamespace(cutting=SimpleNamespace(pieces=8))
    assert at_once(here, placed, small(20, 4)) == 1
    assert at_once(here, placed, small(40, 40)) == 2
    assert at_once(here, placed, small(20, 4, micro=3)) == 3

"""The loop: an update a step, its numbers, the best and the last weights, and sentences where it must end."""

from __future__ import annotations

import hashlib
import json
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from meshrun import Here, Loss, RunFailed, UserError, accuracy, cross_entropy, mean_squared_error
from meshrun.data.order import Order
from meshrun.experiment import Experiment, Metric
from meshrun.parallel.placed import Placed
from meshrun.state.weights import load_weights, save_weights
from meshrun.train import writing
from meshrun.train.loop import Stopped, Trainer
from meshrun.train.totals import Totals
from meshrun.train.totals import Update as TotalsUpdate
from meshrun.train.weight_files import WeightFiles
from tests.train.small import CLIP, on_ranks, plainly, points, small, start_on_cpu


def test_steps_yields_after_every_update_with_its_loss(alone: Here):
    experiment = small(20, 6, steps=5)
    trainer = Trainer(experiment, alone)
    before = [p.detach().clone() for p in trainer.model.parameters()]
    plain = plainly(experiment)
    for number, update in enumerate(trainer.steps()):
        assert update.step == number and trainer.step == number + 1
        assert update.loss == pytest.approx(plain.losses[number], rel=1e-6)
        assert update.grad_norm == pytest.approx(plain.grad_norms[number], rel=1e-6)
        assert update.samples == len(Order(20, 6).batch_ids(number)) == len(update.pieces[0])
        assert update.seconds > 0 and update.data_wait >= 0
        after = [p.detach().clone() for p in trainer.model.parameters()]
        assert not any(torch.equal(a, b) for a, b in zip(before, after, strict=True)), "the update is done"
        assert all(p.grad is None for p in trainer.model.parameters())
        before = after
    assert trainer.step == 5


def test_time_spent_between_updates_is_not_counted_as_training(alone: Here):
    updates = []
    for update in Trainer(small(20, 6, steps=3), alone).steps():
        updates.append(update)
        time.sleep(0.4)
    assert min(update.seconds for update in updates[1:]) < 0.4


def test_a_model_that_somebody_has_put_into_evaluation_is_trained_in_training_mode(alone: Here):
    trainer = Trainer(small(20, 6, steps=2), alone)
    trainer.model.eval()
    assert [trainer.model.training for _ in trainer.steps()] == [True, True]


def test_epochs_become_steps(alone: Here):
    def steps(length: int, batch: int, epochs: float) -> int:
        return Trainer(small(length, batch, steps=None, epochs=epochs), alone).total_steps

    assert steps(20, 6, 2) == 8
    assert steps(20, 6, 0.5) == 2
    assert steps(20, 6, 1.7) == 7, "6.8 steps"
    assert steps(20, 20, 0.1) == 1


def test_train_returns_the_run_in_numbers(alone: Here):
    told: list[tuple[str, dict[str, Any]]] = []
    experiment = small(20, 6, steps=6, evals={"val": points(11, seed=9)}, metrics={"accuracy": accuracy})
    result = Trainer(experiment, alone, record=lambda kind, **fields: told.append((kind, fields))).train()
    plain = plainly(experiment)
    ids = b"".join(Order(20, 6, experiment.seed).batch_ids(step).astype("<i8").tobytes() for step in range(6))
    assert result["losses"] == pytest.approx(plain.losses, rel=1e-6)
    assert result["grad_norms"] == pytest.approx(plain.grad_norms, rel=1e-6)
    assert result["steps"] == 6 and result["samples"] == 20 + 12
    assert result["sample_ids_sha256"] == hashlib.sha256(ids).hexdigest()
    assert result["samples_per_s"] > 0 and 0 <= result["data_wait"] < 1
    assert result["eval"]["val"].keys() == {"loss", "count", "accuracy"}
    assert [(kind, fields["step"]) for kind, fields in told] == [
        *[("step", 1), ("step", 2), ("step", 3), ("step", 4), ("eval", 4)],
        *[("step", 5), ("step", 6), ("eval", 6)],
    ], "evaluated at the end of an epoch of four steps and at the end of the run"
    assert [fields["loss"] for kind, fields in told if kind == "step"] == result["losses"]


class Wandering(nn.Module):
    """One number that the training moves upwards; the evaluation would have it stop at 3."""

    def __init__(self) -> None:
        super().__init__()
        self.at = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.at.expand(len(x))


def towards(goal: float, length: int) -> TensorDataset:
    return TensorDataset(torch.zeros(length), torch.full((length,), goal))


def wandering() -> Experiment:
    """Steps to 1, 2, 3, 4 and 5: the loss of the evaluation falls to 0 and rises again."""
    return Experiment(
        model=Wandering,
        train=towards(1e6, 8),
        loss=mean_squared_error,
        evals={"decides": towards(3.0, 5), "does not": towards(5.0, 5)},
        optimizer=lambda p: torch.optim.SGD(p, lr=1.0),
        clip=1.0,
        batch=4,
        steps=5,
    )


@on_ranks(1, 2)
def test_the_best_weights_are_those_of_the_lowest_loss_and_the_last_are_kept_as_well(ranks: int, tmp_path: Path):
    here = start_on_cpu(ranks)
    result = Trainer(wandering(), here, eval_every=1, weights=tmp_path).train()
    if ranks > 1:
        dist.barrier()
    best, last = Wandering(), Wandering()
    about = load_weights(best, tmp_path / "best.safetensors")
    assert best.at.item() == pytest.approx(3, abs=1e-3)
    assert about["step"] == result["best"]["step"] == 3
    assert about["loss"] == result["best"]["loss"] == pytest.approx(0, abs=1e-5)
    assert load_weights(last, tmp_path / "last.safetensors") == {"step": 5}
    assert last.at.item() == pytest.approx(5, abs=1e-3)
    assert result["eval"]["decides"]["loss"] == pytest.approx(4, rel=1e-3), "the scores are those of the last weights"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best.safetensors", "last.safetensors"]


def test_the_best_weights_may_be_written_while_the_training_goes_on(
    alone: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """As on a GPU: what is written is as it was, and nobody says that it is there before it is."""
    monkeypatch.setattr(WeightFiles, "_has_time", True)
    monkeypatch.setattr(writing, "save_weights", lambda *given: (time.sleep(0.1), save_weights(*given)))
    trainer = Trainer(wandering(), alone, eval_every=1, weights=tmp_path)
    said: list[int | None] = []
    for _ in trainer.steps():
        said.append(trainer.totals.best.get("step"))
        trainer._evaluate_and_keep()
        assert trainer.step > 3 or trainer.totals.best.get("step") != trainer.step
    assert said == [None, 1, 2, 3, 3] and trainer.totals.best["step"] == 3
    best = Wandering()
    assert load_weights(best, tmp_path / "best.safetensors")["step"] == 3
    assert best.at.item() == pytest.approx(3, abs=1e-3)


def test_best_weights_that_cannot_be_written_are_told(alone: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(WeightFiles, "_has_time", True)
    told: list[str] = []

    def record(kind: str, **fields: Any) -> None:
        if kind == "note":
            told.append(fields["text"])

    (tmp_path / "weights").write_text("a file where a folder should be")
    trainer = Trainer(wandering(), alone, eval_every=1, weights=tmp_path / "weights", record=record)
    for _ in trainer.steps():
        trainer._evaluate_and_keep()
    assert told and all(text.startswith(f"cannot write {tmp_path}/weights/best.safetensors: ") for text in told)


def test_last_weights_that_cannot_be_written_are_told(alone: Here, tmp_path: Path):
    (tmp_path / "weights").write_text("a file where a folder should be")
    trainer = Trainer(small(20, 6, steps=2), alone, weights=tmp_path / "weights")
    trainer.train()
    assert trainer.totals.result()["best"] is None, "nothing was evaluated"
    (text,) = trainer.unwritten
    assert text.startswith(f"cannot write {tmp_path}/weights/last.safetensors: ")


def test_of_equal_losses_the_earlier_weights_are_the_best(alone: Here, tmp_path: Path):
    experiment = replace(wandering(), evals={"decides": towards(2.0, 5)}, steps=3)
    trainer = Trainer(experiment, alone, eval_every=1, weights=tmp_path)
    losses = {1: 1.0, 2: 1.0, 3: 0.5}

    def scored() -> dict[str, dict[str, float]]:
        return {"decides": {"loss": losses[trainer.step], "count": 5}}

    trainer.evaluate = scored  # type: ignore[method-assign]
    said = []
    for _ in trainer.steps():
        trainer._evaluate_and_keep()
        said.append(trainer.totals.best["step"])
    assert said == [1, 1, 3]


def test_weights_are_evaluated_every_so_many_steps_and_once_at_the_end(alone: Here):
    evaluated = []

    def record(kind: str, **fields: Any) -> None:
        if kind == "eval":
            evaluated.append(fields["step"])

    Trainer(wandering(), alone, eval_every=2, record=record).train()
    assert evaluated == [2, 4, 5]


@pytest.mark.ranks(2)
def test_without_evaluation_the_last_weights_hold_the_statistics_of_all_ranks(tmp_path: Path):
    def with_statistics() -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 3))

    trainer = Trainer(small(20, 8, model=with_statistics), start_on_cpu(2), weights=tmp_path)
    trainer.train()
    dist.barrier()
    saved = with_statistics()
    load_weights(saved, tmp_path / "last.safetensors")
    assert torch.equal(saved[0].running_mean, trainer.model[0].running_mean)


def poisoned(length: int, bad: int) -> TensorDataset:
    inputs, targets = points(length).tensors
    inputs[bad, 2] = math.nan
    return TensorDataset(inputs, targets)


@on_ranks(1, 3)
def test_a_loss_that_is_not_a_number_names_step_rank_and_samples(ranks: int):
    here = start_on_cpu(ranks)
    order = Order(24, 6, 4)
    bad = int(order.batch_ids(2)[3])  # of six samples, two a rank: rank 1 of 3 has it
    trainer = Trainer(small(24, 6, train=poisoned(24, bad)), here)
    with pytest.raises(RunFailed) as caught:
        list(trainer.steps())
    mine = order.batch_ids(2)[2:4] if ranks == 3 else order.batch_ids(2)
    names = ", ".join(str(number) for number in mine)
    assert str(caught.value) == f"loss is nan at step 3, on rank {ranks // 2}, with the training samples {names}"
    assert len(trainer.totals.losses) == 2
    assert all(p.isfinite().all() for p in trainer.model.parameters()), "the weights are still those of step 2"


def test_of_many_samples_only_the_first_few_are_named(alone: Here):
    ids = Order(24, 20, 4).batch_ids(0)
    with pytest.raises(RunFailed, match=f"with the training samples {', '.join(map(str, ids[:8]))} and 12 more$"):
        list(Trainer(small(24, 20, train=poisoned(24, int(ids[15]))), alone).steps())


def root_of_error(outputs: Tensor, targets: Tensor) -> Loss:
    """0 where the model is right, and there its slope is infinite."""
    return Loss((0 * outputs[:, 0]).abs().sqrt().sum(), len(targets))


def test_a_gradient_that_is_not_finite_is_told_from_a_loss_that_is_not(alone: Here):
    with pytest.raises(RunFailed, match="gradient norm is nan at step 1 while the loss is 0; a smaller learning rate"):
        list(Trainer(small(20, 6, loss=root_of_error), alone).steps())


@on_ranks(1, 2)
def test_counts_that_add_up_to_nothing_are_named(ranks: int):
    def counts_nothing(outputs: Tensor, targets: Tensor) -> Loss:
        return Loss(0 * outputs.sum(), 0 * len(targets))

    with pytest.raises(RunFailed, match="loss is nan at step 1: the counts of all ranks add up to 0"):
        list(Trainer(small(20, 6, loss=counts_nothing), start_on_cpu(ranks)).steps())


def mean_of(outputs: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(outputs, targets).total / len(targets)


@pytest.mark.parametrize(
    "loss, said",
    [
        (mean_of, r"loss returned Tensor; it must return Loss\(total, count\).*reduction='sum'"),
        (lambda *_: None, "loss returned NoneType; it must return Loss"),
        (lambda outputs, _: Loss(outputs, 6), r"a Loss whose total is \(6, 3\); it must be a tensor with one value"),
        (lambda outputs, _: Loss(outputs.sum(), -3), "loss returned a Loss whose count is -3; it must be a finite"),
        (
            lambda outputs, _: Loss(outputs.sum(), math.nan),
            "loss returned a Loss whose count is nan; it must be a finite",
        ),
        (
            lambda outputs, _: Loss(outputs.sum(), math.inf),
            "loss returned a Loss whose count is inf; it must be a finite",
        ),
        (lambda outputs, _: Loss(outputs.sum(), 10**400), "loss returned a Loss whose count is 1000000"),
        (lambda outputs, _: Loss(outputs.sum(), torch.tensor(-8)), r"a Loss whose count is tensor\(-8\); it must be"),
        (
            lambda outputs, _: Loss(outputs.sum(), torch.tensor(8j)),
            "a Loss whose count is a tensor .* must be a number",
        ),
        (lambda outputs, _: Loss(outputs.sum() + 0j, 1), "a Loss whose total is a complex number; it must be a real"),
        (
            lambda outputs, _: Loss(outputs.detach().sum(), 1),
            "loss returned a Loss whose total has no gradient; compute",
        ),
        (
            lambda *_: Loss(torch.ones((), requires_grad=True) * 1, 1),
            "no trained parameter of the model has a gr",
        ),
        (lambda outputs, _: Loss(outputs.sum(), None), "loss returned a Loss whose count is None; it must be a number"),
        (lambda outputs, _: Loss(outputs.sum(), outputs[0]), r"count is a tensor of shape \(3,\); it must be a number"),
        (lambda *_: Loss(1.5, 6), "a Loss whose total is float; it must be a tensor with one value"),
    ],
)
def test_a_loss_that_is_no_loss_is_refused(loss: Any, said: str, alone: Here):
    with pytest.raises(UserError, match=said):
        list(Trainer(small(20, 6, loss=loss), alone).steps())


def test_a_metric_that_is_no_loss_is_refused_by_its_name(alone: Here):
    experiment = small(20, 6, evals={"val": points(4)}, metrics={"hits": mean_of})
    with pytest.raises(UserError, match=r"the metric 'hits' returned Tensor; .*Loss\(\(outputs.argmax\(1\)"):
        Trainer(experiment, alone).evaluate()


@pytest.mark.parametrize("made", [None, "x", 10**400, {1}, torch.ones(2)])
def test_a_metric_that_makes_no_number_of_its_mean_is_refused_by_its_name(made: Any, alone: Here):
    metrics = {"hits": Metric(cross_entropy, lambda _: made)}
    with pytest.raises(UserError, match=r"the metric 'hits' made .* of its mean .*must return a number"):
        Trainer(small(20, 6, evals={"val": points(4)}, metrics=metrics), alone).evaluate()


class Growing(list[Any]):
    """One sample more whenever it is asked."""

    def __len__(self) -> int:
        self.append(self[0])
        return super().__len__()


def test_a_dataset_whose_length_changes_is_refused(alone: Here):
    data = points(20)
    experiment = small(20, 6, train=Growing([data[index] for index in range(20)]))
    with pytest.raises(UserError, match=r"len\(train\) was \d+ when the training began and is \d+ after step 0; the"):
        list(Trainer(experiment, alone).steps())


def test_a_dataset_whose_length_changes_amid_a_training_is_refused_at_the_end_of_the_epoch(alone: Here):
    data = points(12)
    samples = [data[index] for index in range(12)]
    trainer = Trainer(small(12, 6, train=samples, steps=6), alone)
    steps = trainer.steps()
    next(steps)
    samples.append(samples[0])
    next(steps)
    with pytest.raises(UserError, match=r"len\(train\) was 12 when the training began and is 13 after step 2; the"):
        next(steps)


def test_samples_that_are_no_pairs_are_refused(alone: Here):
    with pytest.raises(UserError, match=r"a sample is Tensor; a dataset must give pairs of \(inputs, targets\)"):
        list(Trainer(small(20, 6, train=torch.zeros(20, 5)), alone).steps())
    triples = TensorDataset(*[torch.zeros(20, 5)] * 3)
    with pytest.raises(UserError, match=r"pairs of \(inputs, targets\)"):
        list(Trainer(small(20, 6, train=triples), alone).steps())


def test_a_model_that_is_no_module_is_refused(alone: Here):
    with pytest.raises(UserError, match=r"Experiment\(model=…\) returned str; it must return a torch nn.Module"):
        Trainer(small(20, 6, model=lambda: "net"), alone)


def test_a_buffer_of_a_type_that_checkpoints_cannot_hold_is_refused(alone: Here):
    class Turned(nn.Linear):
        def __init__(self, persistent: bool) -> None:
            super().__init__(5, 3)
            self.register_buffer("angles", torch.ones(2, dtype=torch.complex128), persistent=persistent)

    with pytest.raises(UserError, match=r"'angles' of the model is of type complex128, .*persistent=False"):
        Trainer(small(20, 6, model=lambda: Turned(True)), alone)
    Trainer(small(20, 6, model=lambda: Turned(False)), alone)


def test_a_trainer_that_goes_on_goes_on_where_it_stopped(alone: Here):
    """Whoever leaves the loop and comes back neither misses samples nor sees them twice."""
    trainer = Trainer(small(20, 6, steps=6), alone)
    for update in trainer.steps():
        if update.step == 2:
            break
    list(trainer.steps())
    assert trainer.totals.losses == pytest.approx(plainly(small(20, 6, steps=6)).losses, rel=1e-6)


class Precise(nn.Module):
    """Tells in which arithmetic its layer computes."""

    seen: set[torch.dtype]

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)
        self.seen = set()

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer(x)
        self.seen.add(out.dtype)
        return out.float()


@pytest.mark.parametrize("precision, dtype", [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_bf16_computes_products_in_bfloat16_and_keeps_weights_in_fp32(precision: str, dtype: torch.dtype, alone: Here):
    experiment = small(20, 6, model=Precise, precision=precision, evals={"val": points(4)})
    trainer = Trainer(experiment, alone)
    result = trainer.train()
    assert trainer.model.seen == {dtype} and trainer.model.layer.weight.dtype == dtype
    assert {each.dtype for _, each in trainer.placed.weights()} == {torch.float32}, "what is kept"
    assert result["losses"] == pytest.approx(plainly(small(20, 6, model=Precise)).losses, rel=2e-2)


def test_products_on_gpus_round_where_tf32_was_asked_for_and_nowhere_else(alone: Here):
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.conv.fp32_precision  # type: ignore[attr-defined]
    try:
        for precision, products, convolutions in (("tf32", "high", "tf32"), ("fp32", "highest", "ieee")):
            Trainer(small(20, 6, precision=precision), alone)
            assert torch.get_float32_matmul_precision() == products
            assert torch.backends.cudnn.conv.fp32_precision == convolutions  # type: ignore[attr-defined]
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.conv.fp32_precision = before[1]  # type: ignore[attr-defined]


def test_gradients_that_somebody_looks_at_are_those_of_the_update_and_used_as_they_are(alone: Here):
    shown: list[float] = []

    def inspect(_: int, placed: Placed) -> None:
        shown.append(math.hypot(*(each.gradient.norm().item() for each in placed.shards if each.gradient is not None)))

    experiment = small(20, 6, steps=5)
    trainer = Trainer(experiment, alone, inspect=inspect)
    list(trainer.steps())
    assert trainer.totals.losses == pytest.approx(plainly(experiment).losses, rel=1e-6)
    assert shown == pytest.approx([min(CLIP, norm) for norm in trainer.totals.grad_norms], rel=1e-4)


def test_the_first_step_counts_in_samples_and_not_in_the_speed():
    totals = Totals()
    for step, seconds in enumerate((9.0, 1.0, 3.0)):
        totals.add(TotalsUpdate(step, 10, 0.1, 0.5, [], [2.0, 4.0, 1.0, 2.0, 0.0], None, seconds=seconds))
    found = totals.result()
    assert (found["steps"], found["samples"], found["losses"]) == (3, 30, [0.5] * 3)
    assert found["samples_per_s"] == 20 / 4.0 and found["data_wait"] == 1.0 / 4.0


class Asking:
    """Asks a training to stop in the step with this number, and notes what it was told."""

    def __init__(self, stop_in: int | None = None) -> None:
        self.stop_in = stop_in
        self.evaluates: list[bool] = []

    def asked(self, evaluates: bool) -> float:
        self.evaluates.append(evaluates)
        return float(len(self.evaluates) == self.stop_in)

    def stepped(self, seconds: float) -> None: ...

    def evaluated(self, seconds: float) -> None: ...


def test_who_keeps_time_knows_whether_an_evaluation_follows_the_step_that_is_computed(alone: Here):
    trainer = Trainer(small(20, 6, steps=5, evals={"val": points(4)}), alone, eval_every=2)
    trainer.ending = asking = Asking()
    trainer.train()
    assert asking.evaluates == [False, True, False, True, True], "and the last step is evaluated too"


def test_who_is_asked_to_stop_does_not_evaluate_first(alone: Here):
    told: list[str] = []
    trainer = Trainer(
        small(20, 6, steps=5, evals={"val": points(4)}), alone, eval_every=2, record=lambda kind, **_: told.append(kind)
    )
    trainer.ending = Asking(stop_in=2)
    with pytest.raises(Stopped, match="stopped after step 2"):
        trainer.train()
    assert "eval" not in told


def test_one_rank_that_is_asked_is_enough_and_stays_asked(alone: Here):
    trainer = Trainer(small(20, 6, steps=5), alone)
    about = {"samples": 6, "learning_rate": 0.1, "data_wait": 0.0, "pieces": [], "ready": None}
    asked, after = (
        TotalsUpdate(step=step, values=[6.0, 6.0, 1.0, 6.0, ranks], **about) for step, ranks in ((0, 1.0), (1, 0.0))
    )
    assert asked.asked and not after.asked
    trainer._unsettled.extend([asked, after])
    trainer.settle()
    assert trainer._is_asked


def test_bad_samples_are_written_down_with_the_step_and_the_set_in_which_they_were_met(alone: Here, tmp_path: Path):
    class Broken(list[Any]):
        def __getitem__(self, number: Any) -> Any:
            if number in (3, 9):
                raise ValueError("torn")
            return super().__getitem__(number)

    def broken() -> Broken:
        return Broken([points(12)[number] for number in range(12)])

    experiment = small(12, 6, train=broken(), evals={"val": broken()}, steps=2, shuffle="none")
    Trainer(experiment, alone, skip_bad=True, bad=tmp_path).train()
    lines = [json.loads(line) for line in (tmp_path / "rank-00000.jsonl").read_text().splitlines()]
    assert sorted((each["set"], each["step"], each["id"]) for each in lines) == [
        ("train", 1, 3),
        ("train", 2, 9),
        ("val", 2, 3),
        ("val", 2, 9),
    ]

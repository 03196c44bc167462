"""bf16: matrices are stored and computed with in bf16, their masters are trained and kept in fp32."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import TensorDataset

from meshrun import Experiment, Here, Loss, mesh
from meshrun.data.loader import Loader
from meshrun.layout import parse
from meshrun.parallel.how import How
from meshrun.parallel.masters import shorten
from meshrun.state import catalog
from meshrun.state.checkpoint import Checkpoint
from meshrun.train.interval import Every
from meshrun.train.loop import Trainer
from meshrun.train.recovery import Keeping
from meshrun.train.update import InOnePass, Plain
from tests.ranks import run_on_ranks
from tests.train.small import plainly, points, small, start_on_cpu, trained
from tests.train.whole import Result, differences, program, weight_difference
from tests.train.whole import trained as trained_whole


def on(*layouts: str) -> Any:
    """Runs a test once on each of these layouts."""
    cases = [pytest.param(each, marks=pytest.mark.ranks(parse(each).size), id=each) for each in layouts]
    return pytest.mark.parametrize("layout", cases)


@functools.cache
def by_one_process(precision: str, steps: int = 4) -> Result:
    start_on_cpu(1)
    try:
        return trained_whole(program("small_llama", steps, precision=precision))
    finally:
        mesh.finish()
        mesh.use(mesh.Meeting())


def assert_near(found: Result, wanted: Result) -> None:
    far = differences(found, wanted)
    assert far["losses"] < 3e-4 and far["grad_norms"] < 5e-3 and far["evaluation"] < 1e-3, far
    if mesh.start().rank == 0:
        assert weight_difference(found, wanted)[0] < 1e-2


def test_bf16_trains_as_fp32_does_but_for_rounding(alone: Here):
    del alone
    experiment = program("small_llama", 20)
    found, wanted = (trained_whole(replace(experiment, precision=each)) for each in ("bf16", "fp32"))
    far = differences(found, wanted)
    assert 0 < far["losses"] < 5e-3 and far["grad_norms"] < 3e-2 and far["evaluation"] < 5e-3, far
    assert {each.dtype for each in found.weights.values()} == {torch.float32}


@pytest.fixture
def wanted() -> Result:
    return by_one_process("bf16")


@on("dp=2", "fsdp=2", "tp=2", "pp=2", "pp=2:zb", "pp=2:interleaved", "cp=2", "dp=2,tp=2")
def test_a_layout_trains_in_bf16_as_one_process_does(layout: str, wanted: Result):
    mesh.use(mesh.Meeting(layout=layout, device="cpu"))
    assert_near(trained_whole(program("small_llama", 4, precision="bf16")), wanted)


class Casts(TorchDispatchMode):
    """Counts tensors of these parameters that are cast."""

    def __init__(self, parameters: list[Tensor]) -> None:
        super().__init__()
        self.of, self.count = {each.data_ptr() for each in parameters}, 0

    def __torch_dispatch__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten._to_copy.default:
            self.count += args[0].data_ptr() in self.of
        return function(*args, **(kwargs or {}))


def test_no_matrix_is_cast_in_a_step_and_what_flows_between_layers_is_bf16(alone: Here):
    trainer = Trainer(program("small_llama", 1, precision="bf16"), alone)
    flowing = []
    for block in trainer.model.blocks:
        block.register_forward_hook(lambda *passed: flowing.append(passed[2].dtype))
    data = next(Loader(trainer.experiment.train, trainer.order, 0, 1, trainer.reading).steps(0, 1))
    matrices = [each for each in trainer.model.parameters() if each.dim() > 1]
    trainer.placed.train(True)
    with Casts([*matrices, *(each.parameter for each in trainer.placed.shards if each.copy is not None)]) as casts:
        trainer._update.compute(data)
    assert casts.count == 0 and set(flowing) == {torch.bfloat16}
    assert {each.dtype for each in matrices} == {torch.bfloat16}
    assert {each.dtype for each in trainer.model.parameters() if each.dim() == 1} == {torch.float32}


STEPS, CUT = 6, 3


def llama(precision: str = "bf16") -> Experiment:
    return replace(
        program("small_llama", STEPS, precision=precision),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01, eps=1e-5),
    )


def trainer_on(layout: str, folder: Path, every: Every) -> Trainer:
    mesh.use(mesh.Meeting(layout=layout, device="cpu"))
    return Trainer(llama(), mesh.start(), keeping=Keeping(folder, every=every))


def saved_at_the_cut(layout: str, folder: Path) -> None:
    trainer = trainer_on(layout, folder, Every(steps=CUT))
    for update in trainer.steps():
        if update.step == CUT:  # the checkpoint is made when the loop goes on
            break
    assert trainer.keeper is not None
    trainer.keeper.finish()


def gone_on(layout: str, folder: Path) -> Result:
    trainer = trainer_on(layout, folder, Every(never=True))
    found = trainer.resume()
    assert found is not None and found["step"] == CUT
    return _result(trainer)


def _result(trainer: Trainer) -> Result:
    result = trainer.train()
    weights = {name: each.clone() for name, each in trainer.placed.weights()}
    return Result(result["losses"], result["grad_norms"], result["eval"]["val"], weights)


@on("dp=1", "dp=2", "tp=2", "pp=2")
def test_a_bf16_training_that_goes_on_is_bit_by_bit_the_one_that_did_not_stop(layout: str, tmp_path: Path):
    saved_at_the_cut(layout, tmp_path)
    found = gone_on(layout, tmp_path)
    wanted = _result(trainer_on(layout, tmp_path / "other", Every(never=True)))
    assert found.losses == wanted.losses and found.grad_norms == wanted.grad_norms
    assert all(torch.equal(value, wanted.weights[name]) for name, value in found.weights.items())
    if mesh.start().rank == 0:
        checkpoint = Checkpoint.open(catalog.named(tmp_path)[-1])
        kinds = {info.dtype for name, info in checkpoint.tensors.items() if name.startswith(("model/", "optimizer/"))}
        assert kinds == {torch.float32}
        matrix = checkpoint.whole("model/head.weight")
        assert not torch.equal(matrix, matrix.bfloat16().float()), "masters, not what was rounded"


def compared(layout: str, folder: Path, wanted: Result) -> None:
    assert_near(gone_on(layout, folder), wanted)


def test_what_shards_have_saved_in_bf16_goes_on_on_replicas_and_the_other_way_round(tmp_path: Path, alone: Here):
    wanted = _result(Trainer(llama(), alone))
    mesh.finish()
    for source, target in (("fsdp=2", "dp=2"), ("dp=2", "fsdp=2")):
        folder = tmp_path / source
        run_on_ranks(__file__, "saved_at_the_cut", 2, {"layout": source, "folder": folder}, 60)
        run_on_ranks(__file__, "compared", 2, {"layout": target, "folder": folder, "wanted": wanted}, 60)


def sum_of_outputs(outputs: Tensor, targets: Tensor) -> Loss:
    return Loss(outputs.float().sum(), len(targets))


def ones(batch: int, **changes: Any) -> Experiment:
    """Each sample's gradient of each weight is 1 / batch, which bf16 has exactly."""
    data = TensorDataset(torch.ones(batch, 4), torch.zeros(batch))
    fields = {
        "model": lambda: nn.Sequential(nn.Linear(4, 2, bias=False)),
        "train": data,
        "loss": sum_of_outputs,
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=1.0),
        "clip": None,
        "precision": "bf16",
        "micro": 1,
    }
    return small(batch, batch, 3, **{**fields, **changes})


@on("dp=1", "dp=2", "tp=2")
def test_gradients_of_micro_batches_are_added_up_in_fp32(layout: str):
    """In bf16 the sum of so many small ones would stop growing at 0.5."""
    mesh.use(mesh.Meeting(layout=layout, device="cpu"))
    here = mesh.start()
    trainer = Trainer(ones(512 * here.replicas), here)
    list(trainer.steps())
    assert trainer.totals.grad_norms == [pytest.approx(8**0.5, rel=1e-6)] * 3


def test_statistics_of_batches_go_with_matrices_in_bf16(alone: Here):
    def net() -> nn.Module:
        return nn.Sequential(
            nn.Unflatten(1, (1, 5, 1)),
            nn.Conv2d(1, 8, (3, 1)),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(24, 3),
        )

    experiment = small(40, 10, 20, model=net, evals={"val": points(20, seed=1)})
    found = Trainer(replace(experiment, precision="bf16"), alone).train()
    wanted = Trainer(experiment, alone).train()
    assert found["losses"] == pytest.approx(wanted["losses"], abs=0.05)
    assert found["eval"]["val"]["loss"] == pytest.approx(wanted["eval"]["val"]["loss"], abs=0.05)


class Spectral(nn.Module):
    """Multiplies a vector with its matrix in a way that autocast leaves alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out = nn.Linear(5, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        size = torch.addmv(torch.zeros(16), self.layer.weight, torch.ones(5)).norm()
        return self.out(torch.tanh(self.layer(x) / size)).float()


@pytest.mark.ranks(2)
def test_a_model_that_does_not_compute_with_bf16_matrices_keeps_them_in_fp32(tmp_path: Path):
    here = start_on_cpu(2)
    experiment = small(40, 12, 6, model=Spectral, precision="bf16", micro=2)
    keeping = Keeping(tmp_path, every=Every(steps=3))
    trainer = Trainer(experiment, here, keeping=keeping)
    trainer.train()
    assert any("wants them in fp32" in each for each in trainer.placed.notes)
    assert trainer.totals.losses == pytest.approx(plainly(experiment).losses, rel=2e-2)
    before = replace(experiment, steps=3)
    again = Trainer(before, here, keeping=Keeping(tmp_path / "other", every=Every(steps=3)))
    again.train()
    resumed = Trainer(experiment, here, keeping=Keeping(tmp_path / "other", every=Every(never=True)))
    assert resumed.resume() is not None
    resumed.train()
    assert resumed.totals.losses == trainer.totals.losses


def test_a_model_that_wants_its_matrices_in_fp32_can_be_evaluated_before_its_first_step(alone: Here):
    experiment = small(40, 12, 3, model=Spectral, precision="bf16", evals={"val": points(20, seed=1)})
    wanted = Trainer(replace(experiment, precision="fp32"), alone).evaluate()["val"]["loss"]
    trainer = Trainer(experiment, alone)
    assert trainer.evaluate()["val"]["loss"] == pytest.approx(wanted, rel=2e-2)
    list(trainer.steps())
    assert sum("wants them in fp32" in each for each in trainer.placed.notes) == 1
    assert trainer.totals.losses == pytest.approx(plainly(experiment).losses, rel=2e-2)


def test_one_process_that_goes_on_knows_that_matrices_must_be_in_fp32(alone: Here, tmp_path: Path):
    experiment = small(40, 12, 6, model=Spectral, precision="bf16")
    keeping = Keeping(tmp_path, every=Every(steps=3))
    Trainer(replace(experiment, steps=3), alone, keeping=keeping).train()
    resumed = Trainer(experiment, alone, keeping=Keeping(tmp_path, every=Every(never=True)))
    assert resumed.resume() is not None
    assert {each.computed.dtype for each in resumed.placed.shards} == {torch.float32}
    list(resumed.steps())
    whole = Trainer(experiment, alone)
    list(whole.steps())
    assert resumed.totals.losses == whole.totals.losses


class Tied(nn.Module):
    """One matrix under two names, a frozen one, a vector of two dimensions, and one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(5, 3).requires_grad_(False)
        self.token = nn.Parameter(torch.ones(1, 5))
        self.unused = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(self.second(torch.tanh(self.first(x))) + self.token)


def test_what_is_one_stays_one_and_vectors_stay_as_they_are():
    model = Tied()
    model.first.weight.decays = False
    before = {name: each.detach().clone() for name, each in model.named_parameters()}
    masters = shorten(model)
    assert model.second.weight is model.first.weight and len(masters) == 3
    assert model.token.dtype == torch.float32 and model.frozen.weight.dtype == torch.bfloat16
    assert torch.equal(masters[model.frozen.weight], before["frozen.weight"])
    assert not masters[model.frozen.weight].requires_grad and masters[model.first.weight].requires_grad
    assert masters[model.first.weight].decays is False, "what optimizers may look at"


@pytest.mark.ranks(2)
def test_frozen_weights_are_kept_exactly_and_unused_ones_are_left_alone():
    torch.manual_seed(4)
    before = {name: each.detach().clone() for name, each in Tied().named_parameters()}
    experiment = small(
        40, 12, 4, model=Tied, precision="bf16", micro=2, optimizer=lambda p: torch.optim.AdamW(p, weight_decay=0.5)
    )
    trainer = Trainer(experiment, start_on_cpu(2))
    list(trainer.steps())
    if trainer.here.rank == 0:
        after = dict(trainer.placed.weights())
        same = {name for name, value in before.items() if torch.equal(value, after[name])}
        assert same == {"frozen.weight", "frozen.bias", "unused.weight", "unused.bias"}


class Sometimes(nn.Module):
    """Uses a matrix only for some samples."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.rarely = nn.Linear(5, 8), nn.Linear(5, 8)
        self.out = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.always(x)
        if x[0, 0] > 0:
            hidden = hidden + self.rarely(x)
        return self.out(torch.tanh(hidden)).float()


@pytest.fixture
def sometimes() -> Any:
    experiment = small(40, 12, 6, model=Sometimes, precision="bf16", micro=1)
    start_on_cpu(1)
    try:
        return trained(Trainer(experiment)).losses
    finally:
        mesh.finish()
        mesh.use(mesh.Meeting())


@pytest.mark.ranks(2)
def test_a_matrix_that_only_some_micro_batches_use_is_trained_by_those(sometimes: list[float]):
    trainer = Trainer(small(40, 12, 6, model=Sometimes, precision="bf16", micro=1), start_on_cpu(2))
    list(trainer.steps())
    assert trainer.totals.losses == pytest.approx(sometimes, rel=5e-3)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["fp16", "bf16", "powersgd"])
def test_gradients_of_bf16_matrices_can_be_compressed_too(kind: str):
    experiment = small(40, 12, 14, precision="bf16", micro=3, optimizer=lambda p: torch.optim.SGD(p, lr=0.05))
    trainer = Trainer(experiment, start_on_cpu(2), how=How(compress=kind))
    list(trainer.steps())
    assert trainer.totals.losses == pytest.approx(plainly(experiment).losses, rel=2e-2)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01, weight_decay=0.1, fused=True)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1, fused=True)


@pytest.mark.parametrize("optimizer", [adam, adamw])
@pytest.mark.parametrize("collected", [False, True])
def test_an_update_in_one_pass_is_the_optimizers_own(alone: Here, optimizer: Callable[[Any], Any], collected: bool):
    """And keeps the same state, from which it goes on."""
    experiment = small(40, 12, 10, precision="bf16", optimizer=optimizer)
    plain, at_once = Trainer(experiment, alone), Trainer(experiment, alone)
    assert isinstance(plain._update.update, Plain), "on a CPU"
    updates = plain._update.update, InOnePass(at_once.optimizer, at_once.placed)
    generator = torch.Generator().manual_seed(0)
    for step in range(10):
        for mine, other in zip(at_once.placed.shards, plain.placed.shards, strict=True):
            if step or mine.name != "0.weight":  # one parameter may have seen fewer steps than another
                mine.computed.grad = torch.randn(mine.shape, generator=generator).to(mine.computed.dtype)
                other.computed.grad = mine.computed.grad.clone()
        if collected:
            plain.placed.collect()
            at_once.placed.collect()
        (wanted, found), factor = (each.gradients() for each in updates), 0.5 + step / 10
        assert {each.dtype for each in found} == ({torch.float32} if collected else {torch.float32, torch.bfloat16})
        assert len(wanted) == len(found)
        for update in updates:
            update(factor)
            update.forget()
        if step == 5:  # as after going back to a checkpoint of two steps before
            for state in (*at_once.optimizer.state.values(), *plain.optimizer.state.values()):
                state.update({key: value.clone() - 2 * (key == "step") for key, value in state.items()})
    for mine, other in zip(at_once.placed.shards, plain.placed.shards, strict=True):
        assert mine.gradient is None and other.gradient is None
        torch.testing.assert_close(mine.parameter, other.parameter, rtol=1e-5, atol=1e-6)
        assert mine.copy is None or torch.equal(mine.copy, mine.parameter.bfloat16())
        kept, wanted = at_once.optimizer.state[mine.parameter], plain.optimizer.state[other.parameter]
        assert list(kept) == list(wanted) and kept["step"].item() == wanted["step"].item() in (7, 8)
        assert all(kept[key].dtype == wanted[key].dtype and kept[key].shape == wanted[key].shape for key in wanted)

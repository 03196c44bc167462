"""A training that stops and goes on is the training that never stopped: on its own layout bit for bit."""

from __future__ import annotations

import functools
import hashlib
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

from meshrun import Experiment, Schedule, cross_entropy, mesh
from meshrun.train.interval import Every
from meshrun.train.loop import Trainer
from meshrun.train.recovery import Keeping
from tests.ranks import run_on_ranks
from tests.train.small import points, start_on_cpu
from tests.train.whole import Result, assert_same, program

LAYOUTS = ["dp=1", "dp=2", "fsdp=4", "tp=2", "pp=2", "fsdp=2,tp=2", "pp=2,fsdp=2"]
NEAR = {layout: LAYOUTS[(n + 3) % len(LAYOUTS)] for n, layout in enumerate(LAYOUTS)}
"""For each layout another one to go on from: each is gone on from once, and every axis comes and goes.
All pairs are for `pytest -m every`."""
STEPS, CUT = 4, 2


def ranks_of(layout: str) -> int:
    return functools.reduce(lambda size, part: size * int(part.split("=")[1].split(":")[0]), layout.split(","), 1)


def on(layout: str) -> Any:
    return pytest.param(layout, marks=pytest.mark.ranks(ranks_of(layout), timeout=120), id=layout)


def trainer_on(layout: str, folder: Path, experiment: Experiment, every: Every, **options: Any) -> Trainer:
    mesh.use(mesh.Meeting(layout=layout, device="cpu"))
    return Trainer(experiment, mesh.start(), keeping=Keeping(folder, every=every), **options)


def stopped_at(cut: int, layout: str, folder: Path, experiment: Experiment, **options: Any) -> None:
    """Train as far as `cut`, and save there."""
    trainer = trainer_on(layout, folder, experiment, Every(steps=cut), **options)
    for update in trainer.steps():
        if trainer._to_be_evaluated(trainer.step):
            trainer._evaluate_and_keep()
        if update.step == cut:  # the checkpoint is made when the loop goes on
            break
    assert trainer.keeper is not None
    trainer.keeper.finish()


def result_of(trainer: Trainer) -> Result:
    result = trainer.train()
    weights = {name: each.clone() for name, each in trainer.placed.weights()}
    return Result(result["losses"], result["grad_norms"], result["eval"]["val"], weights)


def gone_on(cut: int, layout: str, folder: Path, experiment: Experiment, **options: Any) -> Result:
    trainer = trainer_on(layout, folder, experiment, Every(never=True), **options)
    found = trainer.resume()
    assert found is not None and found["step"] == cut and found["source"] == "a checkpoint"
    return result_of(trainer)


def llama(steps: int = 6) -> Experiment:
    return replace(
        program("small_llama", steps), optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01, eps=1e-5)
    )


def save(layout: str, folder: Path) -> None:
    stopped_at(CUT, layout, folder, llama(STEPS))


def compare(layout: str, folders: dict[str, Path], wanted: Result) -> None:
    for folder in folders.values():
        assert_same(gone_on(CUT, layout, folder, llama(STEPS)), wanted)


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same training, saved after two steps on every layout."""
    folders = {layout: tmp_path_factory.mktemp("saved") for layout in LAYOUTS}
    for layout, folder in folders.items():
        run_on_ranks(__file__, "save", ranks_of(layout), {"layout": layout, "folder": folder}, 120)
    return folders


@pytest.fixture(scope="session")
def wanted() -> Result:
    start_on_cpu(1)
    try:
        return result_of(Trainer(llama(STEPS), mesh.start()))
    finally:
        mesh.finish()
        mesh.use(mesh.Meeting())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_another_layout_has_saved_goes_on_on_this_one(layout: str, saved: dict[str, Path], wanted: Result):
    folders = {NEAR[layout]: saved[NEAR[layout]]}
    run_on_ranks(__file__, "compare", ranks_of(layout), {"layout": layout, "folders": folders, "wanted": wanted}, 100)


@pytest.mark.every
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_any_layout_has_saved_goes_on_on_this_one(layout: str, saved: dict[str, Path], wanted: Result):
    run_on_ranks(__file__, "compare", ranks_of(layout), {"layout": layout, "folders": saved, "wanted": wanted}, 200)


class Noisy(nn.Module):
    """Draws from all generators, has running statistics, and a parameter that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Dropout(0.2), nn.Linear(8, 3))
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            inputs = inputs + 0.1 * torch.randn_like(inputs) + 0.1 * random.random() + 0.1 * float(np.random.rand())
        return self.body(inputs)


def noisy(steps: int = 6) -> Experiment:
    return Experiment(
        model=Noisy,
        train=points(60),
        evals={"val": points(20, seed=1)},
        loss=cross_entropy,
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.01),
        batch=12,
        steps=steps,
        schedule=Schedule("cosine", warmup=2),
        seed=5,
    )


def assert_equal(found: Result, wanted: Result) -> None:
    assert found.losses == wanted.losses and found.grad_norms == wanted.grad_norms
    assert found.scores == wanted.scores
    assert found.weights.keys() == wanted.weights.keys()
    assert all(torch.equal(each, wanted.weights[name]) for name, each in found.weights.items())


def seeded() -> None:
    """The generators that are not torch's are the user's to seed."""
    random.seed(1 + mesh.start().rank)
    np.random.seed(2 + mesh.start().rank)


def interrupted_is_uninterrupted(layout: str, cut: int, experiment: Experiment, folder: Path, **options: Any) -> None:
    mesh.use(mesh.Meeting(layout=layout, device="cpu"))
    seeded()
    wanted = result_of(Trainer(experiment, mesh.start(), **options))
    seeded()
    stopped_at(cut, layout, folder, experiment, **options)
    random.seed(99)
    np.random.seed(99)
    assert_equal(gone_on(cut, layout, folder, experiment, **options), wanted)


BITWISE = ["dp=1", "dp=2", "dp=3", "fsdp=3", "tp=2", "pp=2", "pp=2:zb", "cp=2", "dp=2,fsdp=2"]


@pytest.mark.parametrize("layout", [on(layout) for layout in BITWISE])
def test_on_the_same_layout_it_goes_on_bit_for_bit(layout: str, tmp_path: Path):
    interrupted_is_uninterrupted(layout, CUT, llama(STEPS), tmp_path)


@pytest.mark.parametrize("cut", [1, 2, 3, 5])
@pytest.mark.ranks(3)
def test_noise_statistics_and_the_order_of_sums_go_on_wherever_it_was_cut(cut: int, tmp_path: Path):
    """Five steps an epoch: in its middle, at its end, right before an evaluation and right after one."""
    interrupted_is_uninterrupted("dp=3", cut, noisy(8), tmp_path, eval_every=2)


@pytest.mark.ranks(2)
def test_micro_batches_and_readers_go_on_bit_for_bit(tmp_path: Path):
    interrupted_is_uninterrupted("dp=2", 3, replace(noisy(), micro=2), tmp_path, workers=1)


def test_alone_it_goes_on_bit_for_bit_with_its_best_weights(tmp_path: Path):
    start_on_cpu(1)
    try:
        interrupted_is_uninterrupted("dp=1", 4, noisy(9), tmp_path / "state", eval_every=2, weights=tmp_path)
    finally:
        mesh.finish()
        mesh.use(mesh.Meeting())
    with safe_open(tmp_path / "best.safetensors", framework="pt") as file:
        assert json.loads(file.metadata()["about"])["step"] in (2, 4, 6, 8, 9)


def test_time_to_resume_does_not_depend_on_how_far_the_epoch_was(tmp_path: Path):
    start_on_cpu(1)
    try:
        experiment = replace(noisy(), train=_Counted(), batch=4, epochs=1, steps=None)
        stopped_at(60, "dp=1", tmp_path, experiment)
        trainer = trainer_on("dp=1", tmp_path, experiment, Every(never=True))
        assert trainer.resume() is not None
        _Counted.read.clear()  # of the one sample, too, by which the batch dimension is found
        next(trainer.steps())
        assert _Counted.read == trainer.order.batch_ids(60).tolist()
        assert trainer.totals.ids.hexdigest() == _digest(trainer, 61)
    finally:
        mesh.finish()
        mesh.use(mesh.Meeting())


class _Counted:
    """Samples that are counted as they are read, by the rank itself."""

    light = True
    read: ClassVar[list[int]] = []

    def __len__(self) -> int:
        return 4000

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.read.append(index)
        return torch.full((5,), float(index % 7)), index % 3


def _digest(trainer: Trainer, steps: int) -> str:
    ids = np.concatenate([trainer.order.batch_ids(step) for step in range(steps)])
    return hashlib.sha256(ids.astype("<i8").tobytes()).hexdigest()

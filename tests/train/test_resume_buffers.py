"""Buffers outside of segments are on every pipeline stage, kept once in a checkpoint, and restored on any layout."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from meshrun import Experiment, mean_squared_error, mesh
from meshrun.state.catalog import find
from meshrun.state.checkpoint import Checkpoint
from meshrun.train.interval import Every
from meshrun.train.loop import Trainer
from tests.ranks import run_on_ranks
from tests.train.small import start_on_cpu
from tests.train.test_resume import assert_equal, gone_on, ranks_of, result_of, stopped_at, trainer_on
from tests.train.whole import Result, assert_same

STEPS, CUT = 4, 2
CHAIN = ["dp=1", "pp=2", "fsdp=2", "dp=2,pp=2:interleaved", "tp=2", "pp=2,tp=2"]
"""Each layout goes on from its own checkpoint and from that of the layout before it."""


class Positions(nn.Module):
    """A module without parameters whose table is added to what comes in, as in JSC's TransformerLM."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("pe", torch.linspace(-1, 1, 32).reshape(4, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.pe[: x.shape[1]]


class Odd(nn.Module):
    """Parameters that torch's fsdp does not cut, and a weight that is computed before each forward pass."""

    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings(category=FutureWarning, action="ignore"):
            self.normed = nn.utils.weight_norm(nn.Linear(8, 8))
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.nothing = nn.Parameter(torch.zeros(3, 0))
        self.wide = nn.Parameter(torch.ones(8, dtype=torch.float64))
        self.turn = nn.Parameter(torch.polar(torch.ones(4), torch.arange(4.0)))
        self.order = nn.Parameter(torch.arange(7, -1, -1), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        turned = torch.view_as_complex(x.reshape(*x.shape[:-1], 4, 2).contiguous()) * self.turn
        x = x + self.scale * self.normed(torch.view_as_real(turned).flatten(-2))
        return x[..., self.order] * self.wide.float() + self.nothing.sum()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.odd = Odd()

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        x = self.odd(x)
        turned = torch.view_as_real(torch.view_as_complex(x.reshape(*x.shape[:-1], 4, 2)) * turns).flatten(-2)
        return x + self.down(self.up(turned).tanh())


class Tables(nn.Module):
    """Tables and a parameter of the model's own.

    Complex numbers as in Llama 2, one of more than a mebibyte, one of which all elements are the same memory, one
    without elements, and one that has two names.
    """

    def __init__(self) -> None:
        super().__init__()
        self.into, self.positions = nn.Linear(3, 8), Positions()
        self.register_buffer("turns", torch.polar(torch.ones(4), torch.arange(4.0)))
        self.register_buffer("large", torch.arange(1 << 19, dtype=torch.int32).reshape(1024, 512))
        self.register_buffer("same", torch.full((1,), 0.5).expand(8))
        self.register_buffer("none", torch.zeros(0))
        self.register_buffer("twin", self.turns)
        self.gain = nn.Parameter(torch.ones(8))
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.out = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.positions(self.into(x)) * self.gain + self.same
        for block in self.blocks:
            x = block(x, self.twin)
        return self.out(x) + self.large[0, 2]


class Statistics(nn.Module):
    """Residual blocks with BatchNorm and in-place ReLU, also around them, as in torchvision's ResNets.

    Running statistics lie in segments, in modules around them with weights and without, and in the model itself.
    """

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.relu, self.conv, self.norm = nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.relu(x)
            return x + self.norm(self.conv(x))

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(1))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.conv, self.norm, self.relu = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True)
        self.blocks = nn.ModuleList(Statistics.Layer() for _ in range(4))
        self.last, self.out = nn.BatchNorm1d(4, affine=False), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
            self.mean.lerp_(x.mean(), 0.1)
        x = nn.functional.avg_pool2d(self.relu(self.norm(self.conv(x - self.mean))), 2)
        for block in self.blocks:
            x = block(x)
        return self.out(self.last(x.mean((2, 3))))


def of(model: type[nn.Module], shape: tuple[int, ...], outputs: tuple[int, ...], **changes: object) -> Experiment:
    def data(length: int, seed: int) -> list[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(seed)
        return [
            (torch.randn(shape, generator=generator), torch.randn(outputs, generator=generator)) for _ in range(length)
        ]

    return Experiment(
        model=model,
        train=data(40, 0),
        evals={"val": data(9, 1)},
        loss=mean_squared_error,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01, eps=1e-5),
        batch=16,
        steps=STEPS,
        seed=3,
        **changes,  # type: ignore[arg-type]
    )


def tables() -> Experiment:
    plan = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
    return of(Tables, (4, 3), (4, 1), tensor_plan=plan, segments=lambda model: list(model.blocks))


def statistics() -> Experiment:
    return of(Statistics, (1, 6, 6), (1,), micro=2, segments=lambda model: list(model.blocks))


def go_on(layout: str, own: Path, before: Path, wanted: Result) -> None:
    stopped_at(CUT, layout, own, tables())
    if mesh.start().rank == 0:
        saved = Checkpoint.open(find(own))
        for name in ("positions.pe", "turns", "large"):
            assert torch.equal(saved.whole(f"buffer/{name}@0"), wanted.weights[name])
    for folder in {own, before}:
        assert_same(gone_on(CUT, layout, folder, tables()), wanted)


def alone(experiment: Experiment) -> Result:
    start_on_cpu(1)
    try:
        return result_of(Trainer(experiment, mesh.start()))
    finally:
        mesh.finish()
        mesh.use(mesh.Meeting())


def test_tables_outside_of_segments_go_on_from_layout_to_layout(tmp_path: Path):
    wanted = alone(tables())
    folders = {layout: tmp_path / str(number) for number, layout in enumerate(CHAIN)}
    for before, layout in zip([CHAIN[0], *CHAIN], CHAIN, strict=False):
        arguments = {"layout": layout, "own": folders[layout], "before": folders[before], "wanted": wanted}
        run_on_ranks(__file__, "go_on", ranks_of(layout), arguments, 120)


@pytest.fixture
def wanted() -> Result:
    return alone(statistics())


@pytest.mark.ranks(2, timeout=120)
def test_running_statistics_around_segments_are_those_of_one_process_and_go_on(tmp_path: Path, wanted: Result):
    stopped_at(CUT, "pp=2", tmp_path, statistics())
    found = gone_on(CUT, "pp=2", tmp_path, statistics())
    assert_same(found, wanted)
    assert_equal(found, result_of(trainer_on("pp=2", tmp_path, statistics(), Every(never=True))))

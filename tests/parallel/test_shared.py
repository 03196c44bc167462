"""What a model has under two names is one thing on every layout, also where these are on other stages."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from meshrun import mesh
from meshrun.train.loop import Trainer
from tests.train.small import plainly, small

WIDTH = 8


class Scale(nn.Module):
    """A part without parameters."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.register_buffer("table", table)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.table


class Block(nn.Module):
    def __init__(self, shared: nn.Module | Tensor) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.shared = shared if isinstance(shared, nn.Module) else Scale(shared)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.shared(self.linear(x).tanh())
        return found


class Net(nn.Module):
    """All blocks have the same part, or the same buffer in parts of their own."""

    def __init__(self, shared: nn.Module | Tensor) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, WIDTH), nn.Linear(WIDTH, 3)
        self.blocks = nn.ModuleList(Block(shared) for _ in range(3))
        around = torch.linspace(0.5, 2, 5)
        self.register_buffer("around", around)
        self.register_buffer("again", around)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x * self.around * self.again)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


SHARED = {
    "buffer": lambda: torch.linspace(0.5, 1.5, WIDTH),
    "part without parameters": lambda: Scale(torch.linspace(0.5, 1.5, WIDTH)),
    "part": lambda: nn.Linear(WIDTH, WIDTH),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("layout", ["fsdp=2", "pp=2", "pp=2:interleaved"])
@pytest.mark.parametrize("kind", SHARED)
def test_what_blocks_share_trains_as_in_one_process(kind: str, layout: str):
    mesh.use(mesh.Meeting(layout=layout, device="cpu"))
    experiment = small(
        24,
        12,
        steps=3,
        model=lambda: Net(SHARED[kind]()),
        segments=lambda model: [model.first, *model.blocks, model.last],
    )
    trainer = Trainer(experiment, mesh.start())
    for _ in trainer.steps():
        pass
    weights = {name: each.clone() for name, each in trainer.placed.weights()}
    wanted = plainly(experiment)
    assert trainer.totals.losses == pytest.approx(wanted.losses, rel=1e-5)
    assert trainer.totals.grad_norms == pytest.approx(wanted.grad_norms, rel=1e-5)
    for name, each in weights.items():
        torch.testing.assert_close(each, wanted.weights[name], rtol=1e-4, atol=1e-6)

"""What a model's own `torch.utils.checkpoint` computes again drops what was dropped the first time."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from meshrun import mesh
from meshrun.train.loop import Trainer
from tests.train.small import Course, difference, small, start_on_cpu, trained


class Block(nn.Module):
    """Draws in every way: by a module, by a function, and in attention."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(16, 16), nn.Dropout(0.3)
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(self.drop(self.linear(x)).tanh(), 0.2, self.training)
        pairs = x.view(-1, 2, 8)
        return self.attention(pairs, pairs, pairs)[0].flatten(1)


class Net(nn.Module):
    """Each block is called twice, and computed again in the backward pass unless `reentrant` is None."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.first, self.last, self.reentrant = nn.Linear(5, 16), nn.Linear(16, 3), reentrant
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            for _ in range(2):
                x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return self.last(x)


class Once(Net):
    """Each block is called once, so that the model can be cut."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return self.last(x)


def course(model: Callable[[], nn.Module]) -> Course:
    return trained(Trainer(small(24, 12, steps=3, micro=5, model=model), start_on_cpu(1)))


@pytest.mark.ranks(1)
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_model_that_computes_again_trains_as_one_that_does_not(reentrant: bool):
    assert difference(course(lambda: Net(reentrant)), course(lambda: Net(None))) < 1e-6


@pytest.mark.ranks(2)
@pytest.mark.parametrize("variant", ["gpipe", "1f1b"])
def test_stages_compute_again_from_what_they_received_for_the_micro_batch(variant: str):
    """Several micro-batches are on their way when the first of them comes back."""
    mesh.use(mesh.Meeting(layout=f"pp=2:{variant}", device="cpu"))
    found = []
    for reentrant in (None, False):
        experiment = small(24, 12, steps=2, model=lambda reentrant=reentrant: Once(reentrant))
        trainer = Trainer(experiment, mesh.start())
        for _ in trainer.steps():
            pass
        found.append(trainer.totals.losses + trainer.totals.grad_norms)
    assert found[1] == pytest.approx(found[0], rel=1e-6)


class Written(nn.Module):
    """A dropout in a function that belongs to no module's code."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.first, self.last, self.reentrant = nn.Linear(5, 16), nn.Linear(16, 3), reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        drop: Callable[[Tensor], Tensor] = lambda each: F.dropout(each, 0.4).tanh()  # noqa: E731
        x = drop(x) if self.reentrant is None else checkpoint(drop, x, use_reentrant=self.reentrant)
        return self.last(x)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_dropout_outside_of_modules_is_that_of_the_module_around_it(reentrant: bool):
    found = [course(lambda kind=kind: Written(kind)) for kind in (None, reentrant)]
    assert difference(*found) < 1e-6

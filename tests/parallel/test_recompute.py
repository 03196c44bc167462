"""Activation checkpointing: which segments are computed twice, and that twice is as once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from meshrun import UserError
from meshrun.parallel import recompute
from meshrun.parallel.dropout import key_dropouts
from meshrun.parallel.moment import Moment
from meshrun.parallel.recompute import Measured, Recomputing, covers, every
from tests.compare import difference


def test_every_kth_segment_counted_from_one_is_computed_twice():
    assert [number for number in range(6) if covers("every-3", number)] == [2, 5]
    assert all(covers("full", number) and covers("selective", number) for number in range(3))
    assert not any(covers(level, number) for level in ("none", "auto") for number in range(3))


@pytest.mark.parametrize("level", ["every-0", "every-", "every-10000", "some", "every-1x"])
def test_what_is_no_level_is_refused(level: str):
    with pytest.raises(UserError, match=f"recompute is '{level}'"):
        every(level)


def test_compiled_code_is_selective_by_itself():
    assert Recomputing("selective").covers(0) and not Recomputing("selective", compiled=True).covers(0)
    assert Recomputing("full", compiled=True).covers(0)


class Counting(nn.Module):
    """Counts how often it is computed; its buffers go on in each forward pass, written to or replaced, and are used."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Tanh())
        spectral_norm(self.inner[0])
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("passes", torch.ones(()))
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.mean.lerp_(x.detach().mean(0), 0.1)
        self.passes = self.passes + 1
        return self.inner(x - self.mean) * self.passes


def trained(level: str) -> tuple[nn.Sequential, Tensor]:
    torch.manual_seed(0)
    model, moment = nn.Sequential(*(Counting() for _ in range(3))), Moment(seed=3)
    key_dropouts(model, moment)
    moment.step, moment.ids = 5, torch.arange(8)
    recompute.apply(list(enumerate(model)), Recomputing(level), moment)
    inputs = torch.randn(8, 6, generator=torch.Generator().manual_seed(1)).requires_grad_()
    for _ in range(2):
        model(inputs).square().sum().backward()
    assert inputs.grad is not None
    return model, inputs.grad


@pytest.mark.parametrize(("level", "counts"), [("full", [4, 4, 4]), ("every-2", [2, 4, 2]), ("selective", [4, 4, 4])])
def test_gradients_statistics_and_masks_are_those_of_computing_once(level: str, counts: list[int]):
    once, wanted = trained("none")
    twice, found = trained(level)
    assert [each.count for each in once] == [2, 2, 2] and [each.count for each in twice] == counts
    assert difference(found, wanted) < 1e-6
    assert difference(dict(twice.state_dict()), dict(once.state_dict())) < 1e-6, "running statistics moved once"
    assert twice[0].inner[1].num_batches_tracked == 2


def test_without_gradients_nothing_is_kept_or_computed_twice(monkeypatch: pytest.MonkeyPatch):
    model, _ = trained("full")
    monkeypatch.setattr(recompute, "checkpoint", lambda *_, **__: pytest.fail("an evaluation keeps nothing"))
    with torch.no_grad():
        model.eval()(torch.randn(2, 6))


def test_selective_keeps_products_and_makes_the_rest_again():
    from torch.utils.checkpoint import CheckpointPolicy

    policy = recompute._policy
    assert policy(None, torch.ops.aten.mm.default) == CheckpointPolicy.MUST_SAVE
    assert policy(None, torch.ops.aten.tanh.default) == CheckpointPolicy.PREFER_RECOMPUTE


def test_segments_that_are_no_longer_computed_twice_are_as_they_were():
    model = nn.Sequential(Counting(), nn.Linear(6, 6))
    own = model[0].forward.__func__
    segments = list(enumerate(model))
    recompute.apply(segments, Recomputing("full"), Moment())
    assert "forward" in vars(model[0]) and "forward" not in vars(model[1]), "a layer keeps its inputs anyway"
    recompute.remove(segments)
    assert "forward" not in vars(model[0]) and model[0].forward.__func__ is own


def test_what_a_segment_would_keep_is_its_largest_pass_times_those_that_wait_at_once():
    measured = Measured(lambda: 0)
    for _ in range(3):
        measured.forward(0)
    measured.again(0, 10)
    measured.again(0, 7)
    measured.forward(0)
    assert measured.kept() == {0: 30}

"""`--states 8bit`: trains as with fp32 moments, keeps a quarter of them, and goes on from any checkpoint of either."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW

from meshrun import Experiment, UserError, mesh
from meshrun.kernels.eightbit import Eight
from meshrun.parallel.how import How
from meshrun.train.interval import Every
from meshrun.train.loop import Trainer
from meshrun.train.recovery import Keeping
from meshrun.train.states import in_eight_bits
from tests.ranks import run_on_ranks
from tests.train.small import small


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 96), nn.Tanh(), nn.Linear(96, 96), nn.Tanh(), nn.Linear(96, 3))


def experiment(steps: int = 12, **changes: Any) -> Experiment:
    """One matrix of it is large enough for 8 bits."""
    return small(48, 8, steps, model=net, optimizer=lambda parameters: AdamW(parameters, lr=1e-2), **changes)


def trained(layout: str, how: How, folder: Path | None = None, steps: int = 12, **changes: Any) -> Trainer:
    mesh.use(mesh.Meeting(layout=layout, device="cpu"))
    keeping = Keeping(folder, every=Every(steps=6)) if folder is not None else None
    trainer = Trainer(experiment(steps, **changes), mesh.start(), how=how, keeping=keeping, workers=0)
    trainer.resume()
    trainer.train()
    return trainer


def moments(trainer: Trainer) -> dict[str, list[Any]]:
    state = trainer.optimizer.state
    return {
        each.name: [state[each.parameter][key] for key in ("exp_avg", "exp_avg_sq")] for each in trainer.placed.shards
    }


LARGE = "2.weight"
EIGHT = How(states="8bit")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "layout", [pytest.param(each, marks=pytest.mark.ranks(n)) for each, n in (("dp=1", 1), ("dp=2", 2), ("fsdp=2", 2))]
)
def test_it_trains_as_with_moments_in_fp32(layout: str, precision: Any):
    plain, mine = (trained(layout, how, precision=precision) for how in (How(), EIGHT))
    assert mine.totals.losses == pytest.approx(plain.totals.losses, rel=0.02)
    assert mine.totals.losses[:2] == pytest.approx(plain.totals.losses[:2], rel=1e-5), "the first update is the same"
    for name, kept in moments(mine).items():
        small_one = name != LARGE
        assert all(isinstance(each, Tensor if small_one else Eight) for each in kept), name
    part = next(each.parameter for each in mine.placed.shards if each.name == LARGE)
    assert sum(each.codes.nbytes + each.scales.nbytes for each in moments(mine)[LARGE]) < 0.27 * 2 * part.nbytes
    if precision == "bf16":
        assert all(
            each.copy is None or torch.equal(each.copy.detach(), each.parameter.detach().bfloat16())
            for each in mine.placed.shards
        )


@pytest.mark.usefixtures("alone")
def test_a_resumed_training_is_bit_for_bit_the_one_that_went_on(tmp_path: Path):
    whole = trained("dp=1", EIGHT)
    trained("dp=1", EIGHT, tmp_path, steps=6)
    resumed = trained("dp=1", EIGHT, tmp_path)
    assert resumed.totals.losses == whole.totals.losses
    for name, kept in moments(whole).items():
        for mine, its in zip(moments(resumed)[name], kept, strict=True):
            assert type(mine) is type(its)
            if isinstance(mine, Eight):
                assert torch.equal(mine.codes, its.codes) and torch.equal(mine.scales, its.scales)


@pytest.mark.usefixtures("alone")
def test_either_kind_of_moments_goes_on_from_a_checkpoint_of_the_other(tmp_path: Path):
    plain = trained("dp=1", How())
    for number, (first, then) in enumerate(((EIGHT, How()), (How(), EIGHT))):
        folder = tmp_path / str(number)
        trained("dp=1", first, folder, steps=6)
        resumed = trained("dp=1", then, folder)
        assert resumed.totals.losses == pytest.approx(plain.totals.losses, rel=0.02)
        assert isinstance(moments(resumed)[LARGE][0], Eight if then is EIGHT else Tensor)


def on_shards(folder: Path, wanted: list[float]) -> None:
    assert trained("fsdp=2", EIGHT, folder).totals.losses == pytest.approx(wanted, rel=0.02)


@pytest.mark.usefixtures("alone")
def test_shards_go_on_from_the_checkpoint_of_one_process(tmp_path: Path):
    whole = trained("dp=1", EIGHT)
    trained("dp=1", EIGHT, tmp_path, steps=6)
    run_on_ranks(__file__, "on_shards", 2, {"folder": tmp_path, "wanted": whole.totals.losses}, 60)


@pytest.mark.usefixtures("alone")
def test_other_optimizers_are_refused_in_a_sentence():
    with pytest.raises(
        UserError, match=r"the optimizer is SGD, but only the moments of torch's own AdamW and Adam.*--states"
    ):
        Trainer(small(20, 5), mesh.start(), how=EIGHT)
    parameter = nn.Parameter(torch.zeros(3))
    with pytest.raises(UserError, match=r"the optimizer is AdamW with amsgrad, but only"):
        in_eight_bits(AdamW([parameter], amsgrad=True))

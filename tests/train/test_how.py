"""What changes how a step is computed changes nothing else: recomputation, compression, statistics over all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import _get_work_registry_size as unwaited

from meshrun import Here, UserError, mesh
from meshrun.layout import parse
from meshrun.parallel.how import How
from meshrun.train.loop import Trainer
from tests.train.small import plainly, points, small, start_on_cpu
from tests.train.whole import Result, assert_same, by_one_process, program, trained


def on(*layouts: str) -> Any:
    """Runs a test once on each of these layouts."""
    cases = [pytest.param(each, marks=pytest.mark.ranks(parse(each).size), id=each) for each in layouts]
    return pytest.mark.parametrize("layout", cases)


@pytest.fixture
def wanted() -> Result:
    return by_one_process("small_llama")


@on("fsdp=2", "pp=2")
@pytest.mark.parametrize("level", ["full", "every-2", "selective"])
def test_recomputed_activations_are_those_that_were_forgotten(layout: str, level: str, wanted: Result):
    """Dropout would show it: drawn anew, the second pass would not be the first."""
    mesh.use(mesh.Meeting(layout=layout, device="cpu"))
    assert_same(trained(program("small_llama"), How(recompute=level)), wanted)


@on("pp=2:zb", "cp=2")
def test_recomputation_goes_with_every_other_axis(layout: str, wanted: Result):
    mesh.use(mesh.Meeting(layout=layout, device="cpu"))
    assert_same(trained(program("small_llama"), How(recompute="full")), wanted)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("level", ["full", "every-2", "selective"])
def test_nothing_that_tp_sends_is_left_unwaited_by_a_segment_that_is_computed_again(level: str, wanted: Result):
    """Torch keeps what nobody has waited for until the process ends: memory would grow with every step."""
    mesh.use(mesh.Meeting(layout="tp=2", device="cpu"))
    assert_same(trained(program("small_llama"), How(recompute=level)), wanted)
    assert unwaited() == 0


@pytest.mark.parametrize("level", ["full", "selective"])
@pytest.mark.usefixtures("alone")
def test_what_is_computed_twice_in_bf16_is_what_is_computed_once(level: str):
    """The last norm of this model is a segment by itself, and in bf16 it is another kernel than torch's own choice."""
    once, twice = (trained(program("small_llama", precision="bf16"), How(recompute=each)) for each in ("none", level))
    assert once.losses == twice.losses and once.grad_norms == twice.grad_norms


class Counting(nn.Module):
    """Counts its forward passes."""

    calls: list[int]

    def __init__(self, number: int) -> None:
        super().__init__()
        self.layer, self.number = nn.Linear(5, 5), number

    def forward(self, x: Tensor) -> Tensor:
        Counting.calls[self.number] += 1
        return torch.tanh(self.layer(x))


@pytest.mark.parametrize(
    "level, passes",
    [("none", [1, 1, 1, 1]), ("full", [2, 2, 2, 2]), ("every-2", [1, 2, 1, 2]), ("every-3", [1, 1, 2, 1])],
)
def test_a_level_says_which_segments_are_computed_twice(alone: Here, level: str, passes: list[int]):
    Counting.calls = [0] * 4
    experiment = small(20, 6, steps=1, model=lambda: nn.Sequential(*(Counting(number) for number in range(4))))
    list(Trainer(experiment, alone, how=How(recompute=level)).steps())
    assert Counting.calls == passes


def test_a_level_that_is_none_is_refused(alone: Here):
    with pytest.raises(
        UserError, match=r"recompute is 'some'; it must be auto, none, full, selective, or every-K.*--recomp"
    ):
        Trainer(small(20, 6), alone, how=How(recompute="some"))


COMPRESSED_STEPS = 14  # PowerSGD sends the first ten as they are


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["fp16", "bf16", "powersgd"])
def test_compressed_gradients_train_nearly_as_exact_ones(kind: str):
    def wide() -> nn.Module:
        return nn.Sequential(nn.Linear(5, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 3))

    experiment = small(
        40, 12, COMPRESSED_STEPS, model=wide, optimizer=lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9)
    )
    plain = plainly(experiment)
    exact = plain.losses
    trainer = Trainer(experiment, start_on_cpu(2), how=How(compress=kind))
    list(trainer.steps())
    losses = trainer.totals.losses
    assert losses[0] == pytest.approx(exact[0], rel=1e-6), "sums of losses are never rounded"
    assert losses == pytest.approx(exact, rel=1e-2)
    assert losses[1:] != pytest.approx(exact[1:], rel=1e-7), "something must have been compressed"
    assert trainer.totals.grad_norms == pytest.approx(plain.grad_norms, rel=0.1)


def with_statistics() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


def statistics(trainer: Trainer) -> list[Tensor]:
    """The running ones, as this rank has them."""
    return [each.clone() for name, each in trainer.model.named_buffers() if "running" in name]


@on("dp=2", "fsdp=2", "dp=2,fsdp=2")
def test_statistics_over_all_ranks_are_those_of_one_process(layout: str):
    """Seven samples: the ranks' shares differ, and so do their weights in the mean."""
    mesh.use(mesh.Meeting(layout=layout, device="cpu"))
    experiment = small(21, 7, model=with_statistics)
    trainer = Trainer(experiment, mesh.start(), how=How(sync_batchnorm=True))
    list(trainer.steps())
    plain = plainly(experiment)
    assert trainer.totals.losses == pytest.approx(plain.losses, rel=1e-5)
    assert trainer.totals.grad_norms == pytest.approx(plain.grad_norms, rel=1e-5)
    running = [plain.weights["1.running_mean"], plain.weights["1.running_var"]]
    for found, wanted in zip(statistics(trainer), running, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


@on("dp=2", "fsdp=2", "dp=2,fsdp=2")
def test_without_them_each_rank_norms_its_own_samples_and_all_end_with_the_same_statistics(layout: str):
    mesh.use(mesh.Meeting(layout=layout, device="cpu"))
    here = mesh.start()
    experiment = small(30, 10, model=with_statistics, evals={"val": points(5, seed=9)})
    trainer = Trainer(experiment, here)
    losses = trainer.train()["losses"]
    assert losses != pytest.approx(plainly(experiment).losses, rel=1e-4), "the samples must tell the two apart"
    everyone = here.gathered([each.tolist() for each in statistics(trainer)])
    assert everyone == [everyone[0]] * here.size

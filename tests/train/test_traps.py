"""Combinations in which torch's own parts train on wrong numbers without a word, held against one process."""

from __future__ import annotations

import pytest
import torch

from meshrun import mesh
from meshrun.parallel.placed import Placed
from meshrun.train.loop import Trainer
from tests.train.whole import Result, assert_same, by_one_process, program, trained


@pytest.fixture
def wanted() -> Result:
    return by_one_process("small_llama")


@pytest.mark.ranks(4)
@pytest.mark.parametrize("layout", ["pp=2:zb,fsdp=2:zero3", "pp=2:zb,fsdp=2:zero1"])
def test_gradients_of_weights_that_are_put_off_survive_the_sharding_of_parameters(layout: str, wanted: Result):
    """Where parameters are whole only for a moment, a gradient that is computed later can be added to nothing."""
    mesh.use(mesh.Meeting(layout=layout, device="cpu"))
    here = mesh.start()
    lost: set[str] = set()

    def look(_: int, placed: Placed) -> None:
        found = {each.name for each in placed.shards if each.parameter.grad is not None and each.parameter.grad.any()}
        empty = {each.name for each in placed.shards if each.parameter.numel() == 0}
        lost.update({each.name for each in placed.shards} - found - empty)

    found = trained(program("small_llama"), inspect=look)
    somewhere = [set(each) for each in here.gathered(sorted(lost))]
    assert not set.intersection(*somewhere), "a gradient that is 0 on all ranks is lost"
    assert_same(found, wanted)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("variant", "micro"), [("zero1", 1), ("zero2", 2), ("zero3", 1)])
def test_whole_parameters_that_are_kept_over_micro_batches_are_not_used_after_the_update(
    variant: str, micro: int, wanted: Result
):
    mesh.use(mesh.Meeting(layout=f"fsdp=2:{variant}", device="cpu"))
    assert_same(trained(program("small_llama", micro=micro)), wanted)


@pytest.mark.ranks(2)
def test_the_first_forward_pass_after_an_update_sees_it():
    """A rate so large that the loss of the second step tells old weights from new ones."""
    mesh.use(mesh.Meeting(layout="fsdp=2:zero1", device="cpu"))
    here = mesh.start()
    losses = []
    for rate in (1e-12, 1.0):
        experiment = program("small_llama", 2, micro=1, optimizer=lambda p, rate=rate: torch.optim.SGD(p, lr=rate))
        trainer = Trainer(experiment, here)
        list(trainer.steps())
        losses.append(trainer.totals.losses)
    assert losses[0][0] == losses[1][0] and abs(losses[0][1] - losses[1][1]) > 1e-3


@pytest.mark.ranks(2)
def test_initial_values_of_a_split_model_are_not_the_same_on_every_rank():
    """DTensor draws the same numbers on all ranks of a CPU mesh: parts of a matrix would be copies of each other."""
    mesh.use(mesh.Meeting(layout="tp=2", device="cpu"))
    here = mesh.start()
    placed = Trainer(program("small_llama", 1), here).placed
    split = [each for each in placed.shards if each.copies == 1]
    assert len(split) >= 8, "products of every block and the vocabulary"
    for each in split:
        first, second = here.gathered(each.parameter.detach().tolist())
        assert first != second, each.name

"""Sharded models: no rank holds more than its part, and parameters of every kind train as in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode

from meshrun import Here, mesh
from meshrun.layout import parse
from meshrun.parallel.build import build
from meshrun.parallel.dtensor import is_dtensor
from meshrun.parallel.fsdp import accumulating, settle
from meshrun.parallel.how import How
from meshrun.parallel.placed import Placed
from meshrun.train.loop import Trainer
from tests.programs import encoder, small_llama
from tests.train.small import Course, difference, plainly, small
from tests.train.whole import program, trained

TOLERANCE = 1e-6


def on(*layouts: str) -> Any:
    """Runs a test once on each of these layouts."""
    cases = [pytest.param(each, marks=pytest.mark.ranks(parse(each).size), id=each) for each in layouts]
    return pytest.mark.parametrize("layout", cases)


def start(layout: str) -> Here:
    mesh.use(mesh.Meeting(layout=layout, device="cpu"))
    return mesh.start()


def bytes_of(tensors: Any) -> int:
    return sum(each.numel() * each.element_size() for each in tensors)


def held(placed: Placed) -> int:
    """Bytes of parameters in this rank's memory, seen from the model and not from the list of shards."""
    locals_ = [each.to_local() if hasattr(each, "to_local") else each for each in placed.model.parameters()]
    return bytes_of({each.untyped_storage().data_ptr(): each for each in locals_ if each.numel()}.values())


@on("fsdp=2", "fsdp=2:zero1", "fsdp=4:zero2", "dp=2,fsdp=2")
def test_after_the_build_no_rank_holds_more_than_its_part(layout: str):
    here = start(layout)
    experiment = small_llama.experiment()
    whole = bytes_of(experiment.model().parameters())
    placed = build(experiment, here, How())
    # Every dimension of this model is one that four ranks divide.
    assert bytes_of(each.parameter for each in placed.shards) == held(placed) == whole // here.layout.fsdp
    assert {each.copies for each in placed.shards} == {here.layout.dp}


@on("pp=2,fsdp=2")
def test_a_stage_is_sharded_too(layout: str):
    here = start(layout)
    experiment = small_llama.experiment()
    placed = build(experiment, here, How())
    whole = bytes_of(experiment.model().parameters())
    assert sum(here.gathered(bytes_of(each.parameter for each in placed.shards))) == whole
    assert max(here.gathered(held(placed))) < 0.4 * whole


@on("fsdp=2", "fsdp=2:zero1", "fsdp=2,tp=2", "pp=2,fsdp=2", "dp=2,fsdp=2")
def test_a_model_begins_with_the_weights_that_one_process_draws(layout: str):
    here = start(layout)
    experiment = encoder.experiment()
    found = {name: each.clone() for name, each in build(experiment, here, How()).weights()}
    torch.manual_seed(experiment.seed)
    wanted = experiment.model().state_dict()
    if here.rank == 0:
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            assert torch.equal(found[name], value), name
    else:
        assert not found


def course(trainer: Trainer) -> Course:
    for _ in trainer.steps():
        pass
    weights = {name: each.clone() for name, each in trainer.placed.weights()}
    return Course(trainer.totals.losses, trainer.totals.grad_norms, weights)


def assert_trains_plainly(here: Here, model: Any, **changes: Any) -> dict[str, Tensor]:
    """Returns the weights that rank 0 ends with."""
    experiment = small(20, 7, model=model, **changes)
    found, wanted = course(Trainer(experiment, here)), plainly(experiment)
    # A weight in two places is there once, under its first name; ranks other than the first have none.
    names = [name for name, _ in model().named_parameters()] if here.rank == 0 else []
    wanted.weights = {name: wanted.weights[name] for name in names}
    assert difference(found, wanted) < TOLERANCE
    return found.weights


def decaying(parameters: Any) -> torch.optim.Optimizer:
    """Decay moves every parameter that has a gradient, even one of 0: a made-up 0 would show."""
    return torch.optim.SGD(parameters, lr=0.3, momentum=0.9, weight_decay=0.1)


LAYOUTS = on("fsdp=2", "fsdp=2:zero1", "fsdp=4", "dp=2,fsdp=2")


class Temperature(nn.Module):
    """A parameter without dimensions, which torch's fsdp does not cut."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x / self.value


@LAYOUTS
def test_parameters_that_the_ranks_do_not_divide_are_exact(layout: str):
    """Three rows for four ranks: one of them holds nothing. One number: each of them holds it."""

    def odd() -> nn.Module:
        return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3), Temperature())

    here = start(layout)
    placed = build(small(20, 7, model=odd), here, How())
    assert (
        sum(here.gathered(bytes_of(each.parameter for each in placed.shards)))
        == here.layout.dp * 4 * 100 + here.size * 4
    )
    assert_trains_plainly(here, odd)


class Tied(nn.Module):
    """One matrix in two places, one of them inside a segment."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(2))
        self.last = nn.Linear(5, 5)
        self.last.weight = self.blocks[0][0].weight
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(self.last(x))


@LAYOUTS
def test_a_weight_in_two_places_stays_one(layout: str):
    here = start(layout)
    placed = build(small(20, 7, model=Tied), here, How())
    names = [each.name for each in placed.shards]
    assert "blocks.0.0.weight" in names and "last.weight" not in names
    assert_trains_plainly(here, Tied)


class Frozen(nn.Module):
    """A layer, and half of another, that are not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(5, 3)
        self.blocks[0].requires_grad_(False)
        self.head.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@LAYOUTS
def test_a_frozen_parameter_stays_as_it_is_and_is_written_with_the_others(layout: str):
    here = start(layout)
    placed = build(small(20, 7, model=Frozen), here, How())
    assert {each.name for each in placed.shards} == {"blocks.1.0.weight", "blocks.1.0.bias", "head.weight"}
    weights = assert_trains_plainly(here, Frozen, optimizer=decaying)
    if here.rank == 0:
        torch.manual_seed(4)
        assert torch.equal(weights["blocks.0.0.weight"], Frozen().blocks[0][0].weight)


class Idle(nn.Module):
    """A layer takes no part in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(2))
        self.idle, self.head = nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@LAYOUTS
def test_a_parameter_without_a_part_in_the_loss_stays_as_it_is(layout: str):
    here = start(layout)
    weights = assert_trains_plainly(here, Idle, optimizer=decaying)
    if here.rank == 0:
        torch.manual_seed(4)
        assert torch.equal(weights["idle.weight"], Idle().idle.weight)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("variant", "sent"), [("zero1", [0, 0, 1]), ("zero2", [1, 1, 1]), ("zero3", [1, 1, 1])])
def test_gradients_are_sent_after_each_micro_batch_but_under_zero1_after_the_last(variant: str, sent: list[int]):
    start("fsdp=2")
    model = fully_shard(nn.Linear(4, 2))
    found = []
    for last in (False, False, True):
        accumulating(model, variant, last)
        with CommDebugMode() as counted:
            model(torch.ones(3, 4)).sum().backward()
        found.append(sum(many for kind, many in counted.get_comm_counts().items() if "reduce_scatter" in str(kind)))
    assert found == sent


@pytest.mark.ranks(2)
def test_what_a_forward_pass_has_left_whole_is_let_go_of_before_an_update():
    """As of a part of the model that the loss does not use; the update changes the parts alone."""
    start("fsdp=2")
    model = fully_shard(nn.Linear(4, 2), reshard_after_forward=False)
    model(torch.ones(3, 4))
    assert not is_dtensor(model.weight)
    settle(model)
    assert is_dtensor(model.weight)


@pytest.mark.ranks(2)
def test_what_is_kept_whole_for_how_long_changes_no_number():
    results = []
    for variant in ("zero1", "zero2", "zero3"):
        mesh._here = None  # the next layout of the same ranks
        start(f"fsdp=2:{variant}")
        results.append(trained(program("small_llama", 3)))
    for other in results[1:]:
        assert other.losses == pytest.approx(results[0].losses, rel=1e-6)
        assert other.grad_norms == pytest.approx(results[0].grad_norms, rel=1e-6)


@pytest.mark.ranks(2)
def test_parameters_kept_on_the_host_train_the_same():
    here = start("fsdp=2")
    found = course(Trainer(small(20, 7), here, how=How(offload=True)))
    wanted = plainly(small(20, 7))
    if here.rank:
        found.weights, wanted.weights = {}, {}
    assert difference(found, wanted) < TOLERANCE

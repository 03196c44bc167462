"""Model on the mesh: the same weights everywhere, random numbers of each rank's own, inputs as the model takes them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from meshrun import Experiment, Here, Loss, UserError, mesh
from meshrun.parallel import values
from meshrun.parallel.build import build
from meshrun.parallel.how import How
from meshrun.parallel.placed import Placed, call


def start_on_cpu(size: int) -> Here:
    mesh.use(mesh.Meeting(device="cpu"))
    here = mesh.start()
    assert here.size == size
    return here


def built(make, here: Here, seed: int = 0) -> Placed:
    """The model on this rank, of an experiment that is never run."""
    experiment = Experiment(
        model=make,
        train=[(torch.ones(3), torch.ones(2))],
        loss=lambda outputs, _: Loss(outputs.sum(), 1),
        optimizer=torch.optim.SGD,
        batch=1,
        steps=1,
        seed=seed,
    )
    return build(experiment, here, How())


class DrawnElsewhere(nn.Module):
    """Its weights come from a generator that no seed of ours reaches; some are not contiguous, one has no size."""

    def __init__(self) -> None:
        super().__init__()
        drawn = np.random.default_rng(dist.get_rank()).normal(size=(4, 3))
        self.weight = nn.Parameter(torch.tensor(drawn).t())
        self.scale = nn.Parameter(torch.tensor(float(dist.get_rank())))
        self.register_buffer("steps", torch.tensor(dist.get_rank()))
        self.register_buffer("mask", torch.tensor([dist.get_rank() == 0]))


@pytest.mark.ranks(3)
def test_all_ranks_start_from_the_weights_of_rank_0():
    here = start_on_cpu(3)
    state = {name: value.tolist() for name, value in built(DrawnElsewhere, here).model.state_dict().items()}
    wanted = torch.tensor(np.random.default_rng(0).normal(size=(4, 3))).t().tolist()
    assert here.gathered(state) == [{"weight": wanted, "scale": 0.0, "steps": 0, "mask": [True]}] * 3


@pytest.mark.ranks(2)
def test_the_seed_decides_the_weights_on_any_number_of_ranks():
    here = start_on_cpu(2)
    torch.manual_seed(5)
    wanted = nn.Linear(3, 2)
    torch.manual_seed(77 + here.rank)
    model = built(lambda: nn.Linear(3, 2), here, seed=5).model
    assert torch.equal(model.weight, wanted.weight)
    assert not torch.equal(built(lambda: nn.Linear(3, 2), here, seed=6).model.weight, wanted.weight)


@pytest.mark.ranks(3)
def test_ranks_draw_numbers_of_their_own_while_they_train():
    """Dropout that leaves out the same units on every rank would make their samples alike."""
    here = start_on_cpu(3)
    draws = []
    for seed in (0, 1):
        built(lambda: nn.Linear(3, 2), here, seed)
        draws += here.gathered(torch.rand(4).tolist())
    assert len({tuple(draw) for draw in draws}) == 6


@pytest.mark.ranks(2)
def test_ranks_that_compute_the_same_samples_draw_the_same_numbers():
    """What a model draws by itself is part of the forward pass, which tp's ranks compute together."""
    mesh.use(mesh.Meeting(device="cpu", layout="tp=2"))
    here = mesh.start()
    built(lambda: nn.Linear(3, 2), here)
    first, second = here.gathered(torch.rand(4).tolist())
    assert first == second


@pytest.mark.ranks(2)
def test_the_same_run_draws_the_same_numbers_again():
    here = start_on_cpu(2)
    built(lambda: nn.Linear(3, 2), here, seed=3)
    first = torch.rand(4)
    built(lambda: nn.Linear(3, 2), here, seed=3)
    assert torch.equal(first, torch.rand(4))


@pytest.mark.ranks(2)
def test_a_model_that_is_no_module_is_refused():
    with pytest.raises(UserError, match=r"Experiment\(model=…\) returned int; it must return a torch nn.Module"):
        built(lambda: 3, start_on_cpu(2))


class TwoInputs(nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a - b


def test_inputs_are_spread_over_the_models_arguments():
    a, b = torch.tensor(5.0), torch.tensor(3.0)
    assert call(TwoInputs(), (a, b)) == call(TwoInputs(), [a, b]) == call(TwoInputs(), {"b": b, "a": a}) == 2
    assert call(nn.Identity(), a) == 5


class Mixed(nn.Module):
    """Tied weights, statistics, a table that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(40, 30), nn.BatchNorm1d(30)
        self.head = nn.Linear(30, 40)
        self.head.weight = self.embed.weight
        self.register_buffer("places", torch.arange(30.0) / 7, persistent=False)


UNFIT = [
    (lambda: torch.jit.script(nn.Linear(3, 2)), "of torch.jit, whose modules cannot be laid out on a mesh; return the"),
    (lambda: nn.LazyLinear(2), "'weight' of the model has no shape yet, since its module is lazy; give its sizes"),
    (lambda: nn.Linear(3, 2, device="meta"), "'weight' of the model is on the meta device, so that it has no values"),
]


@pytest.mark.ranks(1)
def test_a_model_that_cannot_be_trained_is_refused_in_a_sentence():
    here = start_on_cpu(1)
    for make, said in UNFIT:
        with pytest.raises(UserError, match=said):
            built(make, here)


@pytest.fixture
def as_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Here]:
    """On a GPU a model is laid out first and filled then; here the host is laid out for."""
    made = values.made
    monkeypatch.setattr(values, "made", lambda experiment, _: made(experiment, torch.device("cuda")))
    yield start_on_cpu(1)
    mesh.finish()
    mesh.use(mesh.Meeting())


def test_values_that_are_drawn_for_a_gpu_are_those_of_the_constructor(as_for_a_gpu: Here):
    model = built(Mixed, as_for_a_gpu, seed=5).model
    torch.manual_seed(5)
    plain = Mixed()
    assert model.head.weight is model.embed.weight
    for found, wanted in (
        (model.named_parameters(), plain.named_parameters()),
        (model.named_buffers(), plain.named_buffers()),
    ):
        for (name, a), (also, b) in zip(found, wanted, strict=True):
            assert name == also and torch.equal(a, b), name


@pytest.mark.parametrize(("make", "said"), UNFIT)
def test_a_model_that_cannot_be_trained_is_refused_for_a_gpu_too(
    as_for_a_gpu: Here, make: Callable[[], nn.Module], said: str
):
    with pytest.raises(UserError, match=said):
        built(make, as_for_a_gpu)


class Elsewhere(nn.Module):
    """Has its parameters and a buffer in other places too, a note on one, and a table that it moves by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.table = nn.Linear(4, 4), torch.arange(4.0)
        self.register_buffer("scale", torch.full((4,), 3.0))
        self.layer.weight.no_decay = True
        weight, scale = self.layer.weight, self.scale
        self.other = lambda: (weight, scale)

    def _apply(self, fn: Any, recurse: bool = True) -> Elsewhere:
        super()._apply(fn, recurse)
        self.table = fn(self.table)
        return self


def test_what_a_constructor_does_with_its_parameters_holds_on_a_gpu(as_for_a_gpu: Here):
    model = built(Elsewhere, as_for_a_gpu, seed=5).model
    assert model.layer.weight.no_decay is True
    weight, scale = model.other()
    assert weight is model.layer.weight and scale is model.scale and scale.tolist() == [3.0] * 4
    assert model.table.tolist() == [0.0, 1.0, 2.0, 3.0]
    weight.sum().backward()
    assert model.layer.weight.grad is not None


class Hooked(nn.Module):
    """Draws also where no seed of ours reaches."""

    def __init__(self, hook: Callable[[nn.Parameter], object]) -> None:
        super().__init__()
        self.layer, self.shift = nn.Linear(4, 4), random.random() + np.random.rand()
        self.kept = hook(self.layer.weight)


def by_hook(weight: nn.Parameter) -> None:
    weight.register_hook(lambda gradient: gradient * 0)


def by_late_hook(weight: nn.Parameter) -> None:
    def clear(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.zero_()

    weight.register_post_accumulate_grad_hook(clear)


def by_graph(weight: nn.Parameter) -> object:
    """Of the node that adds up its gradients."""
    node = weight.expand_as(weight).grad_fn.next_functions[0][0]
    node.register_prehook(lambda gradients: (gradients[0] * 0,))
    return lambda: node


@pytest.mark.parametrize("hook", [by_hook, by_late_hook, by_graph])
def test_hooks_of_a_constructor_are_called_on_a_gpu(as_for_a_gpu: Here, hook: Callable[[nn.Parameter], object]):
    random.seed(1)
    np.random.seed(1)
    wanted = random.random() + np.random.rand()
    random.seed(1)
    np.random.seed(1)
    model = built(lambda: Hooked(hook), as_for_a_gpu, seed=5).model
    assert model.shift == wanted
    model.layer(torch.ones(2, 4)).sum().backward()
    assert model.layer.weight.grad.count_nonzero() == 0 and model.layer.bias.grad.count_nonzero() == 4


@pytest.mark.gpu
def test_on_a_gpu_the_weights_are_those_of_the_host():
    mesh.use(mesh.Meeting(device="cuda"))
    try:
        model = built(lambda: nn.Sequential(nn.Linear(6000, 6000), nn.Linear(6000, 2)), mesh.start(), seed=5).model
    finally:
        mesh.finish()
        mesh.use(mesh.Meeting())
    torch.manual_seed(5)
    plain = nn.Sequential(nn.Linear(6000, 6000), nn.Linear(6000, 2))
    for (name, found), wanted in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert found.is_cuda and torch.equal(found.cpu(), wanted), name


def test_what_is_one_parameter_under_two_names_gets_memory_once():
    with torch.device("meta"):
        part = nn.ModuleDict(
            {"embed": nn.Embedding(4, 3), "head": nn.Linear(3, 4, bias=False), "other": nn.Linear(3, 4)}
        )
    part["head"].weight = part["embed"].weight
    values.allocate({0: part}, torch.device("cpu"))
    assert part["head"].weight is part["embed"].weight and part["other"].weight is not part["embed"].weight
    assert not any(each.is_meta for each in part.parameters())


@pytest.mark.parametrize(("kind", "refused"), [(torch.complex128, True), (torch.complex64, False)])
def test_a_model_that_no_checkpoint_can_hold_is_refused_before_it_trains(kind: torch.dtype, refused: bool):
    model = nn.Module()
    model.register_buffer("phase", torch.zeros(1, dtype=kind))
    if refused:
        with pytest.raises(
            UserError, match="'phase' of the model is of type complex128, which checkpoints cannot hold"
        ):
            values.refuse_other(model, has_values=True)
    else:
        values.refuse_other(model, has_values=True)
    model.register_buffer("phase", torch.zeros(1, dtype=kind), persistent=False)
    values.refuse_other(model, has_values=True)

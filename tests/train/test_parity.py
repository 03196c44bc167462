"""One result: however the ranks share a step, it is the step of plain torch on one process with the whole batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from meshrun import Here, RunFailed, token_cross_entropy
from meshrun.data.order import Order, slice_of
from meshrun.train.loop import Trainer
from tests.train.small import CLIP, batch_of, difference, on_ranks, plainly, small, start_on_cpu, trained

TOLERANCE = 1e-6


def assert_same_on_all_ranks(weights: dict[str, Tensor]) -> None:
    for name, value in weights.items():
        first = value.clone()
        dist.broadcast(first, src=0)
        assert torch.equal(first, value), name


def test_one_process_trains_as_plain_torch_does(alone: Here):
    experiment = small(20, 7, micro=3)
    plain = plainly(experiment)
    assert difference(trained(Trainer(experiment, alone)), plain) < TOLERANCE
    assert min(plain.grad_norms[:3]) > CLIP, "the comparison must see the clipping"


@on_ranks(2, 3, 4)
def test_ranks_train_as_one_process_does(ranks: int):
    experiment = small(36, 12)
    course = trained(Trainer(experiment, start_on_cpu(ranks)))
    assert difference(course, plainly(experiment)) < TOLERANCE
    assert_same_on_all_ranks(course.weights)


@on_ranks(2, 3)
def test_a_batch_that_the_ranks_do_not_divide_is_exact(ranks: int):
    experiment = small(21, 7)
    assert difference(trained(Trainer(experiment, start_on_cpu(ranks))), plainly(experiment)) < TOLERANCE


@pytest.mark.ranks(3)
def test_a_batch_smaller_than_the_number_of_ranks_is_exact():
    experiment = small(8, 2)
    course = trained(Trainer(experiment, start_on_cpu(3)))
    assert difference(course, plainly(experiment)) < TOLERANCE
    assert_same_on_all_ranks(course.weights)


@on_ranks(3, 4)
def test_a_last_batch_with_fewer_samples_than_ranks_is_exact(ranks: int):
    experiment = small(10, 4, steps=9)
    assert [len(Order(10, 4).batch_ids(step)) for step in range(3)] == [4, 4, 2]
    course = trained(Trainer(experiment, start_on_cpu(ranks)))
    assert difference(course, plainly(experiment)) < TOLERANCE
    assert_same_on_all_ranks(course.weights)


@on_ranks(2, 3)
def test_micro_batches_of_every_size_are_exact(ranks: int):
    here = start_on_cpu(ranks)
    for micro in range(1, 9):
        experiment = small(17, 8, micro=micro)
        assert difference(trained(Trainer(experiment, here)), plainly(experiment)) < TOLERANCE, f"micro {micro}"


class Phrases:
    """Sequences whose number of counted tokens goes from none to all of them."""

    LENGTHS = (12, 1, 0, 2, 12, 1, 3, 0, 11, 1, 1, 5)

    def __init__(self) -> None:
        self.tokens = torch.randint(0, 9, (12, 13), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        targets = self.tokens[index, 1:].clone()
        targets[self.LENGTHS[index] :] = -100
        return self.tokens[index, :-1], targets


def mean_over_tokens(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())


@on_ranks(2, 3)
def test_ragged_token_counts_do_not_bias_the_loss(ranks: int):
    experiment = small(
        12,
        5,
        train=Phrases(),
        loss=token_cross_entropy,
        model=lambda: nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 9)),
    )
    plain = plainly(experiment, mean_over_tokens)
    for micro in (None, 1, 2):
        changed = replace(experiment, micro=micro)
        assert difference(trained(Trainer(changed, start_on_cpu(ranks))), plain) < TOLERANCE
    assert difference_of_a_mean_of_means(experiment.model, ranks) > 0.01, "the data must tell the two means apart"


def difference_of_a_mean_of_means(make, ranks: int) -> float:
    """How wrong the first step's gradient is when each rank divides by its own count, as plain DDP would."""
    data, ids = Phrases(), Order(12, 5, 4).batch_ids(0)
    gradients = []
    for parts in ([ids], [slice_of(ids, part, ranks) for part in range(ranks)]):
        torch.manual_seed(4)
        model = make()
        losses = [mean_over_tokens(model(x), y) for x, y in (batch_of(data, part.tolist()) for part in parts)]
        torch.stack([loss for loss in losses if not loss.isnan()]).mean().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    exact, biased = gradients
    return float((exact - biased).norm() / exact.norm())


class Experts(nn.Module):
    """The second expert is used for samples above a threshold only, and another layer never."""

    def __init__(self, threshold: float) -> None:
        super().__init__()
        self.threshold = threshold
        self.first, self.second = nn.Linear(5, 3), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        chosen = (x[:, 4] > self.threshold).nonzero()[:, 0]
        out = self.first(x)
        return out.index_add(0, chosen, self.second(x[chosen])) if len(chosen) else out


class Idle(Experts):
    """All samples use both experts, and none the layer `idle`."""

    def __init__(self) -> None:
        super().__init__(threshold=-100)
        self.idle = nn.Linear(2, 2)


def decaying(parameters) -> torch.optim.Optimizer:
    """Decay and momentum move every parameter that has a gradient, even one of 0: a made-up 0 would show."""
    return torch.optim.SGD(parameters, lr=0.3, momentum=0.9, weight_decay=0.1)


@on_ranks(2, 3)
def test_a_parameter_without_a_part_in_the_loss_stays_as_it_is(ranks: int):
    experiment = small(20, 6, model=Idle, optimizer=decaying)
    course = trained(Trainer(experiment, start_on_cpu(ranks)))
    plain = plainly(experiment)
    assert difference(course, plain) < TOLERANCE
    torch.manual_seed(experiment.seed)
    assert torch.equal(course.weights["idle.weight"], Idle().idle.weight)


def users_by_step(threshold: float, ranks: int, steps: int) -> list[list[bool]]:
    """Whether each rank's part of each step has a sample for the second expert."""
    data, order = small(20, 6).train, Order(20, 6, 4)
    parts = [[slice_of(order.batch_ids(step), part, ranks) for part in range(ranks)] for step in range(steps)]
    return [[any(data[int(i)][0][4] > threshold for i in part) for part in step] for step in parts]


@on_ranks(2)
@pytest.mark.parametrize("micro", [None, 1, 2])
def test_a_parameter_that_one_rank_uses_in_the_first_step_is_exact(ranks: int, micro: int | None):
    threshold = 2.5
    assert users_by_step(threshold, 2, 4) == [[False, True], [False, False], [False, True], [False, False]]
    experiment = small(20, 6, model=lambda: Experts(threshold), optimizer=decaying, micro=micro)
    assert difference(trained(Trainer(experiment, start_on_cpu(ranks))), plainly(experiment)) < TOLERANCE


@on_ranks(2)
def test_a_parameter_that_only_some_micro_batches_use_is_exact(ranks: int):
    """Every rank has a gradient in the first step, but not from each of its micro-batches."""
    threshold = 0.0
    assert users_by_step(threshold, 2, 1) == [[True, True]]
    experiment = small(20, 6, model=lambda: Experts(threshold), optimizer=decaying, micro=1)
    assert difference(trained(Trainer(experiment, start_on_cpu(ranks))), plainly(experiment)) < TOLERANCE


class Capricious(nn.Module):
    """Leaves its second layer out from the third forward pass on."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.calls = nn.Linear(5, 3), nn.Linear(5, 3), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.first(x) + self.second(x) if self.calls < 3 else self.first(x)


@on_ranks(2)
def test_a_parameter_that_drops_out_later_ends_the_run_with_its_name(ranks: int):
    """It is the last step: nothing after it would notice that gradients were not averaged."""
    trainer = Trainer(small(20, 6, steps=3, model=Capricious), start_on_cpu(ranks))
    with pytest.raises(RunFailed, match=r"on rank \d did not use all parameters.*: second.weight, second.bias"):
        trained(trainer)
    assert len(trainer.totals.losses) == 2


def gradient_collectives(here: Here, micro: int | None) -> list[int]:
    """All-reduces in each step after the first, as torch's profiler sees them."""
    found = []
    updates = Trainer(small(24, 12, micro=micro), here).steps()
    next(updates)
    for _ in range(3):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            next(updates)
        found.append(sum(event.name == "gloo:all_reduce" for event in profile.events()))
    return found


@pytest.mark.ranks(2)
def test_gradients_are_reduced_once_a_step_however_many_micro_batches_there_are():
    here = start_on_cpu(2)
    once = gradient_collectives(here, None)
    assert min(once) == 1, "all gradients of so small a model, and the loss's sum and count with them"
    for micro in (1, 2, 5):
        assert gradient_collectives(here, micro) == once


@pytest.mark.ranks(2)
def test_a_scaled_learning_rate_is_that_of_an_optimizer_made_with_it():
    here = start_on_cpu(2)
    scaled = trained(Trainer(small(20, 6), here, lr_scale=0.5))
    halved = plainly(small(20, 6, optimizer=lambda p: torch.optim.SGD(p, lr=0.15, momentum=0.9)))
    assert difference(scaled, halved) < TOLERANCE

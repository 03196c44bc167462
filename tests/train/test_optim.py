"""The optimizer's side: schedules, each group's own rate, the fused form, and the scaling of gradients."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer, RMSprop

from meshrun import Here, Schedule, UserError, mesh
from meshrun.errors import SharedError
from meshrun.layout import parse
from meshrun.parallel.how import How
from meshrun.train.loop import Trainer
from meshrun.train.optim import (
    clipped_now,
    clipped_on_device,
    make,
    norm_now,
    norm_on_device,
    refuse_unless_separate,
    set_learning_rate,
)
from meshrun.train.refusals import refuse_settings
from meshrun.train.update import scale
from tests.compare import difference
from tests.train.small import plainly, small, small_net, trained


def rates(schedule: Schedule, steps: int) -> list[float]:
    return [schedule.factor(step, steps) for step in range(steps)]


def test_warm_up_rises_evenly_and_ends_at_the_full_rate():
    assert rates(Schedule("constant", warmup=4), 7) == pytest.approx([0.2, 0.4, 0.6, 0.8, 1, 1, 1])


def test_cosine_falls_from_the_full_rate_to_the_final_one():
    factors = rates(Schedule("cosine", final=0.1), 11)
    assert factors == pytest.approx([0.1 + 0.9 * (1 + math.cos(math.pi * step / 10)) / 2 for step in range(11)])
    assert factors[0] == 1 and factors[5] == pytest.approx(0.55) and factors[-1] == pytest.approx(0.1)


def test_linear_falls_evenly_after_the_warm_up():
    assert rates(Schedule("linear", warmup=2), 7) == pytest.approx([1 / 3, 2 / 3, 1, 0.75, 0.5, 0.25, 0])
    assert rates(Schedule("linear", final=0.5), 3) == pytest.approx([1, 0.75, 0.5])


def test_constant_stays_and_knows_no_final_rate():
    assert rates(Schedule("constant", final=0.3), 4) == [1, 1, 1, 1]


def test_a_warm_up_below_one_is_a_share_of_the_run():
    assert rates(Schedule("cosine", warmup=0.25), 40) == rates(Schedule("cosine", warmup=10), 40)
    assert rates(Schedule("linear", warmup=0.5), 8) == rates(Schedule("linear", warmup=4), 8)


def test_a_warm_up_of_one_is_one_step():
    assert rates(Schedule("constant", warmup=1), 4) == [0.5, 1.0, 1.0, 1.0]
    assert rates(Schedule("constant", warmup=0), 2) == [1.0, 1.0]


def test_a_run_shorter_than_its_warm_up_keeps_rising():
    assert rates(Schedule("cosine", warmup=9), 3) == pytest.approx([0.1, 0.2, 0.3])


def test_a_factor_never_leaves_its_range_beyond_the_last_step():
    assert Schedule("cosine", final=0.1).factor(50, 10) == pytest.approx(0.1)
    assert Schedule("linear", final=0.1).factor(50, 10) == pytest.approx(0.1)


def test_a_run_of_one_step_has_the_full_rate():
    assert [rates(Schedule(kind), 1) for kind in ("cosine", "linear", "constant")] == [[1], [1], [1]]


@pytest.mark.parametrize(
    "fields",
    [
        {"kind": "cosin"},
        *({"warmup": value} for value in (-1, math.nan, math.inf, "x", None)),
        *({"final": value} for value in (-1, math.nan, math.inf, "x", None)),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(fields: dict):
    ((name, value),) = fields.items()
    with pytest.raises(UserError, match=f"schedule {name} is .*{value}"):
        Schedule(**fields)


def two_groups(parameters) -> Optimizer:
    """Biases learn ten times as fast."""
    weights, biases = [p for p in parameters if p.dim() > 1], [p for p in parameters if p.dim() == 1]
    return SGD([{"params": weights, "lr": 0.01}, {"params": biases, "lr": 0.1}])


def test_a_schedule_scales_each_groups_own_rate(alone: Here):
    trainer = Trainer(small(20, 5, steps=4, optimizer=two_groups, schedule=Schedule("linear", final=0.4)), alone)
    seen = []
    for update in trainer.steps():
        seen.append([group["lr"] for group in trainer.optimizer.param_groups])
        assert update.learning_rate == seen[-1][0]
    wanted = [[0.01 * factor, 0.1 * factor] for factor in (1, 0.8, 0.6, 0.4)]
    assert seen == [pytest.approx(each) for each in wanted]


def test_any_function_of_step_and_steps_is_a_schedule(alone: Here):
    trainer = Trainer(small(20, 5, steps=3, optimizer=two_groups, schedule=lambda step, steps: step / steps), alone)
    assert [update.learning_rate for update in trainer.steps()] == pytest.approx([0, 0.01 / 3, 0.02 / 3])


def test_without_a_schedule_the_rate_stays(alone: Here):
    trainer = Trainer(small(20, 5, steps=3, optimizer=two_groups), alone)
    assert [update.learning_rate for update in trainer.steps()] == [0.01] * 3


def test_the_scale_of_a_changed_batch_multiplies_every_groups_rate():
    made = make(two_groups, list(nn.Linear(3, 2).parameters()), scale=4)
    assert [group["lr"] for group in made.param_groups] == pytest.approx([0.04, 0.4])


def test_a_schedule_goes_by_the_scaled_rate():
    made = make(two_groups, list(nn.Linear(3, 2).parameters()), scale=4)
    assert set_learning_rate(made, Schedule("linear"), 0, 5) == pytest.approx(0.04)
    set_learning_rate(made, lambda step, steps: step / steps, 1, 2)
    for wrong in (math.nan, math.inf, None, -1, -0.5, "x", "0.5", 10**400, [1]):
        said = f"schedule=…) returned {wrong!r:.200} for step 1 of 2; it must return a finite number of at least 0"
        with pytest.raises(UserError, match=re.escape(said)):
            set_learning_rate(made, lambda *_, wrong=wrong: wrong, 1, 2)
    assert [group["lr"] for group in made.param_groups] == pytest.approx([0.02, 0.2])


def test_a_schedule_that_ends_below_0_by_rounding_ends_at_0():
    made = make(two_groups, list(nn.Linear(3, 2).parameters()), scale=1)
    assert set_learning_rate(made, lambda *_: 1 - 0.1 * 3 - 0.7 - 1e-16, 1, 2) == 0


def test_a_factor_that_makes_rates_infinite_is_named():
    made = make(lambda given: SGD(given, lr=10.0), list(nn.Linear(3, 2).parameters()), scale=1)
    with pytest.raises(
        UserError, match=r"returned 1e\+308 for step 0 of 2, which makes a learning rate of 10 infinite"
    ):
        set_learning_rate(made, lambda *_: 1e308, 0, 2)


@pytest.mark.parametrize("rate", [math.nan, math.inf])
def test_a_learning_rate_that_is_no_number_is_refused(rate: float):
    with pytest.raises(UserError, match=f"the optimizer SGD has the learning rate {rate}; it must be a finite number"):
        make(lambda given: SGD(given, lr=rate), list(nn.Linear(3, 2).parameters()), scale=1)


@pytest.mark.parametrize("rate", [None, -0.1])
def test_a_learning_rate_that_torch_did_not_look_at_is_refused(rate: float | None):
    def sgd(given: list[nn.Parameter]) -> SGD:
        made = SGD(given, lr=0.1)
        made.param_groups[0]["lr"] = rate
        return made

    with pytest.raises(UserError, match=f"the optimizer SGD has the learning rate {rate}; it must be a finite number"):
        make(sgd, list(nn.Linear(3, 2).parameters()), scale=1)


class ByNorm(SGD):
    """Scales each tensor's update by the tensor's norm, as LARS does."""

    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for each in group["params"]:
                each.data -= group["lr"] * each.data.norm() * each.grad


class LaterByNorm(ByNorm):
    """Begins as SGD."""

    def step(self) -> None:  # type: ignore[override]
        self.steps = getattr(self, "steps", 0) + 1
        SGD.step(self) if self.steps < 3 else ByNorm.step(self)


class NeedsAModel(SGD):
    def step(self) -> None:  # type: ignore[override]
        raise TypeError("it needs the whole model")


@pytest.mark.parametrize("kind", [SGD, AdamW, RMSprop])
def test_optimizers_that_update_each_element_by_itself_go_with_parts_of_matrices(kind: Any):
    refuse_unless_separate(lambda parameters: kind(parameters, lr=0.1), parse("fsdp=2"))


@pytest.mark.parametrize("kind", [ByNorm, LaterByNorm, NeedsAModel])
def test_optimizers_that_need_whole_matrices_are_refused_where_ranks_hold_parts(kind: Any):
    said = rf"the optimizer {kind.__name__} does not update each element by itself, but on layout 'fsdp=2'"
    with pytest.raises(SharedError, match=said):
        refuse_unless_separate(lambda parameters: kind(parameters, lr=0.1), parse("fsdp=2"))


@pytest.mark.parametrize(("layout", "refused"), [("tp=2", True), ("fsdp=2", True), ("dp=2", False), ("pp=2", False)])
def test_such_optimizers_are_refused_on_all_layouts_that_cut_matrices(layout: str, refused: bool):
    experiment = small(4, 2, optimizer=lambda parameters: ByNorm(parameters, lr=0.1))
    if refused:
        with pytest.raises(SharedError, match=f"does not update each element by itself, but on layout '{layout}'"):
            refuse_settings(experiment, parse(layout), How())
    else:
        refuse_settings(experiment, parse(layout), How())


class ByWholeNorm(SGD):
    def step(self, closure: Any = None) -> None:
        norm = nn.utils.get_total_norm([each.grad for group in self.param_groups for each in group["params"]])
        for group in self.param_groups:
            for each in group["params"]:
                each.grad.div_(norm)
        super().step(closure)


class Shaken(SGD):
    def step(self, closure: Any = None) -> None:
        super().step(closure)
        with torch.no_grad():
            for each in self.param_groups[0]["params"]:
                each.add_(torch.randn_like(each), alpha=1e-3)


class VectorsByNorm(SGD):
    def step(self, closure: Any = None) -> None:
        for each in self.param_groups[0]["params"]:
            if each.dim() == 1:
                each.grad.div_(each.grad.norm())
        super().step(closure)


@pytest.mark.parametrize(
    ("kind", "layout", "what"),
    [
        (ByWholeNorm, "fsdp=2", "does not update each element by itself"),
        (ByWholeNorm, "pp=2", "does not update each parameter by itself"),
        (VectorsByNorm, "tp=2", "does not update each element by itself"),
        (Shaken, "dp=2", "draws random numbers, which are others on each rank"),
    ],
)
def test_optimizers_that_would_update_ranks_apart_are_refused(kind: Any, layout: str, what: str):
    before = torch.get_rng_state()
    with pytest.raises(SharedError, match=f"the optimizer {kind.__name__} {what}"):
        refuse_unless_separate(lambda parameters: kind(parameters, lr=0.1), parse(layout))
    assert torch.equal(before, torch.get_rng_state())


def by_depth(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return AdamW([{"params": [each], "lr": 0.1 / (1 + place)} for place, each in enumerate(parameters)], fused=True)


def frozen_net() -> nn.Module:
    model = small_net()
    model[0].requires_grad_(False)
    return model


def test_optimizers_that_tell_parameters_by_their_place_go_with_all_layouts():
    for layout in ("dp=2", "fsdp=2", "pp=2"):
        refuse_unless_separate(by_depth, parse(layout))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("changes", [{"optimizer": by_depth}, {"model": frozen_net}], ids=["by depth", "frozen"])
def test_stages_group_parameters_as_one_process_does_and_may_have_none_to_train(changes: dict[str, Any]):
    mesh.use(mesh.Meeting(layout="pp=2", device="cpu"))
    found, wanted = trained(Trainer(small(24, 8, **changes), mesh.start())), plainly(small(24, 8, **changes))
    assert difference((found.losses, found.grad_norms), (wanted.losses, wanted.grad_norms)) < 1e-5


@pytest.mark.ranks(1)
def test_what_the_optimizer_was_not_given_does_not_add_up():
    experiment = small(24, 8, optimizer=lambda parameters: SGD([p for p in parameters if p.dim() > 1], lr=0.3))
    trainer = Trainer(experiment, mesh.start())
    for _ in trainer.steps():
        assert all(each.parameter.grad is None for each in trainer.placed.shards)


def settings(optimizer: Callable[..., Optimizer], parameters: list[nn.Parameter]) -> tuple[object, object]:
    (group,) = make(optimizer, parameters, scale=1).param_groups
    return group.get("fused"), group.get("foreach")


@pytest.mark.parametrize("kind", [SGD, AdamW])
def test_an_optimizer_is_fused_where_the_user_has_not_chosen(kind: type[Optimizer]):
    parameters = list(nn.Linear(3, 2).parameters())
    assert settings(lambda p: kind(p, lr=0.1), parameters)[0] is True
    assert settings(lambda p: kind(p, lr=0.1, foreach=True), parameters) == (None, True)
    assert settings(lambda p: kind(p, lr=0.1, foreach=False), parameters) == (None, False)
    assert settings(lambda p: kind(p, lr=0.1, fused=False), parameters)[0] is False
    assert settings(lambda p: kind(p, lr=0.1, differentiable=True), parameters)[0] is None


def test_an_optimizer_that_cannot_be_fused_is_left_alone():
    parameters = list(nn.Linear(3, 2).parameters())
    assert settings(lambda p: RMSprop(p, lr=0.1), parameters)[0] is None
    assert settings(lambda p: AdamW(p, lr=torch.tensor(0.1)), parameters)[0] is None
    complex_ones = [nn.Parameter(torch.zeros(2, dtype=torch.complex64))]
    assert settings(lambda p: AdamW(p, lr=0.1), complex_ones)[0] is None


def test_a_fused_optimizer_computes_what_the_plain_one_does():
    models = [nn.Linear(3, 2) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    fused = make(lambda p: AdamW(p, lr=0.1), list(models[0].parameters()), scale=1)
    plain = AdamW(models[1].parameters(), lr=0.1, foreach=False)
    for _ in range(3):
        for model, optimizer in zip(models, (fused, plain), strict=True):
            model(torch.ones(4, 3)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(models[0].weight, models[1].weight)


def test_what_is_no_optimizer_is_refused():
    parameters = list(nn.Linear(3, 2).parameters())
    with pytest.raises(UserError, match=r"Experiment\(optimizer=…\) returned dict; it must return a torch Optimizer"):
        make(lambda _: {}, parameters, scale=1)  # type: ignore[arg-type,return-value]


def test_an_optimizer_that_needs_a_closure_is_refused():
    with pytest.raises(
        UserError, match=r"optimizer LBFGS computes the loss several times in a step \(its step\(\) needs"
    ):
        make(torch.optim.LBFGS, [nn.Parameter(torch.ones(2))], 1.0)


def test_an_optimizer_of_another_models_parameters_is_refused():
    def of_another_model(_: object) -> Optimizer:
        return SGD(nn.Linear(2, 2).parameters(), lr=0.1)

    with pytest.raises(UserError, match="returned an optimizer of other parameters than the model's"):
        make(of_another_model, [nn.Parameter(torch.ones(2))], 1.0)


def test_an_optimizer_without_a_learning_rate_is_refused():
    with pytest.raises(UserError, match="the optimizer Optimizer has no learning rate; each of its param_groups must"):
        make(lambda parameters: Optimizer(parameters, {}), [nn.Parameter(torch.ones(2))], 1.0)


def test_a_model_without_trainable_parameters_is_refused(alone: Here):
    def frozen() -> nn.Module:
        return nn.Linear(5, 3).requires_grad_(False)

    with pytest.raises(UserError, match="no parameter that requires a gradient"):
        Trainer(small(20, 5, model=frozen), alone)


def parameters_of(*sizes: int) -> list[nn.Parameter]:
    parameters = [nn.Parameter(torch.zeros(size)) for size in sizes]
    for number, each in enumerate(parameters):
        each.grad = torch.arange(1.0, 1 + each.numel()) * (number + 1)
    return parameters


def scaled_now(gradients: list[torch.Tensor], factor: float, clip: float | None) -> float:
    norm, whole = clipped_now(norm_now(gradients), factor, clip)
    scale(gradients, whole)
    return norm


def scaled_on_device(gradients: list[torch.Tensor], factor: float, clip: float | None) -> float:
    norm, whole = clipped_on_device(norm_on_device(gradients), torch.tensor(factor, dtype=torch.float64), clip)
    scale(gradients, whole)
    return norm.item()


@pytest.mark.parametrize("scaled", [scaled_now, scaled_on_device])
@pytest.mark.parametrize("clip", [None, 0.5, 1e9])
@pytest.mark.parametrize("factor", [1.0, 0.25, 3.0])
def test_gradients_are_scaled_then_clipped_as_torch_clips(
    scaled: Callable[[list[torch.Tensor], float, float | None], float], clip: float | None, factor: float
):
    ours, theirs = parameters_of(3, 5), parameters_of(3, 5)
    norm = scaled([each.grad for each in ours], factor, clip)
    for each in theirs:
        each.grad *= factor
    wanted = nn.utils.clip_grad_norm_(theirs, math.inf if clip is None else clip)
    assert norm == pytest.approx(wanted.item(), rel=1e-6)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, other.grad)


def test_a_rank_that_holds_no_gradient_scales_nothing_and_still_knows_the_norm():
    assert clipped_now(4.0, 0.5, clip=1.0)[0] == 2.0
    assert clipped_on_device(torch.tensor(4.0), torch.tensor(0.5), clip=1.0)[0].item() == 2.0
    scale([], 0.5)
    scale([], torch.tensor(0.5))


def test_a_norm_of_the_whole_mesh_decides_the_clipping_and_not_this_ranks_part():
    (gradient,) = (each.grad for each in parameters_of(2))
    own = norm_now([gradient])
    norm, factor = clipped_now(10.0, 1.0, clip=5.0)
    scale([gradient], factor)
    assert norm == 10.0
    assert norm_now([gradient]) == pytest.approx(own / 2, rel=1e-6)

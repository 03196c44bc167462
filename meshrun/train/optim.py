"""The optimizer's side of a step: its fused form, the learning rate, and the one factor of all gradients.

    optimizer = make(experiment.optimizer, parameters, scale=1.0)
    norm, factor = clipped_now(norm_now(gradients), factor, clip=1.0)

All gradients are multiplied once a step: to make them those of the mean loss, and to clip them.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from meshrun.errors import SharedError, UserError
from meshrun.experiment import Schedule
from meshrun.parallel.placed import norms

ROUNDING = 1e-6
"""How far below 0 a schedule may end by the rounding of its own formula; the rate is 0 then."""


def make(
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer], parameters: list[nn.Parameter], scale: float
) -> Optimizer:
    """The user's optimizer over these parameters, learning rates multiplied by `scale`, in its fastest form."""
    if not parameters:
        raise UserError("the model has no parameter that requires a gradient, so there is nothing to train")
    made = optimizer(parameters)
    if not isinstance(made, Optimizer):
        raise UserError(f"Experiment(optimizer=…) returned {type(made).__name__}; it must return a torch Optimizer")
    if not {id(each) for each in parameters} & {id(each) for group in made.param_groups for each in group["params"]}:
        raise UserError(
            "Experiment(optimizer=…) returned an optimizer of other parameters than the model's; it must update those "
            "that it is given, such as optimizer=lambda parameters: AdamW(parameters, lr=1e-3)"
        )
    if not all("lr" in group for group in made.param_groups):
        raise UserError(
            f"the optimizer {type(made).__name__} has no learning rate; each of its param_groups must have 'lr', which "
            f"its defaults can give: super().__init__(parameters, {{'lr': lr}})"
        )
    for rate in (group["lr"] for group in made.param_groups):
        if not isinstance(rate, int | float | Tensor) or not math.isfinite(rate) or rate < 0:
            shown = rate.item() if isinstance(rate, Tensor) and rate.numel() == 1 else rate
            raise UserError(
                f"the optimizer {type(made).__name__} has the learning rate {shown!r:.60}; it must be a finite number "
                f"of at least 0"
            )
    closure = inspect.signature(made.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UserError(
            f"the optimizer {type(made).__name__} computes the loss several times in a step (its step() needs a "
            f"closure), but an Experiment is trained with one loss a step; use another, such as AdamW, or your own loop"
        )
    for group in made.param_groups:
        group["lr"] = group["lr"] * scale
        group["initial_lr"] = group["lr"]
        # One kernel for all parameters, where the optimizer has it and the user has not chosen otherwise.
        if "fused" in group and group["fused"] is None and group.get("foreach") is None and _can_fuse(group):
            group["fused"] = True
    return made


def refuse_unless_by_element(optimizer: Callable[[Iterable[nn.Parameter]], Optimizer], layout: str) -> None:
    """Refuse an optimizer that treats a matrix as a whole where ranks hold parts of it, by trying it on two halves."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(6, 4, generator=generator)
    whole, halves = nn.Parameter(start.clone()), [nn.Parameter(half.clone()) for half in start.chunk(2)]
    try:
        for _ in range(3):
            whole.grad = torch.randn(6, 4, generator=generator)
            for half, gradient in zip(halves, whole.grad.chunk(2), strict=True):
                half.grad = gradient.clone()
        one, two = optimizer([whole]), optimizer(halves)
        for _ in range(3):
            one.step()
            two.step()
        same = torch.allclose(whole, torch.cat(list(halves)), rtol=1e-5, atol=1e-7)
    except TypeError:
        same = False  # its step wants something that only a whole model can give
    if not same:
        name = type(optimizer([nn.Parameter(start.clone())])).__name__
        raise SharedError(
            f"the optimizer {name} does not update each element by itself, but on layout '{layout}' a rank holds only "
            f"parts of matrices; use one that does, such as AdamW or SGD, or a layout of dp and pp only (--layout)"
        )


def _can_fuse(group: dict[str, object]) -> bool:
    tensors = group["params"]
    plain = not group.get("differentiable") and not isinstance(group["lr"], Tensor)
    return plain and isinstance(tensors, list) and all(p.is_floating_point() and not p.is_complex() for p in tensors)


def set_learning_rate(
    optimizer: Optimizer, schedule: Schedule | Callable[[int, int], float] | None, step: int, steps: int
) -> float:
    """Set every group's rate for this update; returns the first group's."""
    if schedule is not None:
        factor = _factor(schedule, step, steps)
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * factor
            if not isinstance(group["lr"], Tensor) and not math.isfinite(group["lr"]):
                raise UserError(
                    f"Experiment(schedule=…) returned {factor:g} for step {step} of {steps}, which makes a learning "
                    f"rate of {float(group['initial_lr']):g} infinite; it must return a smaller number"
                )
    return float(optimizer.param_groups[0]["lr"])


def _factor(schedule: Schedule | Callable[[int, int], float], step: int, steps: int) -> float:
    """What learning rates are multiplied by for this update; a UserError where the schedule returns no such number."""
    given = schedule.factor(step, steps) if isinstance(schedule, Schedule) else schedule(step, steps)
    factor = math.nan
    if not isinstance(given, str | bytes | bytearray):
        with contextlib.suppress(TypeError, ValueError, OverflowError, RuntimeError):  # as tensors may raise
            factor = float(given)
    if not (math.isfinite(factor) and factor > -ROUNDING):
        raise UserError(
            f"Experiment(schedule=…) returned {given!r:.200} for step {step} of {steps}; it must return a finite "
            f"number of at least 0 that learning rates are multiplied by"
        )
    return max(0.0, factor)


def norm_now(gradients: list[Tensor]) -> float:
    """The norm of all gradients together."""
    return math.hypot(*norms(gradients).tolist())


def clipped_now(norm: float, factor: float, clip: float | None) -> tuple[float, float]:
    """The norm of gradients that are multiplied by `factor`, and what to multiply them by so that it is `clip` at most.

    Both are one pass over the gradients.
    """
    norm *= factor
    if clip is not None:
        factor *= min(1.0, clip / (norm + 1e-6))  # torch's own clipping adds as much
    return norm, factor


def norm_on_device(gradients: list[Tensor]) -> Tensor:
    """The norm of gradients on a GPU, where looking at a number would make the host wait for it."""
    return torch.linalg.vector_norm(norms(gradients))


def clipped_on_device(norm: Tensor, factor: Tensor, clip: float | None) -> tuple[Tensor, Tensor]:
    """What `clipped_now` does, without looking."""
    norm = norm * factor
    return norm, factor if clip is None else factor * torch.clamp(clip / (norm + 1e-6), max=1.0)

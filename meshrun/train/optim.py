"""The optimizer's side of a step: its fused form, the learning rate, and the one factor of all gradients.

    optimizer = make(experiment.optimizer, parameters, scale=1.0)
    norm, factor = clipped_now(norm_now(gradients), factor, clip=1.0)

All gradients are multiplied once a step: to make them those of the mean loss, and to clip them.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from meshrun.errors import SharedError, UserError
from meshrun.experiment import Schedule
from meshrun.layout import Layout
from meshrun.mesh import Here
from meshrun.parallel.placed import Placed, norms

ROUNDING = 1e-6
"""How far below 0 a schedule may end by the rounding of its own formula; the rate is 0 then."""


class Elsewhere(nn.Parameter):
    """Stands for a parameter of another stage, so that users group parameters alike on all stages; it is one number."""


def elsewhere(parameter: Tensor, device: torch.device) -> Elsewhere:
    return Elsewhere(torch.zeros((), dtype=parameter.dtype, device=device).expand(parameter.shape))


def trained_by(placed: Placed, here: Here) -> list[nn.Parameter]:
    """What the model trains, in its order; only what is on this rank has values."""
    own: dict[str, Sequence[nn.Parameter]] = {}
    for shard in placed.shards:
        own[shard.name] = [*own.get(shard.name, ()), shard.parameter]
    if here.layout.pp > 1:
        trained = {name: each for name, each in placed.whole.named_parameters() if each.requires_grad}
        own = {name: [elsewhere(each, here.device)] for name, each in trained.items()} | own
    return [each for parameters in own.values() for each in parameters]


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
    _forget_elsewhere(made)
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


def _forget_elsewhere(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        for each in (each for each in group["params"] if isinstance(each, Elsewhere)):
            optimizer.state.pop(each, None)
        group["params"] = [each for each in group["params"] if not isinstance(each, Elsewhere)]


def refuse_unless_separate(optimizer: Callable[[Iterable[nn.Parameter]], Optimizer], layout: Layout) -> None:
    """Refuse an optimizer that makes other updates of what ranks hold, by trying it on a matrix and a vector."""
    if layout.size == 1:
        return
    for shapes in ((6, 4), (6,)), ((6, 4),):  # some are for matrices alone
        with contextlib.suppress(Exception), contextlib.redirect_stdout(io.StringIO()):
            name, objection = _objection(optimizer, layout, shapes)
            break
    else:
        return  # what is wrong with it is told where it is made
    if objection is not None:
        raise SharedError(f"the optimizer {name} {objection} (--layout)")


def _objection(
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer], layout: Layout, shapes: Sequence[tuple[int, ...]]
) -> tuple[str, str | None]:
    """The optimizer's name, and what it does that cannot go with this layout."""
    generator = torch.Generator().manual_seed(0)
    start, *gradients = [[torch.randn(shape, generator=generator) for shape in shapes] for _ in range(4)]
    name = ""
    cut = layout.fsdp * layout.tp > 1

    def on(rank: int, tensors: Sequence[Tensor]) -> list[Tensor | None]:
        """What the one or the other of two ranks has of these."""
        if cut:
            return [each.chunk(2)[rank] for each in tensors]
        return [each if layout.pp == 1 or number % 2 == rank else None for number, each in enumerate(tensors)]

    def updated(start: Sequence[Tensor | None], *gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        nonlocal name
        held = [
            elsewhere(torch.zeros(shape), torch.device("cpu")) if each is None else nn.Parameter(each.clone())
            for each, shape in zip(start, shapes, strict=True)
        ]
        made = optimizer(held)
        name = type(made).__name__
        _forget_elsewhere(made)
        for step in gradients:
            for each, gradient in zip(held, step, strict=True):
                each.grad = None if gradient is None else gradient.clone()
            made.step()
        return [None if isinstance(each, Elsewhere) else each.detach() for each in held]

    with torch.random.fork_rng(devices=[]):
        before = torch.get_rng_state()
        try:
            whole = [each for each in updated(start, *gradients) if each is not None]
            drawn = not torch.equal(before, torch.get_rng_state())
            ranks = [updated(on(rank, start), *(on(rank, each) for each in gradients)) for rank in range(2)]
            pairs = [pair for rank, held in enumerate(ranks) for pair in zip(on(rank, whole), held, strict=True)]
            same = all(a is None or b is None or torch.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in pairs)
        except TypeError:  # its step wants something that only a whole model can give
            drawn, same = False, not cut
    if drawn:
        return name, f"draws random numbers, which are others on each rank of layout '{layout}'; use one that does not"
    if same:
        return name, None
    if cut:
        return name, (
            f"does not update each element by itself, but on layout '{layout}' a rank holds only parts of matrices; "
            f"use one that does, such as AdamW or SGD (Experiment(clip=…) clips by the whole norm), or a layout of dp "
            f"and pp only"
        )
    return name, (
        f"does not update each parameter by itself, but on layout '{layout}' a rank holds only some of them; use one "
        f"that does, such as AdamW or SGD (Experiment(clip=…) clips by the whole norm), or a layout of dp only"
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

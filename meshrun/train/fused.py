"""The step of an optimizer that torch does in one kernel, without all that torch does before it gets there.

    step = Fused(optimizer)              # of SGD, Adam or AdamW, where `is_bare`
    step()                               # what optimizer.step() does, to the last bit
    step_of(optimizer)                   # optimizer.step(), also where the fused SGD gives up

For every parameter of every step torch asks anew what its state is, of which type and on which device. For a model of
sixty small tensors that takes longer than a GPU needs for the step. Here the lists that the kernel gets are made once,
from what torch's own first step has left, and again as soon as anything in the optimizer's state is another object.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

ODD = ("amsgrad", "maximize", "differentiable", "capturable")
"""What makes a step another one than is known here."""

Group = dict[str, Any]
Lists = dict[str, list[Tensor]]
"""Of one group: what the optimizer keeps of each parameter, by the names of torch."""


def is_hooked(optimizer: Optimizer) -> bool:
    """Whether somebody else has a part in its step."""
    own = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    return bool(own or _global_optimizer_pre_hooks or _global_optimizer_post_hooks or "step" in vars(optimizer))


def is_bare(optimizer: Optimizer) -> bool:
    """Whether a step is the fused kernel of fp32 tensors on one device, and no more."""
    groups, scaled = optimizer.param_groups, hasattr(optimizer, "grad_scale") or hasattr(optimizer, "found_inf")
    if type(optimizer) not in (SGD, Adam, AdamW) or scaled or not all(map(is_usual, groups)):
        return False
    parameters = [each for group in groups for each in group["params"]]
    return _alike(parameters, parameters[0].device) and all(type(each) is nn.Parameter for each in parameters)


def is_usual(group: Group) -> bool:
    """Whether a group is changed by the fused kernel, with plain numbers and nothing odd."""
    odd = any(group.get(each) for each in ODD)
    numbers = [each for key, each in group.items() if key not in ("params", "betas")]
    tensors = any(isinstance(each, Tensor) for each in (*numbers, *group.get("betas", ())))
    return bool(group.get("fused")) and not odd and not tensors


def _alike(tensors: Sequence[Tensor], device: torch.device) -> bool:
    return all(
        each.dtype == torch.float32 and each.device == device and each.layout == torch.strided for each in tensors
    )


@dataclass(frozen=True)
class _Seen:
    """What an optimizer has, as torch's last step has left it."""

    parameters: list[list[Tensor]]
    lists: list[Lists]
    kept: list[Any]


class Fused:
    """The step of one optimizer."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        by_sgd = isinstance(optimizer, SGD)
        self._names = ("momentum_buffer",) if by_sgd else ("step", "exp_avg", "exp_avg_sq")
        self._change = _sgd if by_sgd else _adam
        self._seen: _Seen | None = None

    def __call__(self) -> None:
        optimizer, seen = self._optimizer, self._seen
        groups = optimizer.param_groups
        gradients = [[each.grad for each in group["params"]] for group in groups]
        if is_hooked(optimizer) or any(each is None for found in gradients for each in found):
            step_of(optimizer)  # what is seen may still hold after it
        elif seen is None or not self._holds(seen):
            step_of(optimizer)
            self._seen = self._look(gradients)
        else:
            with torch.no_grad():
                for group, parameters, found, lists in zip(groups, seen.parameters, gradients, seen.lists, strict=True):
                    if parameters:
                        self._change(group, parameters, found, lists)

    def _holds(self, seen: _Seen) -> bool:
        """Whether all is still the same: who loads a state puts others in its place."""
        groups = self._optimizer.param_groups
        return (
            len(groups) == len(seen.parameters)
            and all(map(_same, (group["params"] for group in groups), seen.parameters))
            and all(map(_has_its_lists, groups, seen.lists))
            and _same(self._kept(), seen.kept)
        )

    def _kept(self) -> list[Any]:
        return [state.get(name) for state in self._optimizer.state.values() for name in self._names]

    def _look(self, gradients: list[list[Tensor]]) -> _Seen | None:
        """What is there after a step; None where the kernel could not take it."""
        groups, state = self._optimizer.param_groups, self._optimizer.state
        parameters = [list(group["params"]) for group in groups]
        device = next(each.device for own in parameters for each in own)
        lists: list[Lists] = []
        for group, own, found in zip(groups, parameters, gradients, strict=True):
            names = self._names if group.get("momentum") != 0 else ()
            lists.append({name: [state[each].get(name) for each in own] for name in names})
            held = [each for kept in lists[-1].values() for each in kept]
            if not all(isinstance(each, Tensor) for each in held) or not _alike([*held, *found], device):
                return None
        return _Seen(parameters, lists, self._kept())


def _same(found: Sequence[Any], before: Sequence[Any]) -> bool:
    return len(found) == len(before) and all(map(is_, found, before))


def _has_its_lists(group: Group, lists: Lists) -> bool:
    """Whether a group wants what it was given; without momentum, SGD keeps nothing."""
    return bool(lists) == (group.get("momentum") != 0)


def _sgd(group: Group, parameters: list[Tensor], gradients: list[Any], lists: Lists) -> None:
    torch._fused_sgd_(
        parameters,
        gradients,
        lists.get("momentum_buffer", []),
        weight_decay=group["weight_decay"],
        momentum=group["momentum"],
        lr=group["lr"],
        dampening=group["dampening"],
        nesterov=group["nesterov"],
        maximize=False,
        is_first_step=False,
    )


def _adam(group: Group, parameters: list[Tensor], gradients: list[Any], lists: Lists) -> None:
    beta1, beta2 = group["betas"]
    kernel = torch._fused_adamw_ if group["decoupled_weight_decay"] else torch._fused_adam_
    torch._foreach_add_(lists["step"], 1)
    kernel(
        parameters,
        gradients,
        lists["exp_avg"],
        lists["exp_avg_sq"],
        [],
        lists["step"],
        lr=group["lr"],
        beta1=beta1,
        beta2=beta2,
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        amsgrad=False,
        maximize=False,
    )


def step_of(optimizer: Optimizer) -> None:
    """An optimizer's own step.

    The fused SGD wants a momentum of all parameters or of none, and fails at one whose first gradient comes later than
    that of others. Then this step is done in the form that does not mind.
    """
    try:
        optimizer.step()
    except TypeError:
        groups = optimizer.param_groups
        late = [group for group in groups if _begins_late(optimizer, group)]
        if not isinstance(optimizer, SGD) or not late:
            raise
        try:
            for group in late:
                group["fused"] = False
            # Those before the first of them have made their step already.
            optimizer.param_groups = groups[next(place for place, each in enumerate(groups) if each is late[0]) :]
            optimizer.step()
        finally:
            optimizer.param_groups = groups
            for group in late:
                group["fused"] = True


def _begins_late(optimizer: Optimizer, group: Group) -> bool:
    """Whether some of a group's parameters have a momentum and others do not."""
    states = [optimizer.state.get(each, {}) for each in group["params"] if each.grad is not None]
    has = {state.get("momentum_buffer") is not None for state in states}
    return bool(group.get("fused")) and bool(group.get("momentum")) and len(has) == 2

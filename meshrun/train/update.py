"""The change of the weights by a step's gradients, in the fastest way that this optimizer has here.

    update = fastest(optimizer, placed)
    norm = norm_now(update.gradients())
    update(factor)                       # one step of the optimizer, with all gradients multiplied by `factor`

Plainly: gradients of bf16 copies become fp32 ones of their masters, are scaled, the optimizer makes its step, and the
masters are rounded into the copies: five passes over memory. On a GPU with Triton, Adam and AdamW do all of it in one,
from the bf16 gradient. They then keep their state as torch's own fused form does, under the same names. Where all is
fp32, torch's own kernel is one pass too, and `fused` is a short way to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer

from meshrun.kernels.adamw import Rule, adamw_many_
from meshrun.kernels.here import available
from meshrun.parallel.masters import collect, spread
from meshrun.parallel.placed import Placed, Shard
from meshrun.train.fused import Fused, is_bare, is_hooked, is_usual, step_of


class Update(Protocol):
    """One step of an optimizer."""

    def gradients(self) -> list[Tensor]:
        """As the step will use them, each element of this rank's parts once."""

    def __call__(self, factor: float | Tensor) -> None:
        """Change the weights; `factor` is a number, or on a GPU a tensor that the host does not look at."""

    def change(self, shards: Sequence[Shard], group: dict[str, Any], factor: float | Tensor) -> None:
        """Change these weights alone, of one group of the optimizer, where they have gradients."""

    def forget(self) -> None:
        """Let go of all gradients."""


@dataclass(frozen=True)
class Plain:
    """Any optimizer's own step."""

    optimizer: Optimizer
    placed: Placed
    copied: list[Shard]
    """What has copies to be brought up to date."""
    fused: Fused | None
    """A shorter way to the same step, where there is one."""

    @classmethod
    def of(cls, optimizer: Optimizer, placed: Placed) -> Plain:
        on_gpu = bool(placed.shards) and all(each.parameter.is_cuda for each in placed.shards)
        fused = Fused(optimizer) if on_gpu and is_bare(optimizer) else None
        return cls(optimizer, placed, [each for each in placed.shards if each.copy is not None], fused)

    def gradients(self) -> list[Tensor]:
        self.placed.collect()
        return [each.parameter.grad for each in self.placed.shards if each.parameter.grad is not None]

    def __call__(self, factor: float | Tensor) -> None:
        if isinstance(factor, Tensor) or factor != 1.0:
            scale(self.gradients(), factor)
        else:
            self.placed.collect()
        if self.fused is not None:
            self.fused()
        else:
            step_of(self.optimizer)
        if self.copied:
            spread(self.copied)

    def change(self, shards: Sequence[Shard], group: dict[str, Any], factor: float | Tensor) -> None:
        collect(shards)
        scale([each.parameter.grad for each in shards if each.parameter.grad is not None], factor)
        groups, everyone = self.optimizer.param_groups, group["params"]
        try:
            self.optimizer.param_groups, group["params"] = [group], [each.parameter for each in shards]
            step_of(self.optimizer)
        finally:
            self.optimizer.param_groups, group["params"] = groups, everyone
        spread(shards)

    def forget(self) -> None:
        self.placed.collect()
        self.optimizer.zero_grad()
        for each in self.placed.shards:  # also what the optimizer was not given, which would add up
            each.parameter.grad = None


def scale(gradients: list[Tensor], factor: float | Tensor) -> None:
    """Multiply all, in one pass over them, and in none where nothing is to be changed."""
    if gradients and (isinstance(factor, Tensor) or factor != 1.0):
        torch._foreach_mul_(gradients, factor.to(gradients[0].dtype) if isinstance(factor, Tensor) else factor)


@dataclass(frozen=True)
class InOnePass:
    """Adam or AdamW where matrices have copies."""

    optimizer: Optimizer
    placed: Placed
    _counts: dict[nn.Parameter, tuple[Tensor, int]] = field(default_factory=dict)
    """How many steps a parameter has seen, as a number beside the tensor in which the optimizer's state has it."""

    def gradients(self) -> list[Tensor]:
        return [each.gradient for each in self.placed.shards if each.gradient is not None]

    def __call__(self, factor: float | Tensor) -> None:
        shards = {each.parameter: each for each in self.placed.shards}
        for group in self.optimizer.param_groups:
            self.change([shards[each] for each in group["params"]], group, factor)

    @torch.no_grad()
    def change(self, shards: Sequence[Shard], group: dict[str, Any], factor: float | Tensor) -> None:
        used = [(each, gradient) for each in shards if (gradient := each.gradient) is not None]
        parameters = [each.parameter for each, _ in used]
        states = [self._state(each) for each in parameters]
        self._count(parameters, states)
        by_step: dict[int, list[int]] = {}
        for place, each in enumerate(parameters):
            by_step.setdefault(self._counts[each][1], []).append(place)
        for step, places in by_step.items():
            self._change(
                [parameters[place] for place in places],
                [used[place][1] for place in places],
                [states[place]["exp_avg"] for place in places],
                [states[place]["exp_avg_sq"] for place in places],
                [used[place][0].copy for place in places],
                _rule(self.optimizer, group, step),
                factor.float() if isinstance(factor, Tensor) else factor,
            )

    def _change(
        self,
        parameters: Sequence[Tensor],
        gradients: Sequence[Tensor],
        exp_avgs: Sequence[Any],
        exp_avg_sqs: Sequence[Any],
        copies: Sequence[Tensor | None],
        rule: Rule,
        factor: float | Tensor,
    ) -> None:
        adamw_many_(parameters, gradients, exp_avgs, exp_avg_sqs, copies, rule, factor=factor)

    def _state(self, parameter: nn.Parameter) -> dict[str, Any]:
        """A parameter's state, made as torch's own fused form makes it."""
        state = self.optimizer.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return state

    def _count(self, used: list[nn.Parameter], states: list[dict[str, Any]]) -> None:
        """One step more, in the state and in the numbers; those of a state that was loaded are looked at once."""
        steps: list[Tensor] = [state["step"] for state in states]
        loaded = [
            (each, step)
            for each, step in zip(used, steps, strict=True)
            if each not in self._counts or self._counts[each][0] is not step
        ]
        if loaded:
            for (each, step), count in zip(loaded, torch.stack([step for _, step in loaded]).tolist(), strict=True):
                self._counts[each] = step, round(count)
        for each, step in zip(used, steps, strict=True):
            self._counts[each] = step, self._counts[each][1] + 1
        if steps:
            torch._foreach_add_(steps, 1)

    def forget(self) -> None:
        for each in self.placed.shards:
            each.parameter.grad = each.computed.grad = None


def fastest(optimizer: Optimizer, placed: Placed) -> Update:
    """How this optimizer's steps are made here."""
    plain = Plain.of(optimizer, placed)
    return InOnePass(optimizer, placed) if plain.copied and _is_known(optimizer, placed) else plain


def _is_known(optimizer: Optimizer, placed: Placed) -> bool:
    """Whether a step is Adam's or AdamW's and no more, on a GPU with Triton."""
    on_gpu = all(each.parameter.is_cuda and available(each.parameter.device) for each in placed.shards)
    known = type(optimizer) in (Adam, AdamW) and not is_hooked(optimizer)
    return known and on_gpu and all(map(is_usual, optimizer.param_groups))


def _rule(optimizer: Optimizer, group: dict[str, Any], step: int) -> Rule:
    beta1, beta2 = group["betas"]
    decoupled = bool(group.get("decoupled_weight_decay", type(optimizer) is AdamW))
    return Rule(group["lr"], beta1, beta2, group["eps"], group["weight_decay"], step, decoupled)

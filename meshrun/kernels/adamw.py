"""An update by Adam or AdamW that also scales the gradient and rounds the result into a copy for computing.

    rule = Rule(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, step=7)
    adamw_(master, gradient, exp_avg, exp_avg_sq, rule, copy=weight, factor=factor)
    adamw_many_(masters, gradients, exp_avgs, exp_avg_sqs, weights, rule, factor=factor)

`factor` multiplies the gradient first; as a number in
the GPU's memory it needs no look at it by the host. Where Triton runs, a large parameter is one pass over memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meshrun.kernels.here import available

LARGE = 1 << 16
"""Elements from which on a kernel of its own for a parameter pays: the host needs some 10 µs for each."""


@dataclass(frozen=True)
class Rule:
    """What one step of Adam does to a gradient."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int
    """From 1 on, as torch's is after its own increment."""
    decoupled: bool = True
    """AdamW's weight decay; without it the decay is part of the gradient, as Adam has it."""

    def numbers(self) -> dict[str, float]:
        """What a kernel multiplies and divides by, from the host's doubles."""
        return {
            "beta1": self.beta1,
            "rest1": 1 - self.beta1,
            "beta2": self.beta2,
            "rest2": 1 - self.beta2,
            "eps": self.eps,
            "decay": self.lr * self.weight_decay if self.decoupled else self.weight_decay,
            "step_size": self.lr / (1 - self.beta1**self.step),
            "root2": math.sqrt(1 - self.beta2**self.step),
        }


def adamw_(
    parameter: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    rule: Rule,
    *,
    copy: Tensor | None = None,
    factor: Tensor | float,
) -> None:
    """Update a parameter and its moments, all fp32, in place; `copy` gets the parameter, rounded to its type."""
    if runs_in_one_kernel(parameter, gradient, exp_avg, exp_avg_sq, copy):
        from meshrun.kernels import _adamw_triton

        factor = factor if isinstance(factor, Tensor) else float(factor)
        _adamw_triton.launch(parameter, gradient, exp_avg, exp_avg_sq, copy, factor, rule.numbers(), rule.decoupled)
        return
    gradient = gradient.to(parameter.dtype) * factor
    if rule.weight_decay and rule.decoupled:
        parameter.mul_(1 - rule.lr * rule.weight_decay)
    elif rule.weight_decay:
        gradient = gradient.add(parameter, alpha=rule.weight_decay)
    exp_avg.lerp_(gradient, 1 - rule.beta1)
    exp_avg_sq.mul_(rule.beta2).addcmul_(gradient, gradient, value=1 - rule.beta2)
    denominator = (exp_avg_sq.sqrt() / math.sqrt(1 - rule.beta2**rule.step)).add_(rule.eps)
    parameter.addcdiv_(exp_avg, denominator, value=-rule.lr / (1 - rule.beta1**rule.step))
    if copy is not None:
        copy.copy_(parameter)


def adamw_many_(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    copies: Sequence[Tensor | None],
    rule: Rule,
    *,
    factor: Tensor | float,
) -> None:
    """What `adamw_` does, for parameters of one device; small ones, and those with nothing to round, all at once."""
    rest: list[tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]] = []
    for each in zip(parameters, gradients, exp_avgs, exp_avg_sqs, copies, strict=True):
        parameter, gradient, exp_avg, exp_avg_sq, copy = each
        halves = copy is not None or gradient.dtype != torch.float32
        alone = halves and parameter.numel() >= LARGE and runs_in_one_kernel(*each)
        # torch's kernel for many wants all tensors of a parameter to lie in memory alike.
        if not alone and all(other.stride() == parameter.stride() for other in (gradient, exp_avg, exp_avg_sq)):
            rest.append(each)
            continue
        adamw_(parameter, gradient, exp_avg, exp_avg_sq, rule, copy=copy, factor=factor)
    if not rest:
        return
    # torch's kernel reads from memory which step it is.
    steps = [torch.full((), float(rule.step), device=rest[0][0].device)] * len(rest)
    fused = torch._fused_adamw_ if rule.decoupled else torch._fused_adam_
    fused(
        [parameter for parameter, *_ in rest],
        torch._foreach_mul([gradient.to(parameter.dtype) for parameter, gradient, *_ in rest], factor),
        [exp_avg for _, _, exp_avg, *_ in rest],
        [exp_avg_sq for *_, exp_avg_sq, _ in rest],
        [],
        steps,
        lr=rule.lr,
        beta1=rule.beta1,
        beta2=rule.beta2,
        weight_decay=rule.weight_decay,
        eps=rule.eps,
        amsgrad=False,
        maximize=False,
    )
    copied = [(copy, parameter) for parameter, *_, copy in rest if copy is not None]
    if copied:
        torch._foreach_copy_([copy for copy, _ in copied], [parameter for _, parameter in copied])


def runs_in_one_kernel(parameter: Tensor, gradient: Tensor, *others: Tensor | None) -> bool:
    """Whether Triton runs here, and element i of memory is the same element in all of these tensors."""
    if parameter.dtype != torch.float32 or not parameter.numel() or not available(parameter.device):
        return False
    dense = parameter.is_contiguous() or (
        parameter.dim() == 4 and parameter.is_contiguous(memory_format=torch.channels_last)
    )
    tensors = [gradient, *(each for each in others if each is not None)]
    return dense and all(each.stride() == parameter.stride() and each.is_cuda for each in tensors)

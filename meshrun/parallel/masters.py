"""bf16: matrices are stored as they are computed with, and what is trained and kept is their master in fp32.

    masters = shorten(model)              # its matrices are bf16 from now on; matrix -> master
    collect(shards)                       # gradients of the matrices -> of their masters, added up in fp32
    spread(shards)                        # masters -> matrices, after anything that has changed masters

So no step casts a matrix, and what flows between the layers is bf16 too. Vectors (norms, biases) and buffers stay fp32,
and autocast, which stays on, makes of them what an operation asks for. Where fsdp keeps shards in fp32 and gathers them
in bf16, the shard is the master, and nothing of this is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from meshrun.parallel.dtensor import is_dtensor
from meshrun.parallel.placed import Shard

_TAKE_NO_OTHER_TYPE = (nn.Bilinear, parametrize.ParametrizationList)
"""Modules that autocast knows nothing of: they want all that they compute with in one type."""


@torch.no_grad()
def shorten(*models: nn.Module) -> dict[nn.Parameter, nn.Parameter]:
    """Store the matrices of these models in bf16; returns the master of each. What is one under two names stays one."""
    masters: dict[nn.Parameter, nn.Parameter] = {}
    for model in models:
        for module in model.modules():
            if isinstance(module, _TAKE_NO_OTHER_TYPE):
                continue
            if type(module) is nn.RMSNorm:
                module.__class__ = _RMSNorm
            for parameter in module.parameters(recurse=False):
                if parameter not in masters and _is_matrix(parameter):
                    masters[parameter] = _shortened(parameter)
    return masters


class _RMSNorm(nn.RMSNorm):
    """One kernel from bf16 to bf16, which computes in fp32 inside; with weights of another type torch has only many."""

    def forward(self, x: Tensor) -> Tensor:
        if self.weight is None or x.dtype != torch.bfloat16:
            return super().forward(x)
        eps = torch.finfo(torch.float32).eps if self.eps is None else self.eps
        with torch.autocast(x.device.type, enabled=False):
            return nn.functional.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), eps)


def _is_matrix(parameter: nn.Parameter) -> bool:
    """Not what is a vector but for its shape, as the token that some models begin their sequences with."""
    return parameter.dtype == torch.float32 and sum(size > 1 for size in parameter.shape) > 1


def _shortened(parameter: nn.Parameter) -> nn.Parameter:
    """Make a parameter bf16, as the object that it is; returns its master, in the memory that it had."""
    master = nn.Parameter(local(parameter).detach(), requires_grad=parameter.requires_grad)
    short = master.detach().bfloat16()
    if is_dtensor(parameter):
        from torch.distributed.tensor import DTensor  # imported by then

        wrapped = DTensor.from_local(
            short,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
        torch.utils.swap_tensors(parameter, nn.Parameter(wrapped, requires_grad=parameter.requires_grad))
    else:
        parameter.data = short
        vars(master).update(vars(parameter))  # what the user has noted there, for the optimizer to look at
    # What is not trained is looked at only to be saved: it need not take up the GPU's memory.
    return master if master.requires_grad else nn.Parameter(master.detach().cpu(), requires_grad=False)


def local(tensor: Tensor) -> Tensor:
    """The memory that this rank holds of a tensor."""
    return tensor._local_tensor if is_dtensor(tensor) else tensor


def collect(shards: Iterable[Shard]) -> None:
    """Move gradients from the copies to their masters, to what was collected before."""
    for shard in shards:
        if shard.copy is not None and shard.copy.grad is not None:
            gradient, shard.copy.grad = shard.copy.grad, None
            add(shard.parameter, gradient)


def add(master: nn.Parameter, gradient: Tensor) -> None:
    """Add a gradient to a master's."""
    if master.grad is None:
        master.grad = gradient.to(master.dtype)
    else:
        master.grad.add_(gradient)


@torch.no_grad()
def spread(shards: Sequence[Shard]) -> None:
    """Round masters into their copies."""
    pairs = [(each.copy, each.parameter) for each in shards if each.copy is not None]
    if pairs:
        torch._foreach_copy_([copy for copy, _ in pairs], [master for _, master in pairs])


def collect_at_once(parameter: nn.Parameter, take: Callable[[Tensor], None]) -> None:
    """Let `take` have each gradient of a matrix as soon as it is computed; the matrix itself keeps none."""

    def taken(computed: Tensor) -> None:
        gradient, computed.grad = computed.grad, None
        if gradient is not None:  # else it is put off
            take(gradient)

    parameter.register_post_accumulate_grad_hook(taken)


def is_about_types(error: RuntimeError) -> bool:
    """Whether an operation failed since it was given tensors of different types."""
    text = str(error).lower()
    return "bfloat16" in text or "dtype" in text or "scalar type" in text


@torch.no_grad()
def lengthen(shards: Iterable[Shard]) -> None:
    """Let copies be their masters themselves, in their memory: for a model that does not compute with bf16 matrices."""
    for shard in shards:
        if shard.copy is not None:
            shard.copy.data = shard.parameter.detach().to(shard.copy.device)

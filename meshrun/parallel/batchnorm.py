"""Batch normalisation over the samples of all ranks, as if one process had them.

    sync_batchnorms(model, mesh["dp"].get_group())

torch's `SyncBatchNorm` needs GPUs. Here one all-reduce sums counts, values and squares, another one the gradients' own.
All ranks of the group must call the model equally often; a rank without samples calls it with a batch of none. The
gradients of weight and bias are those of the rank's own samples.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


def sync_batchnorms(model: nn.Module, group: dist.ProcessGroup) -> list[str]:
    """Let every batch norm of a model take the statistics of all ranks in training, and name them."""
    turned = []
    for name, module in model.named_modules():
        if (synced := SYNCED.get(type(module))) is not None:
            module.__class__ = synced
            # The group's name and not the group: modules must be copyable.
            module.group = group.group_name
            turned.append(name)
    return turned


class _Synced(nn.modules.batchnorm._BatchNorm):
    group: Any
    """The name of the ranks' process group."""

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return super().forward(input)
        self._check_input_dim(input)
        output, mean, deviations, count = _Normalised.apply(input, self.weight, self.bias, self.eps, self.group)
        if self.track_running_stats and self.running_mean is not None and self.running_var is not None:
            assert self.num_batches_tracked is not None
            self.num_batches_tracked.add_(1)
            share = 1 / self.num_batches_tracked if self.momentum is None else self.momentum
            with torch.no_grad():
                for running, now in ((self.running_mean, mean), (self.running_var, deviations / (count - 1))):
                    running.copy_(running * (1 - share) + now.to(running.dtype) * share)
        return output


class SyncedBatchNorm1d(_Synced, nn.BatchNorm1d):
    pass


class SyncedBatchNorm2d(_Synced, nn.BatchNorm2d):
    pass


class SyncedBatchNorm3d(_Synced, nn.BatchNorm3d):
    pass


SYNCED: dict[type[nn.Module], type[_Synced]] = {
    nn.BatchNorm1d: SyncedBatchNorm1d,
    nn.BatchNorm2d: SyncedBatchNorm2d,
    nn.BatchNorm3d: SyncedBatchNorm3d,
}


class _Normalised(torch.autograd.Function):
    """Normalised values; beside them the mean, the sum of squared deviations, and the count over all ranks."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, group: Any
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        mean, deviations, count = _statistics(x, group)
        # Doubles only between the ranks: values are normalised in the precision that torch itself uses.
        dtype = torch.promote_types(x.dtype, torch.float32)
        variance = (deviations / count).to(dtype)
        ctx.save_for_backward(x, weight, mean.to(dtype), (variance + eps).rsqrt(), count)
        ctx.group = group
        factor, summand = (None if each is None else each.to(dtype) for each in (weight, bias))
        output = F.batch_norm(x, mean.to(dtype), variance, factor, summand, training=False, eps=eps)
        ctx.mark_non_differentiable(mean, deviations, count)
        return output, mean, deviations, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, inverse, count = ctx.saved_tensors
        grad = grads[0].to(mean.dtype)
        dims = [dim for dim in range(x.dim()) if dim != 1]
        normal = (x - _channels(mean, x)) * _channels(inverse, x)
        own = torch.stack([grad.sum(dims), (grad * normal).sum(dims)])
        shares = (_sum(own.double(), ctx.group) / count).to(mean.dtype)
        scale = inverse if weight is None else inverse * weight
        flow = grad - _channels(shares[0], x) - normal * _channels(shares[1], x)
        wanted = ctx.needs_input_grad
        return (
            (flow * _channels(scale, x)).to(x.dtype) if wanted[0] else None,
            own[1].to(weight.dtype) if wanted[1] else None,
            own[0].to(weight.dtype) if wanted[2] else None,
            None,
            None,
        )


def _statistics(x: Tensor, group: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, sum of squared deviations from it, and count, over all ranks, for each channel.

    A rank's own are computed as torch does, without loss. Sums of squares travel as doubles, which lose nothing of fp32
    until the mean is some 10,000 times the standard deviation.
    """
    dims = [dim for dim in range(x.dim()) if dim != 1]
    channels, own = x.shape[1], x.numel() // max(x.shape[1], 1)
    sums = x.new_zeros(2 * channels + 1, dtype=torch.float64)
    if own:
        variance, mean = torch.var_mean(x.to(torch.promote_types(x.dtype, torch.float32)), dims, correction=0)
        mean = mean.double()
        sums[:channels], sums[channels:-1], sums[-1] = mean * own, (variance.double() + mean**2) * own, own
    sums = _sum(sums, group)
    count = sums[-1]
    mean = sums[:channels] / count
    deviations = (sums[channels:-1] - count * mean**2).clamp(min=0)
    if x.device.type == "cpu" and count <= 1:
        raise ValueError(f"batch norm in training needs more than 1 value a channel over all ranks, got {int(count)}")
    return mean, deviations, count


def _channels(values: Tensor, x: Tensor) -> Tensor:
    return values.view(1, -1, *[1] * (x.dim() - 2))


def _sum(values: Tensor, group: Any) -> Tensor:
    summed: Tensor = collectives.wait_tensor(collectives.all_reduce(values.contiguous(), "sum", group))
    return summed

"""The axis fsdp: every rank keeps a part of each parameter, of its gradient and of its optimizer state.

    apply(model, segments, mesh_of(here), variant_of(layout), precision="fp32", offload=False)
    accumulating(model, "zero3", last=True); loss.backward()
    settle(model)                           # before the optimizer step

torch's `fully_shard` with one unit a segment, or a few small ones, and what is outside of them in the outermost unit.
The variants differ in what is whole, and for how long:

    zero3   parameters are whole only while their segment computes; gradients are cut after each micro-batch
    zero2   parameters stay whole from the forward to the backward pass; gradients are cut after each micro-batch
    zero1   parameters and gradients stay whole through all micro-batches of a step; only the optimizer's state is cut

On a mesh of two axes (dp, fsdp), parts are kept along the second and copies along the first: hybrid sharding.
"""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from meshrun.experiment import in_halves
from meshrun.layout import Layout
from meshrun.mesh import Here

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


def apply(
    model: nn.Module,
    segments: Sequence[nn.Module],
    mesh: DeviceMesh,
    variant: str,
    precision: str,
    offload: bool,
) -> None:
    """Shard a model whose parameters may still be on the meta device."""
    # Slow to import: only where it is used, for this file is also read where nothing is sharded.
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    # Autocast keeps its own rules of what is computed how; only what travels and what is kept is decided here.
    policy = (
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
        if in_halves(precision)
        else MixedPrecisionPolicy()
    )
    pin = mesh.device_type == "cuda"
    kept = CPUOffloadPolicy(pin_memory=pin) if offload else OffloadPolicy()
    reshard = variant == "zero3"
    whole = kept_whole(model)
    units = _units([each for each in segments if not _shares_parameters(each, model)])
    for unit in units:
        # What comes last in the forward pass comes first in the backward pass: it may stay for that moment.
        again = reshard and unit is not units[-1]
        fully_shard(
            unit, mesh=mesh, reshard_after_forward=again, mp_policy=policy, offload_policy=kept, ignored_params=whole
        )
        if all(isinstance(each, nn.Embedding) for each in unit):
            # The gradient of a table does not need its values.
            cast("FSDPModule", unit[0]).set_unshard_in_backward(False)
    fully_shard(
        model, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy, offload_policy=kept, ignored_params=whole
    )
    for unit, after in itertools.pairwise(units):
        # Asked for before this one computes. In the backward pass torch does so by itself.
        cast("FSDPModule", unit[0]).set_modules_to_forward_prefetch([cast("FSDPModule", after[0])])


def kept_whole(model: nn.Module) -> set[nn.Parameter]:
    """Parameters that every rank keeps whole, since torch cannot cut them: single values, none at all, those that
    are no real numbers, and those of another type than most."""
    sizes = Counter[torch.dtype]()
    for each in model.parameters():
        sizes[each.dtype] += each.numel() * each.is_floating_point()
    usual = max(sizes, key=lambda kind: sizes[kind], default=torch.float32)
    return {each for each in model.parameters() if each.dim() == 0 or not each.numel() or each.dtype != usual}


def mesh_of(here: Here) -> DeviceMesh:
    """The ranks that share a model's parameters out among them; with dp, also those that hold copies."""
    sharded = here.submesh("fsdp", "cp")
    assert sharded is not None and here.mesh is not None
    names = sharded.mesh_dim_names
    assert names is not None
    return here.mesh["dp", names[0]] if here.layout.dp > 1 else sharded


def variant_of(layout: Layout) -> str:
    """Weights' gradients that are computed late need the parameters to be as they were."""
    return "zero2" if layout.pp_variant == "zb" and layout.fsdp_variant == "zero3" else layout.fsdp_variant


def _units(segments: Sequence[nn.Module]) -> list[list[nn.Module]]:
    """Segments that travel together: small ones, such as a last norm, with a neighbour, since each trip takes time."""
    sizes = [sum(each.numel() for each in segment.parameters()) for segment in segments]
    small = statistics.median(sizes) / 2 if sizes else 0
    units: list[list[nn.Module]] = []
    waiting: list[nn.Module] = []
    for segment, size in zip(segments, sizes, strict=True):
        waiting.append(segment)
        if size >= small:
            units.append(waiting)
            waiting = []
    if waiting and units:
        units[-1] += waiting
    return units


def _shares_parameters(segment: nn.Module, model: nn.Module) -> bool:
    """Whether another part of the model uses these parameters too: then only the outermost unit can own them."""
    own = {id(each) for each in segment.parameters()}
    paths = tuple(f"{name}." for name, each in model.named_modules(remove_duplicate=False) if each is segment)
    return not own or any(
        id(each) in own and not name.startswith(paths) for name, each in model.named_parameters(remove_duplicate=False)
    )


def accumulating(model: nn.Module, variant: str, last: bool) -> None:
    """Say before a micro-batch's backward pass whether it is the last one of the step."""
    module = cast("FSDPModule", model)
    module.set_is_last_backward(last)
    if variant == "zero1":
        module.set_requires_gradient_sync(last)
        module.set_reshard_after_backward(last)


def before_backward(layout: Layout, part: nn.Module, last: bool) -> None:
    """What `accumulating` needs to know on this layout."""
    # Pipelines have many micro-batches: their gradients are reduced once a step.
    accumulating(part, "zero1" if layout.pp > 1 else layout.fsdp_variant, last)


def settle(model: nn.Module) -> None:
    """Let go of whole parameters before the optimizer changes their parts: kept ones would be used once more, stale."""
    from torch.distributed.fsdp import FSDPModule  # imported by then

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()

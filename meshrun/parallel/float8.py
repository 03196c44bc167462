"""Linear layers that compute in float8, under their own names: parameters, state and plans stay as they are.

    notes = apply(model, ["embed", "blocks.0", …, "head"], torch.device("cuda"))

All else computes as with bf16. The layers are those for which it pays and does no harm:

- nn.Linear and what inherits its forward pass, with sizes that are multiples of 16, and at least `LEAST` elements;
- inside of the segments, which leaves out what is before and after the blocks of a model; the last segment is left out
  too, unless it is one more of the blocks: logits want the precision. In a model without segments, the last layer;
- with a weight of their own: one that is also an embedding's table is not.

Under dp and fsdp scales are those of one process; fsdp gathers weights in float8 (`float8_fsdp`). Under tp each rank
quantises its part of a matrix by itself: tokens of which it has some features only, and rows of a weight of which it
has a part, may get other scales, so results agree within float8's rounding. In pipelines of the variant zb, the
weights' gradients of these layers are not put off.

torchao's float8 layers, which have one scale a tensor, are used where that library is installed, in one process and
with dp alone; `meshrun verify`, which compares layouts, uses those here on all.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshrun.errors import SharedError
from meshrun.parallel import float8_product
from meshrun.parallel.dtensor import is_dtensor
from meshrun.parallel.float8_product import MULTIPLE

LEAST = 1 << 20
"""Elements of a weight. Quantising takes time by the sum of its sizes, multiplying by their product: with fewer
elements than these (of 2048 x 512), what is won in the one is lost in the other."""
CAPABILITY = (8, 9)
"""The first GPUs that multiply in float8: Ada and Hopper."""


def objection(capability: tuple[int, int], name: str) -> str | None:
    """Why a GPU cannot, or None."""
    if capability >= CAPABILITY:
        return None
    return (
        f"precision is 'float8', but {name} has compute capability {capability[0]}.{capability[1]}, and float8 needs "
        f"{CAPABILITY[0]}.{CAPABILITY[1]} or more; use bf16 (--precision)"
    )


def apply(model: nn.Module, segments: Sequence[str], device: torch.device, torchao: bool = False) -> list[str]:
    """Make layers of a model, whose parameters may still be on the meta device, compute in float8; returns notes.

    `segments` are the names of all segments, also of those that are on other stages.
    """
    if device.type == "cuda":
        reason = objection(torch.cuda.get_device_capability(device), torch.cuda.get_device_name(device))
        if reason is not None:
            raise SharedError(reason)
    names = chosen(model, segments)
    if not names:
        return [
            f"float8: no linear layer of this model qualifies (sizes that are multiples of {MULTIPLE}, and at least "
            f"{LEAST:,} weights, inside of the segments), so all of it computes in bf16"
        ]
    if torchao and _through_torchao(model, set(names), device):
        return [f"float8: {len(names)} linear layers compute in it, through torchao"]
    for name in names:
        module = model.get_submodule(name)
        kind: Any = type(module)
        module.__class__ = _in_float8(kind)
    return [f"float8: {len(names)} linear layers compute in it"]


def chosen(model: nn.Module, segments: Sequence[str]) -> list[str]:
    """The names of the layers that compute in float8."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    within = [name for name in segments if name != _head(model, segments)]
    if segments:
        layers = {name: each for name, each in layers.items() if any(f"{name}.".startswith(f"{s}.") for s in within)}
    elif layers:
        layers.popitem()
    uses = Counter(id(each) for module in model.modules() for each in module._parameters.values())
    return [name for name, each in layers.items() if _qualifies(each) and uses[id(each.weight)] == 1]


def _head(model: nn.Module, segments: Sequence[str]) -> str | None:
    """The last segment, if it is no block like the one before it."""
    kinds = [type(model.get_submodule(name)) for name in segments[-2:]]
    other = len(set(kinds)) == 2 or any(issubclass(each, nn.Linear) for each in kinds[-1:])
    return segments[-1] if other else None


def _qualifies(layer: nn.Linear) -> bool:
    if type(layer).forward is not nn.Linear.forward or "forward" in vars(layer) or layer.weight is None:
        return False
    weight = layer.weight
    part = weight._local_tensor if is_dtensor(weight) else weight
    if is_dtensor(weight) and not (len(weight.placements) == 1 and weight.placements[0].is_shard()):
        return False
    return part.numel() >= LEAST and not any(size % MULTIPLE for size in part.shape)


def _through_torchao(model: nn.Module, names: set[str], device: torch.device) -> bool:
    """Whether torchao is there, and has converted these layers: one scale a tensor, its fastest recipe."""
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError:
        return False
    config = Float8LinearConfig(emulate=device.type != "cuda")
    convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: name in names)
    return True


class InFloat8(nn.Linear):
    """What a layer's class becomes a child of, so that it computes in float8 and is the same otherwise."""

    gathered: tuple[Tensor, Tensor] | None = None
    """The weight in float8 with the scales of its rows, where fsdp has gathered it so."""

    def forward(self, inputs: Tensor) -> Tensor:
        if is_dtensor(self.weight):
            return _on_parts(self, inputs)
        return float8_product.linear(inputs, self.weight, self.bias, self.gathered)


@functools.cache
def _in_float8(kind: Any) -> type[nn.Linear]:
    """By class rather than by layer, so that like layers stay alike for a compiler."""
    return type(f"Float8{kind.__name__}", (InFloat8, kind), {})


def _on_parts(layer: InFloat8, inputs: Any) -> Tensor:
    """As F.linear computes with DTensors: a weight cut by its outputs leaves outputs cut, one cut by its inputs a sum
    that is still to be made over ranks.
    """
    from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard  # slow to import, only for tp

    weight: Any = layer.weight
    by_outputs = weight.placements[0].is_shard(0)
    last = Shard(inputs.dim() - 1)
    wanted: Placement = Replicate() if by_outputs else last
    if not is_dtensor(inputs):
        return F.linear(inputs, weight, layer.bias)  # torch's own sentence
    if inputs.placements != (wanted,):
        inputs = inputs.redistribute(placements=[wanted])
    # Each rank of a weight cut by outputs knows a part of the sum that the gradient of its inputs is.
    part = inputs.to_local(grad_placements=[Partial() if by_outputs else last])
    bias: Any = layer.bias
    if bias is not None:
        # A sum over ranks would add all of it once a rank.
        bias = bias.to_local() if by_outputs else bias.to_local(grad_placements=[Partial()]) / weight.device_mesh.size()
    outputs = float8_product.linear(part, weight.to_local(), bias, layer.gathered)
    return DTensor.from_local(outputs, weight.device_mesh, [last if by_outputs else Partial()], run_check=False)

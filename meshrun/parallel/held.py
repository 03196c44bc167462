"""Which part of which parameter a rank holds, under the model's own names.

    held = held_by(model, parts)                         # the model without values; this rank's stages of it
    held[0].cut(whole, tp=(1, 4), sharded=(0, 2))        # this rank's part of the constructor's tensor
    held[0].where(tp=(1, 4), sharded=(0, 2))             # the whole shape, and where in it the part begins

Places are (part, parts). Values are filled in by these, and checkpoints and saved weights are written by them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from meshrun.parallel.attention import KeyedAttention
from meshrun.parallel.dtensor import is_dtensor
from meshrun.parallel.masters import local


@dataclass(frozen=True, eq=False)
class Held:
    """A parameter of the model of which this rank holds all or a part."""

    name: str
    """As the model itself calls it."""
    parameter: nn.Parameter
    block: tuple[int, int]
    """(number, of): which of several equal blocks of the model's own parameter this is; (0, 1) for all of it."""
    split_dim: int | None
    """The dimension along which tp has split it."""
    master: nn.Parameter | None = None
    """This rank's part in fp32, where the parameter itself is bf16."""
    sharded: bool = True
    """Whether fsdp, where there is any, has cut it."""

    @property
    def local(self) -> Tensor:
        """The memory that this rank holds."""
        return local(self.parameter)

    def cut(self, whole: Tensor, tp: tuple[int, int], sharded: tuple[int, int]) -> Tensor:
        """This rank's part of the model's own parameter; places are (part, parts)."""
        number, of = self.block
        part = whole.chunk(of)[number] if of > 1 else whole
        if self.split_dim is not None:
            part = _chunk(part, tp, self.split_dim)
        return _chunk(part, sharded, 0) if sharded[1] > 1 and self.sharded else part

    def where(self, tp: tuple[int, int], sharded: tuple[int, int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shape of the model's own parameter, and where in it this rank's part begins."""
        number, of = self.block
        block = list(self.parameter.shape)
        shape, start = list(block), [0] * len(block)
        if of > 1:
            shape[0], start[0] = block[0] * of, block[0] * number
        if self.split_dim is not None:
            step = -(-block[self.split_dim] // tp[1])
            first = min(step * tp[0], block[self.split_dim])
            start[self.split_dim] += first
            block[self.split_dim] = min(step, block[self.split_dim] - first)
        if sharded[1] > 1 and self.sharded:
            start[0] += min(-(-block[0] // sharded[1]) * sharded[0], block[0])
        return tuple(shape), tuple(start)


def _chunk(tensor: Tensor, place: tuple[int, int], dim: int) -> Tensor:
    """As torch cuts: full chunks first, then a smaller one, then none."""
    chunks = tensor.chunk(place[1], dim)
    return chunks[place[0]] if place[0] < len(chunks) else tensor.narrow(dim, 0, 0)


def held_by(plain: nn.Module, parts: Mapping[int, nn.Module]) -> list[Held]:
    """What this rank holds, under the model's own names; a parameter with several names goes by its first."""
    first: dict[int, str] = {}
    own: dict[str, str] = {}
    for name, parameter in plain.named_parameters(remove_duplicate=False):
        own[name] = first.setdefault(id(parameter), name)
    held: list[Held] = []
    for part in parts.values():
        model = part.model
        assert isinstance(model, nn.Module)
        for prefix, module in model.named_modules():
            fused = module.fused if isinstance(module, KeyedAttention) else {}
            for name, parameter in module.named_parameters(prefix, recurse=False):
                last = name.rpartition(".")[2]
                source, block, blocks = fused.get(last, (last, 0, 1))
                whole = f"{prefix}.{source}" if prefix else source
                if any(each.parameter is parameter for each in held):
                    continue
                sharded = is_dtensor(parameter) and parameter.device_mesh.mesh_dim_names != ("tp",)
                place = own.get(whole, whole), parameter, (block, blocks), _split_dim(parameter)
                held.append(Held(*place, sharded=sharded))
    return held


def _split_dim(parameter: Tensor) -> int | None:
    """The dimension along which tp has split a parameter: the last axis of its mesh is tp's."""
    if not is_dtensor(parameter) or "tp" not in (parameter.device_mesh.mesh_dim_names or ()):
        return None
    placement = parameter.placements[-1]
    return placement.dim if placement.is_shard() else None  # type: ignore[attr-defined]

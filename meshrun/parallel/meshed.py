"""A model on a mesh of any axes: this rank's parts of it, and one update of them.

    placed = Meshed(here, held, pipeline, …)
    placed.step(7, pieces, samples=64, loss=cross_entropy)

The optimizer, the norm and the clipping see plain tensors (`shards`), whatever torch wraps around them: each element of
the model counts once in the norm, however many ranks hold it, and one small collective a step carries the norm together
with the sums of the losses.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshrun.layout import AXES
from meshrun.mesh import Here
from meshrun.parallel import buffers, cp, fsdp
from meshrun.parallel.pipeline import Pipeline
from meshrun.parallel.placed import TYPES, Cutting, Outcome, Piece, Score, Shard, norms, persistent_buffers

_BUCKET = 25 << 20
"""Bytes of gradients that travel together."""


@dataclass(frozen=True)
class Held:
    """A parameter of the model of which this rank holds all or a part."""

    name: str
    """As the model itself calls it."""
    parameter: nn.Parameter
    block: tuple[int, int]
    """(number, of): which of several equal blocks of the model's own parameter this is; (0, 1) for all of it."""
    split_dim: int | None
    """The dimension along which tp has split it."""

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
        return _chunk(part, sharded, 0) if sharded[1] > 1 else part


def local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _chunk(tensor: Tensor, place: tuple[int, int], dim: int) -> Tensor:
    """As torch cuts: full chunks first, then a smaller one, then none."""
    chunks = tensor.chunk(place[1], dim)
    return chunks[place[0]] if place[0] < len(chunks) else tensor.narrow(dim, 0, 0)


class Meshed:
    """Parts of a model on a mesh."""

    def __init__(
        self, here: Here, pipeline: Pipeline, held: list[Held], model: nn.Module, cutting: Cutting, notes: list[str]
    ) -> None:
        self.here, self.pipeline, self.held, self.model = here, pipeline, held, model
        self.cutting, self.notes = cutting, notes
        layout = here.layout
        self._sharded = layout.fsdp > 1
        self._divided_by = layout.dp * layout.fsdp * layout.cp if self._sharded else 1
        self._counts_here = here.place("tp") == 0 and here.place("pp") == layout.pp - 1
        reduced = here.submesh("dp", "cp") if not self._sharded else None
        self._reduced = reduced.get_group() if reduced is not None else None
        self._ties = _ties(here, held)
        stages = {name: len(ranks) for name, (ranks, _) in self._ties.items()}
        self.trained = [each for each in held if each.parameter.requires_grad]
        self.shards = [
            Shard(each.name, _plain(each.parameter), self._copies(each, stages.get(each.name, 1)))
            for each in self.trained
        ]
        self._used: list[bool] | None = None

    def _copies(self, held: Held, stages: int) -> int:
        layout = self.here.layout
        parts = (layout.fsdp * layout.cp if self._sharded else 1) * (layout.tp if held.split_dim is not None else 1)
        return layout.size // layout.pp // parts * stages

    def step(self, step: int, pieces: list[Piece], samples: int, loss: Score) -> Outcome:
        own = self.pipeline.train(step, [self._mine(each) for each in pieces], self._divided_by / samples, loss)
        self._finish_gradients()
        gradients = [each.parameter.grad for each in self.shards if each.parameter.grad is not None]
        copies = [each.copies for each in self.shards if each.parameter.grad is not None]
        squares = norms(gradients) ** 2 if gradients else own.new_zeros(0)
        share = (squares / torch.tensor(copies, dtype=torch.float64, device=own.device)).sum()
        everyone = torch.cat([own if self._counts_here else torch.zeros_like(own), share.reshape(1)])
        dist.all_reduce(everyone)
        return Outcome(own, everyone[:2], everyone[2].sqrt())

    def scores(self, pieces: Iterable[Piece], functions: Mapping[str, Score]) -> Tensor:
        sums = self.pipeline.score(map(self._mine, pieces), functions)
        return sums if self._counts_here else torch.zeros_like(sums)

    def _mine(self, piece: Piece) -> Piece:
        """What of a piece is this rank's, where sequences are split over ranks."""
        parts = self.here.layout.cp
        if parts == 1:
            return piece
        inputs, targets, positions = cp.split(piece.inputs, piece.targets, self.here.place("cp"), parts)
        inputs = cp.with_positions(self.model, inputs, positions)
        return replace(piece, inputs=inputs, targets=targets, positions=positions, length=len(positions) * parts)

    def train(self, mode: bool) -> None:
        for part in self.pipeline.parts.values():
            part.train(mode)

    def agree_on_buffers(self) -> None:
        mesh = self.here.submesh("dp", "fsdp")
        if mesh is not None:
            with self.here.waiting("the running statistics of the other ranks"):
                for part in self.pipeline.parts.values():
                    buffers.average((local(each) for each in part.buffers()), mesh.get_group())

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors, one after the other: put together along tp and fsdp, and sent to rank 0 from their stage."""
        held = {name: blocks for part in self.pipeline.parts.values() for name, blocks in self._state(part).items()}
        homes: dict[str, int] = {}
        for rank, names in enumerate(self.here.gathered(list(held))):
            homes |= {name: self.here.layout.coordinates(rank)["pp"] for name in names if name not in homes}
        for name, stage in homes.items():
            leader = self.here.layout.rank_of(dict.fromkeys(AXES, 0) | {"pp": stage})
            whole = _joined(held[name]) if self.here.place("pp") == stage else None
            if stage and self.here.rank == leader:
                assert whole is not None
                _send(whole)
            if self.here.rank == 0:
                yield name, _receive(leader) if whole is None else whole

    def _state(self, part: nn.Module) -> dict[str, list[Tensor]]:
        """The blocks of each of the model's own parameters and persistent buffers that a part holds."""
        held: dict[str, list[Tensor]] = {}
        for each in self.held:
            held.setdefault(each.name, []).append(each.parameter)
        model = part.model
        assert isinstance(model, nn.Module)
        return held | {name: [tensor] for name, tensor in persistent_buffers(model)}

    def _finish_gradients(self) -> None:
        """Make the gradients of this step those of all replicas, on the shards."""
        if self._sharded:
            for part in self.pipeline.parts.values():
                fsdp.settle(part)
        for held, shard in zip(self.trained, self.shards, strict=True):
            parameter, gradient = held.parameter, held.parameter.grad
            if isinstance(gradient, DTensor):
                assert isinstance(parameter, DTensor)
                if gradient.placements != parameter.placements:
                    gradient = gradient.redistribute(placements=parameter.placements)
                shard.parameter.grad, parameter.grad = gradient.to_local(), None
        if self._used is None:
            self._used = self._used_anywhere()
        for used, shard in zip(self._used, self.shards, strict=True):
            if used and shard.parameter.grad is None:
                shard.parameter.grad = torch.zeros_like(shard.parameter)
        if self._reduced is not None:
            _sum([each.parameter.grad for each in self.shards if each.parameter.grad is not None], self._reduced)
        for name, (_, group) in self._ties.items():
            if group is not None:
                _sum(
                    [
                        each.parameter.grad
                        for each in self.shards
                        if each.name == name and each.parameter.grad is not None
                    ],
                    group,
                )

    def _used_anywhere(self) -> list[bool]:
        """Which parameters some rank has a gradient of: one that nobody uses must stay without, as in one process."""
        named = {each.name for each in self.shards if each.parameter.grad is not None}
        everywhere = set().union(*self.here.gathered(named))
        return [each.name in everywhere for each in self.shards]


def _joined(blocks: list[Tensor]) -> Tensor:
    whole = [each.full_tensor() if isinstance(each, DTensor) else each for each in blocks]
    return (whole[0] if len(whole) == 1 else torch.cat(whole)).detach().cpu()


def _send(tensor: Tensor) -> None:
    """To rank 0, shape first; from host memory, which every backend can send from."""
    about = [tensor.dim(), TYPES.index(tensor.dtype), *tensor.shape]
    dist.send(torch.tensor(about + [0] * (16 - len(about))), 0)
    dist.send(tensor.contiguous(), 0)


def _receive(rank: int) -> Tensor:
    about = torch.zeros(16, dtype=torch.int64)
    dist.recv(about, rank)
    dims, kind, *shape = about.tolist()
    tensor = torch.empty(shape[:dims], dtype=TYPES[kind])
    dist.recv(tensor, rank)
    return tensor


def _plain(parameter: nn.Parameter) -> nn.Parameter:
    """A parameter without any wrapping, in the same memory."""
    return nn.Parameter(local(parameter).detach()) if isinstance(parameter, DTensor) else parameter


def _ties(here: Here, held: list[Held]) -> dict[str, tuple[tuple[int, ...], dist.ProcessGroup | None]]:
    """Parameters that several stages hold -> those stages, and the group in which their gradients are summed."""
    if here.layout.pp == 1:
        return {}
    stages: dict[str, set[int]] = {}
    for rank, names in enumerate(here.gathered({each.name for each in held})):
        for name in names:
            stages.setdefault(name, set()).add(here.layout.coordinates(rank)["pp"])
    shared = {name: tuple(sorted(places)) for name, places in sorted(stages.items()) if len(places) > 1}
    groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
    for places in sorted(set(shared.values())):
        for ranks in here.layout.groups("pp"):
            group = dist.new_group([ranks[place] for place in places])
            if here.rank in ranks and here.place("pp") in places:
                groups[places] = group
    return {name: (places, groups.get(places)) for name, places in shared.items()}


def _sum(gradients: list[Tensor], group: dist.ProcessGroup) -> None:
    """Sum gradients over a group in place, several at a time."""
    works: list[tuple[dist.Work | None, Tensor, list[Tensor]]] = []
    bucket: list[Tensor] = []
    size = 0
    for number, each in enumerate(gradients):
        bucket.append(each)
        size += each.numel() * each.element_size()
        after = gradients[number + 1] if number + 1 < len(gradients) else None
        if after is None or size >= _BUCKET or after.dtype != each.dtype:
            flat = torch.cat([one.reshape(-1) for one in bucket])
            works.append((dist.all_reduce(flat, group=group, async_op=True), flat, bucket))
            bucket, size = [], 0
    for work, flat, tensors in works:
        assert work is not None
        work.wait()
        for one, summed in zip(tensors, flat.split([each.numel() for each in tensors]), strict=True):
            one.copy_(summed.view_as(one))

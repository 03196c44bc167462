"""A model on a mesh of any axes: this rank's parts of it, and one update of them.

    placed = Meshed(here, held, pipeline, …)
    placed.step(7, pieces, samples=64, loss=cross_entropy, asked=nobody)

The optimizer, the norm and the clipping see plain tensors (`shards`), whatever torch wraps around them: each element of
the model counts once in the norm, however many ranks hold it, and one small collective a step carries the norm together
with the sums of the losses.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshrun.layout import AXES
from meshrun.mesh import Here
from meshrun.parallel import buffers, cp, fsdp, gather, masters
from meshrun.parallel.dtensor import is_dtensor
from meshrun.parallel.held import Held
from meshrun.parallel.masters import local
from meshrun.parallel.pipeline import Pipeline
from meshrun.parallel.placed import Asked, Cutting, Outcome, Piece, Score, Shard, norms, persistent_buffers
from meshrun.parallel.reduced import Counted, Overlapped, Source, summed


class Meshed:
    """Parts of a model on a mesh."""

    def __init__(
        self,
        here: Here,
        pipeline: Pipeline,
        held: list[Held],
        model: nn.Module,
        whole: nn.Module,
        cutting: Cutting,
        notes: list[str],
    ) -> None:
        self.here, self.pipeline, self.model, self.whole = here, pipeline, model, whole
        first = {(each.name, each.block): each for each in reversed(held)}
        self.held = [each for each in held if each is first[each.name, each.block]]
        """What this rank holds, once each; `_copied` are the further copies that its other stages compute with."""
        copied = [(each, first[each.name, each.block]) for each in held if each not in self.held]
        self._copied = [(replace(each, master=None), kept) for each, kept in copied]
        self.cutting, self.notes = cutting, notes
        layout = here.layout
        self._sharded = layout.fsdp > 1
        self._divided_by = layout.dp * layout.fsdp * layout.cp if self._sharded else 1
        self._counts_here = here.place("tp") == 0 and here.place("pp") == layout.pp - 1
        reduced = here.submesh("dp", "cp") if not self._sharded else None
        self._reduced = reduced.get_group() if reduced is not None else None
        self._ties = _ties(here, self.held)
        self._buffer_stages = _stages_of(here, list(self.own_buffers()))
        self.trained = [each for each in self.held if each.parameter.requires_grad]
        self._holders_of: dict[tuple[bool, bool, tuple[int, ...]], tuple[int, ...]] = {}
        self._copies_on_device: dict[tuple[int, ...], Tensor] = {}
        self.chosen: dict[str, Any] = {}
        self.shards = [self._shard(each) for each in self.trained]
        pairs = zip(self.trained, self.shards, strict=True) if self._sharded else ()
        self._kept_whole = [shard for each, shard in pairs if not each.sharded]
        """Those that fsdp has not cut."""
        self.frozen = [self._shard(each) for each in self.held if not each.parameter.requires_grad]
        self._unused: set[str] | None = None
        """Parameters that no rank has a gradient of, once that is known."""
        self._again: set[str] = set()
        """Those whose gradients come in several parts, known at the same time."""
        self._partial: set[nn.Parameter] = set()
        """Masters whose collected gradients are still to be summed over tp."""
        for each, kept in [*((each, each) for each in self.trained), *self._copied]:
            if kept.master is not None and kept.master.requires_grad:
                masters.collect_at_once(each.parameter, functools.partial(self._collected, each.parameter, kept.master))
        self._sums: Counted | Overlapped | None = None
        """Over dp and cp, while the backward pass goes on; not where gradients of weights are put off past its end."""
        if self._reduced is not None and pipeline.settings.later is None:
            self._sums = Counted(self._sources())
            pipeline.settings.before_backward = self._before_backward

    def _shard(self, held: Held) -> Shard:
        here = self.here
        mesh = here.submesh("fsdp", "cp") if self._sharded else None
        sharded = (mesh.get_local_rank(), mesh.size()) if mesh is not None else (0, 1)
        shape, start = held.where((here.place("tp"), here.layout.tp), sharded)
        held_here = _plain(held.parameter)
        if held.master is None:
            return Shard(held.name, held_here, self._holders(held), shape, start)
        return Shard(held.name, held.master, self._holders(held), shape, start, copy=held_here)

    def _holders(self, held: Held) -> tuple[int, ...]:
        """All ranks that differ from this one only along axes that do not cut the parameter."""
        here = self.here
        stages = self._ties[held.name][0] if held.name in self._ties else (here.place("pp"),)
        sharded = self._sharded and held.sharded
        key = held.split_dim is not None, sharded, stages
        if key not in self._holders_of:
            cuts = {"fsdp", "cp"} if sharded else set()
            cuts |= {"tp"} if held.split_dim is not None else set()
            mine = here.layout.coordinates(here.rank)
            places = map(here.layout.coordinates, range(here.size))
            self._holders_of[key] = tuple(
                rank
                for rank, place in enumerate(places)
                if place["pp"] in stages and all(place[axis] == mine[axis] for axis in cuts)
            )
        return self._holders_of[key]

    def step(self, step: int, pieces: list[Piece], samples: int, loss: Score, asked: Asked) -> Outcome:
        self._same_on_all_chunks()
        self._begin_sums()
        own = self.pipeline.train(step, [self._mine(each) for each in pieces], self._divided_by / samples, loss)
        self._finish_gradients()
        gradients = self._gradients()
        squares = norms(gradients).to(own.device) ** 2 if gradients else own.new_zeros(0)
        share = (squares / self._copies(own.device)).sum()
        counted = own if self._counts_here else torch.zeros_like(own)
        everyone = torch.cat([counted, own.new_full((1,), asked()), share.reshape(1)])
        dist.all_reduce(everyone)
        return Outcome(own, everyone[:3], everyone[3].sqrt())

    def _copies(self, device: torch.device) -> Tensor:
        """How many ranks hold each gradient that there is; sent to a GPU once, since the host waits for it."""
        copies = tuple(each.copies for each in self.shards if each.parameter.grad is not None)
        if copies not in self._copies_on_device:
            self._copies_on_device[copies] = torch.tensor(copies, dtype=torch.float64, device=device)
        return self._copies_on_device[copies]

    def scores(self, pieces: Iterable[Piece], functions: Mapping[str, Score]) -> Tensor:
        self._same_on_all_chunks()
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

    def _collected(self, parameter: nn.Parameter, master: nn.Parameter, gradient: Tensor) -> None:
        """Each micro-batch's gradient of a bf16 parameter is added to its master's, in fp32."""
        plain, is_partial = _plain_gradient(gradient, parameter)
        masters.add(master, plain)
        if is_partial:
            self._partial.add(master)

    def collect(self) -> None:
        """Done after every micro-batch already."""

    def spread(self) -> None:
        masters.spread(self.shards)
        masters.spread(self.frozen)

    def train(self, mode: bool) -> None:
        for part in self.pipeline.parts.values():
            part.train(mode)

    def agree_on_buffers(self) -> None:
        mesh = self.here.submesh("dp", "fsdp")
        if mesh is not None:
            with self.here.waiting("the running statistics of the other ranks"):
                for part in self.pipeline.parts.values():
                    buffers.average((local(each) for each in part.buffers()), mesh.get_group())

    def own_buffers(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for part in self.pipeline.parts.values():
            assert isinstance(part.model, nn.Module)
            found |= {name: local(each) for name, each in persistent_buffers(part.model)}
        return found

    def stages_with(self, buffer: str) -> tuple[int, ...]:
        return self._buffer_stages.get(buffer, (self.here.place("pp"),))

    def habits(self) -> dict[str, Any]:
        """Which parameters nobody uses and which gradients come in several parts, once that is known."""
        return {} if self._unused is None else {"unused": sorted(self._unused), "again": sorted(self._again)}

    def take_up(self, habits: Mapping[str, Any]) -> bool:
        if "unused" in habits:
            self._unused, self._again = set(habits["unused"]), set(habits.get("again", ()))
        return False

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors, one after the other: put together along tp and fsdp, and sent to rank 0 from their stage."""
        held = self._state()
        homes: dict[str, int] = {}
        for rank, names in enumerate(self.here.gathered(list(held))):
            homes |= {name: self.here.layout.coordinates(rank)["pp"] for name in names if name not in homes}
        for name, stage in homes.items():
            leader = self.here.layout.rank_of(dict.fromkeys(AXES, 0) | {"pp": stage})
            whole = self._whole(held[name]) if self.here.place("pp") == stage else None
            if stage and self.here.rank == leader:
                assert whole is not None
                gather.send(whole, to=0)
            if self.here.rank == 0:
                yield name, gather.receive(leader) if whole is None else whole

    def _state(self) -> dict[str, list[Held] | Tensor]:
        """Each of the model's own parameters, as the blocks that this rank has of it, and its persistent buffers."""
        state: dict[str, list[Held] | Tensor] = {}
        for each in self.held:
            blocks = state.setdefault(each.name, [])
            assert isinstance(blocks, list)
            blocks.append(each)
        return state | self.own_buffers()

    def _whole(self, blocks: list[Held] | Tensor) -> Tensor:
        if isinstance(blocks, Tensor):
            return blocks.detach().cpu()
        whole = [
            gather.whole(each.parameter, each.local if each.master is None else each.master, each.split_dim, self.here)
            for each in blocks
        ]
        return whole[0] if len(whole) == 1 else torch.cat(whole)

    def _same_on_all_chunks(self) -> None:
        """Bring copies of a parameter that several stages of this rank hold up to date."""
        with torch.no_grad():
            for copy, first in self._copied:
                copy.local.copy_(first.local)

    def _finish_gradients(self) -> None:
        """Make the gradients of this step those of all replicas, on the shards."""
        if self._sharded:
            for part in self.pipeline.parts.values():
                fsdp.settle(part)
        partial: list[Tensor] = []
        for held, shard in zip(self.trained, self.shards, strict=True):
            if held.master is None:
                shard.parameter.grad = _taken(held.parameter, partial)
            elif held.master in self._partial and held.master.grad is not None:
                partial.append(held.master.grad)
        for copy, first in self._copied:
            gradient = _taken(copy.parameter, partial)
            copy.parameter.grad = None
            shard = self.shards[self.trained.index(first)]
            if gradient is not None:
                own = shard.parameter.grad
                shard.parameter.grad = gradient if own is None else own + gradient
        if partial:
            mesh = self.here.submesh("tp")
            assert mesh is not None
            summed(partial, mesh.get_group())
        if self._unused is None:
            self._unused = self._used_nowhere()
        done: set[nn.Parameter] = set()
        if isinstance(self._sums, Overlapped):
            done = {each.kept for each in self._sums.sources}
            self._sums.finish()
        for shard in self.shards:
            if shard.parameter.grad is None and shard.name not in self._unused:
                shard.parameter.grad = torch.zeros_like(shard.parameter)
        if self._reduced is not None:
            left = [each.parameter.grad for each in self.shards if each.parameter not in done]
            summed([each for each in left if each is not None], self._reduced)
        self._average_kept_whole()
        for name, (_, group) in self._ties.items():
            if group is not None:
                summed(self._gradients(name), group)

    def _average_kept_whole(self) -> None:
        """What fsdp has not cut gets the mean over all replicas, as fsdp makes it of the rest."""
        gradients = [each.parameter.grad for each in self._kept_whole if each.parameter.grad is not None]
        if gradients:
            mesh = self.here.submesh("dp", "fsdp", "cp")
            assert mesh is not None
            summed(gradients, mesh.get_group())
            torch._foreach_div_(gradients, self._divided_by)

    def _sources(self) -> list[Source]:
        """Parameters whose gradients can be summed over dp and cp while others are still computed.

        Not those that tp keeps whole, which may have to be summed over tp first, nor those of several stages.
        """
        late = (self._unused or set()) | self._again | {first.name for _, first in self._copied}
        return [
            Source(held.name, held.parameter, held.parameter if held.master is None else held.master, shard.parameter)
            for held, shard in zip(self.trained, self.shards, strict=True)
            if held.name not in late and not (is_dtensor(held.parameter) and held.split_dim is None)
        ]

    def _begin_sums(self) -> None:
        if isinstance(self._sums, Counted) and self._unused is not None:
            self._sums.end()
            assert self._reduced is not None
            self._sums = Overlapped(self._sources(), self._reduced)
        if self._sums is not None:
            self._sums.begin()

    def _before_backward(self, _: nn.Module, last: bool) -> None:
        assert self._sums is not None
        self._sums.last = last

    def _gradients(self, name: str | None = None) -> list[Tensor]:
        found = [each.parameter.grad for each in self.shards if name in (None, each.name)]
        return [each for each in found if each is not None]

    def _used_nowhere(self) -> set[str]:
        """Parameters that nobody has a gradient of: they must stay without, as in one process."""
        idle = {each.name for each in self.shards if each.parameter.grad is None}
        used = {each.name for each in self.shards if each.parameter.grad is not None}
        again = self._sums.again() if isinstance(self._sums, Counted) else set()
        everyone = self.here.gathered((idle, used, again))
        all_idle, all_used, self._again = (set[str]().union(*each) for each in zip(*everyone, strict=True))
        return all_idle - all_used


def _taken(parameter: nn.Parameter, partial: list[Tensor]) -> Tensor | None:
    """A parameter's gradient as a plain tensor; one that is still to be summed over tp is also added to `partial`."""
    if parameter.grad is None or not is_dtensor(parameter):
        return parameter.grad
    gradient, parameter.grad = parameter.grad, None
    plain, is_partial = _plain_gradient(gradient, parameter)
    if is_partial:
        partial.append(plain)
    return plain


def _plain_gradient(gradient: Tensor, parameter: nn.Parameter) -> tuple[Tensor, bool]:
    """A gradient without any wrapping, and whether it is still to be summed over tp."""
    if not is_dtensor(gradient):
        return gradient, False
    assert is_dtensor(parameter)
    if gradient.placements == parameter.placements:
        return gradient.to_local(), False
    if len(gradient.placements) == 1 and gradient.placements[0].is_partial() and parameter.placements[0].is_replicate():
        return gradient.to_local(), True
    return gradient.redistribute(placements=parameter.placements).to_local(), False


def _plain(parameter: nn.Parameter) -> nn.Parameter:
    """A parameter without any wrapping, in the same memory."""
    return nn.Parameter(local(parameter).detach()) if is_dtensor(parameter) else parameter


def _ties(here: Here, held: list[Held]) -> dict[str, tuple[tuple[int, ...], dist.ProcessGroup | None]]:
    """Parameters that several stages hold -> those stages, and the group in which their gradients are summed."""
    if here.layout.pp == 1:
        return {}
    stages = _stages_of(here, [each.name for each in held])
    shared = {name: places for name, places in sorted(stages.items()) if len(places) > 1}
    groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
    for places in sorted(set(shared.values())):
        for ranks in here.layout.groups("pp"):
            group = dist.new_group([ranks[place] for place in places])
            if here.rank in ranks and here.place("pp") in places:
                groups[places] = group
    return {name: (places, groups.get(places)) for name, places in shared.items()}


def _stages_of(here: Here, names: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Each of the names that ranks give -> the places along pp of those that do."""
    if here.layout.pp == 1:
        return {}
    stages: dict[str, set[int]] = {}
    for rank, given in enumerate(here.gathered(sorted(set(names)))):
        for name in given:
            stages.setdefault(name, set()).add(here.layout.coordinates(rank)["pp"])
    return {name: tuple(sorted(places)) for name, places in stages.items()}

"""Runs the parts of a model that are on this rank: micro-batches through them, and what neighbours need of them.

    pipeline = Pipeline(here, parts, moment, …)
    own = pipeline.train(step, pieces, scale, loss)        # forward and backward in the schedule's order
    own = pipeline.score(pieces, {"loss": loss})           # forward only

A model that is not cut is a pipeline of one stage, and goes the same way. Every rank reads its replica's samples, so
only what the model has computed travels: from the call of a stage's first segment to that very call on the next rank.

Messages between two ranks go in the order in which the sender computes, which both know beforehand. In one direction
they have a communicator of their own where NCCL is used: there, sends and receives in one could wait for each other.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from meshrun.mesh import Here
from meshrun.parallel.later import Later
from meshrun.parallel.moment import Moment
from meshrun.parallel.placed import TYPES, Piece, Score, as_real, as_sums, counted, refuse_unclear
from meshrun.parallel.schedule import Action, orders

_MOST_TENSORS, _MOST_DIMS = 8, 6


class Event(NamedTuple):
    """What was computed when: from `ready` on, before it the rank waited for a message."""

    action: Action
    began: float
    ready: float
    ended: float


@dataclass
class Passed:
    """A forward pass that waits for its backward pass."""

    received: tuple[Tensor, ...]
    sent: tuple[Tensor, ...]


@dataclass
class Settings:
    """What is the same for all steps."""

    variant: str
    chunks: int
    arithmetic: Callable[[], AbstractContextManager[Any]]
    attention: Callable[[], AbstractContextManager[Any]]
    before_backward: Callable[[nn.Module, bool], None]
    """Told before each backward pass of a part whether it is that part's last of the step."""
    later: Later | None
    """Where gradients of weights wait for their turn (zb)."""
    whole_last: bool
    """Whether a part's last backward pass must be in one piece, and after all that was put off."""


@dataclass
class Pipeline:
    here: Here
    parts: Mapping[int, nn.Module]
    """Stage -> the part of the model that computes it, for this rank's stages."""
    moment: Moment
    settings: Settings
    events: list[Event] | None = None
    """Filled with what was computed when, if it is a list."""
    _shapes: dict[Any, list[tuple[torch.Size, torch.dtype]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.ranks = self.here.layout.pp
        self.stages = self.ranks * self.settings.chunks
        self._peers = self.here.layout.group_of(self.here.rank, "pp")
        self._lanes = _lanes(self.here, self.settings.chunks)

    def train(self, step: int, pieces: list[Piece], scale: float, loss: Score) -> Tensor:
        """Forward and backward of all pieces; returns this rank's (total, count)."""
        plans = orders(self.settings.variant, self.ranks, self.settings.chunks, len(pieces))
        run = _Run(self, plans, pieces, {"loss": loss}, scale)
        lasts = {action.stage: number for number, action in enumerate(plans[self._place]) if action.kind in "BI"}
        for number, action in enumerate(plans[self._place]):
            began = time.perf_counter()
            run.ask_ahead()
            if action.kind == "F":
                run.forward(step, action)
            elif action.kind == "W":
                self._weights(action)
            else:
                self._backward(run, action, lasts[action.stage] == number)
            if self.events is not None:
                self.events.append(Event(action, began, max(began, run.ready), time.perf_counter()))
        run.finish()
        return run.sums[0]

    def score(self, pieces: Iterable[Piece], functions: Mapping[str, Score]) -> Tensor:
        """Forward passes only; a row of (total, count) for each function, zeros where the last stage is elsewhere."""
        sums = torch.zeros(len(functions), 2, dtype=torch.float64, device=self.here.device)
        for round_ in _rounds(pieces, self.ranks):
            plans = [
                [
                    Action("F", chunk * self.ranks + rank, piece)
                    for chunk in range(self.settings.chunks)
                    for piece in range(len(round_))
                ]
                for rank in range(self.ranks)
            ]
            run = _Run(self, plans, round_, functions, None)
            with torch.no_grad():
                for action in plans[self._place]:
                    run.ask_ahead()
                    run.forward(None, action)
            run.finish()
            sums += run.sums
        return sums

    @property
    def _place(self) -> int:
        return self.here.place("pp")

    def _backward(self, run: _Run, action: Action, last: bool) -> None:
        later = self.settings.later
        if later is not None:
            later.place = (action.stage, action.piece)
            later.at_once = last and self.settings.whole_last
            if later.at_once:
                later.all_now()
        run.backward(action, last)

    def _weights(self, action: Action) -> None:
        assert self.settings.later is not None
        self.settings.later.now((action.stage, action.piece))


class _Run:
    """One pass of some pieces through this rank's stages."""

    def __init__(
        self,
        pipeline: Pipeline,
        plans: list[list[Action]],
        pieces: list[Piece],
        functions: Mapping[str, Score],
        scale: float | None,
    ) -> None:
        self.pipeline, self.pieces, self.functions, self.scale = pipeline, pieces, functions, scale
        self.sums = torch.zeros(len(functions), 2, dtype=torch.float64, device=pipeline.here.device)
        self._waiting: dict[tuple[int, int], Passed] = {}
        self._totals: dict[int, Tensor] = {}
        self._incoming = {kind: Incoming(self, plans, kind) for kind in ("F", "B")} if pipeline.ranks > 1 else {}
        self._sending: list[tuple[dist.Work, Tensor]] = []
        self.ready = 0.0
        """When the last message that was waited for was there."""

    def ask_ahead(self) -> None:
        """Ask for the next message of each kind: it can then arrive while this rank computes."""
        for each in self._incoming.values():
            each.ask_ahead()

    def forward(self, step: int | None, action: Action) -> None:
        pipeline, piece = self.pipeline, self.pieces[action.piece]
        settings = pipeline.settings
        received = self._incoming["F"].take(action.stage, action.piece) if action.stage else ()
        self.ready = time.perf_counter()
        training = self.scale is not None
        for each in received:
            each.requires_grad_(training and (each.is_floating_point() or each.is_complex()))
        pipeline.moment.step = step
        pipeline.moment.ids = piece.ids_on(pipeline.here.device)
        pipeline.moment.positions, pipeline.moment.length = piece.positions, piece.length
        part = pipeline.parts[action.stage]
        with settings.attention(), settings.arithmetic():
            if settings.later is not None:
                settings.later.place = (action.stage, action.piece)
            outputs = part(received, piece.inputs)
            if action.stage == pipeline.stages - 1:
                self._score(outputs, piece, action)
                outputs = ()
        sent = tuple(outputs)
        if sent:
            self._send("F", action, action.stage + 1, [each.detach() for each in sent])
        if training:
            self._waiting[action.stage, action.piece] = Passed(received, sent)

    def _score(self, outputs: Any, piece: Piece, action: Action) -> None:
        moment, functions = self.pipeline.moment, self.functions.values()
        if moment.unplaced is not None and moment.outputs is None and moment.batch_dim != 0:
            refuse_unclear(outputs, piece, moment.unplaced)
        losses = [counted(outputs, piece, each, moment.outputs, moment.targets) for each in functions]
        self.sums += torch.stack([as_sums(each) for each in losses])
        if self.scale is not None:
            self._totals[action.piece] = losses[0].total * self.scale

    def backward(self, action: Action, last: bool) -> None:
        pipeline = self.pipeline
        passed = self._waiting[action.stage, action.piece]
        pipeline.settings.before_backward(pipeline.parts[action.stage], last)
        with pipeline.settings.attention():
            if action.stage == pipeline.stages - 1:
                self._totals.pop(action.piece).backward()
            else:
                gradients = self._incoming["B"].take(action.stage, action.piece)
                self.ready = time.perf_counter()
                pairs = [(out, grad) for out, grad in zip(passed.sent, gradients, strict=True) if out.requires_grad]
                torch.autograd.backward([out for out, _ in pairs], [grad for _, grad in pairs])
        del self._waiting[action.stage, action.piece]
        if action.stage:
            given = [each.grad if each.grad is not None else torch.zeros_like(each) for each in passed.received]
            self._send("B", action, action.stage - 1, given)

    def shapes_of(self, kind: str, stage: int, piece: int) -> list[tuple[torch.Size, torch.dtype]] | None:
        """What a message to a stage consists of; None if the sender has to say so first."""
        if kind == "B":
            passed = self._waiting.get((stage, piece))
            return None if passed is None else [(each.shape, each.dtype) for each in passed.sent]
        return self.pipeline._shapes.get(self._signature(stage, piece))

    def _signature(self, stage: int, piece: int) -> Any:
        """Messages look alike for inputs that look alike; both ends see the inputs."""
        looks = tuple(
            (each.shape, each.dtype) for each in tree_leaves(self.pieces[piece].inputs) if hasattr(each, "shape")
        )
        return stage, looks, self.scale is not None

    def _send(self, kind: str, action: Action, stage: int, tensors: list[Tensor]) -> None:
        pipeline = self.pipeline
        lane = pipeline._lanes[kind, min(stage, action.stage) % pipeline.ranks == pipeline.ranks - 1]
        peer = pipeline._peers[stage % pipeline.ranks]
        signature = self._signature(stage, action.piece)
        if kind == "F" and signature not in pipeline._shapes:
            pipeline._shapes[signature] = [(each.shape, each.dtype) for each in tensors]
            self._post(lane.send(_header(tensors, pipeline.here.device), peer))
        for each in tensors:
            self._post(lane.send(each.contiguous(), peer))

    def _post(self, sending: tuple[dist.Work, Tensor]) -> None:
        # What has arrived need not be kept any longer.
        self._sending = [each for each in self._sending if not each[0].is_completed()]
        self._sending.append(sending)

    def finish(self) -> None:
        for work, _ in self._sending:
            work.wait()


class Incoming:
    """The messages of one kind to this rank, asked for in the order in which their sender sends them.

    Activations come from the rank before and gradients from the one after; the first and the last are neighbours too.
    """

    def __init__(self, run: _Run, plans: list[list[Action]], kind: str) -> None:
        self.run, self.kind = run, kind
        pipeline = run.pipeline
        place, step, kinds = pipeline.here.place("pp"), *((1, "F") if kind == "F" else (-1, "BI"))
        sender = (place - step) % pipeline.ranks
        self.peer = pipeline._peers[sender]
        self.around = place == 0 if kind == "F" else place == pipeline.ranks - 1
        self.coming = deque(
            (each.stage + step, each.piece)
            for each in plans[sender]
            if each.kind in kinds and 0 <= each.stage + step < pipeline.stages
        )
        self.posted: dict[tuple[int, int], list[tuple[dist.Work, Tensor]]] = {}

    @property
    def _lane(self) -> Lane:
        return self.run.pipeline._lanes[self.kind, self.around]

    def take(self, stage: int, piece: int) -> tuple[Tensor, ...]:
        while (stage, piece) not in self.posted:
            self._post()
        messages = self.posted.pop((stage, piece))
        for work, _ in messages:
            work.wait()
        if not self._lane.in_order:
            # The next one can arrive while this one is computed with.
            self.ask_ahead()
        device = self.run.pipeline.here.device
        return tuple(tensor.to(device) for _, tensor in messages)

    def ask_ahead(self) -> None:
        """Ask for the next message, if none is asked for and it is known what it consists of."""
        if not self.posted and self.coming and self.run.shapes_of(self.kind, *self.coming[0]) is not None:
            self._post()

    def _post(self) -> None:
        stage, piece = self.coming.popleft()
        device, lane = self.run.pipeline.here.device, self._lane
        shapes = self.run.shapes_of(self.kind, stage, piece)
        if shapes is None:
            work, header = lane.receive((_HEADER,), torch.int64, self.peer, device)
            work.wait()
            shapes = _from_header(header)
            self.run.pipeline._shapes[self.run._signature(stage, piece)] = shapes
        self.posted[stage, piece] = [lane.receive(shape, dtype, self.peer, device) for shape, dtype in shapes]


@dataclass
class Lane:
    """One direction between neighbours. gloo tells messages apart by number, NCCL by their order."""

    group: dist.ProcessGroup
    number: int
    through_host: bool
    in_order: bool
    """A message waits for all that were asked for or sent before it: asked for too early, it would hold up a send, and
    neighbours that do so wait for each other in a circle."""
    counts: dict[tuple[str, int], int] = field(default_factory=dict)

    def send(self, tensor: Tensor, peer: int) -> tuple[dist.Work, Tensor]:
        tensor = tensor.cpu() if self.through_host else tensor
        work = dist.isend(as_real(tensor), peer, self.group, self._tag("to", peer))
        assert work is not None
        return work, tensor

    def receive(
        self, shape: tuple[int, ...], dtype: torch.dtype, peer: int, device: torch.device
    ) -> tuple[dist.Work, Tensor]:
        buffer = torch.empty(shape, dtype=dtype, device="cpu" if self.through_host else device)
        work = dist.irecv(as_real(buffer), peer, self.group, self._tag("from", peer))
        assert work is not None
        return work, buffer

    def _tag(self, way: str, peer: int) -> int:
        count = self.counts[way, peer] = self.counts.get((way, peer), 0) + 1
        return self.number << 24 | count % (1 << 24)


def _lanes(here: Here, chunks: int) -> dict[tuple[str, bool], Lane]:
    """(F or B, whether it goes around from the last rank to the first) -> lane."""
    mesh = here.submesh("pp")
    if mesh is None:
        return {}
    keys = [("F", False), ("B", False), *([("F", True), ("B", True)] if chunks > 1 else [])]
    group = mesh.get_group()
    if dist.get_backend(group) == "gloo" or here.device.type == "cpu":
        # gloo cannot send from a GPU's memory.
        host = here.device.type == "cuda"
        return {key: Lane(group, number, host, False) for number, key in enumerate(keys)}
    lanes = {}
    for number, key in enumerate(keys):
        groups = [dist.new_group(list(ranks)) for ranks in here.layout.groups("pp")]
        mine = here.layout.groups("pp").index(here.layout.group_of(here.rank, "pp"))
        lanes[key] = Lane(groups[mine], number, False, True)
    return lanes


def _rounds(pieces: Iterable[Piece], size: int) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    for piece in pieces:
        batch.append(piece)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


_HEADER = 1 + _MOST_TENSORS * (2 + _MOST_DIMS)


def _header(tensors: list[Tensor], device: torch.device) -> Tensor:
    words = [len(tensors)]
    for each in tensors:
        words += [TYPES.index(each.dtype), each.dim(), *each.shape, *[0] * (_MOST_DIMS - each.dim())]
    return torch.tensor(words + [0] * (_HEADER - len(words)), device=device)


def _from_header(header: Tensor) -> list[tuple[torch.Size, torch.dtype]]:
    words = header.tolist()
    rows = [words[1 + i * (2 + _MOST_DIMS) :][: 2 + _MOST_DIMS] for i in range(words[0])]
    return [(torch.Size(row[2 : 2 + row[1]]), TYPES[row[0]]) for row in rows]

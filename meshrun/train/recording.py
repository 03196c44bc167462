"""What is recorded of a step: who writes it down, and what a recording needs to be replayed.

    found, replay = recorder.record(lambda: compute(step, held, samples), branches=False)
    recording = Recording(form, held, inputs, found, gradients, replay)
    recording(step, pieces, tensors)       # what compute(step, pieces, samples) returns, and leaves in `.grad`

Batches of one form have one recording: it reads them from tensors of its own, into which they are copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten

from meshrun.parallel.dropout import Keyed
from meshrun.parallel.moment import Moment
from meshrun.parallel.placed import Piece
from meshrun.train.branches import on_streams
from meshrun.train.room import room


class Recorder(Protocol):
    """Writes down what a device is told to do."""

    def aside(self) -> AbstractContextManager[None]:
        """Around what is computed as always, in the place where it will be recorded."""

    def record(self, body: Callable[[], Any], branches: bool) -> tuple[Any, Callable[[], None]]:
        """What `body` returns, whose tensors have no values yet, and what gives them and all else their values.

        With `branches`, what does not depend on each other may be done at the same time.
        """

    def wait(self) -> None:
        """Until the device has done all that it was told."""

    def has_room(self) -> bool:
        """Whether there is memory for a step beside a recording of it, which keeps as much as a step takes."""


@dataclass(frozen=True)
class CudaRecorder:
    """Records on a stream of its own, into memory of its own."""

    device: torch.device
    stream: torch.cuda.Stream = field(init=False)
    second: torch.cuda.Stream = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "stream", torch.cuda.Stream(self.device))
        object.__setattr__(self, "second", torch.cuda.Stream(self.device))

    @contextmanager
    def aside(self) -> Iterator[None]:
        computing = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(computing)
        with torch.cuda.stream(self.stream):
            yield
        computing.wait_stream(self.stream)

    def record(self, body: Callable[[], Any], branches: bool) -> tuple[Any, Callable[[], None]]:
        graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
        number = torch.cuda.current_device() if self.device.index is None else self.device.index
        computing, generator = torch.cuda.current_stream(self.device), torch.cuda.default_generators[number]
        before = generator.clone_state()
        try:
            # Only of this thread: another one copies the next batches meanwhile.
            with (
                torch.cuda.graph(graph, pool=pool, stream=self.stream, capture_error_mode="thread_local"),
                on_streams(self.stream, self.second) if branches else nullcontext(),
            ):
                found = body()
        except BaseException:
            # One that breaks off leaves torch on its stream, and memory and the generator as if it still went on.
            torch.cuda.set_stream(computing)
            generator.graphsafe_set_state(before)
            with suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(number, pool)
                torch._C._cuda_releasePool(number, pool)
            raise
        return found, graph.replay

    def wait(self) -> None:
        torch.cuda.synchronize(self.device)

    def has_room(self) -> bool:
        free, taken = room(self.device)
        return free >= 2 * taken


class Unfit(Exception):
    """Why a step cannot be recorded."""


@dataclass(frozen=True)
class Form:
    """What batches must have in common for one recording: structure, shapes and types, but not the values."""

    structure: TreeSpec = field(hash=False)
    leaves: tuple[Any, ...]
    rows: tuple[tuple[int, int], ...]
    samples: int


def form_of(pieces: list[Piece], samples: int) -> tuple[Form, list[Tensor]]:
    """The form of a step's batches, and the tensors in them."""
    leaves, structure = tree_flatten([(each.inputs, each.targets) for each in pieces])
    for each in leaves:
        if not isinstance(each, Tensor | int | float | str | None):
            raise Unfit(f"batches hold a {type(each).__name__}")
    kinds = tuple((each.shape, each.dtype) if isinstance(each, Tensor) else each for each in leaves)
    rows = tuple((len(each.ids), each.real) for each in pieces)
    return Form(structure, kinds, rows, samples), [each for each in leaves if isinstance(each, Tensor)]


@dataclass(frozen=True)
class Recording:
    """A recorded step: replaying it reads the `inputs`, and writes the `gradients` and what it has `found`."""

    form: Form
    held: list[Piece]
    """The batches that it was recorded with, of which the `inputs` are the tensors."""
    inputs: list[Tensor]
    found: Any
    gradients: list[tuple[nn.Parameter, Tensor]]
    replay: Callable[[], None]
    moment: Moment | None = None
    """Where it draws by key: of the `held` batches, the ids that were sent are read too."""
    rates: tuple[tuple[Keyed, float, bool], ...] = ()
    """How much each module drops by key, and whether it does: numbers of the host, and part of what was recorded."""

    @property
    def holds(self) -> bool:
        """Whether a step would still do what was recorded."""
        return all(each.rate == rate and each.training is training for each, rate, training in self.rates)

    def tensors_of(self, pieces: list[Piece], samples: int) -> list[Tensor] | None:
        """What `form_of` finds, for next to nothing, where the form is this one; None where only it can tell."""
        if samples != self.form.samples or len(pieces) != len(self.held):
            return None
        found: list[Tensor] = []
        for new, held in zip(pieces, self.held, strict=True):
            if len(new.ids) != len(held.ids) or new.real != held.real:
                return None
            if not _like(new.inputs, held.inputs, found) or not _like(new.targets, held.targets, found):
                return None
        return found

    def __call__(self, step: int, pieces: list[Piece], tensors: list[Tensor]) -> Any:
        if self.moment is not None:
            self.moment.step = step
            for held, piece in zip(self.held, pieces, strict=True):
                assert held.sent is not None
                held.sent.copy_(piece.id_tensor(), non_blocking=True)
        for static, new in zip(self.inputs, tensors, strict=True):
            static.copy_(new, non_blocking=True)
        parameter, gradient = self.gradients[0]
        if parameter.grad is not gradient:  # a step was computed as always in between
            for parameter, gradient in self.gradients:
                parameter.grad = gradient
        self.replay()
        return self.found


def _like(new: Any, held: Any, found: list[Tensor]) -> bool:
    """Whether a batch surely has the form of another; its tensors are added to those that were found."""
    if isinstance(held, Tensor):
        found.append(new)
        return isinstance(new, Tensor) and new.dtype is held.dtype and new.shape == held.shape
    kind = type(held)
    if type(new) is not kind:
        return False
    if kind is tuple or kind is list:
        return len(new) == len(held) and all(_like(one, other, found) for one, other in zip(new, held, strict=True))
    if kind is dict:
        return list(new) == list(held) and all(_like(new[key], held[key], found) for key in held)
    return kind in (int, float, bool, str, type(None)) and bool(new == held)

"""Brings batches to the device ahead of the step that needs them.

    for data in fed(loader.steps(0, 100), on(device), StepData.moved): …       # its batches are on the device

On a GPU a thread takes batches from the loader and copies them on a stream of its own, beside the computation, some
steps ahead. Where only the calling thread may read, it does so when a batch is asked for, while the GPU still computes
what it was given before. On a CPU there is nothing to bring anywhere, and no thread.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

Item = TypeVar("Item")
Move = Callable[[Any], Any]
"""Makes of a batch the same batch on the device."""

_PATIENCE = 1.0
"""Seconds that an end waits for the batch that is just being read."""


class Lane(Protocol):
    """A way to the device."""

    def open(self) -> AbstractContextManager[Any]:
        """Around all that the thread does."""

    def copy(self, tensor: Tensor) -> Tensor:
        """Begin to copy."""

    def sent(self) -> Any:
        """A mark behind all copies that were begun."""

    def arrived(self, mark: Any, tensors: list[Tensor]) -> None:
        """Let the computation of the calling thread come after the mark, and keep these tensors until it has."""


@dataclass(frozen=True)
class CudaLane:
    """A stream of its own beside that of the computation."""

    device: torch.device
    stream: torch.cuda.Stream = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "stream", torch.cuda.Stream(self.device))

    def open(self) -> AbstractContextManager[Any]:
        stack = contextlib.ExitStack()
        stack.enter_context(torch.cuda.device(self.device))
        stack.enter_context(torch.cuda.stream(self.stream))
        return stack

    def copy(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, non_blocking=True)

    def sent(self) -> torch.cuda.Event:
        return self.stream.record_event()

    def arrived(self, mark: torch.cuda.Event, tensors: list[Tensor]) -> None:
        computing = torch.cuda.current_stream(self.device)
        computing.wait_event(mark)
        for tensor in tensors:
            # Its memory is the lane's: without a word it would be given to a later batch while this one is computed.
            tensor.record_stream(computing)


def on(device: torch.device) -> Lane | None:
    """The way to a device; None to one that shares the host's memory."""
    return CudaLane(device) if device.type == "cuda" else None


@dataclass(frozen=True)
class _Sent:
    item: Any
    mark: Any
    tensors: list[Tensor]


Take = Callable[[], _Sent | None]
"""The next item that was sent; None after the last one."""


def fed(
    items: Generator[Item, None, None],
    lane: Lane | None,
    move: Callable[[Item, Move], Item],
    depth: int = 2,
    waited: Callable[[Item, float], Item] = lambda item, _: item,
    aside: bool = True,
) -> Generator[Item, None, None]:
    """The same items with their batches moved down a lane, `depth` of them ahead; not `aside`, none and by no thread.

    `waited` is told how long the caller was held up for an item. What goes wrong in the thread goes wrong here; and
    when this generator is closed, the items are.
    """
    if lane is None:
        yield from items
        return
    with contextlib.ExitStack() as ending:
        take = _by_a_thread(items, lane, move, depth, ending) if aside else _in_turn(items, lane, move, ending)
        while True:
            began = time.perf_counter()
            found = take()
            if found is None:
                return
            lane.arrived(found.mark, found.tensors)
            item: Item = found.item
            del found
            yield waited(item, time.perf_counter() - began)
            del item


def _in_turn(
    items: Generator[Item, None, None], lane: Lane, move: Callable[[Item, Move], Item], ending: contextlib.ExitStack
) -> Take:
    ending.enter_context(contextlib.closing(items))

    def take() -> _Sent | None:
        with lane.open():
            return _next(items, lane, move)

    return take


def _by_a_thread(
    items: Generator[Item, None, None],
    lane: Lane,
    move: Callable[[Item, Move], Item],
    depth: int,
    ending: contextlib.ExitStack,
) -> Take:
    room, ready, stop = threading.Semaphore(depth), queue.SimpleQueue[_Sent | BaseException | None](), threading.Event()
    thread = threading.Thread(target=_bring, args=(items, lane, move, room, ready, stop), name="feed", daemon=True)
    thread.start()
    # The last one first. Who is in the middle of reading something long is left to it: the thread ends with the
    # program, or when it looks up.
    ending.callback(thread.join, _PATIENCE)
    ending.callback(room.release)
    ending.callback(stop.set)

    def take() -> _Sent | None:
        found = ready.get()
        if isinstance(found, BaseException):
            raise found
        if found is not None:
            room.release()
        return found

    return take


class _Copies:
    """Copies batches down a lane, and knows their tensors."""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self.tensors: list[Tensor] = []

    def __call__(self, batch: Any) -> Any:
        return mapped(batch, self._copy)

    def _copy(self, tensor: Tensor) -> Tensor:
        self.tensors.append(self._lane.copy(tensor))
        return self.tensors[-1]


def _next(items: Generator[Item, None, None], lane: Lane, move: Callable[[Item, Move], Item]) -> _Sent | None:
    """The next item, on its way; None after the last one."""
    for item in items:
        copies = _Copies(lane)
        moved = move(item, copies)
        return _Sent(moved, lane.sent(), copies.tensors)
    return None


def _bring(
    items: Generator[Item, None, None],
    lane: Lane,
    move: Callable[[Item, Move], Item],
    room: threading.Semaphore,
    ready: queue.SimpleQueue[_Sent | BaseException | None],
    stop: threading.Event,
) -> None:
    """In the thread."""
    try:
        with lane.open(), contextlib.closing(items):
            while room.acquire() and not stop.is_set() and (sent := _next(items, lane, move)) is not None:
                ready.put(sent)
                del sent  # what is read next may take a while, and its memory is not small
    except BaseException as error:
        ready.put(error)
    else:
        ready.put(None)


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch with every tensor in it on the device, copied beside the computation where memory is pinned."""
    return batch if device.type == "cpu" else mapped(batch, lambda each: each.to(device, non_blocking=True))


def mapped(batch: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """The batch with another tensor for every one in it; its structure stays."""
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        return {key: mapped(value, function) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(mapped(value, function) for value in batch))
    if isinstance(batch, Sequence) and not isinstance(batch, str | bytes):
        return type(batch)(mapped(value, function) for value in batch)  # type: ignore[call-arg]
    return batch

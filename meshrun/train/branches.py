"""Gradients of convolutions' weights beside those of their inputs, while a step is being recorded.

    with Branches(fork, join):
        loss.backward()
        ...                           # whatever uses such a gradient comes after a join
    # all have joined

A small batch leaves most of a GPU idle, and the backward pass of a network is a chain of which only the gradients of
inputs are links. Those of weights nobody needs before the end, so a recording has them on a second branch. Operations
are seen where torch dispatches them, which costs the host time: of a recording, once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Fork = Callable[[], AbstractContextManager[None]]
"""Around what goes to the second branch, after all that the first one has begun."""

_BACKWARD = torch.ops.aten.convolution_backward.default
_ALIASES = frozenset({torch.ops.aten.detach.default, torch.ops.aten.alias.default, torch.ops.aten.view.default})
"""What reads no values."""


class Branches(TorchDispatchMode):
    """Splits the backward pass of convolutions; `join` has the first branch wait for the second."""

    def __init__(self, fork: Fork, join: Callable[[], None]) -> None:
        super().__init__()
        self._fork, self._join = fork, join
        self._there: set[int] = set()
        """Where the tensors of the second branch lie that the first has not waited for."""
        self._held: list[Any] = []
        """All that the second branch reads: memory that is let go of is used anew by the first."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """torch would import its compiler in order to keep it out, which it does under a mode anyway."""
        return False

    def __torch_dispatch__(
        self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _BACKWARD and args[10][0] and args[10][1]:
            return self._split(args)
        if self._there and func not in _ALIASES and any(self._is_there(each) for each in tree_leaves((args, kwargs))):
            self._meet()
        return func(*args, **(kwargs or {}))

    def _split(self, args: tuple[Any, ...]) -> tuple[Any, Any, Any]:
        *given, (_, _, bias) = args
        if any(self._is_there(each) for each in given):
            self._meet()
        with self._fork():
            _, weight, offset = _BACKWARD(*given, [False, True, bias])
        inputs, _, _ = _BACKWARD(*given, [True, False, False])
        self._held.append(given)  # and not its result: a gradient that somebody else holds too is copied
        self._there.update(each.data_ptr() for each in (weight, offset) if isinstance(each, Tensor))
        return inputs, weight, offset

    def _is_there(self, value: Any) -> bool:
        return isinstance(value, Tensor) and value.data_ptr() in self._there

    def _meet(self) -> None:
        self._join()
        self._there.clear()
        self._held.clear()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._meet()


@contextmanager
def on_streams(first: torch.cuda.Stream, second: torch.cuda.Stream) -> Iterator[None]:
    """The two branches as streams of a GPU."""

    @contextmanager
    def fork() -> Iterator[None]:
        second.wait_stream(first)
        with torch.cuda.stream(second):
            yield

    with Branches(fork, lambda: first.wait_stream(second)):
        yield

"""What a model computes again by `torch.utils.checkpoint` is computed as it was the first time.

    replay_checkpoints(moment)     # once for each object that must go back; however the model's code names the function

Modules that draw by key count their calls in a forward pass and know its samples, and a stage of a pipeline knows what
it has received. The second computation is in the backward pass, when all that has moved on: other elements would be
dropped than the first time, and gradients would be wrong without a word. So `torch.utils.checkpoint` gets a function
that first goes back.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch.utils import checkpoint as torchs

from meshrun.parallel import functional


class Replayed(Protocol):
    def returning(self) -> Callable[[], AbstractContextManager[None]]:
        """Makes contexts, as often as wanted, inside of which the object is what it is now."""


_replayed: weakref.WeakSet[Any] = weakref.WeakSet()
_PLAIN = torchs._checkpoint_without_reentrant_generator


def replay_checkpoints(*owners: Replayed) -> None:
    """Return to these in every second computation; torch's own parts are replaced once, for all of the process.

    `torch.utils.checkpoint.checkpoint` itself stays: programs have imported it by name. It finds these two when called.
    """
    for owner in owners:
        _replayed.add(owner)
    torchs._checkpoint_without_reentrant_generator = _without_reentrant  # type: ignore[assignment]
    torchs.CheckpointFunction = Reentrant  # type: ignore[misc]


def _without_reentrant(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """For `use_reentrant=False`: the function is what computes again, the first computation is elsewhere."""
    return _PLAIN(_again(function), *arguments, **named)


class Reentrant(torchs.CheckpointFunction):
    """For `use_reentrant=True`: the function computes first, and then again."""

    @classmethod
    def apply(cls, function: Callable[..., Any], *arguments: Any) -> Any:
        again, computed = _again(function), False

        def compute(*inputs: Any) -> Any:
            nonlocal computed
            before, computed = computed, True
            return again(*inputs) if before else function(*inputs)

        return super().apply(compute, *arguments)


def _again(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, called as if it were now."""
    back = [functional.returning(), *(owner.returning() for owner in _replayed)]

    def again(*inputs: Any, **named: Any) -> Any:
        with contextlib.ExitStack() as stack:
            for there in back:
                stack.enter_context(there())
            return function(*inputs, **named)

    return again

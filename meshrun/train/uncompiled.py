"""torch's optimizers, without torch's compiler where nothing is compiled.

    leave_out_the_compiler()             # before the first optimizer is made

torch keeps its compiler out of what optimizers do, and imports it in order to do so, which takes as long as the import
of torch itself. Here they do the same without it, until something else has imported it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import SGD, Adam, AdamW, Optimizer

COMPILER = "torch._dynamo"
KEPT_OUT = ("add_param_group", "zero_grad", "state_dict", "load_state_dict")
"""What torch wraps in all optimizers, so that it is not compiled."""
STEPPING = (SGD, Adam, AdamW)
"""Those of which torch wraps the step."""


def leave_out_the_compiler() -> None:
    """Does nothing where the compiler is imported already, or where this torch has nothing to take it out of."""
    if COMPILER in sys.modules:
        return
    for name in KEPT_OUT:
        if (plain := _inside(Optimizer, name)) is not None:
            _replace(Optimizer, name, plain)
    for kind in STEPPING:
        # After the first optimizer of its kind was made, a step is what its hooks are called around.
        if (plain := _inside(kind, "step")) is not None and not hasattr(kind.step, "hooked"):
            _replace(kind, "step", _without_graph(plain))


def _inside(kind: type[Optimizer], name: str) -> Callable[..., Any] | None:
    """What torch has wrapped, if it has, and if it was not taken out before."""
    found = vars(kind).get(name)
    return None if hasattr(found, "either") else getattr(found, "__wrapped__", None)


def _replace(kind: type[Optimizer], name: str, plain: Callable[..., Any]) -> None:
    wrapped = vars(kind)[name]

    @functools.wraps(wrapped)
    def method(*given: Any, **named: Any) -> Any:
        return (wrapped if COMPILER in sys.modules else plain)(*given, **named)

    method.either = True  # type: ignore[attr-defined]
    setattr(kind, name, method)


def _without_graph(step: Callable[..., Any]) -> Callable[..., Any]:
    """As torch has it: the step is not differentiated, unless the optimizer was asked for that."""

    def method(self: Optimizer, *given: Any, **named: Any) -> Any:
        with torch.set_grad_enabled(self.defaults["differentiable"]):
            return step(self, *given, **named)

    return method

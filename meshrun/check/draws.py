"""What a model draws at random and meshrun cannot make the same on every mesh.

    for draw in find_draws(model, lambda: model(inputs)):
        print(draw)         # drawn at my_model.py:31 (aten.bernoulli_ in blocks.0)

Dropout draws by sample once it is keyed (`parallel.dropout`, `parallel.functional`); a call of `torch.rand` in a
forward pass draws from the generator of its rank, so its numbers change with the mesh.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import meshrun
from meshrun.parallel.dropout import Keyed

NOT_THE_USERS = tuple(str(Path(str(package.__file__)).parent) for package in (torch, meshrun))
SWITCHES = {"dropout_p": 0, "dropout": 0, "p": 0, "train": False, "training": False}
"""Arguments with which an operation that could draw draws nothing."""


@dataclass(frozen=True)
class Draw:
    """Random numbers that one line of a module drew."""

    module: str
    """Its name; empty for the model itself, and for what is no part of it."""
    op: str
    where: str | None
    """file:line of the user's code; None if the draw was not made there, or not seen being made."""

    def __str__(self) -> str:
        place = f"{self.op} in {self.module or 'the model'}"
        return f"drawn at {self.where} ({place})" if self.where else f"drawn by {place}"


def find_draws(model: nn.Module, call: Callable[[], Any]) -> list[Draw]:
    """Run a forward pass, in which no module is compiled, and say what it drew that no keyed module did: each once."""
    watch = _Watch()
    python, numpy = random.getstate(), _state_of_numpy()
    with watch.naming(model), watch:
        call()
    if random.getstate() != python:
        watch.found.append(Draw("", "Python's random", None))
    if _state_of_numpy() != numpy:
        watch.found.append(Draw("", "numpy.random", None))
    return list(dict.fromkeys(watch.found))


class _Watch(TorchDispatchMode):
    """Sees every operation, below all that decomposes into others."""

    def __init__(self) -> None:
        super().__init__()
        self.inside: list[tuple[str, nn.Module]] = []
        self.found: list[Draw] = []

    @contextlib.contextmanager
    def naming(self, model: nn.Module) -> Iterator[None]:
        """Know in which module the program is."""
        hooks = []
        for name, module in model.named_modules():

            def enter(module: nn.Module, _: Any, name: str = name) -> None:
                self.inside.append((name, module))

            def leave(*_: Any) -> None:
                self.inside.pop()

            hooks += [
                module.register_forward_pre_hook(enter, prepend=True),
                module.register_forward_hook(leave, always_call=True),
            ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name, module = self.inside[-1] if self.inside else ("", None)
        if not isinstance(module, Keyed) and _draws(func, args, kwargs):
            self.found.append(Draw(name, str(func.overloadpacket), _users_line(sys._getframe(1))))
        return func(*args, **kwargs)


def _draws(func: Any, args: Any, kwargs: Any) -> bool:
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    arguments = func._schema.arguments
    given = {each.name: each.default_value for each in arguments if each.has_default_value()}
    given |= dict(zip((each.name for each in arguments), args, strict=False)) | kwargs
    return not any(given[name] == off for name, off in SWITCHES.items() if isinstance(given.get(name), bool | float))


def _users_line(frame: FrameType | None) -> str | None:
    """The innermost line that is neither torch's nor ours."""
    while frame is not None and frame.f_code is not find_draws.__code__:
        if not frame.f_code.co_filename.startswith((*NOT_THE_USERS, "<")):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return None


def _state_of_numpy() -> tuple[Any, ...]:
    kind, keys, *rest = np.random.get_state(legacy=True)
    return kind, np.asarray(keys).tobytes(), *rest

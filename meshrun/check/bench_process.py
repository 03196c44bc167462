"""A process that calls what it is asked to, and says what came of it.

    with Process(device) as process:
        process.begin(importlib.import_module, "torch")  # without waiting for it
        counts = process.ask(count, experiment)          # what `count` returns there, or a `SideFailed`

It is silent, it never outlives the one who asks, and what it fails with is a sentence here.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from meshrun.errors import UserError
from meshrun.world.environment import inherited, of_python, only, take_over

PRELOADED = ["meshrun.check.bench_peers", "torch._dynamo"]
"""What every side needs: on a CPU imported once, in the process that all of them are forks of."""


class SideFailed(Exception):
    """Something went wrong in a side's process."""


class OutOfMemory(SideFailed):
    """And it is that the GPU's memory is full."""


class Refused(SideFailed):
    """And it is what the user gave, which the sentence says."""


FAILURES = {"memory": OutOfMemory, "user": Refused, "error": SideFailed}


class Process:
    """Another process, which calls what it is asked to."""

    def __init__(self, device: torch.device) -> None:
        # Forks are soon there, but CUDA does not survive one: there every process is a new one.
        context: Any = multiprocessing.get_context("spawn" if device.type == "cuda" else "forkserver")
        if device.type == "cpu":
            context.set_forkserver_preload(PRELOADED)
        self._pipe, theirs = context.Pipe()
        # Not a daemon, which could have no readers; `_end_with_parent` sees to it that none is left behind.
        self._process = context.Process(target=_serve, args=(theirs, inherited()), daemon=False)
        with only(of_python()):
            self._process.start()
        theirs.close()
        self._due = 0
        """Answers that nobody has waited for yet."""

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.close()
        self._process.join(5.0)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def begin(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Have it call a function, without waiting for what that returns."""
        self._pipe.send((function, arguments))
        self._due += 1

    def ask(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What the function returns there."""
        self.begin(function, *arguments)
        failed: SideFailed | None = None
        while self._due:
            try:
                kind, result = self._pipe.recv()
            except (EOFError, ConnectionError):
                self._process.join(5.0)
                raise SideFailed(f"its process ended with status {self._process.exitcode}") from None
            self._due -= 1
            if kind != "fine" and failed is None:
                failed = FAILURES[kind](result)
        if failed is not None:
            raise failed
        return result


def _serve(pipe: Connection, environment: dict[str, str]) -> None:
    """A process's life: call what it is asked to, until nobody is there to ask."""
    take_over(environment)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # CTRL-C is for who asks
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # Readers are forked, as in a run: those of a server of forks would not end with this process.
    multiprocessing.set_start_method("fork", force=True)
    silent = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):  # peers greet, advise and warn
        os.dup2(silent, stream)
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            function, arguments = pipe.recv()
            try:
                answer = ("fine", function(*arguments))
            except torch.OutOfMemoryError as error:
                answer = ("memory", f"out of memory: {str(error).partition('. ')[0]}")
            except UserError as error:
                answer = ("user", str(error))
            except BaseException as error:
                where = traceback.extract_tb(error.__traceback__)[-1]
                text = f"{type(error).__name__}: {error}".strip().partition("\n")[0]
                answer = ("error", f"{text} ({where.filename}:{where.lineno})")
            pipe.send(answer)


def _end_with_parent() -> None:
    """End this process when the one that asks is gone, even amid a turn.

    The kernel's own signal would not do: on a CPU the parent that it knows is the server of forks, which stays as long
    as one of them. Readers end with this process by themselves.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)

"""A rank that fails when it is told to: at moments too short to be hit from outside, and as only its own process can.

    arm(folder)                                     # on the rank
    control = Control(folder)                       # on whoever injects
    control.order(rank=1, Order(7, "rename"))       # rank 1 kills itself when it comes to that
    control.fired(7)                                # when that was, or None

Nothing in meshrun knows of this: `arm` wraps functions of the system and of torch in the process that it is called in.

Moments: forward (in a module's), update (between two operations of the optimizer), snapshot (copied to memory, not
marked as whole), write (half of a checkpoint's file), rename and renamed (of a whole checkpoint), prune (an old one is
half gone), words (half of the last words), load (state is being read), weights and result (beside the file that they
replace). At "disk" the order's number is an error for all that is written to checkpoints, and at "clock" it is added
to the time of day; these two hold until the order is taken back.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from meshrun.world import detect

SELF_MADE = ("forward", "update", "snapshot", "write", "rename", "renamed", "prune", "words", "load")
AT_THE_END = ("weights", "result")
MOMENTS = (*SELF_MADE, *AT_THE_END, "disk", "clock")


@dataclass(frozen=True)
class Order:
    """What a rank is to do next; `number` is how many times it lets the moment pass, an error, or seconds."""

    id: int
    moment: str
    number: int = 0


@dataclass(frozen=True)
class Control:
    """The folder through which ranks are told; it is whoever injects that makes it."""

    folder: Path

    def order(self, rank: int, order: Order) -> None:
        beside = self.folder / f".order-{rank}"
        beside.write_text(json.dumps(asdict(order)))
        beside.replace(self._order_of(rank))

    def take_back(self, rank: int) -> None:
        self._order_of(rank).unlink(missing_ok=True)

    def fired(self, number: int) -> float | None:
        """When an order was carried out, on the monotonic clock."""
        try:
            return float((self.folder / f"fired-{number}").read_text())
        except (OSError, ValueError):
            return None

    def pace(self, seconds: float) -> None:
        """Let each step take so much longer, as a slow reader would."""
        beside = self.folder / ".pace"
        beside.write_text(repr(seconds))
        beside.replace(self.folder / "pace")

    def _order_of(self, rank: int) -> Path:
        return self.folder / f"order-{rank}"


def arm(control: Path) -> None:
    """Make this process carry out orders, if it is a rank."""
    world = detect(os.environ)
    if world.source != "none":
        _Armed(control, world.rank).wrap()


class _Armed:
    """One rank's side."""

    def __init__(self, control: Path, rank: int) -> None:
        self._folder, self._path = control, control / f"order-{rank}"
        self._write, self._rename, self._replace, self._mkdir = os.write, os.rename, os.replace, os.mkdir
        self._time = time.time

    def wrap(self) -> None:
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

        from meshrun.data.loader import Loader
        from meshrun.state.checkpoint import Checkpoint

        os.write, os.mkdir, time.time = self._on_write, self._on_mkdir, self._on_time
        os.rename = self._on(self._rename, self._before_rename, self._after_rename)
        os.replace = self._on(self._replace, self._before_replace)
        Checkpoint.whole = self._on(Checkpoint.whole, lambda *_: self._at("load"))  # type: ignore[method-assign]
        Loader.steps = self._paced(Loader.steps)  # type: ignore[method-assign,assignment]
        register_optimizer_step_pre_hook(self._before_update)
        register_optimizer_step_post_hook(lambda *_: self._at("update"))

    def _order(self, moment: str) -> Order | None:
        try:
            order = Order(**json.loads(self._path.read_bytes()))
        except (OSError, ValueError):
            return None
        return order if order.moment == moment else None

    def _at(self, moment: str) -> None:
        order = self._order(moment)
        if order is not None:
            self._die(order)

    def _die(self, order: Order) -> None:
        self._note(order)
        self._path.unlink(missing_ok=True)  # whoever comes after this process lives
        os.kill(os.getpid(), signal.SIGKILL)

    def _note(self, order: Order) -> None:
        path = self._folder / f"fired-{order.id}"
        if not path.exists():
            beside = self._folder / f".fired-{order.id}"
            beside.write_text(repr(time.monotonic()))
            self._replace(beside, path)

    def _paced(self, steps: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
        def paced(*args: Any) -> Iterator[Any]:
            for data in steps(*args):
                with contextlib.suppress(OSError, ValueError):
                    time.sleep(float((self._folder / "pace").read_text()))
                if (order := self._order("forward")) is not None:
                    self._die_in_forward(order)
                yield data

        return paced

    def _die_in_forward(self, order: Order) -> None:
        from torch.nn.modules.module import register_module_forward_pre_hook

        left = itertools.count(order.number, -1)
        register_module_forward_pre_hook(lambda *_: self._die(order) if next(left) <= 0 else None)

    def _before_update(self, *_: Any) -> None:
        if (order := self._order("update")) is None:
            return
        from torch.utils._python_dispatch import TorchDispatchMode

        left, die, known = itertools.count(order.number, -1), self._die, order

        class Dying(TorchDispatchMode):
            def __torch_dispatch__(self, operation: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
                if next(left) <= 0:
                    die(known)
                return operation(*args, **(kwargs or {}))

        Dying().__enter__()  # which nothing leaves: an optimizer of fewer operations dies behind its last one

    @staticmethod
    def _on(
        original: Callable[..., Any], before: Callable[..., None], after: Callable[..., None] = lambda *_: None
    ) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            before(*args)
            result = original(*args, **kwargs)
            after(*args)
            return result

        return wrapped

    def _before_rename(self, source: Any, name: Any) -> None:
        if _is_checkpoint(name):
            self._refuse(source)
            self._at("rename")

    def _after_rename(self, _source: Any, name: Any) -> None:
        if _is_checkpoint(name):
            self._at("renamed")
        if Path(name).name.startswith(".partial-gone-"):
            if self._order("prune"):
                next(Path(name).iterdir()).unlink()
            self._at("prune")

    def _before_replace(self, _source: Any, name: Any) -> None:
        path = Path(name)
        if path.suffix == ".json" and path.name.startswith("rank-"):
            self._at("snapshot")
        elif path.name == "result.json":
            self._at("result")
        elif path.suffix == ".safetensors" and path.parent.name == "weights":
            self._at("weights")

    def _on_write(self, file: int, buffer: Any) -> int:
        written = os.readlink(f"/proc/self/fd/{file}")  # noqa: PTH115 - a pathname that may be gone
        self._refuse(written)
        path = Path(written)
        moment = "words" if path.name.startswith("words-") else "write" if ".partial-" in path.parent.name else ""
        if moment and self._order(moment):
            self._write(file, memoryview(buffer)[: len(buffer) // 2])
            self._at(moment)
        return self._write(file, buffer)

    def _on_mkdir(self, path: Any, *args: Any, **kwargs: Any) -> None:
        self._refuse(path)
        self._mkdir(path, *args, **kwargs)

    def _refuse(self, path: Any) -> None:
        """A disk that takes nothing more."""
        if ".partial-" in str(path) and (order := self._order("disk")) is not None:
            self._note(order)
            raise OSError(order.number, os.strerror(order.number), str(path))

    def _on_time(self) -> float:
        order = self._order("clock")
        if order is None:
            return self._time()
        self._note(order)
        return self._time() + order.number


def _is_checkpoint(name: Any) -> bool:
    return Path(name).name.startswith("step-")


DISK_ERRORS = {"full": errno.ENOSPC, "read-only": errno.EROFS, "error": errno.EIO}

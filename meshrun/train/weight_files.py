"""The weights that a run leaves behind: the best ones and the last ones, each a file under the model's own names.

    files = WeightFiles(run.weights, here, placed, tell, mark)
    if files.keep_best({"step": 40, "loss": 0.3}): ...     # they are there; else they are still being written
    files.finish()                                         # now they are: returns what was said of them
    files.keep_last({"step": 100})                         # why a file could not be written, a sentence each

Best weights that a full disk refuses are tried again with each checkpoint (`write_late`), and at the end. Ranks that
hold parts of the model send them to rank 0. Where the host is free while a GPU computes, and nobody else waits for what
is written, the training goes on meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from meshrun.mesh import Here
from meshrun.parallel.placed import Placed
from meshrun.state.weights import save_weights
from meshrun.train.writing import Writing


class WeightFiles:
    """Those of one run; without a folder there are none."""

    def __init__(
        self,
        folder: Path | None,
        here: Here,
        placed: Placed,
        tell: Callable[..., None],
        mark: Callable[[str], None],
    ) -> None:
        self.folder, self.here, self.placed, self.tell, self.mark = folder, here, placed, tell, mark
        self._writing: Writing | None = None
        self._late: Writing | None = None
        """The best weights, while the disk refuses them."""

    def keep_best(self, about: dict[str, Any]) -> bool:
        """Write the best weights so far; whether they are there when this returns."""
        if self.folder is not None and self._has_time:
            self._writing = Writing.begin(dict(self.placed.weights()), self.folder / "best.safetensors", about)
            return False
        if self.folder is not None:
            self._keep_best_now(self.folder / "best.safetensors", about)
        # Who goes on from here believes that they are kept, so nobody does before they are.
        self.here.gathered(None)
        return True

    def finish(self) -> dict[str, Any] | None:
        """End what is being written; returns what was said of it."""
        if self._writing is None:
            return None
        writing, self._writing = self._writing, None
        self._note(writing, writing.finish())
        return writing.about

    def write_late(self) -> str | None:
        """Try to write the best weights that the disk has refused; returns why it refuses them still."""
        if self._late is None:
            return None
        error = self._late.try_again()
        if error is not None:
            return _not_written(self._late.path, error)
        self._late = None
        return None

    @property
    def _has_time(self) -> bool:
        """Whether the host is free while the device computes, and nobody else waits for what is written."""
        return self.here.size == 1 and self.here.device.type == "cuda"

    def keep_last(self, about: dict[str, Any]) -> list[str]:
        """Write the weights as they are at the end, and the best ones if they are late; returns what failed."""
        if self.folder is None:
            return []
        whole = self._gathered()
        if self.here.rank != 0:
            return []
        failed = [late] if (late := self.write_late()) else []
        path = self.folder / "last.safetensors"
        try:
            save_weights(whole, path, about)
        except OSError as error:
            failed.append(_not_written(path, error))
        return failed

    def _keep_best_now(self, path: Path, about: dict[str, Any]) -> None:
        whole = self._gathered()
        if self.here.rank != 0:
            return
        try:
            save_weights(whole, path, about)
        except OSError as error:
            self._note(Writing.of(whole, path, about), error)
        else:
            self._late = None

    def _gathered(self) -> dict[str, Tensor]:
        self.mark("saving")
        with self.here.waiting("the weights of all ranks"):
            return dict(self.placed.weights())

    def _note(self, writing: Writing, error: OSError | None) -> None:
        """What became of the best weights; a disk that keeps refusing them is told of once."""
        refused_before, self._late = self._late is not None, None if error is None else writing
        if error is not None and not refused_before:
            again = "the training goes on, and tries again with each checkpoint and at its end"
            self.tell("note", text=f"{_not_written(writing.path, error)}; {again}")


def _not_written(path: Path, error: OSError) -> str:
    return f"cannot write {path}: {error.strerror or error}"

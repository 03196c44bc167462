"""The weights that a run leaves behind: the best ones and the last ones, each a file under the model's own names.

    files = WeightFiles(run.weights, here, placed, tell, mark)
    if files.keep_best({"step": 40, "loss": 0.3}): ...     # they are there; else they are still being written
    files.finish()                                         # now they are: returns what was said of them
    files.keep("last", {"step": 100})

Ranks that hold parts of the model send them to rank 0. Where the host is free while a GPU computes, and nobody else
waits for what is written, the training goes on meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from meshrun.errors import RunFailed
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

    def keep_best(self, about: dict[str, Any]) -> bool:
        """Write the best weights so far; whether they are there when this returns."""
        if self.folder is not None and self._has_time:
            self._writing = Writing.begin(dict(self.placed.weights()), self.folder / "best.safetensors", about)
            return False
        self.keep("best", about)
        # Who goes on from here believes that they are kept, so nobody does before they are.
        self.here.gathered(None)
        return True

    def finish(self) -> dict[str, Any] | None:
        """End what is being written; returns what was said of it."""
        if self._writing is None:
            return None
        writing, self._writing = self._writing, None
        error = writing.finish()
        if error is not None:
            self.tell("note", text=f"{_not_written(writing.path, error)}; the training goes on")
        return writing.about

    @property
    def _has_time(self) -> bool:
        """Whether the host is free while the device computes, and nobody else waits for what is written."""
        return self.here.size == 1 and self.here.device.type == "cuda"

    def keep(self, name: str, about: dict[str, Any]) -> None:
        """Write the weights as they are now."""
        if self.folder is None:
            return
        self.mark("saving")
        with self.here.waiting("the weights of all ranks"):
            whole = dict(self.placed.weights())
        if self.here.rank == 0:
            path = self.folder / f"{name}.safetensors"
            try:
                save_weights(whole, path, about)
            except OSError as error:
                if name == "last":
                    raise RunFailed(f"{_not_written(path, error)}; make room and `meshrun resume` the run") from error
                self.tell("note", text=f"{_not_written(path, error)}; the training goes on")


def _not_written(path: Path, error: OSError) -> str:
    return f"cannot write {path}: {error.strerror or error}"

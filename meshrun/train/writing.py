"""A file of weights that is written beside the training: a GPU need not wait for a disk.

writing = Writing.begin(weights, path, best)      # copied to the host now
...                                               # steps
writing.finish()                                  # why it could not be written, or None
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from meshrun.state.weights import save_weights


@dataclass
class Writing:
    """One file, and what is true once it is there."""

    path: Path
    about: dict[str, Any]
    _error: Exception | None = None
    _thread: threading.Thread = field(init=False)

    @classmethod
    def begin(cls, weights: Mapping[str, Tensor], path: Path, about: dict[str, Any]) -> Writing:
        writing = cls(path, about)
        copied = {name: each.to("cpu", copy=True) for name, each in weights.items()}
        writing._thread = threading.Thread(target=writing._write, args=(copied,), name="weights")
        writing._thread.start()
        return writing

    def finish(self) -> OSError | None:
        self._thread.join()
        if isinstance(self._error, OSError | None):
            return self._error
        raise self._error

    def _write(self, weights: dict[str, Tensor]) -> None:
        try:
            save_weights(weights, self.path, self.about)
        except Exception as error:
            self._error = error

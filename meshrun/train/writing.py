"""A file of weights that is written beside the training: a GPU need not wait for a disk.

writing = Writing.begin(weights, path, best)      # copied to the host now
...                                               # steps
writing.finish()                                  # why it could not be written, or None
writing.try_again()                               # the same, now and here
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

    weights: dict[str, Tensor]
    """A copy on the host."""
    path: Path
    about: dict[str, Any]
    _error: Exception | None = None
    _thread: threading.Thread = field(init=False)

    @classmethod
    def of(cls, weights: Mapping[str, Tensor], path: Path, about: dict[str, Any]) -> Writing:
        """Weights that are yet to be written, as they are now."""
        return cls({name: each.to("cpu", copy=True) for name, each in weights.items()}, path, about)

    @classmethod
    def begin(cls, weights: Mapping[str, Tensor], path: Path, about: dict[str, Any]) -> Writing:
        writing = cls.of(weights, path, about)
        writing._thread = threading.Thread(target=writing._write, name="weights")
        writing._thread.start()
        return writing

    def finish(self) -> OSError | None:
        self._thread.join()
        return self._outcome()

    def try_again(self) -> OSError | None:
        self._write()
        return self._outcome()

    def _outcome(self) -> OSError | None:
        if isinstance(self._error, OSError | None):
            return self._error
        raise self._error

    def _write(self) -> None:
        self._error = None
        try:
            save_weights(self.weights, self.path, self.about)
        except Exception as error:
            self._error = error

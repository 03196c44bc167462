"""A loop in a thread of its own, for as long as a block runs.

class Follow(Aside):
    def _run(self) -> None:
        while not self._over.wait(0.25): …

with Follow(): …                     # the block waits for the last round before it is left
"""

from __future__ import annotations

import threading
from typing import Self


class Aside:
    """`_run` ends soon after `_over` is set."""

    def __init__(self, name: str) -> None:
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        """What each kind does."""

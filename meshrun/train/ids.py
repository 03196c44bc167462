"""The digest of all samples that a training has used, in order, also of one that goes on where another stopped.

used = UsedIds()
used.begin_at(order, step=120)      # the steps before, from the order alone, beside the training
used.add(ids)
used.hexdigest()
"""

from __future__ import annotations

import hashlib
import threading

from meshrun.data.order import Order
from meshrun.data.permutation import Ids


class UsedIds:
    """A sha256 over the ids as 64-bit numbers. Its state cannot be saved, so what came before is gone through again."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._waiting: list[Ids] = []
        self._before: threading.Thread | None = None

    def begin_at(self, order: Order, step: int) -> None:
        """Forget what was added, and stand behind the first `step` batches; returns at once."""
        self.__init__()  # type: ignore[misc]
        self._before = threading.Thread(target=_go_through, args=(self._hash, order, step), name="ids", daemon=True)
        self._before.start()

    def add(self, ids: Ids) -> None:
        self._waiting.append(ids)
        if self._before is None or not self._before.is_alive():
            self._take_in()

    def hexdigest(self) -> str:
        if self._before is not None:
            self._before.join()
        self._take_in()
        return self._hash.hexdigest()

    def _take_in(self) -> None:
        for each in self._waiting:
            self._hash.update(each.astype("<i8", copy=False).data)
        self._waiting.clear()


def _go_through(digest: hashlib._Hash, order: Order, steps: int) -> None:
    for step in range(steps):
        digest.update(order.batch_ids(step).astype("<i8", copy=False).data)

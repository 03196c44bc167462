"""The digest of used samples: in order, also where those of earlier steps are still being gone through."""

from __future__ import annotations

import hashlib
import threading

import numpy as np
import pytest

from meshrun.data.order import Order
from meshrun.train.ids import UsedIds

STEPS = 3


class Slow(Order):
    """An order whose batches are not there before it is told to go."""

    go = threading.Event()

    def batch_ids(self, step: int) -> np.ndarray:
        assert self.go.wait(30)
        return super().batch_ids(step)


@pytest.fixture
def order() -> Slow:
    Slow.go = threading.Event()
    return Slow(40, 4, 7)


def digest(order: Order, steps: int) -> str:
    return hashlib.sha256(np.concatenate([order.batch_ids(step) for step in range(steps)]).astype("<i8")).hexdigest()


def test_samples_that_are_used_while_earlier_ones_are_gone_through_come_after_them(order: Slow):
    plain = Order(40, 4, 7)
    used = UsedIds()
    used.add(np.arange(5))
    used.begin_at(order, STEPS)
    used.add(plain.batch_ids(STEPS))
    threading.Timer(0.05, order.go.set).start()
    assert used.hexdigest() == digest(plain, STEPS + 1)
    used.add(plain.batch_ids(STEPS + 1))
    assert used.hexdigest() == digest(plain, STEPS + 2)
    assert used.hexdigest() == digest(plain, STEPS + 2), "each sample counts once"

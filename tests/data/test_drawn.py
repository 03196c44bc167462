"""Where generators of random numbers stand, and the way back there."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from meshrun.data import drawn
from meshrun.data.drawn import Drawn, draw_on

CPU = torch.device("cpu")
DRAWS: dict[str, Callable[[], object]] = {
    "python": random.random,
    "python-pair": lambda: random.gauss(0, 1),
    "python-seed": lambda: random.seed(77),
    "numpy": np.random.rand,
    "numpy-pair": np.random.randn,
    "torch": lambda: torch.rand(1),
}


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before = Drawn.now(CPU)
    yield
    draw_on(before.tensors(), CPU)


@pytest.mark.parametrize("sees_words", [True, False])
@pytest.mark.parametrize("kind", DRAWS)
def test_every_draw_is_noticed_and_can_be_taken_back(kind: str, sees_words: bool, monkeypatch: pytest.MonkeyPatch):
    """The second number of a pair too, which is drawn without moving on; and many in a row."""
    monkeypatch.setattr(drawn, "_SEES_WORDS", sees_words and drawn._SEES_WORDS)
    random.seed(1)
    for _ in range(701):
        before = Drawn.now(CPU)
        assert before.same(Drawn.now(CPU))
        DRAWS[kind]()
        now = Drawn.now(CPU)
        assert before.same(now) == (kind == "python-seed" and before.python == now.python)
        assert now.python == random.getstate()
    first = [DRAWS[kind](), random.random(), np.random.rand(), torch.rand(1).item()]
    before.restore()
    assert before.same(Drawn.now(CPU))
    draw_on(now.tensors(), CPU)
    assert [DRAWS[kind](), random.random(), np.random.rand(), torch.rand(1).item()] == first


def test_the_words_of_this_python_are_where_they_are_looked_for():
    """Else a step costs some microseconds more, and nothing is wrong."""
    assert drawn._SEES_WORDS

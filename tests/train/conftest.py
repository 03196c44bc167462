from __future__ import annotations

from collections.abc import Iterator

import pytest

from meshrun import Here, mesh
from tests.train.small import start_on_cpu


@pytest.fixture
def alone() -> Iterator[Here]:
    """A world of one, on the CPU, in the test's own process."""
    yield start_on_cpu(1)
    mesh.finish()
    mesh.use(mesh.Meeting())


@pytest.fixture
def on_gpu() -> Iterator[Here]:
    """The same on a GPU."""
    mesh.use(mesh.Meeting(device="cuda"))
    yield mesh.start()
    mesh.finish()
    mesh.use(mesh.Meeting())

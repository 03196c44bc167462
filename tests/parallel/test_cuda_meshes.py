"""Layouts of several ranks on one GPU: the losses and norms of one process there.

Ranks that share a GPU meet over gloo, which carries what fsdp sends; what tp and pp send goes through the host.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from meshrun import mesh
from meshrun.layout import parse
from tests.staged_group import rejoin
from tests.train.whole import Result, differences, program, trained

pytestmark = pytest.mark.gpu
STEPS = 10


@pytest.fixture(scope="module")
def wanted() -> Iterator[Result]:
    """The training in one process on the GPU; its weights, which are there, do not travel to the ranks."""
    mesh.use(mesh.Meeting(device="cuda"))
    try:
        yield replace(trained(program("small_llama", STEPS)), weights={})
    finally:
        mesh.finish()
        mesh.use(mesh.Meeting())


@pytest.mark.parametrize(
    "layout, group",
    [
        pytest.param(layout, group, marks=pytest.mark.ranks(parse(layout).size, timeout=120), id=layout)
        for layout, group in (
            ("fsdp=2", "gloo"),
            ("fsdp=4", "gloo"),
            ("tp=2", "staged"),
            ("pp=2", "staged"),
            ("fsdp=2,tp=2", "staged"),
            ("dp=2,tp=2", "staged"),
        )
    ],
)
def test_ranks_that_share_a_gpu_train_as_one_process_on_it_does(layout: str, group: str, wanted: Result):
    if group == "staged":
        rejoin()
    mesh.use(mesh.Meeting(layout=layout, device="cuda", backend="gloo"))
    found = trained(program("small_llama", STEPS))
    assert mesh.start().device.type == "cuda" and len(found.losses) == STEPS
    far = {kind: each for kind, each in differences(found, wanted).items() if not each <= 1e-5}
    assert not far, f"{far}\n{found.losses}\n{wanted.losses}\n{found.grad_norms}\n{wanted.grad_norms}"

"""The test-only group that stages through host memory carries whole trainings on the CPU, as it does on a GPU."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from meshrun import mesh
from tests.staged_group import NAME, rejoin
from tests.train.whole import Result, assert_same, by_one_process, program, trained


@pytest.fixture
def wanted() -> Result:
    return by_one_process("small_llama")


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param("pp=2", marks=pytest.mark.ranks(2)),
        pytest.param("fsdp=2,tp=2", marks=pytest.mark.ranks(4)),
    ],
)
def test_a_training_through_the_staged_group_is_that_of_one_process(layout: str, wanted: Result):
    rejoin()
    mesh.use(mesh.Meeting(layout=layout, device="cpu"))
    assert_same(trained(program("small_llama")), wanted)
    assert dist.get_backend() == NAME

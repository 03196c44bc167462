"""Whole trainings on every axis, and on products of axes, are the training of one process.

The programs in `tests/programs` have dropout, tied weights, padding, and batches of seven that no layout divides; the
optimizer is SGD with momentum and the gradient is clipped, so that a gradient of the wrong size cannot hide.
"""

from __future__ import annotations

from typing import Any

import pytest

from meshrun import mesh
from meshrun.layout import parse
from tests.train.whole import Result, assert_same, by_one_process, program, trained

EVERYWHERE = ["fsdp=2", "tp=2", "pp=2"]
"""Where every program trains; the rest is spread over them, so that the whole takes a minute."""
ELSEWHERE = {
    "small_llama": [
        *("dp=2", "fsdp=2:zero1", "fsdp=2:zero2", "cp=2", "fsdp=2,tp=2", "pp=2,fsdp=2"),
        *("pp=2:interleaved", "pp=2:zb", "dp=2,fsdp=2", "pp=2,dp=2", "pp=2,tp=2", "fsdp=2,cp=2", "pp=2,cp=2"),
    ],
    "encoder": ["dp=2", "pp=2:zb"],
    "gpt2": ["dp=2", "cp=2", "pp=2:interleaved"],
    "hf_llama": ["cp=2"],
    "t5": ["dp=2"],
    "bert": ["fsdp=2,tp=2"],
}
THE_REST = {
    "small_llama": ["pp=2:gpipe"],
    "encoder": ["fsdp=2:zero1", "pp=2:interleaved", "fsdp=2,tp=2", "pp=2,fsdp=2", "pp=2,tp=2"],
    "gpt2": ["fsdp=2:zero1", "pp=2:zb", "fsdp=2,tp=2", "pp=2,fsdp=2", "pp=2,dp=2"],
    "hf_llama": ["pp=2,tp=2", "pp=2:gpipe", "pp=2:interleaved", "pp=2:zb", "fsdp=2,tp=2", "pp=2,fsdp=2"],
    "t5": ["pp=4", "fsdp=2:zero2", "pp=2:interleaved", "pp=2:zb", "fsdp=2,tp=2", "pp=2,dp=2", "pp=2,fsdp=2"],
    "bert": ["pp=2:gpipe", "pp=2:interleaved", "pp=2:zb", "dp=2,fsdp=2", "pp=2,fsdp=2"],
}
"""More schedules and products of axes, for `pytest -m every`."""


def case(name: str, layout: str, *marks: pytest.MarkDecorator) -> Any:
    ranks = parse(layout).size
    return pytest.param(name, layout, marks=[pytest.mark.ranks(ranks), *marks], id=f"{name}-{layout}")


@pytest.fixture
def wanted(name: str) -> Result:
    return by_one_process(name)


@pytest.mark.parametrize(
    "name, layout",
    [
        *(case(name, layout) for name in ELSEWHERE for layout in EVERYWHERE + ELSEWHERE[name]),
        *(case(name, layout, pytest.mark.every) for name in THE_REST for layout in THE_REST[name]),
    ],
)
def test_a_training_on_a_layout_is_that_of_one_process(name: str, layout: str, wanted: Result):
    mesh.use(mesh.Meeting(layout=layout, device="cpu"))
    assert_same(trained(program(name)), wanted)


@pytest.mark.parametrize("name", [pytest.param("small_llama", marks=pytest.mark.ranks(8, timeout=120))])
def test_three_axes_on_eight_ranks_train_as_one_process_does(name: str, wanted: Result):
    mesh.use(mesh.Meeting(layout="pp=2,fsdp=2,tp=2", device="cpu"))
    assert_same(trained(program(name)), wanted)


@pytest.fixture
def tied() -> Result:
    return by_one_process("tied_llama")


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(each, marks=pytest.mark.ranks(parse(each).size), id=each)
        for each in ("tp=2", "pp=2", "pp=2:interleaved", "pp=2,fsdp=2")
    ],
)
def test_a_head_that_is_the_embedding_trains_as_in_one_process(layout: str, tied: Result):
    mesh.use(mesh.Meeting(layout=layout, device="cpu"))
    assert_same(trained(program("tied_llama")), tied)

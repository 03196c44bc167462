"""Copies of a model's buffers, as they were before a step."""

from __future__ import annotations

import torch
from torch import Tensor

from meshrun.train.copies import Copier


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert list(found) == list(wanted)
    for name, each in wanted.items():
        assert found[name].dtype == each.dtype and torch.equal(found[name], each), name
        assert found[name].data_ptr() != each.data_ptr(), "a copy"


def test_copies_are_those_of_buffers_that_change_their_shapes_and_types():
    copier, empty = Copier(), torch.tensor(1)
    for shapes in (
        {"x": (3,), "y": (3,), "table": (2, 2), "other": (2, 2)},
        {"x": (2,), "y": (4,), "table": (2, 2), "other": (2, 2)},  # as many in all as before
        {"x": (2,), "y": (5,), "table": (2, 2), "other": (2, 3)},
        {"x": (2, 1), "y": (5,), "table": (4,), "other": (2, 3)},
    ):
        now = {name: torch.rand(shape) for name, shape in shapes.items()} | {"count": empty}
        assert_same(dict(copier(now)), now)
    now["y"] = now["y"].double()
    assert_same(dict(copier(now)), now)
    now["other"].resize_(3)  # the same object
    assert_same(dict(copier(now)), now)
    now["y"].mul_(2)
    assert_same(dict(copier(now)), now)


def test_a_buffer_that_gets_another_shape_and_stays_the_same_object_is_copied_whole():
    copier, buffer, other = Copier(), torch.zeros(2), torch.ones(1)
    assert copier({"a": buffer, "b": other})["a"].tolist() == [0.0, 0.0]
    buffer.data = torch.arange(3.0)
    again = copier({"a": buffer, "b": other})
    assert [again[name].tolist() for name in ("a", "b")] == [[0.0, 1.0, 2.0], [1.0]]

"""What readers send: small tensors by value, and everything as it was."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
import torch
from torch.utils.data._utils import worker

from meshrun.data.loader import Loader, Reading
from meshrun.data.order import Order
from meshrun.data.sending import SMALL, _Value, is_without_room, not_shared, packed, unpacked

Pair = namedtuple("Pair", "a b")
LARGE = torch.zeros(SMALL + 1, dtype=torch.uint8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.uint8, torch.bool, torch.bfloat16, torch.float16])
def test_small_tensors_of_every_type_come_back_as_they_were(dtype: torch.dtype):
    tensor = torch.arange(12).reshape(3, 4).to(dtype)
    batch = ({"x": tensor, "view": tensor[:, 1:3].t()}, [tensor[0, 0], "text", None])
    inputs, (scalar, text, nothing) = unpacked(packed(batch))
    assert torch.equal(inputs["x"], tensor) and inputs["x"].dtype == dtype
    assert torch.equal(inputs["view"], tensor[:, 1:3].t())
    assert torch.equal(scalar, tensor[0, 0]) and (text, nothing) == ("text", None)


def test_only_small_plain_tensors_in_plain_containers_are_sent_by_value():
    small, parameter = torch.zeros(3), torch.nn.Parameter(torch.zeros(3))
    assert isinstance(packed([small])[0], _Value)
    for left in (LARGE, parameter, torch.zeros(3).to_sparse(), torch.ones(3, requires_grad=True), Pair(small, small)):
        assert packed((left,))[0] is left


class Mixed:
    """Samples of a small and a large tensor, and a word."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        return {"small": torch.full((3,), index), "large": LARGE + index, "word": str(index)}, torch.tensor(index)


def test_a_rank_gets_the_same_batches_from_readers_as_it_reads_itself():
    order = Order(12, 4, seed=1)
    read = [list(Loader(Mixed(), order, 0, 1, Reading(workers=workers)).steps(0, 3)) for workers in (0, 2)]
    for alone, by_readers in zip(*read, strict=True):
        (mine, targets), (theirs, their_targets) = alone.batches[0], by_readers.batches[0]
        assert torch.equal(mine["small"], theirs["small"]) and torch.equal(mine["large"], theirs["large"])
        assert mine["word"] == theirs["word"] and torch.equal(targets, their_targets)
        theirs["small"].add_(1)  # no view of what may not be written to


FULL = "unable to allocate shared memory(shm) for file </torch_1>: No space left on device (28)"


def refuse(*_: object, **__: object) -> None:
    raise RuntimeError(FULL)


def test_large_tensors_go_by_value_where_there_is_no_room_in_shared_memory(monkeypatch: pytest.MonkeyPatch):
    """Else they would be lost on their way, and the rank wait for ever."""
    monkeypatch.setattr(torch.Tensor, "share_memory_", refuse)
    (sent,) = packed([LARGE + 1])
    assert isinstance(sent, _Value) and torch.equal(unpacked([sent])[0], LARGE + 1)


def test_readers_put_samples_together_elsewhere_where_there_is_no_room_in_shared_memory(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(torch.UntypedStorage, "_new_shared", refuse)
    monkeypatch.setattr(torch.Tensor, "share_memory_", refuse)
    order = Order(12, 4, seed=1)
    read = [list(Loader(Mixed(), order, 0, 1, Reading(workers=workers)).steps(0, 3)) for workers in (0, 1)]
    for alone, by_readers in zip(*read, strict=True):
        assert torch.equal(alone.batches[0][0]["large"], by_readers.batches[0][0]["large"])


def test_after_a_batch_that_was_put_together_elsewhere_torch_knows_again_that_it_is_in_a_reader(
    monkeypatch: pytest.MonkeyPatch,
):
    about = object()
    monkeypatch.setattr(worker, "_worker_info", about)
    with pytest.raises(KeyError), not_shared():
        assert worker._worker_info is None
        raise KeyError
    assert worker._worker_info is about


@pytest.mark.parametrize(
    ("said", "is_one"),
    [
        (FULL, True),
        ("unable to resize file </torch_7_1_0> to the right size: File too large (27)", True),
        ("unable to open shared memory object </torch_7_1_0> in read-write mode: Too many open files (24)", True),
        ("unable to open shared memory object </torch_7_1_0> in read-write mode: No such file or directory (2)", False),
        ("the program's own: No space left on device (28)", False),
    ],
)
def test_what_torch_says_where_shared_memory_cannot_be_had_is_known(said: str, is_one: bool):
    assert is_without_room(RuntimeError(said)) is is_one

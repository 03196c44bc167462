"""Tensors from one stage to another arrive as what they are."""

from __future__ import annotations

from collections import deque

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from meshrun.parallel import gather


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> deque[Tensor]:
    """What is on its way: bytes, as between ranks, that only fit into a tensor of as many."""
    waiting: deque[Tensor] = deque()

    def send(tensor: Tensor, to: int) -> None:
        assert to == 0 and tensor.is_contiguous()
        waiting.append(tensor.clone())

    def receive(tensor: Tensor, rank: int) -> None:
        assert rank == 1
        message = waiting.popleft()
        assert message.dtype == tensor.dtype and message.numel() == tensor.numel()
        tensor.copy_(message.view_as(tensor))

    monkeypatch.setattr(dist, "send", send)
    monkeypatch.setattr(dist, "recv", receive)
    return waiting


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).reshape(2, 3),
        torch.arange(6.0).reshape(2, 3).T,
        torch.arange(4, dtype=torch.bfloat16),
        torch.arange(4, dtype=torch.float64).reshape(1, 2, 2, 1),
        torch.tensor(7),
        torch.tensor([True, False]),
        torch.zeros(0, 3),
    ],
    ids=["fp32", "turned", "bf16", "fp64", "a number", "bool", "empty"],
)
def test_a_tensor_arrives_with_its_type_and_shape(tensor: Tensor, wire: deque[Tensor]):
    gather.send(tensor, to=0)
    found = gather.receive(1)
    assert not wire
    torch.testing.assert_close(found, tensor)

"""What a bucket of gradients is made of: parts for masters, and those of parameters that have none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from meshrun.parallel import compress
from meshrun.parallel.compress import _given_to_masters


def test_of_a_bucket_masters_get_their_parts_and_others_get_theirs_back():
    """A bf16 parameter of the user's own may share a bucket with matrices that have masters."""
    buffer = torch.arange(6.0).bfloat16()
    short, own = nn.Parameter(torch.ones(2, 2).bfloat16()), nn.Parameter(torch.ones(2).bfloat16())
    master = nn.Parameter(torch.ones(2, 2))
    master.grad = torch.full((2, 2), 2**-10)
    gradients = [buffer[:4].view(2, 2), buffer[4:]]
    bucket: Any = SimpleNamespace(buffer=lambda: buffer, parameters=lambda: [short, own], gradients=lambda: gradients)
    state: Any = SimpleNamespace(masters={short: master})
    whole = buffer.float()
    ((gradient, part),) = _given_to_masters(state, bucket, whole)
    assert gradient is gradients[1] and part.tolist() == [4.0, 5.0] and part.dtype == torch.float32
    assert torch.equal(master.grad, torch.arange(4.0).view(2, 2) + 2**-10)
    assert master.grad.data_ptr() == whole.data_ptr(), "what arrives there is the master's"


def test_gradients_are_made_smaller_before_they_travel_in_fewer_bits(monkeypatch: pytest.MonkeyPatch):
    """What is within the range of fp16 as a mean may be outside of it before."""
    gradient = torch.tensor([2.0**16, 1.0])
    there: torch.futures.Future[Any] = torch.futures.Future()
    sent: list[torch.Tensor] = []

    def all_reduce(tensor: torch.Tensor, **_: object) -> Any:
        sent.append(tensor.clone())
        there.set_result([tensor.mul_(0.5)])  # as other ranks' gradients are others
        return SimpleNamespace(get_future=lambda: there)

    monkeypatch.setattr(compress.dist, "all_reduce", all_reduce)
    monkeypatch.setattr(compress.dist, "get_world_size", lambda _: 2)
    bucket: Any = SimpleNamespace(buffer=lambda: gradient, parameters=list, gradients=list)
    group: Any = None
    mean = compress._mean(compress._State(group, torch.float16, {}), bucket)
    assert torch.equal(mean.wait(), gradient) and gradient.tolist() == [2.0**14, 0.25]
    assert [each.dtype for each in sent] == [torch.float16]

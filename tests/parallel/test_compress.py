"""What a bucket of gradients is made of: parts for masters, and those of parameters that have none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

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

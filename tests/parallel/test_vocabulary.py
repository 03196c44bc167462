"""Cross entropy of logits that are split over the vocabulary is that of whole logits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import Shard, distribute_tensor

from meshrun import mesh
from meshrun.parallel.vocabulary import split_cross_entropy


@pytest.mark.ranks(4)
@pytest.mark.parametrize(("scale", "ignored"), [(1.0, 7), (300.0, -100)])
def test_split_logits_give_the_loss_and_gradients_of_whole_ones(scale: float, ignored: int):
    """Logits of hundreds: without the largest of all ranks, their exponentials are infinite or all zero."""
    mesh.use(mesh.Meeting(layout="dp=2,tp=2", device="cpu"))
    here = mesh.start()
    assert here.mesh is not None
    torch.manual_seed(here.replica)  # each replica has samples of its own
    whole = (torch.randn(6, 10) * scale).requires_grad_()
    targets = torch.tensor([0, 9, 4, ignored, 5, 6])
    expected = F.cross_entropy(whole, targets, ignore_index=ignored, reduction="sum")
    (gradient,) = torch.autograd.grad(expected, whole)
    logits = distribute_tensor(whole.detach(), here.mesh["tp"], [Shard(1)]).requires_grad_()
    loss = split_cross_entropy(logits, targets, ignore_index=ignored)
    torch.testing.assert_close(loss, expected)
    (found,) = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(found.full_tensor(), gradient, rtol=1e-5, atol=1e-6)

"""The ready losses: a sum and a count whose quotient is torch's own mean, however a batch is cut."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from meshrun import Loss, UserError, accuracy, cross_entropy, mean_squared_error, token_cross_entropy


def mean(loss: Loss) -> float:
    return loss.total.item() / float(loss.count)


@pytest.fixture
def logits() -> Tensor:
    return torch.randn(10, 4, generator=torch.Generator().manual_seed(0), requires_grad=True)


CLASSES = torch.tensor([0, 1, 2, 3, 0, 1, 2, 3, 3, 3])


def test_cross_entropy_is_the_sum_over_samples_and_their_number(logits: Tensor):
    loss = cross_entropy(logits, CLASSES)
    assert loss.count == 10 and loss.total.shape == ()
    assert mean(loss) == pytest.approx(F.cross_entropy(logits, CLASSES).item(), rel=1e-6)
    loss.total.backward()
    assert logits.grad is not None and logits.grad.abs().sum() > 0


def test_parts_of_a_batch_add_up_to_the_whole(logits: Tensor):
    parts = [cross_entropy(logits[rows], CLASSES[rows]) for rows in (slice(0, 7), slice(7, 8), slice(8, 10))]
    assert sum(part.count for part in parts) == 10
    total = sum(part.total.item() for part in parts)
    assert total / 10 == pytest.approx(mean(cross_entropy(logits, CLASSES)), rel=1e-6)


def test_targets_that_are_no_classes_are_refused_with_their_row(logits: Tensor):
    with pytest.raises(UserError, match=r"row 1 of a batch is 4; the model tells 4 classes apart, from 0 to 3"):
        cross_entropy(logits[:3], torch.tensor([0, 4, -1]))
    with pytest.raises(UserError, match=r"is of type float32; numbers of classes must be int64, from 0 to 3"):
        cross_entropy(logits[:3], torch.tensor([0.0, 1.0, 2.0]))
    with pytest.raises(UserError, match=r"row 1 of a batch is 9;"):
        token_cross_entropy(torch.randn(2, 3, 4), torch.tensor([[0, -100, 1], [2, 9, 0]]))


def test_shares_of_classes_and_targets_that_do_not_count_have_the_mean_that_torch_has(logits: Tensor):
    shares = torch.roll(logits.detach(), 1, 0).softmax(1)
    assert mean(cross_entropy(logits, shares)) == pytest.approx(F.cross_entropy(logits, shares).item(), rel=1e-6)
    some = CLASSES.masked_fill(torch.arange(10) > 6, -100)
    loss = cross_entropy(logits, some)
    assert loss.count == 7
    assert mean(loss) == pytest.approx(F.cross_entropy(logits, some).item(), rel=1e-6)


def test_token_cross_entropy_counts_only_tokens_that_are_not_ignored():
    outputs = torch.randn(3, 5, 7, generator=torch.Generator().manual_seed(1))
    targets = torch.randint(0, 7, (3, 5), generator=torch.Generator().manual_seed(2))
    targets[0, 1:], targets[2, :] = -100, -100
    loss = token_cross_entropy(outputs, targets)
    assert int(loss.count) == 6
    assert mean(loss) == pytest.approx(float(F.cross_entropy(outputs.flatten(0, 1), targets.flatten())), rel=1e-6)


def test_token_cross_entropy_takes_another_ignore_index():
    outputs, targets = torch.randn(2, 3, 4), torch.tensor([[0, 1, 2], [0, 0, 3]])
    loss = token_cross_entropy(outputs, targets, ignore_index=0)
    wanted = F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), ignore_index=0)
    assert int(loss.count) == 3 and mean(loss) == pytest.approx(float(wanted), rel=1e-6)


def test_token_cross_entropy_of_nothing_but_padding_is_zero_of_zero():
    loss = token_cross_entropy(torch.randn(1, 3, 4), torch.full((1, 3), -100))
    assert float(loss.total) == 0 and int(loss.count) == 0


def test_mean_squared_error_is_the_sum_over_elements():
    outputs, targets = torch.randn(4, 3), torch.randn(4, 3)
    loss = mean_squared_error(outputs, targets)
    assert loss.count == 12 and mean(loss) == pytest.approx(float(F.mse_loss(outputs, targets)), rel=1e-6)


def test_mean_squared_error_does_not_broadcast():
    with pytest.raises(ValueError, match=r"\(4, 1\) but targets have \(4,\)"):
        mean_squared_error(torch.zeros(4, 1), torch.zeros(4))


def test_accuracy_is_the_number_of_hits_and_of_targets():
    outputs = torch.eye(4)[[0, 1, 2, 2, 0, 1]]
    hits = accuracy(outputs, torch.tensor([0, 1, 2, 3, 0, 0]))
    assert int(hits.total) == 4 and hits.count == 6

"""When gradients are sent, in which buckets, and what is known of those that come in several parts: without ranks.

The group is a stand-in whose other rank has the same gradients, so that every sum is twice what this rank has.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshrun.parallel import reduced
from meshrun.parallel.reduced import Counted, Overlapped, Source

GROUP: Any = None


class Message:
    def __init__(self, flat: Tensor) -> None:
        self.flat = flat

    def wait(self) -> None:
        self.flat.mul_(2)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The messages so far; a bucket is of one parameter."""
    messages: list[Tensor] = []

    def begun(flat: Tensor, _: dist.ProcessGroup) -> Any:
        messages.append(flat)
        return Message(flat)

    monkeypatch.setattr(reduced, "_begun", begun)
    monkeypatch.setattr(reduced, "BUCKET", 1)
    return messages


def parameters(count: int = 2) -> list[nn.Parameter]:
    return [nn.Parameter(torch.full((2,), float(number + 1))) for number in range(count)]


def sources(parameters: list[nn.Parameter]) -> list[Source]:
    return [Source(f"p{number}", each, each, each) for number, each in enumerate(parameters)]


def backward(first: nn.Parameter, second: nn.Parameter) -> None:
    (first * second).sum().backward()


def test_gradients_of_micro_batches_are_sent_once_with_the_last_of_them(sent: list[Tensor]):
    first, second = parameters()
    sums = Overlapped(sources([first, second]), GROUP)
    backward(first, second)
    assert not sent
    sums.last = True
    backward(first, second)
    assert len(sent) == 2
    sums.finish()
    assert len(sent) == 2
    assert (first.grad.tolist(), second.grad.tolist()) == ([8.0, 8.0], [4.0, 4.0])


def test_the_next_step_begins_with_micro_batches_that_are_not_the_last(sent: list[Tensor]):
    first, second = parameters()
    sums = Overlapped(sources([first, second]), GROUP)
    sums.last = True
    backward(first, second)
    sums.finish()
    sent.clear()
    first.grad = second.grad = None
    backward(first, second)
    assert not sent
    sums.last = True
    backward(first, second)
    sums.finish()
    assert len(sent) == 2 and first.grad.tolist() == [8.0, 8.0]


def test_what_the_samples_did_not_need_is_sent_as_zeros_and_holds_up_only_what_is_before_it(sent: list[Tensor]):
    first, unused, last = parameters(3)
    sums = Overlapped(sources([first, unused, last]), GROUP)
    sums.last = True
    backward(first, last)
    assert len(sent) == 1, "buckets go in one order on all ranks"
    sums.finish()
    assert [each.grad.tolist() for each in (first, unused, last)] == [[6.0, 6.0], [0.0, 0.0], [2.0, 2.0]]


def test_a_gradient_is_in_parts_if_it_comes_more_than_once_in_the_last_backward_pass():
    once, twice = parameters()
    counted = Counted(sources([once, twice]))
    for counted.last in (False, True):
        backward(once, twice)
    assert counted.again() == set(), "one micro-batch after another is no gradient in parts"
    twice.sum().backward()
    assert counted.again() == {"p1"}
    counted.begin()
    assert counted.again() == set() and not counted.last
    counted.last = True
    counted.end()
    for _ in range(2):
        backward(once, twice)
    assert counted.again() == set()


def test_gradients_that_are_summed_at_the_end_keep_their_places_and_shapes(
    sent: list[Tensor], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(reduced, "BUCKET", 1000)
    gradients = [torch.full((2, 3), 1.0), torch.arange(4.0), torch.ones(2, dtype=torch.float64), torch.tensor(5.0)]
    wanted = [2 * each for each in gradients]
    reduced.summed(gradients, GROUP)
    assert [len(each) for each in sent] == [10, 2, 1]
    for found, each in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(found, each)


def test_a_gradient_that_is_a_row_of_another_tensor_is_summed_where_it_is(sent: list[Tensor]):
    row = torch.ones(1, 7, 8)[:, :1]  # as of a class token, for one sample
    reduced.summed([row], GROUP)
    assert len(sent) == 1 and torch.equal(row, torch.full((1, 1, 8), 2.0))

"""The backward pass of convolutions on two branches: the same gradients, and nothing used before it is there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from meshrun.train.branches import Branches


class Lines:
    """What the second branch computes has no values before the first has waited for it."""

    def __init__(self) -> None:
        self.log: list[str] = []

    @contextmanager
    def fork(self) -> Iterator[None]:
        self.log.append("fork")
        yield

    def join(self) -> None:
        self.log.append("join")


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 3, 3), nn.Flatten(), nn.Linear(12, 2)
    )


def gradients(model: nn.Module, backward: Callable[[Tensor], None]) -> list[Tensor]:
    backward(model(torch.randn(5, 2, 6, 6, generator=torch.Generator().manual_seed(1))).square().sum())
    return [each.grad for each in model.parameters() if each.grad is not None]


def test_gradients_are_the_same_and_are_waited_for_once():
    plain, lines = net(), Lines()
    expected = gradients(plain, Tensor.backward)
    split = net()

    def backward(loss: Tensor) -> None:
        with Branches(lines.fork, lines.join):
            loss.backward()
            assert lines.log == ["fork"], "the first convolution has no inputs to find gradients of"
            torch._foreach_norm([each.grad for each in split.parameters()])
            assert lines.log == ["fork", "join"]

    for one, other in zip(gradients(split, backward), expected, strict=True):
        torch.testing.assert_close(one, other)
    assert lines.log == ["fork", "join", "join"]


def test_gradients_that_are_added_up_are_waited_for_before():
    lines, split = Lines(), net()
    with Branches(lines.fork, lines.join):
        for _ in range(2):
            gradients(split, Tensor.backward)
        assert lines.log == ["fork", "fork", "join"]
    expected = [2 * each for each in gradients(net(), Tensor.backward)]
    for one, other in zip((each.grad for each in split.parameters()), expected, strict=True):
        torch.testing.assert_close(one, other)

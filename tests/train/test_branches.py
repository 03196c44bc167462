"""The backward pass of convolutions on two branches: the same gradients, and nothing used before it is there."""

from __future__ import annotations

import weakref
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


def convolved_back(gradient: Tensor, inputs: Tensor, weight: Tensor, wanted: tuple[bool, bool, bool]) -> list[Tensor]:
    """The gradients of a convolution with a bias, as autograd asks for them."""
    pair = [1, 1]
    return torch.ops.aten.convolution_backward.default(
        gradient, inputs, weight, [len(weight)], pair, [0, 0], pair, False, [0, 0], 1, list(wanted)
    )


def test_a_convolution_that_reads_a_gradient_of_the_other_branch_waits_for_it():
    lines, gradient, inputs, weight = Lines(), torch.ones(1, 3, 4, 4), torch.ones(1, 2, 6, 6), torch.ones(3, 2, 3, 3)
    with Branches(lines.fork, lines.join):
        _, of_weight, _ = convolved_back(gradient, inputs, weight, (True, True, True))
        convolved_back(gradient, inputs, weight, (True, True, True))
        assert lines.log == ["fork", "fork"]
        convolved_back(gradient, inputs, of_weight, (True, True, True))
        assert lines.log == ["fork", "fork", "join", "fork"]


def test_a_bias_is_waited_for_and_gradients_of_inputs_are_not():
    lines, gradient, inputs, weight = Lines(), torch.ones(1, 3, 4, 4), torch.ones(1, 2, 6, 6), torch.ones(3, 2, 3, 3)
    with Branches(lines.fork, lines.join):
        of_inputs, of_weight, of_bias = convolved_back(gradient, inputs, weight, (True, True, True))
        of_inputs.sum()
        of_weight.detach()
        assert lines.log == ["fork"]
        assert of_bias.sum() == 48
        assert lines.log == ["fork", "join"]
        of_weight.sum()
        assert lines.log == ["fork", "join"], "what was waited for once is there"


def test_one_gradient_alone_stays_on_the_first_branch():
    lines, gradient, inputs, weight = Lines(), torch.ones(1, 3, 4, 4), torch.ones(1, 2, 6, 6), torch.ones(3, 2, 3, 3)
    with Branches(lines.fork, lines.join):
        convolved_back(gradient, inputs, weight, (False, True, True))
        convolved_back(gradient, inputs, weight, (True, False, False))
        assert lines.log == []


def test_memory_that_the_other_branch_reads_is_kept_until_it_was_waited_for():
    lines, gradient, inputs, weight = Lines(), torch.ones(1, 3, 4, 4), torch.ones(1, 2, 6, 6), torch.ones(3, 2, 3, 3)
    read = [weakref.ref(gradient), weakref.ref(inputs)]
    with Branches(lines.fork, lines.join):
        _, of_weight, _ = convolved_back(gradient, inputs, weight, (True, True, True))
        del gradient, inputs
        assert all(each() is not None for each in read)
        of_weight.sum()
        assert all(each() is None for each in read)

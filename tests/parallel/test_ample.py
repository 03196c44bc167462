"""What compiled code keeps for its backward pass where memory is ample."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._functorch.config
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import Tensor, fx, nn
from torch._inductor.compile_fx import compile_fx
from torch.utils.checkpoint import checkpoint

from meshrun.parallel import compiled, inductor


class Gated(nn.Module):
    """What is multiplied last is made of two tensors."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.rise, self.fall = nn.Linear(8, 32, bias=bias), nn.Linear(16, 8, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.rise(x).split(16, -1)
        return self.fall(F.silu(gate) * up)


class Masked(Gated):
    """It is made of one tensor, and of numbers that nobody reads from memory."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.rise(x)[..., :16]
        return self.fall(F.relu(hidden) * (torch.arange(hidden.numel()) % 3).view_as(hidden))


class Activated(Gated):
    """It is made of one tensor, twice."""

    def forward(self, x: Tensor) -> Tensor:
        return self.fall(F.silu(self.rise(x)[..., :16]))


class Weighted(Gated):
    """It is made of one tensor, and of a weight that is seen as large."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.rise(x)[..., :16]
        return self.fall(F.relu(hidden) * self.fall.weight[0].expand_as(hidden))


class Normed(Gated):
    """It is made of a sum of two tensors, which is kept in any case."""

    def forward(self, x: Tensor) -> Tensor:
        one, other = self.rise(x).split(16, -1)
        return self.fall(F.rms_norm(one + other, (16,), self.fall.weight[0]))


def kept(module: nn.Module, forward: Callable[..., Tensor]) -> list[tuple[int, ...]]:
    """The shapes of what is kept, of 24 rows, and gradients that are those of the module."""
    found: list[tuple[int, ...]] = []
    x = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(0))
    with torch.autograd.graph.saved_tensors_hooks(lambda each: (found.append(tuple(each.shape)), each)[1], lambda _: _):
        result = forward(x)
    gradients = torch.autograd.grad(result.square().sum(), list(module.parameters()))
    expected = torch.autograd.grad(module(x).square().sum(), list(module.parameters()))
    torch.testing.assert_close(gradients, expected, rtol=1e-4, atol=1e-5)
    return found


def _as_it_is(graph: fx.GraphModule, *_: Any, **__: Any) -> Any:
    return make_boxed_func(graph.forward)


@pytest.fixture(autouse=True)
def _compiles_anew(monkeypatch: pytest.MonkeyPatch):
    """Up to where a graph is cut into both passes: of these, no code is made."""
    monkeypatch.setattr(inductor, "compile_fx", partial(compile_fx, inner_compile=_as_it_is))
    monkeypatch.setattr(compiled, "_prepare", lambda _: None)  # with it, torch would want code to keep
    torch.manual_seed(0)
    torch._dynamo.reset()
    torch._dynamo.trace_rules.clear_lru_cache()  # an earlier training may have left its own functions there
    with torch._functorch.config.patch(enable_autograd_cache=False):
        yield
    torch._dynamo.reset()


@pytest.mark.parametrize("bias", [False, True])
def test_a_gated_activation_is_kept(bias: bool):
    module = Gated(bias)
    counts = [
        sum(shape in ((24, 16), (4, 6, 16)) for shape in kept(module, torch.compile(module.forward, backend=backend)))
        for backend in (inductor.backend, inductor.Ample())
    ]
    assert counts[1] == counts[0] + 1


@pytest.mark.parametrize("kind", [Masked, Activated, Normed, Weighted])
def test_what_reads_no_more_than_one_tensor_is_made_again(kind: type[Gated]):
    module = kind(False)
    backends = inductor.backend, inductor.Ample()
    shapes = [kept(module, torch.compile(module.forward, backend=each)) for each in backends]
    assert sorted(shapes[0]) == sorted(shapes[1])


class Twice(Gated):
    """The second time it is the user who has it computed twice."""

    def forward(self, x: Tensor) -> Tensor:
        again: Tensor = checkpoint(super().forward, super().forward(x), use_reentrant=False)
        return again


def test_what_a_user_has_computed_twice_stays_so():
    module = Twice(False)
    backends = inductor.backend, inductor.Ample()
    counts = [len(kept(module, torch.compile(module.forward, backend=each))) for each in backends]
    assert counts[1] == counts[0] + 1


def test_compiled_code_keeps_more_and_less_as_it_is_told():
    plain, module = Gated(False), Gated(False)
    module.load_state_dict(plain.state_dict())
    code = compiled.apply([module], asked=True)

    def saved() -> int:
        return len(kept(plain, lambda x: torch.func.functional_call(module, dict(plain.named_parameters()), x)))

    least = saved()
    code.keep_more()
    assert not code.keeps_more, "nothing is known before it is compiled"
    assert saved() == least + 1 and code.keeps_more
    code.keep_less()
    assert saved() == least and not code.keeps_more


class Dropped(Gated):
    """What is multiplied is made again with what it has dropped."""

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.rise(x).split(16, -1)
        return self.fall(F.dropout(F.silu(gate) * up, 0.1))


@pytest.mark.parametrize("kind", [Dropped, Activated, Normed])
def test_code_without_gates_keeps_nothing_more(kind: type[Gated]):
    module = kind(False)
    code = compiled.apply([module], asked=True)
    code.keep_more()
    module(torch.randn(4, 6, 8)).sum().backward()
    assert not code.keeps_more


def test_an_evaluation_has_nothing_to_keep():
    module = Gated(False)
    expected = module(x := torch.randn(4, 6, 8))
    compiled.apply([module], asked=True).keep_more()
    with torch.no_grad():
        torch.testing.assert_close(module(x), expected)

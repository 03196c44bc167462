"""What a step consists of: arithmetic by kind, and bytes that go through memory, counted without computing anything.

    counts = count(experiment, torch.device("cuda"))
    counts.products, counts.attention, counts.traffic

The step is traced on tensors without values. Bytes are what every operation reads and writes, each by itself: an upper
bound, since compiling fuses operations. Attention that is causal counts half of its products: those that are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.data import default_collate
from torch.utils.flop_counter import flop_registry

from meshrun.data.order import Order
from meshrun.experiment import Experiment, in_halves, sample_of
from meshrun.kernels.eightbit import BLOCK, LEAST
from meshrun.parallel.demands import demands_of
from meshrun.parallel.placed import call

ATTENTION = torch._C._nn.scaled_dot_product_attention
"""What torch.nn.functional calls so, unless somebody has put something else there."""


@dataclass(frozen=True)
class Counts:
    """Of one step of the whole batch: forward, backward and update."""

    products: float
    """Floating-point operations of matrix products and convolutions."""
    attention: float
    """And of attention."""
    traffic: float
    """Bytes that all operations but those two read and write."""
    optimizer: float
    """Bytes that the update reads and writes."""
    calls: int
    """Operations that a host starts, when nothing is compiled."""
    parameters: int

    @property
    def flops(self) -> float:
        return self.products + self.attention


def count(experiment: Experiment, device: torch.device, states: str = "fp32") -> Counts:
    """Trace a step of the experiment's first batch; `states` is how the optimizer keeps its moments."""
    model = demands_of(experiment).model
    short = in_halves(experiment.precision)
    for parameter in model.parameters():
        if short and parameter.dim() >= 2 and parameter.is_floating_point():
            parameter.data = parameter.data.to(torch.bfloat16)
    order = Order.of(experiment.train, experiment.batch, experiment.seed, experiment.shuffle)
    samples = [sample_of(experiment.train, number) for number in order.batch_ids(0).tolist()]
    inputs, targets = (experiment.collate or default_collate)(samples)
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        model.to_empty(device=device).train()

        def without_values(tensor: Tensor) -> Tensor:
            return fake.from_tensor(tensor).to(device)

        inputs, targets = (tree_map_only(Tensor, without_values, each) for each in (inputs, targets))
        with _Watch() as seen:
            with _Attention(seen), torch.autocast(device.type, torch.bfloat16, enabled=short):
                outputs = call(model, inputs)
                total = _loss(experiment.loss, outputs, targets)
            total.backward()
    sizes = [each.numel() for each in model.parameters() if each.requires_grad]
    eight = sum(size for size in sizes if states == "8bit" and size >= LEAST)
    update = _bytes_of_update(experiment.optimizer, short, 8.0) * (sum(sizes) - eight)
    update += _bytes_of_update(experiment.optimizer, short, 2 * (1 + 4 / BLOCK)) * eight
    return Counts(seen.products, seen.attention, seen.traffic, update, seen.calls, sum(sizes))


def _loss(loss: Callable[[Any, Any], Any], outputs: Any, targets: Any) -> Tensor:
    try:
        total = loss(outputs, targets).total
        assert isinstance(total, Tensor)
        return total
    except Exception:
        # One that looks at numbers, of which there are none here. This reads and writes about as much.
        found = [each for each in tree_leaves(outputs) if isinstance(each, Tensor) and each.is_floating_point()]
        return torch.stack([each.float().logsumexp(-1).sum() for each in found]).sum()


def _bytes_of_update(optimizer: Callable[[Iterable[nn.Parameter]], Any], short: bool, of_moment: float) -> float:
    """Bytes that an update reads and writes for each element: gradient, weight, and what the optimizer keeps."""
    parameter = nn.Parameter(torch.ones(4, 4))
    made = optimizer([parameter])
    parameter.grad = torch.ones(4, 4)
    kept: list[Tensor] = []
    try:
        made.step()
        state = made.state[parameter].values()
        kept = [each for each in state if isinstance(each, Tensor) and each.shape == parameter.shape]
    except Exception:  # one that wants to be called otherwise; most keep two
        kept = [parameter, parameter]
    gradient, copy = (2, 2) if short else (4, 0)
    return gradient + copy + 8 + of_moment * len(kept)


class _Watch(TorchDispatchMode):
    """Adds up what passes."""

    def __init__(self) -> None:
        super().__init__()
        self.products = self.attention = self.traffic = 0.0
        self.calls = 0
        self.looks_away = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if self.looks_away or _only_names(func):
            return out
        self.calls += 1
        formula = flop_registry.get(func._overloadpacket)
        if formula is not None:
            self.products += formula(*args, **kwargs, out_val=out)
        else:
            self.traffic += sum(_bytes(each) for each in tree_leaves((args, kwargs, out)))
        return out


def _only_names(func: Any) -> bool:
    """Whether an operation gives tensors without touching their elements: views, and memory that is not filled."""
    if func._schema.name in ("aten::empty", "aten::empty_like", "aten::new_empty", "aten::empty_strided"):
        return True
    returned = func._schema.returns
    return bool(returned) and all(each.alias_info is not None and not each.alias_info.is_write for each in returned)


def _bytes(value: object) -> float:
    return value.numel() * value.element_size() if isinstance(value, Tensor) else 0


class _Attention(TorchFunctionMode):
    """Counts attention where it is called, since what it is made of depends on the device."""

    def __init__(self, seen: _Watch) -> None:
        super().__init__()
        self.seen = seen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        if func is not ATTENTION:
            return func(*args, **(kwargs or {}))
        return self._attended(*args, **(kwargs or {}))

    def _attended(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Any = None,
        dropout_p: Any = 0,
        is_causal: Any = False,
        **_: Any,
    ) -> Tensor:
        del attn_mask, dropout_p
        rows, columns = query.shape[-2], key.shape[-2]
        pairs = query.numel() // query.shape[-1] * columns
        needed = (columns + 1) / (2 * columns) if is_causal and rows == columns else 1.0
        forward = 2.0 * pairs * (query.shape[-1] + value.shape[-1]) * needed
        self.seen.attention += 3 * forward  # backward is twice as much
        self.seen.calls += 2
        self.seen.looks_away = True
        try:
            result = _StandIn.apply(query, key, value)
        finally:
            self.seen.looks_away = False
        assert isinstance(result, Tensor)
        return result


class _StandIn(torch.autograd.Function):
    """Attention's shapes, forward and backward."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        ctx.save_for_backward(query, key, value)
        return query.new_empty((*query.shape[:-1], value.shape[-1]))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        del gradient
        return tuple(torch.empty_like(each) for each in ctx.saved_tensors)

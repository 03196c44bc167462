"""What fsdp shards together, and when gradients travel."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from meshrun.layout import parse
from meshrun.parallel import fsdp
from meshrun.parallel.fsdp import _shares_parameters, _units, before_backward, variant_of


def test_small_segments_go_with_the_next_large_one_and_the_last_ones_with_the_one_before():
    big = [nn.Linear(10, 10) for _ in range(3)]
    small = [nn.Linear(2, 2) for _ in range(3)]
    order = [small[0], big[0], big[1], small[1], big[2], small[2]]
    assert _units(order) == [[small[0], big[0]], [big[1]], [small[1], big[2], small[2]]]
    assert _units([]) == []


def test_a_segment_that_shares_a_weight_with_the_rest_is_no_unit_of_its_own():
    first, second, third = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)
    second.weight = first.weight
    model = nn.Sequential(first, second, third, nn.ReLU())
    assert [_shares_parameters(each, model) for each in model] == [True, True, False, True]


@pytest.mark.parametrize(
    ("text", "variant"),
    [("fsdp=2", "zero3"), ("pp=2:zb,fsdp=2", "zero2"), ("pp=2,fsdp=2", "zero3"), ("pp=2:zb,fsdp=2:zero1", "zero1")],
)
def test_zero_bubble_keeps_weights_until_their_gradients_are_computed(text: str, variant: str):
    assert variant_of(parse(text)) == variant


class Noted:
    """An FSDP module that notes what it is told."""

    def __init__(self) -> None:
        self.told: dict[str, bool] = {}

    def __getattr__(self, name: str) -> Any:
        return lambda value: self.told.__setitem__(name, value)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(("text", "waits"), [("fsdp=2:zero1", True), ("fsdp=2", False), ("pp=2,fsdp=2", True)])
def test_gradients_that_are_kept_are_sent_with_the_last_micro_batch(text: str, waits: bool, last: bool):
    part = Noted()
    before_backward(parse(text), part, last)  # type: ignore[arg-type]
    told = {"set_is_last_backward": last}
    if waits:
        told |= {"set_requires_gradient_sync": last, "set_reshard_after_backward": last}
    assert part.told == told


def test_gradients_are_summed_over_ranks_in_fp32(monkeypatch: pytest.MonkeyPatch):
    import torch

    made: list[Any] = []
    monkeypatch.setattr("torch.distributed.fsdp.fully_shard", lambda *_, mp_policy, **__: made.append(mp_policy))
    mesh: Any = type("Mesh", (), {"device_type": "cpu"})()
    fsdp.apply(nn.Sequential(nn.Linear(2, 2)), [], mesh, "zero3", "bf16", offload=False)
    fsdp.apply(nn.Sequential(nn.Linear(2, 2)), [], mesh, "zero3", "fp32", offload=False)
    assert (made[0].param_dtype, made[0].reduce_dtype) == (torch.bfloat16, torch.float32)
    assert (made[1].param_dtype, made[1].reduce_dtype) == (None, None)

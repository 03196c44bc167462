"""The benchmark of checkpoints measures what it says: the layouts that it describes by hand, and its ratios."""

from __future__ import annotations

import math

import checkpoint as benchmark
import pytest
import torch

from meshrun.state.region import Region


@pytest.fixture(autouse=True)
def a_small_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "VOCABULARY", 64)
    monkeypatch.setattr(benchmark, "LAYER", {name: ((8, 12), dim) for name, (_, dim) in benchmark.LAYER.items()})
    monkeypatch.setattr(benchmark, "HIDDEN", 12)


def held(regions: list[Region]) -> dict[str, torch.Tensor]:
    """How often each element of each tensor is in the regions."""
    counts: dict[str, torch.Tensor] = {}
    for region in regions:
        count = counts.setdefault(region.name, torch.zeros(region.shape))
        count[tuple(slice(at, at + n) for at, n in zip(*region.box, strict=True))] += 1
    return counts


@pytest.mark.parametrize("columns_only", [False, True])
def test_every_element_is_on_one_rank_of_each_layout(columns_only: bool):
    for ranks in (
        [benchmark.rows_of(rank, 4) for rank in range(4)],
        [benchmark.by_stage_and_plan(rank, columns_only) for rank in range(4)],
    ):
        counts = held([region for regions in ranks for region in regions])
        assert counts.keys() == {name for name, _, _ in benchmark.shapes()}
        assert all((count == 1).all() for count in counts.values())
        sizes = [sum(region.tensor.nbytes for region in regions) for regions in ranks]
        assert max(sizes) == min(sizes)


def test_the_state_is_a_gigabyte(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.undo()
    assert sum(4 * math.prod(shape) for _, shape, _ in benchmark.shapes()) == pytest.approx(1e9, rel=0.1)


def test_a_ratio_is_the_median_of_the_rounds_of_the_slowest_rank():
    names = {name for pair in benchmark.RATIOS.values() for name in pair}
    memory = {"save": 1.0, "load": 0.1}
    first = {name: [1.0, 1.0, 9.0] for name in names} | {"stall": [0.1, 0.3, 0.9]}
    second = {name: [2.0, 1.0, 9.0] for name in names} | {"stall": [0.1, 0.2, 0.9]}
    found = [{"seconds": each, "bytes": 5, "memory": memory} for each in (first, second)]
    row = benchmark.summary(2, found)
    assert row["seconds"]["stall"] == 0.3
    assert row["ratios"]["stall / dcp.async_save"] == pytest.approx(0.1)
    assert (row["bytes"], row["ratios"]["memory of a save / part"]) == (10, 1.0)
    assert benchmark.BARS.keys() <= row["ratios"].keys()

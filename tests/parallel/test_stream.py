"""Random numbers that several threads draw are those that one would draw, and so is the generator after them."""

from __future__ import annotations

import pytest
import torch

from meshrun.parallel import stream
from meshrun.parallel.stream import Draw, fill


def drawn(sizes: list[int], kinds: list[str]) -> tuple[list[torch.Tensor], torch.Tensor]:
    """One after the other, as torch does it."""
    made = [torch.empty(size) for size in sizes]
    for tensor, kind in zip(made, kinds, strict=True):
        getattr(tensor, kind)(-0.5, 2.0)
    return made, torch.get_rng_state()


@pytest.mark.parametrize("before", [0, 1, 623, 624, 1000])
def test_many_threads_draw_what_one_would(monkeypatch: pytest.MonkeyPatch, before: int):
    """In runs and pieces so short that tensors are cut by both; some end between groups, and begin anywhere."""
    monkeypatch.setattr(stream, "RUN", 624 * 40)
    monkeypatch.setattr(stream, "PIECE", 1 << 12)
    stream._terms.cache_clear()
    sizes = [50_000, 16, 17, 4096, 4097, 4100, 31, 70_001, 8192, 100]
    kinds = ["normal_", "uniform_"] * 5
    torch.manual_seed(before)
    torch.rand(before)
    start = torch.get_rng_state()
    wanted, end = drawn(sizes, kinds)
    torch.set_rng_state(start)
    found = [torch.empty(size) for size in sizes]
    fill([Draw(each, kind, (-0.5, 2.0)) for each, kind in zip(found, kinds, strict=True)], threads=3)
    stream._terms.cache_clear()
    for number, (a, b) in enumerate(zip(found, wanted, strict=True)):
        assert torch.equal(a, b), number
    assert torch.equal(torch.get_rng_state(), end)


def test_what_a_draw_takes_from_the_stream_is_known():
    for elements in (16, 17, 32, 1000):
        for kind in ("normal_", "uniform_"):
            torch.manual_seed(0)
            start = torch.get_rng_state()
            getattr(torch.empty(elements), kind)()
            assert torch.equal(stream._skipped(start, stream.taken(elements, kind)), torch.get_rng_state())

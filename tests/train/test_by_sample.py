"""Dropout and noise in a loop of the user's own: a sample gets the same numbers on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from meshrun import randn_like, shard
from meshrun.data.order import slice_of
from meshrun.train import by_sample
from meshrun.train.by_sample import compute_in, compute_on, leave, telling_of_other_draws
from tests.train.small import start_on_cpu

IDS = torch.tensor([17, 4, 90, 3, 8, 55])


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    yield
    compute_on(None)


def drawn(part: slice, draw: Callable[[int], Tensor]) -> Tensor:
    torch.manual_seed(0)
    compute_on(IDS[part])
    draw(len(IDS[part]))  # the numbers of the second call are those of a second call on any rank
    return draw(len(IDS[part]))


ATTENTION = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True)

VALUES = torch.arange(24.0).view(1, 3, 8)
LSTM = nn.LSTM(3, 4, num_layers=2, dropout=0.5, bidirectional=True)
GRU = nn.GRU(3, 4, num_layers=3, dropout=0.5, batch_first=True)


def attend(samples: int, heads: int = 2) -> Tensor:
    query, key = (VALUES.view(1, 1, 3, 8).expand(samples, count, 3, 8) for count in (heads, 2))
    return F.scaled_dot_product_attention(query, key, key, dropout_p=0.5, is_causal=True, enable_gqa=heads > 2)


DRAWS: dict[str, tuple[int, Callable[[int], Tensor]]] = {
    "nn.Dropout": (0, lambda n: nn.Dropout(0.5)(torch.ones(n, 7, 3))),
    "F.dropout of vectors": (0, lambda n: F.dropout(torch.ones(n, 40), 0.3)),
    "time first": (1, lambda n: F.dropout(torch.ones(12, n, 5), 0.5)),
    "attention weights": (0, lambda n: F.dropout(torch.ones(n * 2, 3, 3), 0.5)),
    "attention weights as square as the batch": (0, lambda n: F.dropout(torch.full((n * 2, 2, 2), 0.5), 0.5)),
    "nn.MultiheadAttention": (0, lambda n: ATTENTION(*[torch.arange(24.0).view(1, 3, 8).expand(n, 3, 8)] * 3)[0]),
    "attention with dropout": (0, lambda n: attend(n)),
    "attention of heads that share keys": (0, lambda n: attend(n, heads=4)),
    "attention without weights": (0, lambda n: ATTENTION(*[VALUES.expand(n, 3, 8)] * 3, need_weights=False)[0]),
    "nn.LSTM": (1, lambda n: LSTM(torch.ones(5, n, 3))[0]),
    "nn.GRU, batch first": (0, lambda n: GRU(torch.ones(n, 5, 3))[0]),
    "nn.AlphaDropout": (0, lambda n: nn.AlphaDropout(0.5)(torch.ones(n, 7))),
    "nn.FeatureAlphaDropout": (0, lambda n: nn.FeatureAlphaDropout(0.5)(torch.ones(n, 7, 2))),
    "nn.Dropout2d": (0, lambda n: nn.Dropout2d(0.5)(torch.ones(n, 9, 2, 2))),
    "nn.Dropout2d without a width": (0, lambda n: nn.Dropout2d(0.5)(torch.ones(n, 9, 2))),
    "randn_like": (0, lambda n: randn_like(torch.empty(n, 3, 2))),
    "randn_like, time first": (1, lambda n: randn_like(torch.empty(5, n))),
}


ZEROS = [name for name in DRAWS if name.startswith(("nn.Dropout", "F.", "time", "attention weights"))]


@pytest.mark.parametrize("name", DRAWS)
def test_parts_of_a_batch_draw_what_the_whole_batch_draws(name: str):
    dim, draw = DRAWS[name]
    whole, after = drawn(slice(0, 6), draw), torch.get_rng_state()
    for part in (slice(0, 4), slice(4, 6), slice(6, 6)):
        entries = whole.shape[dim] // 6
        expected = whole.movedim(dim, 0)[part.start * entries : part.stop * entries]
        torch.testing.assert_close(drawn(part, draw).movedim(dim, 0), expected, rtol=1e-5, atol=1e-6)
        assert torch.equal(torch.get_rng_state(), after), "all ranks draw the same words, also one without samples"
    assert 0.2 < (whole == 0).float().mean() < 0.8 or name not in ZEROS


@pytest.mark.parametrize(
    "how", [{"is_causal": True}, {"scale": 0.1}, {"attn_mask": torch.rand(5, 5, generator=torch.Generator()) < 0.5}]
)
def test_attention_with_dropout_is_torch_s_but_for_the_weights_that_are_dropped(how: dict[str, Any]):
    query, key = torch.arange(300.0).sin().view(2, 6, 1, 5, 5)
    given = query, key, torch.eye(5).expand(6, 1, 5, 5)  # so that the outputs are the weights
    wanted = F.scaled_dot_product_attention(*given, **how)
    compute_on(IDS)
    found = F.scaled_dot_product_attention(*given, dropout_p=0.5, **how)
    stays = found != 0
    torch.testing.assert_close(found[stays], 2 * wanted[stays])
    assert 0.3 < stays.sum() / (wanted != 0).sum() < 0.7


def test_what_was_drawn_by_sample_before_is_no_other_draw_of_the_model(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(by_sample, "_warned", set())
    compute_on(IDS)
    F.dropout(torch.ones(6, 4), 0.5)
    with telling_of_other_draws(torch.device("cpu")):
        F.dropout(torch.ones(6, 4), 0.5)
    assert not by_sample._warned
    told = pytest.warns(match="draws random numbers that do not belong to samples")
    with told, telling_of_other_draws(torch.device("cpu")):
        torch.rand(3)


def test_normal_numbers_by_sample_are_normal():
    compute_on(torch.arange(1000))
    numbers = randn_like(torch.empty(1000, 50))
    assert abs(numbers.mean()) < 0.02 and abs(numbers.std() - 1) < 0.02
    assert abs((numbers.abs() < 1).float().mean() - 0.6827) < 0.01


def test_every_forward_pass_drops_others_and_the_seed_decides_which():
    compute_on(IDS)
    x = torch.ones(6, 50)
    torch.manual_seed(1)
    first, second = F.dropout(x, 0.5), F.dropout(x, 0.5)
    assert not torch.equal(first, second)
    torch.manual_seed(2)
    assert not torch.equal(F.dropout(x, 0.5), first)
    torch.manual_seed(1)
    assert torch.equal(F.dropout(x, 0.5), first)


@pytest.mark.parametrize(("name", "shape"), [("dropout", (6, 50)), ("dropout1d", (6, 50, 2))])
def test_dropout_in_place_writes_in_place(name: str, shape: tuple[int, ...]):
    compute_on(IDS)
    x = torch.ones(shape)
    output = getattr(F, name)(x, 0.5, True, True)
    assert output is x and 0 < (x == 0).sum() < x.numel()


@pytest.mark.parametrize("name", ["dropout", "dropout1d", "dropout2d", "dropout3d"])
def test_what_stays_is_scaled(name: str):
    compute_on(IDS)
    dims = {"dropout2d": 1, "dropout3d": 2}.get(name, 0)
    output = getattr(F, name)(torch.ones(6, 50, 2, *[2] * dims), 0.75)
    assert output.unique().tolist() == [0, 4]


def test_what_another_library_has_put_in_the_place_of_torch_s_dropout_is_called(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(by_sample, "_before", dict(by_sample._before))
    monkeypatch.setattr(F, "dropout", lambda *_, **__: "theirs")
    compute_on(IDS)
    assert F.dropout(torch.ones(5), 0.5) == "theirs"


def test_a_sentence_is_said_once_whatever_its_figures(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(by_sample, "_warned", set())
    with pytest.warns(UserWarning) as said:
        for what in ("one (2): a", "one (3): b", "another: a"):
            by_sample.warn(what)
    assert [str(each.message) for each in said] == ["one (2): a", "another: a"]


def test_recomputed_activations_drop_the_same():
    compute_on(IDS)
    x = torch.ones(6, 50, requires_grad=True)
    output = checkpoint(lambda y: F.dropout(y, 0.5) * y, x, use_reentrant=False)
    output.sum().backward()
    assert torch.equal(x.grad, 2 * output)


def test_a_tensor_without_the_batch_and_evaluation_are_left_to_torch():
    compute_on(IDS)
    torch.manual_seed(0)
    ours = F.dropout(torch.ones(5, 50), 0.5)
    compute_on(None)
    torch.manual_seed(0)
    assert torch.equal(F.dropout(torch.ones(5, 50), 0.5), ours)
    compute_on(IDS)
    assert F.dropout(torch.ones(6, 9), 0.5, training=False).sum() == 54


def test_a_loop_that_ends_leaves_the_samples_of_the_loop_around_it():
    outer, middle, inner = object(), object(), object()
    for number, loop in enumerate((outer, middle, inner)):
        compute_in(loop, IDS[: number + 1])
    for loop, samples in ((inner, 2), (outer, 2), (middle, None)):
        leave(loop)
        ids = compute_on(None)
        assert ids is None if samples is None else ids is not None and len(ids) == samples
        compute_on(ids)


@pytest.mark.ranks(2)
def test_a_loop_over_a_sharded_loader_drops_by_sample():
    here = start_on_cpu(2)
    torch.manual_seed(0)
    loader = shard(DataLoader(torch.arange(7).view(7, 1).float(), batch_size=3))
    mine = [F.dropout(rows + torch.ones(30), 0.5).tolist() for rows in loader]
    parts = here.gathered(mine)
    torch.manual_seed(0)
    for step, size in enumerate((3, 3, 1)):
        ids = torch.arange(3 * step, 3 * step + size)
        compute_on(ids)
        whole = F.dropout(ids.view(size, 1) + torch.ones(30), 0.5).tolist()
        assert mine[step] == whole[slice_of(range(size), here.rank, 2).start :][: len(mine[step])]
        assert len(parts[0][step]) + len(parts[1][step]) == size
    compute_on(None)
    torch.manual_seed(here.rank)
    other = [
        F.dropout(rows + torch.ones(30), 0.5).tolist() for rows in shard(DataLoader(torch.ones(2, 1), batch_size=2))
    ]
    assert here.gathered(other)[0] != here.gathered(other)[1], "ranks with seeds of their own draw others"


@pytest.mark.usefixtures("alone")
def test_after_the_loop_numbers_are_torchs_own_again():
    outer = shard(DataLoader(torch.ones(4, 1), batch_size=2))
    for _ in outer:
        for _ in shard(DataLoader(torch.ones(3, 1), batch_size=3)):
            pass
        assert len(compute_on(None)) == 2, "the loop around goes on with its own samples"
    for _ in outer:
        break
    assert compute_on(None) is None


def test_a_number_keeps_its_shape_and_channels_without_a_batch_are_dropped_whole():
    before = compute_on(torch.arange(4))
    try:
        assert randn_like(torch.tensor(1.0)).shape == ()
        dropped = F.dropout1d(torch.ones(4, 50), 0.5)
        assert torch.equal(dropped, dropped[:, :1].expand(4, 50))
    finally:
        compute_on(before)


@pytest.mark.parametrize("number", [0, 2**32 - 1], ids=["smallest", "largest"])
def test_the_outermost_uniform_numbers_make_finite_normal_ones(monkeypatch: pytest.MonkeyPatch, number: int):
    monkeypatch.setattr(by_sample, "_uniform", lambda shape, _: torch.full(shape, number, dtype=torch.float64))
    before = compute_on(torch.arange(4))
    try:
        assert randn_like(torch.zeros(4, 3)).isfinite().all()
    finally:
        compute_on(before)


@pytest.mark.usefixtures("alone")
def test_zipped_loops_leave_nothing_behind_whichever_ends_first():
    for lengths in ((4, 8), (8, 4)):
        loaders = [shard(DataLoader(torch.ones(length, 1), batch_size=2)) for length in lengths]
        for _ in zip(*loaders, strict=False):
            pass
        assert compute_on(None) is None


@pytest.mark.usefixtures("alone")
def test_where_sizes_do_not_tell_the_batch_from_the_time_the_user_is_asked(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(by_sample, "_warned", set())
    torch.manual_seed(0)
    compute_on(IDS)
    with pytest.warns(UserWarning, match=r"shape \(6, 6, 5\) and 6 samples: dim 0 .* shard\(loader, batch_dim=0\)"):
        F.dropout(torch.ones(6, 6, 5), 0.5)
    compute_on(IDS, batch_dim=1)
    torch.manual_seed(0)
    whole = F.dropout(torch.ones(6, 6, 5), 0.5)
    compute_on(IDS[:3], batch_dim=1)
    torch.manual_seed(0)
    assert torch.equal(F.dropout(torch.ones(6, 3, 5), 0.5), whole[:, :3])


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("batch_dim", [None, 1])
def test_weights_of_attention_are_known_where_the_batch_is_as_long_as_the_sequence(batch_dim: int | None):
    """Of (time, batch, …) as of (batch * heads, queries, keys) the second dim then has the size of the batch."""
    weights = torch.full((2 * len(IDS), len(IDS), len(IDS)), 1 / len(IDS))
    for given, first in ((weights, True), (2 * weights, False)):
        compute_on(IDS, batch_dim)
        torch.manual_seed(0)
        whole = F.dropout(given, 0.5)
        compute_on(IDS[:3], batch_dim)
        torch.manual_seed(0)
        half = F.dropout(given[:6] if first else given[:, :3], 0.5)
        assert torch.equal(half, whole[:6] if first else whole[:, :3])


@pytest.mark.ranks(2)
def test_dropout_outside_of_a_loop_says_that_ranks_draw_as_torch_does():
    start_on_cpu(2)
    batches = list(shard(DataLoader(torch.ones(4, 3), batch_size=4)))
    by_sample._warned.clear()
    with pytest.warns(UserWarning, match=r"F\.dropout does not draw by sample here.* itertools\.cycle\(\)"):
        F.dropout(batches[0], 0.5)

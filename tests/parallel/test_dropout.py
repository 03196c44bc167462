"""Dropout masks belong to samples: however they are shared out, each is dropped as one process would drop it."""

from __future__ import annotations

import time

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.utils.checkpoint import checkpoint

from meshrun import RunFailed
from meshrun.parallel.attention import key_attentions
from meshrun.parallel.dropout import KeyedDropout, hashed, key_dropouts, mixed
from meshrun.parallel.moment import Moment, Place, frozen, replay

B, T, D = 8, 6, 10
IDS = torch.tensor([5, 3, 11, 0, 999_999_999_999, 7, 1, 2])


def keyed(kind: type[nn.Module] = nn.Dropout, p: float = 0.4, name: str = "drop") -> nn.Module:
    model = nn.ModuleDict({name: kind(p)})
    assert key_dropouts(model, Moment(seed=1, step=4)) == [name]
    return model[name]


def mask(drop: nn.Module, shape: tuple[int, ...], ids: Tensor = IDS) -> Tensor:
    drop.moment.ids = ids
    return drop(torch.ones(shape)) != 0


WHOLE = mask(keyed(), (B, T, D))


def test_masks_of_any_split_of_the_samples_are_those_of_the_whole():
    for cuts in ([1] * 8, [5, 3], [2, 2, 4], [7, 1]):
        parts = [mask(keyed(), (len(ids), T, D), ids) for ids in IDS.split(cuts)]
        assert torch.equal(torch.cat(parts), WHOLE)
    assert torch.equal(mask(keyed(), (B, T, D), IDS.flip(0)), WHOLE.flip(0))


@pytest.mark.parametrize("kind", [nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d])
def test_a_dropout_in_place_changes_what_it_was_given(kind: type[nn.Module]):
    shape = (B, T, D, *(2,) * {nn.Dropout2d: 1, nn.Dropout3d: 2}.get(kind, 0))
    drop, whole = keyed(kind), mask(keyed(kind), shape)
    drop.inplace, drop.moment.ids, given = True, IDS, torch.ones(shape)
    assert drop(given) is given
    assert torch.equal(given != 0, whole)


def test_what_all_samples_share_drops_alike_whichever_samples_these_are():
    drop = keyed()
    drop.moment.place({"drop": [Place(None, (T, D))]})
    shared = mask(drop, (T, D))
    assert 0 < shared.sum() < T * D
    for ids in (IDS[:1], IDS[2:5], IDS.flip(0)):
        assert torch.equal(mask(drop, (T, D), ids), shared)


def test_masks_of_parts_of_the_sequence_and_of_the_features_are_those_of_the_whole():
    for parts in (2, 3, 6):
        drop, masks = keyed(), []
        for part in range(parts):
            drop.part_of_sequence = part, parts
            masks.append(mask(drop, (B, T // parts, D)))
        assert torch.equal(torch.cat(masks, dim=1), WHOLE)
    for parts in (2, 5):
        drop, masks = keyed(), []
        for part in range(parts):
            drop.part_of_features = part, parts
            masks.append(mask(drop, (B, T, D // parts)))
        assert torch.equal(torch.cat(masks, dim=2), WHOLE)


def test_parts_of_a_sequence_drop_what_the_whole_does_where_a_sample_has_several_entries():
    whole, drop, masks = mask(keyed(), (B * 2, 8, D)), keyed(), []
    for part in range(2):
        drop.part_of_sequence = part, 2
        masks.append(mask(drop, (B * 2, 4, D)))
    assert torch.equal(torch.cat(masks, dim=1), whole)


def test_tokens_in_zigzag_order_drop_what_their_positions_say():
    whole = mask(keyed(), (B, 8, D))
    for positions in (torch.tensor([0, 1, 6, 7]), torch.tensor([2, 3, 4, 5])):
        drop = keyed()
        drop.moment.positions, drop.moment.length = positions, 8
        assert torch.equal(mask(drop, (B, 4, D)), whole[:, positions])
        assert torch.equal(mask(drop, (B * 4, D)), whole[:, positions].flatten(0, 1))
        for part in range(2):
            drop.part_of_sequence = part, 2
            assert torch.equal(mask(drop, (B, 2, D)), whole[:, positions.chunk(2)[part]])


def test_channels_that_are_no_tokens_drop_by_their_own_numbers():
    whole, drop = mask(keyed(nn.Dropout1d), (B, 6, 5)), keyed(nn.Dropout1d)
    drop.moment.positions, drop.moment.length = torch.tensor([2, 3, 4]), 8
    assert torch.equal(mask(drop, (B, 6, 5)), whole)
    assert torch.equal(mask(drop, (B, 3, 5)), mask(keyed(nn.Dropout1d), (B, 8, 5))[:, [2, 3, 4]])


def test_probabilities_of_attention_follow_heads_and_queries():
    whole = mask(keyed(), (B, 4, 8, 8))
    positions = torch.tensor([2, 3, 4])
    drop = keyed()
    drop.moment.positions, drop.moment.length = positions, 8
    assert torch.equal(mask(drop, (B, 4, 3, 8)), whole[:, :, positions])
    assert torch.equal(mask(drop, (B * 4, 3, 8)), whole[:, :, positions].flatten(0, 1))
    drop.part_of_sequence = 1, 2
    assert torch.equal(mask(drop, (B, 2, 3, 8)), whole[:, 2:, positions])


def test_a_tensor_without_tokens_is_no_part_of_a_sequence():
    whole, drop = mask(keyed(), (B, D)), keyed()
    drop.moment.positions, drop.moment.length = torch.tensor([0, 1, 6, 7]), 8
    assert torch.equal(mask(drop, (B, D)), whole)


def test_flattened_and_batch_second_tensors_drop_the_same_elements():
    assert torch.equal(mask(keyed(), (B * T, D)), WHOLE.flatten(0, 1))
    assert torch.equal(mask(keyed(), (T, B, D)), WHOLE.transpose(0, 1))
    assert mask(keyed(), (B,)).shape == (B,)
    assert torch.equal(mask(keyed(), (B, 1)).flatten(), mask(keyed(), (B,)))
    assert mask(keyed(), (0, T, D), IDS[:0]).shape == (0, T, D)


def test_a_tensor_that_is_no_batch_is_refused():
    drop = keyed(name="block")
    with pytest.raises(RunFailed, match=r"'block' got a tensor of shape \(7, 6, 10\) for a micro-batch of 8 samples"):
        mask(drop, (7, 6, 10))
    with pytest.raises(RunFailed, match=r"dim 0 of what a Dropout1d gets must be the batch"):
        mask(keyed(nn.Dropout1d), (7, 6, 10))
    with pytest.raises(RunFailed, match="'block' draws random numbers by sample, but nobody said which ones"):
        mask(drop, (8, 6, 10), None)


def test_masks_differ_by_seed_step_name_sample_and_call():
    def changed(**fields: object) -> Tensor:
        drop = keyed()
        for name, value in fields.items():
            setattr(drop.moment, name, value)
        return mask(drop, (B, T, D))

    others = [changed(seed=2), changed(step=5), mask(keyed(name="other"), (B, T, D)), WHOLE.roll(1, 0)]
    drop = keyed()
    mask(drop, (B, T, D))
    others.append(drop(torch.ones(B, T, D)) != 0)
    for other in others:
        assert 0.3 < (other != WHOLE).float().mean() < 0.66
    assert torch.equal(mask(drop, (B, T, D)), WHOLE), "a new forward pass begins with the first call"


def test_a_new_name_and_the_old_one_again():
    drop = keyed()
    drop.name = "stage.0.drop"
    assert not torch.equal(mask(drop, (B, T, D)), WHOLE)
    drop.name = "drop"
    assert drop.name == "drop" and torch.equal(mask(drop, (B, T, D)), WHOLE)


@pytest.mark.parametrize("kind, shape", [(nn.Dropout1d, (B, 12, 5)), (nn.Dropout2d, (B, 12, 3, 4)),
                                         (nn.Dropout2d, (B, 12, 5)), (nn.Dropout3d, (B, 12, 2, 3, 2))])  # fmt: skip
def test_whole_channels_are_dropped(kind: type[nn.Module], shape: tuple[int, ...]):
    whole = mask(keyed(kind), shape)
    channels = whole.flatten(2)
    assert torch.equal(channels.all(2), channels.any(2)) and 0.4 < channels.float().mean() < 0.8
    drop = keyed(kind)
    assert torch.equal(torch.cat([mask(drop, (4, *shape[1:]), ids) for ids in IDS.split(4)]), whole)
    drop.part_of_features = 1, 3
    assert torch.equal(mask(drop, (B, 4, *shape[2:])), whole[:, 4:8])


def test_one_sample_without_a_batch_is_the_sample_of_its_id():
    whole = mask(keyed(nn.Dropout1d), (B, 12, 5))
    assert torch.equal(mask(keyed(nn.Dropout1d), (12, 5), IDS[2:3]), whole[2])


def test_what_stays_is_scaled_and_gradients_go_where_values_went():
    drop = keyed()
    drop.moment.ids = IDS
    x = torch.randn(B, T, D, dtype=torch.float64, requires_grad=True)
    y = drop(x)
    assert torch.allclose(y, x * WHOLE / 0.6)
    weights = torch.randn_like(x)
    (y * weights).sum().backward()
    assert torch.allclose(x.grad, weights * WHOLE / 0.6)
    for dtype in (torch.bfloat16, torch.float16):
        assert drop(torch.ones(B, T, D, dtype=dtype)).dtype == dtype


def test_no_and_total_dropout_and_evaluation_are_as_in_torch():
    x = torch.randn(B, T, D)
    for p, wanted in ((0.0, x), (1.0, torch.zeros_like(x))):
        drop = keyed(p=p)
        drop.moment.ids = IDS
        assert torch.equal(drop(x), wanted)
    drop = keyed().eval()
    assert torch.equal(drop(x), x)


def test_a_moment_that_says_nothing_leaves_it_to_torch():
    model = nn.Sequential(nn.Dropout(0.5))
    key_dropouts(model, Moment())
    torch.manual_seed(3)
    drawn = model(torch.ones(4, 5))
    torch.manual_seed(3)
    assert torch.equal(drawn, F.dropout(torch.ones(4, 5), 0.5))


def test_names_hooks_and_state_of_a_model_stay():
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Dropout(0.3), nn.Dropout2d()), nn.AlphaDropout())
    state, seen = model.state_dict(), []
    model[1][0].register_forward_hook(lambda *_: seen.append(1))
    moment = Moment(seed=0, step=0, ids=torch.arange(2))
    assert key_dropouts(model, moment) == ["1.0", "1.1"]
    assert isinstance(model[1][0], nn.Dropout) and model[1][0].p == 0.3
    assert model.state_dict().keys() == state.keys() and not list(model.buffers())
    model[1][0](torch.ones(2, 3))
    assert seen == [1] and type(model[2]) is nn.AlphaDropout


def test_the_numbers_are_uniform_and_rows_columns_and_rectangles_are_independent():
    """Over a 2,048 x 512 grid of consecutive rows and columns, as whole models have them."""
    words = mixed(torch.tensor([1, 2]))
    numbers = hashed(words, torch.arange(1024), torch.arange(512)).flatten(0, 1).double() / 2**31
    assert abs(numbers.mean()) < 3e-3 and abs(numbers.var() - 1 / 3) < 3e-3
    for p in (0.01, 0.1, 0.5, 0.9):
        signs = (numbers >= 2 * p - 1).double()
        assert abs(1 - signs.mean() - p) < 4 * (p * (1 - p) / signs.numel()) ** 0.5, "the share that is dropped"
        signs = (signs - (1 - p)) / (p * (1 - p)) ** 0.5
        # Sums of n independent values are around n ** 0.5; five times as much happens once in a million.
        for dim, n in ((0, 2048), (1, 512)):
            sums = signs.sum(dim) / n**0.5
            assert sums.abs().max() < (5.5 if 0.05 < p < 0.95 else 8) and 0.8 < sums.var() < 1.2
        for shift in (1, 2, 3, 16, 64, 256):
            for product in (
                signs[shift:] * signs[:-shift],
                signs[:, shift:] * signs[:, :-shift],
                signs[shift:, shift:] * signs[:-shift, shift:] * signs[shift:, :-shift] * signs[:-shift, :-shift],
            ):
                assert abs(product.sum()) / product.numel() ** 0.5 < 5, f"p {p}, shift {shift}"
    bits = (hashed(words, torch.arange(64), torch.arange(512))[..., None] >> torch.arange(32) & 1).double()
    assert (bits.mean((0, 1, 2)) - 0.5).abs()[16:].max() < 0.01


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("tokens", [6, 16])
def test_all_dropouts_of_a_layer_agree_when_a_batch_is_computed_in_halves(batch_first: bool, tokens: int):
    """Also with the batch in dim 1, where 16 tokens are a multiple of the batch."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.1, batch_first=batch_first)
    moment = Moment(seed=0, step=3)
    assert key_dropouts(layer, moment) == ["dropout", "dropout1", "dropout2"]
    assert key_attentions(layer, moment) == ["self_attn"]
    x = torch.randn(B, tokens, 16)

    def run(rows: slice, ids: Tensor = IDS) -> tuple[Tensor, dict[str, Tensor]]:
        moment.ids = ids[rows]
        layer.zero_grad()
        y = layer(x[rows]) if batch_first else layer(x[rows].transpose(0, 1)).transpose(0, 1)
        y.pow(3).sum().backward()
        return y.detach(), {name: each.grad for name, each in layer.named_parameters()}

    whole, grads = run(slice(None))
    first, second = run(slice(4)), run(slice(4, 8))
    assert (torch.cat([first[0], second[0]]) - whole).abs().max() < 1e-6
    for name, grad in grads.items():
        assert (first[1][name] + second[1][name] - grad).abs().max() < 1e-5 * max(1, grad.abs().max()), name
    assert (run(slice(None), IDS.roll(1))[0] - whole).abs().max() > 0.1


def test_recomputation_drops_what_the_forward_pass_dropped():
    """Also where a module is called in two segments, and when the moment has moved on before the backward pass."""
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(D, D), nn.Linear(D, D), nn.Dropout(0.4)])
    moment = Moment(seed=0)
    key_dropouts(model, moment)
    xs = torch.randn(2, B, T, D)

    def grads(recompute: bool) -> list[Tensor]:
        model.zero_grad()
        losses = []
        for step, x in enumerate(xs):
            moment.step, moment.ids = step, IDS + step
            for linear in model[:2]:

                def segment(x: Tensor, linear: nn.Module = linear) -> Tensor:
                    return model[2](linear(model[2](x)))  # fmt: skip

                x = (
                    checkpoint(segment, x, use_reentrant=False, context_fn=lambda: replay(moment))
                    if recompute
                    else segment(x)
                )
            losses.append(x.pow(2).sum())
        sum(losses).backward()
        return [each.grad for each in model.parameters()]

    for plain, again in zip(grads(False), grads(True), strict=True):
        assert torch.equal(plain, again)


def test_a_frozen_moment_returns_to_what_it_was():
    drop = keyed()
    first = mask(drop, (B, T, D))
    earlier = drop.moment.copy()
    second = drop(torch.ones(B, T, D)) != 0
    drop.moment.step, drop.moment.ids = 9, IDS + 1
    with pytest.raises(ZeroDivisionError), frozen(drop.moment, earlier):
        assert torch.equal(drop(torch.ones(B, T, D)) != 0, second)
        raise ZeroDivisionError
    assert drop.moment.step == 9 and torch.equal(drop.moment.ids, IDS + 1)
    assert not torch.equal(drop(torch.ones(B, T, D)) != 0, first)


SHAPES = [(B, T, D), (B, D), (B, 17, 3, D)]


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("backend", "shapes"),
    [("aot_eager", SHAPES), pytest.param("inductor", SHAPES[:1], marks=pytest.mark.every)],
    ids=["graph", "code"],
)
def test_what_is_compiled_drops_the_same(backend: str, shapes: list[tuple[int, ...]]):
    """Code takes seconds to make: of one shape to see that it does as the graph, which is that of all of them."""
    moment = Moment(seed=0)
    block = nn.Sequential(nn.Linear(D, D), nn.Dropout(0.4))
    key_dropouts(block, moment)
    compiled = torch.compile(block, backend=backend, fullgraph=True)
    for shape in shapes:
        x = torch.randn(shape)
        moment.step, moment.ids = 0, IDS
        wanted = block(x)
        moment.step = 0
        assert torch.allclose(compiled(x), wanted, atol=1e-6)


def test_dropout_is_compiled_once_for_all_steps_and_blocks():
    moment = Moment(seed=0)
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(D, D), nn.Dropout(0.4)) for _ in range(3))
    key_dropouts(blocks, moment)
    count = CompileCounter()
    counted = [torch.compile(block, backend=count, fullgraph=True) for block in blocks]
    x = torch.randn(B, T, D)
    for step in range(4):
        for block, fast in zip(blocks, counted, strict=True):
            moment.step, moment.ids = step, IDS + step
            wanted = [block(x), block(x)]
            moment.ids = IDS + step
            assert torch.equal(fast(x), wanted[0]) and torch.equal(fast(x), wanted[1])
    assert count.frame_count == 1


@pytest.mark.gpu
def test_gpus_drop_what_cpus_drop():
    drop = keyed()
    for ids in (IDS, IDS.cuda()):
        drop.moment.ids = ids
        assert torch.equal(drop(torch.ones(B, T, D, device="cuda")).cpu() != 0, WHOLE)
    drop.moment.ids = IDS
    assert torch.equal(torch.compile(drop)(torch.ones(B, T, D, device="cuda")).cpu() != 0, WHOLE)


def test_keys_cost_no_more_than_three_times_torchs_dropout():
    x, plain, drop = torch.ones(16, 128, 256), nn.Dropout(0.1), keyed(p=0.1)
    drop.moment.ids = torch.arange(16)
    times: dict[nn.Module, list[float]] = {plain: [], drop: []}
    for _ in range(30):
        for module, taken in times.items():
            began = time.perf_counter()
            module(x)
            taken.append(time.perf_counter() - began)
    assert min(times[drop]) < 3 * min(times[plain])
    assert isinstance(drop, KeyedDropout)

"""Attention with keyed dropout or shared heads is torch's attention: the same results, the same gradients."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from meshrun import RunFailed, UserError
from meshrun.parallel import attention as attention_module
from meshrun.parallel.attention import FUSED, KeyedAttention, key_attentions, split_heads
from meshrun.parallel.dropout import key_dropouts
from meshrun.parallel.moment import Moment
from tests import compare

B, L, S, E, H = 4, 5, 7, 16, 4
TOLERANCE = 1e-6


def attention(seed: int = 0, dropout: float = 0.0, **options: Any) -> nn.MultiheadAttention:
    torch.manual_seed(seed)
    made = nn.MultiheadAttention(E, H, dropout=dropout, **options)
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.3)
    return made


def keyed(module: nn.MultiheadAttention, moment: Moment | None = None) -> nn.MultiheadAttention:
    model = nn.ModuleDict({"attend": module})
    key_attentions(model, moment or Moment(seed=2, step=1, ids=torch.arange(B)))
    return module


def inputs(batch_first: bool, kdim: int = E, vdim: int = E) -> list[Tensor]:
    torch.manual_seed(9)
    made = [torch.randn(B, L, E), torch.randn(B, S, kdim), torch.randn(B, S, vdim)]
    return [(each if batch_first else each.transpose(0, 1)).contiguous().requires_grad_() for each in made]


def masks() -> list[dict[str, Any]]:
    torch.manual_seed(4)
    hidden, padding = torch.rand(L, S) < 0.3, torch.zeros(B, S, dtype=torch.bool)
    hidden[:, 0], padding[1, 5:] = False, True
    added = torch.randn(B * H, L, S)
    return [
        {},
        {"attn_mask": hidden},
        {"attn_mask": added},
        {"key_padding_mask": padding},
        {"attn_mask": hidden[None].expand(B * H, -1, -1), "key_padding_mask": padding},
        {"key_padding_mask": padding * -2.0},
        {"attn_mask": added[0], "key_padding_mask": padding * -2.0},
    ]


def results(module: nn.Module, given: list[Tensor], **options: Any) -> list[Tensor | None]:
    """Outputs and weights; gradients of inputs and of parameters, joined under the model's own names."""
    module.zero_grad()
    for each in given:
        each.grad = None
    output, weights = module(*given, **options)
    loss = output.sin().sum() + (0 if weights is None else (weights * torch.arange(S)).sum() / S)
    loss.backward()
    fused: dict[str, list[Tensor]] = {}
    grads = {}
    for name, parameter in module.named_parameters():
        grad = parameter.grad.full_tensor() if isinstance(parameter, DTensor) else parameter.grad
        if name in getattr(module, "fused", {}):
            old, block, _ = FUSED[name]
            assert block == len(fused.setdefault(old, []))
            fused[old].append(grad)
        else:
            grads[name] = grad
    grads |= {name: torch.cat(blocks) for name, blocks in fused.items()}
    return [output, weights, *(each.grad for each in given), *(grads[name] for name in sorted(grads))]


def difference(got: list[Tensor | None], wanted: list[Tensor | None]) -> float:
    return compare.difference(got, wanted, least=1)


def torchs_own(monkeypatch: pytest.MonkeyPatch, module: KeyedAttention, given: list[Tensor], **options: Any) -> Any:
    """What torch's module computes when its dropout is the keyed one."""

    def drop(x: Tensor, p: float, *_: Any, **__: Any) -> Tensor:
        return module._drop(x.view(B, H, L, S), p).view(x.shape)

    module.moment.ids = module.moment.ids
    with monkeypatch.context() as patch:
        patch.setattr(F, "dropout", drop)
        patch.setattr(KeyedAttention, "forward", nn.MultiheadAttention.forward)
        return results(module, given, **{**options, "need_weights": True})


@pytest.mark.parametrize("batch_first, bias, kdim", [(True, True, None), (False, False, None), (True, True, 6)])
def test_keyed_dropout_is_all_that_differs_from_torchs_attention(
    monkeypatch: pytest.MonkeyPatch, batch_first: bool, bias: bool, kdim: int | None
):
    module = keyed(attention(dropout=0.3, batch_first=batch_first, bias=bias, kdim=kdim, vdim=kdim))
    given = inputs(batch_first, kdim or E, kdim or E)
    for options, average in itertools.product(masks(), (True, False)):
        wanted = torchs_own(monkeypatch, module, given, average_attn_weights=average, **options)
        module.moment.ids = torch.arange(B)
        got = results(module, given, average_attn_weights=average, **options)
        assert difference(got, wanted) < TOLERANCE


def test_self_attention_with_a_causal_hint():
    module = keyed(attention(dropout=0.3, batch_first=True))
    x = torch.randn(B, L, E)
    causal = nn.Transformer.generate_square_subsequent_mask(L)
    output, weights = module(x, x, x, attn_mask=causal, is_causal=True)
    assert weights.triu(1).abs().max() == 0
    module.moment.ids = torch.arange(B)
    without, none = module(x, x, x, attn_mask=causal, is_causal=True, need_weights=False)
    assert none is None and torch.allclose(output, without, atol=TOLERANCE)
    with pytest.raises(RuntimeError, match="attn_mask"):
        module(x, x, x, is_causal=True)


def test_in_evaluation_of_split_heads_padding_is_hidden_beside_a_causal_mask(monkeypatch: pytest.MonkeyPatch):
    """All heads are on one rank here, so that sums over ranks are what is there."""
    monkeypatch.setattr(attention_module, "_sum", lambda x, _: x)
    module = keyed(attention(dropout=0.3, batch_first=True)).eval()
    plain = attention(batch_first=True).eval()
    module.heads = SimpleNamespace(get_local_rank=lambda: 0)
    x, padding = torch.randn(B, L, E), torch.zeros(B, L, dtype=torch.bool)
    padding[1, 1:3] = True
    causal = nn.Transformer.generate_square_subsequent_mask(L)
    hidden = torch.zeros(B, L).masked_fill(padding, -torch.inf)
    options = {"attn_mask": causal, "need_weights": False, "is_causal": True}
    for given in (None, hidden):
        found, _ = module(x, x, x, key_padding_mask=given, **options)
        wanted, _ = plain(x, x, x, key_padding_mask=given, **options)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_halves_of_a_batch_drop_what_the_whole_batch_drops():
    module = keyed(attention(dropout=0.3, batch_first=True))
    given = inputs(True)
    whole = module(*given)[0]
    for rows in (slice(1), slice(1, 4)):
        module.moment.ids = torch.arange(B)[rows]
        assert torch.allclose(module(*(each[rows] for each in given))[0], whole[rows], atol=TOLERANCE)
    module.moment.ids = torch.arange(1)
    one = module(*(each[0] for each in given))
    assert torch.allclose(one[0], whole[0], atol=TOLERANCE) and one[1].shape == (L, S)
    module.moment.ids = torch.arange(3)
    with pytest.raises(RunFailed, match=r"'attend' got a tensor of shape .* for a micro-batch of 3 samples"):
        module(*given)


def test_queries_in_zigzag_order_drop_what_their_positions_say():
    module = keyed(attention(dropout=0.3, batch_first=True))
    x = torch.randn(B, 8, E)
    whole = module(x, x, x)[0]
    for positions in (torch.tensor([0, 1, 6, 7]), torch.tensor([2, 3, 4, 5])):
        module.moment.ids, module.moment.positions, module.moment.length = torch.arange(B), positions, 8
        assert torch.allclose(module(x[:, positions], x, x)[0], whole[:, positions], atol=TOLERANCE)


def test_without_dropout_the_module_is_torchs_own():
    moment = Moment(seed=2, step=1, ids=torch.arange(B))
    plain, module = attention(dropout=0.3, batch_first=True).eval(), keyed(attention(dropout=0.3, batch_first=True))
    given = inputs(True)
    for need in (True, False):
        assert difference(list(module.eval()(*given, need_weights=need)), list(plain(*given, need_weights=need))) == 0
    model = nn.ModuleList([attention(), attention(dropout=0.1, add_zero_attn=True), attention(dropout=0.1)])
    assert key_attentions(model, moment) == ["2"]
    assert type(model[0]) is nn.MultiheadAttention
    module.train().moment.step = None
    torch.manual_seed(0)
    drawn = module(*given)[0]
    torch.manual_seed(0)
    assert torch.equal(drawn, plain.train()(*given)[0])


def tp_mesh(size: int) -> DeviceMesh:
    return init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))


def check_split_heads(ranks: int, dtype: torch.dtype, tolerance: float, *dropouts: float) -> None:
    mesh = tp_mesh(ranks)
    torch.set_default_dtype(dtype)
    variants = [{}, {"bias": False}, {"kdim": 6, "vdim": 10}]
    for dropout, batch_first, variant in itertools.product(dropouts, (True, False), variants):
        module = keyed(attention(dropout=dropout, batch_first=batch_first, **variant))
        split = keyed(attention(dropout=dropout, batch_first=batch_first, **variant))
        split_heads(split, mesh)
        given = inputs(batch_first, variant.get("kdim", E), variant.get("vdim", E))
        asked = [{"need_weights": False}, {}, {"average_attn_weights": False}]
        for options, weights in zip(masks(), itertools.cycle(asked), strict=False):
            for each in (module, split):
                if isinstance(each, KeyedAttention):
                    each.moment.ids = torch.arange(B)
            wanted = results(module, given, **options, **weights)
            assert difference(results(split, given, **options, **weights), wanted) < tolerance


@pytest.mark.ranks(2)
def test_two_ranks_with_half_of_the_heads_compute_what_one_does_with_all():
    check_split_heads(2, torch.float32, 1e-6, 0.0, 0.3)
    check_split_heads(2, torch.float64, 1e-14, 0.3)


@pytest.mark.ranks(4)
def test_four_ranks_with_a_head_each_compute_what_one_does_with_all():
    check_split_heads(4, torch.float32, 1e-6, 0.3)


@pytest.mark.ranks(2)
def test_self_attention_sums_the_gradient_of_its_input_once():
    whole, split = attention(batch_first=True), attention(batch_first=True)
    split_heads(split, tp_mesh(2))
    x = torch.randn(B, L, E, generator=torch.Generator().manual_seed(0))
    causal = nn.Transformer.generate_square_subsequent_mask(L)
    grads, outputs = [], []
    for module in (whole, split):
        mine = x.clone().requires_grad_()
        outputs.append(module(mine, mine, mine, need_weights=False, attn_mask=causal, is_causal=True)[0])
        outputs[-1].pow(3).sum().backward()
        grads.append(mine.grad)
    assert difference([outputs[1], grads[1]], [outputs[0], grads[0]]) < TOLERANCE


@pytest.mark.ranks(2)
def test_heads_are_split_before_there_are_values():
    values = attention(batch_first=True, dropout=0.1)
    with torch.device("meta"):
        split = nn.MultiheadAttention(E, H, batch_first=True, dropout=0.1)
    split_heads(split, tp_mesh(2))
    assert split.fused == FUSED
    assert {name: type(each) is nn.Parameter for name, each in split.named_parameters()}["out_proj.bias"]
    assert "in_proj_weight" not in dict(split.named_parameters())
    split.to_empty(device="cpu")
    rank = split.heads.get_local_rank()
    with torch.no_grad():
        for name, (old, block, blocks) in split.fused.items():
            mine = getattr(values, old).chunk(blocks)[block].chunk(2)[rank]
            getattr(split, name).to_local().copy_(mine)
        split.out_proj.weight.to_local().copy_(values.out_proj.weight.chunk(2, 1)[rank])
        split.out_proj.bias.copy_(values.out_proj.bias)
    given = inputs(True)
    assert torch.allclose(split.eval()(*given)[0], values.eval()(*given)[0], atol=TOLERANCE)


@pytest.mark.ranks(2)
def test_an_encoder_with_split_heads_is_evaluated_as_the_whole_one_is():
    """torch's fused kernels for evaluation must neither read split weights nor send nested tensors."""

    def made() -> nn.TransformerEncoder:
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(E, H, 32, dropout=0.1, batch_first=True)
        return nn.TransformerEncoder(layer, 2)

    whole, split = made().eval(), made().eval()
    x = torch.randn(B, L, E)
    padding = torch.zeros(B, L, dtype=torch.bool)
    padding[:, 4:] = True
    with torch.no_grad():
        wanted = [whole(x), whole(x, src_key_padding_mask=padding)]
        moment = Moment(seed=0, step=0, ids=torch.arange(B))
        key_dropouts(split, moment), key_attentions(split, moment)
        assert torch.allclose(split(x), wanted[0], atol=TOLERANCE), "swapped classes alone change nothing"
        for layer in split.layers:
            split_heads(layer.self_attn, tp_mesh(2))
        assert torch.allclose(split(x), wanted[0], atol=TOLERANCE)
        assert torch.allclose(split(x, src_key_padding_mask=padding)[:, :4], wanted[1][:, :4], atol=TOLERANCE)
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            assert torch.allclose(split(x), wanted[0], atol=TOLERANCE)


@pytest.mark.ranks(3)
def test_heads_that_tp_does_not_divide_are_refused():
    mesh = tp_mesh(3)
    with pytest.raises(UserError, match=r"'layers.0.attn' has 4 heads, which tp=3 does not divide; heads must be div"):
        split_heads(attention(), mesh, "layers.0.attn")
    with pytest.raises(UserError, match="'attend' has 4 heads"):
        split_heads(keyed(attention(dropout=0.1)), mesh)


@pytest.mark.ranks(2)
def test_attention_that_adds_keys_is_not_split():
    with pytest.raises(UserError, match=r"'a' adds keys of its own \(add_bias_kv, add_zero_attn\)"):
        split_heads(attention(add_bias_kv=True), tp_mesh(2), "a")

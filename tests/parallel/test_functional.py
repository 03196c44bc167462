"""Dropout that a model calls as a function belongs to samples, as that of `nn.Dropout` modules does."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import dropout, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from meshrun import Experiment, Loss, RunFailed, cross_entropy
from meshrun.parallel import compiled, functional
from meshrun.parallel.batch_dim import BatchFinder
from meshrun.parallel.functional import key_functions
from meshrun.parallel.moment import Moment, Place, replay
from meshrun.parallel.placed import Piece, counted

IDS = torch.tensor([5, 3, 11, 0, 999_999_999_999, 7, 1, 2])
B, H, T, D = len(IDS), 4, 6, 8


class Calls(nn.Module):
    """Its code is any function of its input."""

    def __init__(self, forward: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.code = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.code(x)


def keyed(code: Callable[[Tensor], Tensor], **moment: object) -> Calls:
    model = Calls(code)
    model.moment = Moment(seed=1, step=4, ids=IDS, **moment)
    key_functions(model, model.moment)
    return model


def run(model: Calls, x: Tensor, ids: Tensor = IDS) -> Tensor:
    model.moment.ids = ids
    return model(x)


def attend(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x, dropout_p=0.4)


ONES = torch.ones(B, T, D)
QUERIES = torch.randn(B, H, T, D, generator=torch.Generator().manual_seed(0))
MORE_KEYS = nn.MultiheadAttention(D, 2, dropout=0.4, add_bias_kv=True, batch_first=True)
FUNCTIONS = {
    "dropout": (lambda x: F.dropout(x, 0.4), ONES),
    "torch.dropout": (lambda x: torch.dropout(x, 0.4, True), ONES),
    "torch.alpha_dropout": (lambda x: torch.alpha_dropout(x, 0.4, True), ONES),
    "imported by name": (lambda x: dropout(x, 0.4), ONES),
    "attention imported by name": (lambda x: scaled_dot_product_attention(x, x, x, dropout_p=0.4), QUERIES),
    "dropout1d": (lambda x: F.dropout1d(x, 0.4), ONES),
    "dropout2d": (lambda x: F.dropout2d(x, 0.4), torch.ones(B, T, D, 2)),
    "dropout3d": (lambda x: F.dropout3d(x, 0.4), torch.ones(B, T, D, 2, 2)),
    "attention": (attend, QUERIES),
    "a module that is no torch class": (type("Own", (nn.Dropout,), {})(0.4), ONES),
    "multi-head attention that adds keys": (
        lambda x: MORE_KEYS(x, x, x)[0],
        ONES,
    ),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_is_dropped_follows_the_sample_however_the_batch_is_cut(name: str):
    code, x = FUNCTIONS[name]
    model = keyed(code)
    whole = run(model, x)
    torch.manual_seed(7)
    for cuts in ([1] * 8, [5, 3], [7, 1]):
        parts = zip(x.split(cuts), IDS.split(cuts), strict=True)
        assert torch.allclose(torch.cat([run(model, each, ids) for each, ids in parts]), whole, atol=1e-6)
    model.moment.step = 5
    assert not torch.allclose(run(model, x), whole)


def test_two_calls_and_two_modules_drop_otherwise():
    first = keyed(lambda x: torch.cat([F.dropout(x, 0.4), F.dropout(x, 0.4)]))
    one, two = run(first, ONES).chunk(2)
    assert not torch.equal(one, two)
    pair = nn.Sequential(Calls(lambda x: F.dropout(x, 0.4)), Calls(lambda x: F.dropout(x, 0.4)))
    key_functions(pair, Moment(seed=1, step=4, ids=IDS))
    assert not torch.equal(pair[0](ONES), pair[1](ONES))


def test_a_dropout_in_place_changes_what_it_was_given():
    x = ONES.clone()
    found = keyed(lambda each: F.dropout(each, 0.4, inplace=True))(x)
    assert found is x and torch.equal(x, keyed(lambda each: F.dropout(each, 0.4))(ONES))
    assert (x == 0).any()


@pytest.mark.parametrize("mask", ["none", "causal", "boolean", "added", "a query that may look nowhere"])
@pytest.mark.parametrize("grouped", [False, True])
def test_attention_with_dropout_is_torchs_where_nothing_is_dropped(mask: str, grouped: bool):
    q = QUERIES.clone().requires_grad_()
    k = QUERIES[:, :2] if grouped else QUERIES.flip(0)
    allowed = torch.rand(B, 1, T, T, generator=torch.Generator().manual_seed(1)) < 0.7
    allowed[..., 0] = True
    if mask == "a query that may look nowhere":
        allowed[0, 0, 2] = False
    given = {"none": None, "causal": None, "added": torch.where(allowed, 0.5, -math.inf)}.get(mask, allowed)
    options = {"attn_mask": given, "is_causal": mask == "causal", "enable_gqa": grouped}
    plain = F.scaled_dot_product_attention(q, k, k, scale=0.3, **options)
    (expected,) = torch.autograd.grad(plain.square().sum(), q)
    # 1e-12 of the weights are dropped: none of these.
    model = keyed(lambda x: F.scaled_dot_product_attention(x, k, k, scale=0.3, dropout_p=1e-12, **options))
    assert torch.allclose(model(q), plain, atol=1e-6)
    assert torch.allclose(torch.autograd.grad(model(q).square().sum(), q)[0], expected, atol=1e-5)


def test_attention_drops_its_share_and_scales_the_rest():
    value = torch.eye(T).expand(B, H, T, T)
    weights = keyed(lambda x: F.scaled_dot_product_attention(x, x, value, dropout_p=0.25))(torch.zeros(B, H, T, D))
    assert torch.allclose(weights, (weights != 0) / T / 0.75)
    assert 0.2 < (weights == 0).float().mean() < 0.3


def test_heads_that_tp_gives_to_a_rank_drop_what_they_would_drop_in_one_process():
    whole = run(keyed(attend), QUERIES)
    place = {"": [Place(0, (1, H, T, T))]}
    for part in range(2):
        model = Calls(attend)
        model.moment = Moment(seed=1, step=4, ids=IDS)
        key_functions(model, model.moment, (part, 2))
        model.moment.place(place)
        own = QUERIES.chunk(2, 1)[part]
        assert torch.allclose(model(own), whole.chunk(2, 1)[part], atol=1e-6)
    model.moment.step = 4
    assert torch.allclose(model(QUERIES), whole, atol=1e-6), "heads that are whole on every rank"


def test_a_dropout_of_what_tp_may_have_split_is_refused():
    model = Calls(lambda x: F.dropout(x, 0.4))
    model.moment = Moment(seed=1, step=4, ids=IDS)
    key_functions(model, model.moment, (1, 2))
    with pytest.raises(RunFailed, match=r"calls a dropout as a function on a tensor of .*, of which tp=2"):
        model(ONES)
    model.moment.place({"": [Place(0, (1, T, 2 * D))]})
    model.moment.step = 4
    with pytest.raises(RunFailed, match=r"make it an nn\.Dropout module that the tensor_plan names"):
        model(ONES)
    model.moment.place({"": [Place(0, (1, T, D))]})
    model.moment.step = 4
    assert (model(ONES) == 0).any()


def test_recomputed_activations_drop_the_same():
    model = keyed(lambda x: (F.dropout(x, 0.4) * attend(x)).square())
    x = QUERIES.clone().requires_grad_()
    (plain,) = torch.autograd.grad(run(model, x).sum(), x)
    model.moment.ids = IDS
    twice = checkpoint(model, x, use_reentrant=False, context_fn=lambda: replay(model.moment))
    assert torch.equal(torch.autograd.grad(twice.sum(), x)[0], plain)


def test_without_dropout_torchs_own_function_computes(monkeypatch: pytest.MonkeyPatch):
    """In training without dropout, in evaluation, and where nobody says which samples these are."""
    met: list[float] = []
    plain = functional._attention_without_dropout

    def own(*given: object, **named: object) -> Tensor:
        met.append(float(given[4]))
        return plain(*given, **named)

    model = keyed(lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.0))
    monkeypatch.setattr(functional, "_attention_without_dropout", own)
    model(QUERIES)
    assert met == [0.0]
    asleep = keyed(attend)
    asleep.moment.step = None
    asleep(QUERIES)
    assert met == [0.0, 0.4]


def test_compiled_code_drops_what_plain_code_does():
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Calls(lambda x: F.dropout(x.sin(), 0.4, self.training))

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x).cos() + 1

    model = Block()
    moment = Moment(seed=1, step=4, ids=IDS)
    key_functions(model, moment)
    expected = model(ONES)
    compiled.apply([model], asked=True)
    model.forward.compile("aot_eager")  # torch's own tracing, and no kernels
    for ids in (IDS, IDS.flip(0)):
        moment.ids = ids
        assert torch.allclose(model(ONES), expected if ids is IDS else expected.flip(0))
    model.eval()
    assert torch.allclose(model(ONES), ONES.sin().cos() + 1)


class Data:
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.full((T,), float(index)), torch.tensor(index % 3)


def found(model: Callable[[], nn.Module]) -> BatchFinder:
    optimizer: Callable[..., torch.optim.Optimizer] = lambda parameters: torch.optim.SGD(parameters, lr=0.1)  # noqa: E731
    experiment = Experiment(model=model, train=Data(), loss=cross_entropy, optimizer=optimizer, batch=8, steps=2)
    key_functions(nn.Module(), Moment())
    finder = BatchFinder.of(model(), experiment)
    finder.find()
    return finder


def test_where_the_batch_is_is_found_for_modules_functions_and_outputs():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.drop, self.norm = nn.Linear(1, D), nn.Dropout(0.1), nn.BatchNorm1d(T)

        def forward(self, x: Tensor) -> Tensor:
            x = F.dropout(self.drop(self.embed(self.norm(x).t()[..., None])), 0.2)  # (time, batch, width)
            heads = x.unflatten(-1, (2, 4)).permute(1, 2, 0, 3)
            x = x + F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.1).permute(2, 0, 1, 3).flatten(2)
            return x + F.dropout(self.embed.weight.t(), 0.1)

    finder = found(Model)
    assert finder.failure is None
    dims = finder.find()
    assert dims is not None and dims.outputs == [Place(1, (T, 1, D))]
    assert dims.calls["drop"] == [Place(1, (T, 1, D))]
    assert dims.calls[""] == [Place(1, (T, 1, D)), Place(0, (1, 2, T, T)), Place(None, (1, D))]


def test_a_model_whose_shapes_depend_on_values_says_why_its_batch_was_not_found():
    finder = found(lambda: Calls(lambda x: x if len(x.nonzero()) else -x))
    assert finder.find() is None and str(finder.failure).startswith("it cannot be run without values (")


def test_time_first_tensors_draw_what_batch_first_ones_do_whatever_their_sizes():
    whole = run(keyed(lambda x: F.dropout(x, 0.4)), torch.ones(B, B, D))
    later = keyed(lambda x: F.dropout(x, 0.4))
    later.moment.place({"": [Place(1, (B, 1, D))]})
    assert torch.equal(run(later, torch.ones(B, B, D)), whole.transpose(0, 1))


def test_attention_that_drops_all_weights_gives_zeros():
    model = keyed(lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=1.0))
    assert not run(model, torch.ones(B, H, T, D)).any()


def test_a_tensor_that_all_samples_share_is_dropped_alike_on_every_rank():
    model = keyed(lambda x: F.dropout(x, 0.4))
    model.moment.place({"": [Place(None, (B, D))]})
    whole = run(model, torch.ones(B, D))
    assert (whole == 0).any() and torch.equal(run(model, torch.ones(B, D), IDS[:3]), whole)


def test_sizes_that_fit_two_dimensions_are_refused_unless_the_user_says_which():
    code, square = (lambda x: F.dropout(x, 0.4)), torch.ones(B, 2 * B, D)
    with pytest.raises(RunFailed, match=r"both dim 0 and dim 1 may be the batch.*because it looks at values: say"):
        keyed(code, unplaced="it looks at values")(square)
    first, second = (keyed(code, unplaced="…", batch_dim=dim)(square) for dim in (0, 1))
    assert torch.equal(first, keyed(code)(square)) and not torch.equal(first, second)
    assert keyed(code, unplaced="it looks at values")(ONES).shape == ONES.shape, "these sizes fit one only"


def test_rows_that_only_fill_a_micro_batch_up_are_left_out_of_time_first_outputs_too():
    outputs = torch.arange(2 * 2 * 3.0).view(2, 2, 3)  # (time, batch, width)
    piece = Piece(inputs=None, targets=torch.zeros(2, 2), ids=[4, 4], real=1)
    shown: list[tuple[Tensor, Tensor]] = []

    def loss(found: Tensor, targets: Tensor) -> Loss:
        shown.append((found, targets))
        return Loss(found.view(-1).sum(), targets.numel())

    for places in ([Place(1, (2, 1, 3))], [Place(0, (1, 2, 3))], None):
        counted(outputs, piece, loss, places)
    first, second, unknown = shown
    assert torch.equal(first[0], outputs[:, :1]) and len(first[1]) == 1
    assert torch.equal(second[0], outputs[:1]) and torch.equal(unknown[0], outputs[:1])

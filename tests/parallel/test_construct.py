"""A model that is filled in parts has bit for bit the values of its plain constructor."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshrun.errors import RunFailed
from meshrun.parallel import construct
from meshrun.parallel.construct import Blueprint, blueprint

SEED = 7
Build = Callable[[], nn.Module]


def collect(plan: Blueprint) -> dict[str, Tensor]:
    values: dict[str, Tensor] = {}

    def take(name: str, tensor: Tensor) -> None:
        assert name not in values, f"{name} was given twice"
        assert tensor.device.type == "cpu"
        values[name] = tensor.clone()

    plan.fill(take)
    return values


def named(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters()) | dict(model.named_buffers())


def assert_same_as_plain(build: Build) -> Blueprint:
    """Whether it could be recorded or not: the same names, values, strides, and the generator in the same state."""
    torch.manual_seed(SEED)
    random.seed(SEED)
    np.random.seed(SEED)
    expected = named(build())
    state = torch.get_rng_state()

    torch.manual_seed(SEED + 1)
    random.seed(SEED)
    np.random.seed(SEED)
    found = torch.get_rng_state()
    plan = blueprint(build, SEED)
    assert torch.equal(torch.get_rng_state(), found), "recording has moved the generator"
    for _ in range(2):
        values = collect(plan)
        assert torch.equal(torch.get_rng_state(), state), "the generator stands elsewhere"
        assert values.keys() == expected.keys()
        for name, value in values.items():
            assert value.dtype == expected[name].dtype and value.shape == expected[name].shape, name
            assert torch.equal(value, expected[name]), f"{name} differs"
    made = named(plan.model)
    assert {name: (each.shape, each.stride(), each.requires_grad) for name, each in made.items()} == {
        name: (each.shape, each.stride(), each.requires_grad) for name, each in expected.items()
    }
    return plan


def assert_recorded(build: Build) -> nn.Module:
    plan = assert_same_as_plain(build)
    assert plan.reason is None
    assert all(each.is_meta for each in named(plan.model).values())
    return plan.model


class Module(nn.Module):
    """A module whose constructor is the given function."""

    def __init__(self, construct: Callable[[Any], None]) -> None:
        super().__init__()
        construct(self)


def constructor(construct: Callable[[Any], None]) -> Build:
    return lambda: Module(construct)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.LayerNorm(16), nn.Linear(16, 4))


def cnn() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8, 4))


def tied() -> nn.Module:
    model = nn.ModuleDict({"embed": nn.Embedding(10, 4), "head": nn.Linear(4, 10, bias=False)})
    model["head"].weight = model["embed"].weight
    return model


def drawn_parameters() -> nn.Module:
    return nn.ParameterDict({"a": nn.Parameter(torch.randn(3, 5)), "b": nn.Parameter(torch.rand(4) * 2 - 1)})


def legacy_constructors() -> nn.Module:
    model = nn.ParameterDict({"a": nn.Parameter(torch.Tensor(3, 5)), "b": nn.Parameter(torch.FloatTensor([1, 2]))})
    nn.init.xavier_normal_(model["a"])
    return model


def truncated() -> nn.Module:
    model = nn.Linear(16, 16)
    nn.init.trunc_normal_(model.weight, std=0.02)
    nn.init.trunc_normal_(model.bias, mean=1, std=2, a=0, b=0.5)
    return model


def orthogonal() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 9), nn.Linear(9, 4), nn.Linear(3, 3))
    for each in (model[0], model[1]):
        nn.init.orthogonal_(each.weight, gain=1.5)
    nn.init.sparse_(model[2].weight, 0.3)
    return model


def initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.02)
        nn.init.zeros_(module.bias)


def reinitialised() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Sequential(nn.Linear(16, 4), nn.Linear(4, 4))).apply(initialise)


def written_in_parts() -> nn.Module:
    early = torch.randn(6)
    model = nn.Sequential(nn.Linear(6, 5), nn.Embedding(4, 3))
    model[1].weight.data[2].zero_()
    model[0].weight.data[4].copy_(early)
    with torch.no_grad():
        model[0].weight[:, :3].normal_()
        model[0].weight.t()[4, 1:3] = 5.0
        model[0].weight[torch.tensor([1, 3])] *= 2
        model[0].bias.view(5, 1).mul_(3).add_(model[0].weight[:, :1])
    return model


def aliases() -> nn.Module:
    model = nn.Linear(4, 4)
    model.weight.data = torch.randn(6, 4)[1:5]
    model.bias.data.to("cpu").fill_(2.0)
    model.bias.detach().cpu()[1] = 3.0
    model.scale = nn.Parameter(model.weight.data)
    model.weight.data.mul_(2)
    return model


def tables() -> nn.Module:
    def construct(self: Any) -> None:
        angles = torch.outer(torch.arange(7.0), 1.0 / (10000 ** (torch.arange(0, 8, 2).float() / 8)))
        self.register_buffer("cosine", angles.cos(), persistent=False)
        self.register_buffer("turn", torch.polar(torch.ones_like(angles), angles))
        self.register_buffer("mask", torch.ones(5, 5, dtype=torch.bool, device="cpu").tril())
        self.register_buffer("numpy", torch.from_numpy(np.arange(6.0).reshape(2, 3).T))
        self.register_buffer("list", torch.tensor([[1, 2], [3, 4]]))
        self.register_buffer("none", None)

    return Module(construct)


def reads_a_small_table() -> nn.Module:
    rates = [each.item() for each in torch.linspace(0, 0.3, 3)] + torch.linspace(0, 1, 2).tolist()
    sizes = torch.tensor([2, 3]).cumsum(0).numpy()
    assert bool(torch.ones(2).all())
    return nn.Sequential(*(nn.Dropout(rate) for rate in rates), nn.Linear(int(sizes[1]), 2))


def bfloat16() -> nn.Module:
    torch.set_default_dtype(torch.bfloat16)
    try:
        low = nn.Linear(4, 4)
        low.gain = nn.Parameter(torch.randn(4) + torch.ones(4))
    finally:
        torch.set_default_dtype(torch.float32)
    return nn.Sequential(low, nn.Linear(4, 4).to(torch.bfloat16), nn.Linear(4, 4).double())


def python_random() -> nn.Module:
    return nn.Sequential(nn.Linear(random.randint(2, 9), int(np.random.randint(2, 9))), nn.Dropout(random.random()))


class TruncatedInPart(nn.Module):
    """Draws until values please it, into a part of what was written before."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((8, 16), 3.0))
        nn.init.trunc_normal_(self.weight[2:5])


BUILDS: list[Build] = [
    TruncatedInPart,
    mlp,
    cnn,
    tied,
    drawn_parameters,
    legacy_constructors,
    truncated,
    orthogonal,
    reinitialised,
    written_in_parts,
    aliases,
    tables,
    reads_a_small_table,
    bfloat16,
    python_random,
    lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32), 3),
    lambda: nn.Embedding(10, 4, padding_idx=3),
    lambda: nn.LSTM(4, 5, 2),
    lambda: weight_norm(nn.Linear(8, 6)),
    lambda: spectral_norm(nn.Linear(8, 6)),
]


@pytest.mark.parametrize("build", BUILDS)
def test_values_are_those_of_the_plain_constructor(build: Build) -> None:
    assert_recorded(build)


@pytest.mark.parametrize("build", BUILDS)
def test_values_that_threads_have_drawn_ahead_are_the_same(monkeypatch: pytest.MonkeyPatch, build: Build) -> None:
    monkeypatch.setattr(construct, "MANY", 16)
    monkeypatch.setattr(construct, "AHEAD", 1000)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert_recorded(build)


def hugging_face(name: str, **sizes: Any) -> Build:
    transformers = pytest.importorskip("transformers")
    model, config = getattr(transformers, name), getattr(transformers, name.split("For")[0] + "Config", None)
    config = config or transformers.GPT2Config
    return lambda: model(config(vocab_size=90, **sizes))


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("GPT2LMHeadModel", {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 24}),
        ("LlamaForCausalLM", {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}),
        ("T5ForConditionalGeneration", {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}),
        ("BertForSequenceClassification", {"hidden_size": 24, "intermediate_size": 24, "num_hidden_layers": 2}),
    ],
)
def test_values_are_those_of_a_hugging_face_constructor(name: str, sizes: dict[str, int]) -> None:
    heads = {} if "num_heads" in sizes or "n_head" in sizes else {"num_attention_heads": 2}
    assert_recorded(hugging_face(name, **sizes, **heads))


def test_tied_parameters_stay_tied() -> None:
    model = assert_recorded(tied)
    assert model["head"].weight is model["embed"].weight


def test_a_known_tensor_attribute_gets_its_value() -> None:
    def construct(self: Any) -> None:
        self.linear = nn.Linear(2, 2)
        self.scale = torch.tensor([0.5, 2.0]).sqrt()

    model = assert_recorded(constructor(construct))
    assert torch.equal(model.scale, torch.tensor([0.5, 2.0]).sqrt())


def test_a_constructor_that_asks_where_its_tensors_are_hears_of_the_host() -> None:
    seen: list[Any] = []

    def construct(self: Any) -> None:
        self.weight = nn.Parameter(torch.randn(3))
        seen.append((self.weight.device, self.weight.is_meta, self.weight.is_cpu))
        self.register_buffer("zeros", torch.zeros(2, device=self.weight.device))

    assert_recorded(constructor(construct))
    assert seen[0] == seen[1] == (torch.device("cpu"), False, True)


def reads_random_number(self: Any) -> None:
    self.linear = nn.Linear(2, 2 + int(torch.rand(1).item() > 0.5))


def branches_on_random_number(self: Any) -> None:
    self.linear = nn.Linear(2, 2 if torch.rand(1) > 0.5 else 3)


def swallows_the_refusal(self: Any) -> None:
    try:
        width = int(torch.rand(1).item() * 5) + 1
    except Exception:
        width = 1
    self.linear = nn.Linear(2, width)


def lists_values(self: Any) -> None:
    self.names = torch.rand(3).tolist()
    self.linear = nn.Linear(2, 2)


def converts_to_numpy(self: Any) -> None:
    self.linear = nn.Linear(2, 2)
    self.start = float(self.linear.weight.detach().numpy().sum())


def writes_through_numpy(self: Any) -> None:
    self.register_buffer("table", torch.zeros(3))
    self.table.numpy()[1] = 5.0
    self.linear = nn.Linear(2, 2)


def changes_shared_numpy(self: Any) -> None:
    values = np.zeros(3)
    self.register_buffer("table", torch.from_numpy(values))
    values[1] = 5.0


def own_generator(self: Any) -> None:
    self.weight = nn.Parameter(torch.randn(3, generator=torch.Generator().manual_seed(3)))


def seeds_itself(self: Any) -> None:
    torch.manual_seed(5)
    self.linear = nn.Linear(2, 2)


def forks_the_generator(self: Any) -> None:
    with torch.random.fork_rng(devices=[]):
        self.first = nn.Linear(2, 2)
    self.second = nn.Linear(2, 2)


def asks_for_meta(self: Any) -> None:
    with torch.device("meta"):
        self.counted = sum(each.numel() for each in nn.Linear(3, 3).parameters())
    self.linear = nn.Linear(2, 2)


def hides_a_tensor(self: Any) -> None:
    self.linear = nn.Linear(2, 2)
    self.noise = torch.randn(4)


def hides_tensors_in_a_list(self: Any) -> None:
    self.linear = nn.Linear(2, 2)
    self.weights = [self.linear.weight]


def finds_indices(self: Any) -> None:
    self.register_buffer("indices", torch.rand(5).gt(0.5).nonzero())


OUTSIDE = nn.Linear(2, 2)


def takes_an_earlier_module(self: Any) -> None:
    self.linear = OUTSIDE


def resizes(self: Any) -> None:
    self.weight = nn.Parameter(torch.randn(4))
    self.weight.data.resize_(2, 3).fill_(1.0)


@pytest.mark.parametrize(
    ("construct", "reason"),
    [
        (reads_random_number, "its constructor reads the value of a tensor (aten._local_scalar_dense)"),
        (branches_on_random_number, "its constructor reads the value of a tensor (aten._local_scalar_dense)"),
        (swallows_the_refusal, "its constructor reads the value of a tensor (aten._local_scalar_dense)"),
        (lists_values, "its constructor reads the value of a tensor (Tensor.tolist)"),
        (converts_to_numpy, "its constructor reads the value of a tensor (Tensor.numpy)"),
        (
            writes_through_numpy,
            "its constructor fails on the meta device (ValueError: assignment destination is read-only)",
        ),
        (changes_shared_numpy, "its constructor changes numpy values or earlier tensors after their use"),
        (own_generator, "its constructor draws from a generator of its own"),
        (seeds_itself, "its constructor sets the state of the random generator"),
        (forks_the_generator, "its constructor sets the state of the random generator"),
        (asks_for_meta, "its constructor makes tensors on the meta device"),
        (hides_a_tensor, "its attribute noise holds a tensor that is neither a parameter nor a buffer"),
        (hides_tensors_in_a_list, "its attribute weights holds a tensor that is neither a parameter nor a buffer"),
        (finds_indices, "its constructor calls an operation that needs values (aten.nonzero.default)"),
        (
            takes_an_earlier_module,
            "the values of linear.weight come from a file, another library or a tensor made before",
        ),
        (resizes, "its constructor changes the size of a tensor in place"),
    ],
)
def test_what_cannot_be_recorded_is_built_whole_with_the_reason(construct: Any, reason: str) -> None:
    plan = assert_same_as_plain(constructor(construct))
    assert plan.reason == reason
    assert not any(each.is_meta for each in named(plan.model).values())


def test_values_from_a_file_are_built_whole(tmp_path: Any) -> None:
    torch.save(nn.Linear(3, 3).state_dict(), tmp_path / "weights.pt")

    def construct(self: Any) -> None:
        self.linear = nn.Linear(3, 3)
        self.linear.load_state_dict(torch.load(tmp_path / "weights.pt", weights_only=True))

    plan = assert_same_as_plain(constructor(construct))
    assert (
        plan.reason == "its constructor calls an operation that needs values (aten.set_.source_Storage_storage_offset)"
    )


def test_a_pretrained_model_is_built_whole(tmp_path: Any) -> None:
    build = hugging_face("GPT2LMHeadModel", n_embd=16, n_layer=1, n_head=2, n_positions=24)
    model = build()
    model.save_pretrained(tmp_path)
    plan = assert_same_as_plain(lambda: type(model).from_pretrained(tmp_path))
    assert plan.reason == "its constructor makes tensors on the meta device"
    assert torch.equal(collect(plan)["transformer.wte.weight"], model.transformer.wte.weight)


def test_python_random_numbers_are_the_same_when_it_is_built_whole() -> None:
    plan = assert_same_as_plain(lambda: nn.Sequential(python_random(), Module(reads_random_number)))
    assert plan.reason == "its constructor reads the value of a tensor (aten._local_scalar_dense)"


@pytest.mark.parametrize("error", [ValueError("heads must divide width"), KeyError("size"), RuntimeError("no")])
def test_an_error_of_the_constructor_surfaces_unchanged(error: Exception) -> None:
    def construct(self: Any) -> None:
        self.linear = nn.Linear(2, 2)
        raise error

    state = torch.get_rng_state()
    with pytest.raises(type(error)) as caught:
        blueprint(constructor(construct), SEED)
    assert caught.value is error and caught.value.__context__ is None
    assert torch.equal(torch.get_rng_state(), state)


@torch.library.custom_op("meshrun_tests::turned", mutates_args=())
def turned(values: Tensor) -> Tensor:
    return values.t().clone(memory_format=torch.contiguous_format).t()


@torch.library.custom_op("meshrun_tests::halved", mutates_args=())
def halved(values: Tensor) -> Tensor:
    return values[::2].clone()


@turned.register_fake
@halved.register_fake
def _(values: Tensor) -> Tensor:
    return values.new_empty(values.shape)


def test_an_operation_that_orders_its_result_otherwise_on_meta_gives_the_same_values() -> None:
    plan = blueprint(lambda: nn.ParameterList([turned(torch.randn(3, 4))]), SEED)
    assert plan.reason is None
    torch.manual_seed(SEED)
    expected = torch.randn(3, 4)
    assert torch.equal(collect(plan)["0"], expected)


def test_an_operation_that_is_wrong_about_its_shape_is_named() -> None:
    plan = blueprint(lambda: nn.ParameterList([halved(torch.randn(4, 3))]), SEED)
    with pytest.raises(RunFailed, match=r"halved.* shape \(2, 3\) on the host .* shape \(4, 3\) on the meta device"):
        collect(plan)


class LiveBytes(TorchDispatchMode):
    """The most bytes of real storages that were alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        self.alive = {key: each for key, each in self.alive.items() if not each[0].expired()}
        for each in tree_leaves((args, outputs)):
            if isinstance(each, Tensor) and not each.is_meta:
                storage = each.untyped_storage()
                self.alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, sum(size for _, size in self.alive.values()))
        return outputs


WIDTH, LAYERS = 512, 24


def stack() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def rescaled() -> nn.Module:
    model = stack().apply(initialise)
    for depth, layer in enumerate(model):
        layer.weight.data.div_(math.sqrt(2.0 * (depth + 1)))
    return model


def copied() -> nn.Module:
    layer = nn.Linear(WIDTH, WIDTH)
    model = stack()
    for each in model:
        each.load_state_dict(layer.state_dict())
    return model


@pytest.mark.parametrize(
    "build",
    [
        stack,
        lambda: stack().apply(initialise),
        lambda: stack().apply(initialise).to(torch.bfloat16),
        lambda: stack().double(),
        rescaled,
        copied,
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(256, 4, 1024), 8, enable_nested_tensor=False),
    ],
)
def test_memory_stays_near_the_largest_tensor(build: Build) -> None:
    plan = blueprint(build, SEED)
    assert plan.reason is None
    sizes = [each.nbytes for each in plan.model.parameters()]
    largest = max(*sizes, WIDTH * WIDTH * 4)
    assert sum(sizes) > 8 * largest
    with LiveBytes() as live:
        plan.fill(lambda *_: None)
    assert largest <= live.peak <= 3 * largest


def test_recording_a_big_model_takes_no_memory() -> None:
    sizes = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 20}
    build = hugging_face("LlamaForCausalLM", **sizes, num_attention_heads=64, num_key_value_heads=8)
    with LiveBytes() as live:
        plan = blueprint(build, SEED)
    assert plan.reason is None
    assert sum(each.numel() for each in plan.model.parameters()) > 15e9
    assert live.peak < 10e6


@pytest.mark.parametrize(
    ("size", "stride", "nbytes", "dtype", "plain"),
    [
        ((32,), (1,), 128, torch.float32, True),
        ((16,), (1,), 64, torch.float32, True),
        ((15,), (1,), 60, torch.float32, False),
        ((32,), (1,), 256, torch.float32, False),
        ((4, 8), (1, 4), 128, torch.float32, False),
        ((32,), (1,), 64, torch.bfloat16, False),
    ],
    ids=["whole", "a group", "less than a group", "a part", "turned", "halves"],
)
def test_threads_draw_only_what_fills_a_whole_tensor_in_order(
    size: tuple[int, ...], stride: tuple[int, ...], nbytes: int, dtype: torch.dtype, plain: bool
) -> None:
    ref = construct._Ref(0, dtype, size, stride, 0, nbytes)
    written = frozenset([0])
    step = construct._Step(
        torch.ops.aten.normal_.default, (ref,), {}, torch.float32, (), frozenset(), written, written, True
    )
    assert construct._is_plain(step) is plain

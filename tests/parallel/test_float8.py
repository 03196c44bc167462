"""Linear layers in float8: what they compute, which ones they are, and that every layout computes the same."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition

from meshrun import Experiment, mesh, token_cross_entropy
from meshrun.check.probe import Probing, probe
from meshrun.kernels.turned import FORMAT
from meshrun.layout import parse
from meshrun.parallel import float8, float8_product
from meshrun.parallel.build import build
from meshrun.parallel.how import How
from meshrun.recipes import llama
from meshrun.recipes.llama import PLAN, Llama, Shape, segments
from meshrun.train.loop import Trainer
from tests.compare import largest
from tests.programs.small_llama import phrases
from tests.train.small import points, small, start_on_cpu
from tests.train.whole import Result, differences, trained, weight_difference

SHAPE = Shape(32, 64, layers=2, heads=4, kv_heads=2, ffn=128, context=8)
ROUNDING = 0.04
"""Of a product of two tensors of e4m3: 2^-4 at most for each number, 0.026 on average."""


@pytest.fixture(autouse=True)
def small_layers_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float8, "LEAST", 1)
    monkeypatch.setattr(float8, "_through_torchao", lambda *_: False)


def small_layers_on_this_rank() -> None:
    float8.LEAST, float8._through_torchao = 1, lambda *_: False


def off(found: Tensor, wanted: Tensor) -> float:
    return float((found.detach().double() - wanted.detach().double()).norm() / wanted.detach().double().norm())


def tensors(rows: int = 48) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Inputs, weight, bias, gradient; some tokens much larger or smaller than others, as in a model."""
    generator = torch.Generator().manual_seed(0)
    size = torch.logspace(-3, 3, rows, base=2)[:, None]
    inputs = torch.randn(rows, 64, generator=generator) * size
    weight = torch.randn(96, 64, generator=generator) * 0.02
    gradient = torch.randn(rows, 96, generator=generator) * size.flip(0) * 1e-7
    values = (inputs, weight, torch.randn(96, generator=generator))
    return *(each.requires_grad_() for each in values), gradient  # type: ignore[return-value]


@pytest.mark.parametrize("scaling", ["row", "tensor"])
def test_results_and_gradients_are_those_of_a_linear_layer_within_the_rounding(
    scaling: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(float8_product, "SCALING", scaling)
    inputs, weight, bias, gradient = tensors()
    wanted = F.linear(inputs, weight, bias)
    found = float8_product.linear(inputs, weight, bias)
    assert off(found - bias, wanted - bias) < ROUNDING
    pairs = zip(
        torch.autograd.grad(found, (inputs, weight, bias), gradient),
        torch.autograd.grad(wanted, (inputs, weight, bias), gradient),
        strict=True,
    )
    assert all(off(a, b) < ROUNDING and a.dtype == b.dtype for a, b in pairs)


def test_every_token_is_rounded_by_itself():
    """So that it does not matter which others are in its micro-batch."""
    inputs, weight, _, gradient = tensors()
    together = float8_product.linear(inputs, weight, None)
    (gradients,) = torch.autograd.grad(together, inputs, gradient)
    for rows in (slice(0, 16), slice(16, 48)):
        some = inputs[rows].detach().requires_grad_()
        alone = float8_product.linear(some, weight, None)
        assert torch.equal(alone, together[rows])
        assert torch.equal(torch.autograd.grad(alone, some, gradient[rows])[0], gradients[rows])


def test_any_number_of_tokens_in_any_shape():
    inputs, weight, bias, gradient = tensors(21)
    found = float8_product.linear(inputs.view(3, 7, 64), weight, bias)
    assert found.shape == (3, 7, 96)
    (wanted,) = torch.autograd.grad(F.linear(inputs, weight, bias), weight, gradient)
    assert off(torch.autograd.grad(found, weight, gradient.view(3, 7, 96))[0], wanted) < ROUNDING


def test_scales_are_powers_of_two_that_just_fit():
    largest = torch.tensor([[448.0], [449.0], [1.0], [1.75], [1.76], [3e-9], [0.0]])
    values, scales = float8_product.quantised(largest)
    assert scales.flatten()[:5].tolist() == [1, 2, 2**-8, 2**-8, 2**-7]
    assert torch.all(torch.frexp(scales).mantissa == 0.5)
    assert torch.allclose(values.float() * scales, largest, rtol=2**-4)


def test_what_is_not_finite_stays_so():
    inputs, weight, _, _ = tensors(16)
    for bad in (float("nan"), float("inf")):
        broken = inputs.detach().clone()
        broken[3, 5] = bad
        found = float8_product.linear(broken, weight, None)
        assert not found[3].isfinite().any() and found[:3].isfinite().all() and found[4:].isfinite().all()


def test_a_layer_of_zeros_learns():
    """Its scales say nothing about those of its gradient."""
    inputs, _, _, gradient = tensors()
    weight = torch.zeros(96, 64, requires_grad=True)
    (found,) = torch.autograd.grad(float8_product.linear(inputs, weight, None), weight, gradient)
    (wanted,) = torch.autograd.grad(F.linear(inputs, weight), weight, gradient)
    assert off(found, wanted) < ROUNDING


def test_the_cpu_multiplies_the_very_numbers_that_a_gpu_would():
    inputs, weight, _, _ = tensors()
    (left, _), (right, _) = float8_product.quantised(inputs), float8_product.quantised(weight)
    one = torch.ones(())
    wanted = torch._scaled_mm(left, right.t(), one, one, out_dtype=torch.bfloat16)
    assert torch.allclose(float8_product._multiplied(left, right.t()), wanted, rtol=2**-7)


def test_between_the_passes_inputs_are_kept_in_8_bits():
    inputs, weight, _, _ = tensors()
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        float8_product.linear(inputs.view(48, 64), weight, None)
    sizes = {each.dtype: each.numel() for each in kept if each.data_ptr() != weight.data_ptr() and each.numel() > 48}
    assert sizes == {FORMAT: inputs.numel()}


def on_meta(shape: Shape) -> Llama:
    with torch.device("meta"):
        return Llama(shape)


SEGMENTS = ["embed", "blocks.0", "blocks.1", "norm", "head"]
IN_A_BLOCK = ["attention.wq", "attention.wk", "attention.wv", "attention.wo", "ffn.gate", "ffn.up", "ffn.down"]


def test_layers_of_blocks_are_chosen_and_the_head_is_not():
    wanted = [f"blocks.{number}.{name}" for number in range(2) for name in IN_A_BLOCK]
    assert float8.chosen(on_meta(SHAPE), SEGMENTS) == wanted
    # Segments as they are found in models that only have a list of blocks.
    assert float8.chosen(on_meta(SHAPE), ["blocks.0", "blocks.1"]) == wanted


def test_layers_too_small_or_of_odd_sizes_are_not_chosen(monkeypatch: pytest.MonkeyPatch):
    odd = on_meta(replace(SHAPE, ffn=120))
    assert not [name for name in float8.chosen(odd, SEGMENTS) if "ffn" in name]
    monkeypatch.setattr(float8, "LEAST", 64 * 128)
    assert float8.chosen(on_meta(SHAPE), ["blocks.0"]) == ["blocks.0.ffn.gate", "blocks.0.ffn.up", "blocks.0.ffn.down"]


def test_weights_in_two_places_and_layers_with_a_way_of_their_own_are_not_chosen():
    class Own(nn.Linear):
        def forward(self, inputs: Tensor) -> Tensor:
            return super().forward(inputs) * 2

    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), Own(16, 16), nn.Linear(16, 16), nn.Linear(16, 16))
    model[1].weight = model[0].weight
    assert float8.chosen(model, ["0", "1", "2", "3", "4"]) == ["3"]
    assert float8.chosen(nn.ModuleDict({"a": nn.Linear(16, 16), "b": nn.Linear(16, 16)}), []) == ["a"]


def test_a_gpu_that_cannot_is_refused_in_a_sentence():
    assert float8.objection((9, 0), "NVIDIA H200") is None
    assert float8.objection((8, 9), "NVIDIA L40") is None
    assert float8.objection((8, 0), "NVIDIA A100") == (
        "precision is 'float8', but NVIDIA A100 has compute capability 8.0, and float8 needs 8.9 or more; use bf16 "
        "(--precision)"
    )


def test_a_model_without_layers_for_it_is_told_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(float8, "LEAST", 1 << 20)
    (note,) = float8.apply(on_meta(SHAPE), SEGMENTS, torch.device("cpu"))
    assert note.endswith("so all of it computes in bf16")


def experiment(precision: str = "float8", steps: int = 6, **changes: Any) -> Experiment:
    return Experiment(
        model=lambda: Llama(SHAPE),
        train=phrases(40, seed=0),
        evals={"val": phrases(9, seed=1)},
        loss=token_cross_entropy,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.5, momentum=0.9),
        batch=8,
        steps=steps,
        clip=0.2,
        seed=3,
        precision=precision,
        segments=segments,
        tensor_plan=PLAN,
        **changes,
    )


@functools.cache
def alone(precision: str) -> Result:
    start_on_cpu(1)
    try:
        return trained(experiment(precision))
    finally:
        mesh.finish()
        mesh.use(mesh.Meeting())


@pytest.fixture
def wanted() -> Result:
    return alone("float8")


def test_parameters_and_state_are_those_of_the_model():
    here = start_on_cpu(1)
    placed = build(experiment(), here, How())
    wanted = Llama(SHAPE).state_dict()
    assert {name: (each.shape, each.dtype) for name, each in placed.weights()} == {
        name: (each.shape, each.dtype) for name, each in wanted.items()
    }
    assert sum(isinstance(each, float8.InFloat8) for each in placed.model.modules()) == 14
    assert "float8: 14 linear layers compute in it" in placed.notes


THROUGH_TORCHAO = float8._through_torchao


def test_torchao_computes_where_it_is_installed(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("torchao")
    monkeypatch.setattr(float8, "_through_torchao", THROUGH_TORCHAO)
    here = start_on_cpu(1)
    trainer = Trainer(experiment(), here)
    assert "float8: 14 linear layers compute in it, through torchao" in trainer.placed.notes
    assert trainer.train()["losses"] == pytest.approx(alone("bf16").losses, rel=0.02)


@contextmanager
def torchao_installed() -> Iterator[list[nn.Module]]:
    """A library of that name, which is given models and changes nothing about them."""
    given: list[nn.Module] = []
    library = ModuleType("torchao.float8")
    vars(library).update(
        Float8LinearConfig=lambda **_: None, convert_to_float8_training=lambda model, **_: given.append(model)
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(float8, "LEAST", 1)
        patch.setattr(float8, "_through_torchao", THROUGH_TORCHAO)
        patch.setitem(sys.modules, "torchao", ModuleType("torchao"))
        patch.setitem(sys.modules, "torchao.float8", library)
        yield given


@pytest.mark.parametrize("layout", [pytest.param("dp=1"), pytest.param("pp=2", marks=pytest.mark.ranks(2))])
def test_torchao_is_for_one_process_and_not_for_what_is_compared_with_other_layouts(layout: str, tmp_path: Path):
    mesh.use(mesh.Meeting(layout=layout, device="cpu"))
    with torchao_installed() as given:
        build(experiment(), here := mesh.start(), How())
        assert len(given) == (layout == "dp=1")
        probe(experiment(), here, Probing(tmp_path))
        assert len(given) == (layout == "dp=1")


def on(*layouts: str) -> Any:
    """Runs a test once on each of these layouts."""
    cases = [pytest.param(each, marks=pytest.mark.ranks(parse(each).size), id=each) for each in layouts]
    return pytest.mark.parametrize("layout", cases)


def assert_as_one_process(layout: str, how: How, wanted: Result) -> None:
    """Within what bf16 sums allow too."""
    small_layers_on_this_rank()
    mesh.use(mesh.Meeting(layout=layout, device="cpu"))
    found = trained(experiment(), how)
    assert largest(differences(found, wanted).values()) < 1e-3, differences(found, wanted)
    assert mesh.start().rank > 0 or weight_difference(found, wanted)[0] < 1e-2


@on("dp=2", "fsdp=2", "tp=2", "pp=2", "fsdp=2,tp=2")
def test_layouts_train_as_one_process(layout: str, wanted: Result):
    assert_as_one_process(layout, How(), wanted)


def with_biases() -> nn.Module:
    inside = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    return nn.Sequential(nn.Linear(5, 64), inside, nn.Linear(64, 3))


@pytest.fixture
def wanted_with_biases() -> Result:
    start_on_cpu(1)
    try:
        return trained(small(20, 8, 2, model=with_biases, precision="float8", evals={"val": points(9)}))
    finally:
        mesh.finish()
        mesh.use(mesh.Meeting())


@on("tp=2", "fsdp=2")
def test_biases_are_added_once(layout: str, wanted_with_biases: Result):
    small_layers_on_this_rank()
    mesh.use(mesh.Meeting(layout=layout, device="cpu"))
    found = trained(small(20, 8, 2, model=with_biases, precision="float8", evals={"val": points(9)}))
    assert largest(differences(found, wanted_with_biases).values()) < 5e-3, differences(found, wanted_with_biases)
    assert mesh.start().rank > 0 or weight_difference(found, wanted_with_biases)[0] < 2e-2


@on("dp=2", "fsdp=2:zero2")
def test_recomputed_blocks_train_as_one_process(layout: str, wanted: Result):
    assert_as_one_process(layout, How(recompute="selective"), wanted)


@pytest.mark.ranks(2)
def test_fsdp_gathers_weights_in_8_bits_and_holds_no_others():
    small_layers_on_this_rank()
    mesh.use(mesh.Meeting(layout="fsdp=2", device="cpu"))
    sent: list[int] = []
    gather = dist.distributed_c10d.all_gather_into_tensor

    def spied(output: Tensor, *inputs: Any, **named: Any) -> Any:
        sent.append(output.numel() * output.element_size())
        return gather(output, *inputs, **named)

    trainer = Trainer(experiment(steps=2), mesh.start())
    for each in ("all_gather_into_tensor", "all_gather_single"):
        if hasattr(dist, each):
            setattr(dist, each, spied)
    for _ in trainer.steps():
        pass
    layers = [each for each in trainer.model.modules() if isinstance(each, float8.InFloat8)]
    weights = sum(each.weight.numel() for each in layers) // 2
    scales = sum(4 * each.out_features for each in layers) // 2
    norms = 2 * 2 * 64
    assert weights + scales + norms in sent, (sent, weights + scales + norms)
    for each in layers:
        assert each.gathered is not None and each.gathered[0].dtype == FORMAT
    group = trainer.model.blocks[0]._get_fsdp_state()._fsdp_param_group
    whole = [each._unsharded_param for each in group.fsdp_params if each._unsharded_param.dim() == 2]
    assert len(whole) == 7 and not any(each.untyped_storage().size() for each in whole)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-3)


def end_of(wanted: Experiment) -> float:
    """The mean loss of the last fifth of a training, which must have learned something."""
    losses = Trainer(wanted, mesh.start(), how=How(recompute="none")).train()["losses"]
    last = losses[-len(losses) // 5 :]
    assert sum(last) / len(last) < 0.7 * losses[0]
    return sum(last) / len(last)


def test_two_hundred_steps_come_to_where_bf16_comes_to():
    start_on_cpu(1)
    shape = Shape(32, 32, layers=1, heads=2, kv_heads=2, ffn=64, context=8)
    changes = {
        "model": lambda: Llama(shape),
        "train": phrases(400, seed=0),
        "batch": 16,
        "optimizer": adam,
        "evals": {},
    }
    bf16, found = (end_of(replace(experiment(each, steps=200), **changes)) for each in ("bf16", "float8"))
    assert found == pytest.approx(bf16, rel=0.01)


class Gated(nn.Module):
    """Two layers of one input, as in a block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gate, self.up = nn.RMSNorm(256), nn.Linear(256, 512, bias=False), nn.Linear(256, 512)

    def forward(self, inputs: Tensor) -> Tensor:
        inputs = self.norm(inputs)
        return F.silu(self.gate(inputs)) * self.up(inputs)


def gated(device: str) -> tuple[nn.Module, Tensor, Tensor]:
    """A module in float8, inputs and a gradient."""
    torch.manual_seed(0)
    module = nn.Sequential(Gated(), nn.Linear(512, 256))
    assert float8.apply(module, ["0", "1"], torch.device("cpu")) == ["float8: 2 linear layers compute in it"]
    module.to(device)
    for parameter in module.parameters():
        parameter.data = parameter.data.bfloat16() if parameter.dim() > 1 else parameter.data
    inputs = torch.randn(4, 64, 256).to(device, torch.bfloat16)
    return module, inputs, 1e-5 * torch.randn(4, 64, 512).to(device, torch.bfloat16)


def passes(module: nn.Module, inputs: Tensor, gradient: Tensor) -> dict[str, Tensor]:
    """The outputs and all gradients of the first part of a module."""
    inputs = inputs.clone().requires_grad_()
    module.zero_grad()
    with torch.autocast(inputs.device.type, torch.bfloat16):
        outputs = module[0](inputs)  # type: ignore[index]
    outputs.backward(gradient)
    named = {name: each.grad for name, each in module[0].named_parameters()}  # type: ignore[index]
    return {name: each.detach().cpu() for name, each in (named | {"outputs": outputs, "inputs": inputs.grad}).items()}


def in_fp32(module: nn.Module, inputs: Tensor, gradient: Tensor) -> dict[str, Tensor]:
    plain = nn.Sequential(Gated(), nn.Linear(512, 256)).to(inputs.device)
    plain.load_state_dict({name: each.float() for name, each in module.state_dict().items()})
    inputs = inputs.float().requires_grad_()
    outputs = plain[0](inputs)
    outputs.backward(gradient.float())
    named = {name: each.grad for name, each in plain[0].named_parameters()}
    return {name: each.detach().cpu() for name, each in (named | {"outputs": outputs, "inputs": inputs.grad}).items()}


def assert_near(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """Results of two layers multiplied with each other, and gradients that went through both."""
    far = {name: off(found[name], each) for name, each in wanted.items() if not off(found[name], each) < 2 * ROUNDING}
    assert not far, far


def test_a_compiled_module_is_one_graph_and_keeps_inputs_once_for_both_layers():
    module, inputs, gradient = gated("cpu")
    wanted = passes(module, inputs, gradient)
    assert_near(wanted, in_fp32(module, inputs, gradient))
    kept: list[list[Any]] = []

    def cut(joint: Any, *given: Any, **named: Any) -> Any:
        forward, backward = min_cut_rematerialization_partition(joint, *given, **named)
        kept.append([each.meta["val"] for each in backward.graph.find_nodes(op="placeholder")])
        return forward, backward

    backend = aot_autograd(fw_compiler=lambda graph, _: make_boxed_func(graph.forward), partition_fn=cut)
    module[0].forward = torch.compile(module[0].forward, backend=backend, fullgraph=True)
    found = passes(module, inputs, gradient)
    assert all(off(found[name], each) < 1e-3 for name, each in wanted.items())
    # Of the two weights nothing but themselves.
    eight = [tuple(each.shape) for each in kept[0] if each.dtype == FORMAT]
    assert len(kept) == 1 and eight == [(256, 256)]


@pytest.mark.gpu
def test_on_a_gpu_results_are_those_of_the_cpu():
    module, inputs, gradient = gated("cuda")
    found = passes(module, inputs, gradient)
    assert_near(found, in_fp32(module, inputs, gradient))
    module, inputs, gradient = gated("cpu")
    on_cpu = passes(module, inputs, gradient)
    assert all(off(found[name], each) < ROUNDING / 2 for name, each in on_cpu.items())


@pytest.mark.gpu
def test_on_a_gpu_compiled_code_is_one_graph_and_computes_the_same():
    module, inputs, gradient = gated("cuda")
    module[0].forward = torch.compile(module[0].forward, fullgraph=True)
    found = passes(module, inputs, gradient)
    assert_near(found, in_fp32(module, inputs, gradient))
    again = passes(module, inputs, gradient)
    assert all(torch.equal(found[name], each) for name, each in again.items())


@pytest.mark.gpu
@pytest.mark.parametrize("scaling", ["row", "tensor"])
def test_on_a_gpu_tokens_of_any_number_and_zeros(scaling: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(float8_product, "SCALING", scaling)
    inputs, weight, bias, gradient = (each.detach().cuda() for each in tensors(37))
    gradient[:3] = 0
    values = [each.requires_grad_() for each in (inputs, weight, bias)]
    wanted = F.linear(*values)
    found = float8_product.linear(*values)
    assert off(found - bias, wanted - bias) < ROUNDING
    pairs = zip(
        torch.autograd.grad(found, values, gradient), torch.autograd.grad(wanted, values, gradient), strict=True
    )
    assert all(off(a, b) < ROUNDING for a, b in pairs)


@pytest.mark.gpu
@pytest.mark.timeout(180)
def test_on_a_gpu_a_thousand_steps_come_to_where_bf16_comes_to(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(float8, "LEAST", 1 << 18)
    mesh.use(mesh.Meeting(device="cuda"))
    shape = Shape(2048, 512, layers=4, heads=8, kv_heads=8, ffn=1536, context=128)
    text = llama.experiment(preset="20m", context=128)
    changes = {"model": lambda: Llama(shape), "steps": 1000, "evals": {}, "after": None}
    bf16, found = (end_of(replace(text, precision=each, **changes)) for each in ("bf16", "float8"))
    assert found == pytest.approx(bf16, rel=0.01)

"""Plans of tensor parallelism: found, matched and checked before any process exists; what stays whole is named."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshrun import Experiment, UserError, mesh
from meshrun.layout import parse
from meshrun.parallel import demands as demands_module
from meshrun.parallel import tp, tp_hidden
from meshrun.parallel.build import build
from meshrun.parallel.demands import demands_of
from meshrun.parallel.dropout import key_dropouts
from meshrun.parallel.how import How
from meshrun.parallel.moment import Moment
from meshrun.recipes.llama import PLAN
from tests.programs import encoder, gpt2, hf_llama, small_llama


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


def llama() -> nn.Module:
    return on_meta(small_llama.experiment().model)


def test_a_star_stands_for_one_part_of_a_name():
    styles = tp.plan_for(llama(), {"blocks.*.ffn.up": "colwise", "blocks.1.ffn.down": "rowwise"}).styles
    assert styles == {**{f"blocks.{i}.ffn.up": "colwise" for i in range(4)}, "blocks.1.ffn.down": "rowwise"}


def test_a_plan_may_name_the_weights_of_modules():
    assert tp.plan_for(llama(), {"head.weight": "head"}).styles == {"head": "head"}


REFUSED = {
    "a name that no module has": (
        {"blocks.*.wq": "colwise"},
        r"tensor_plan names 'blocks.\*.wq', which is no module .*attention.wq",
    ),
    "half a name": ({"hea": "colwise"}, "tensor_plan names 'hea', which is no module of the model"),
    "a style that is none": ({"head": "columns"}, r"gives 'head' the style 'columns'; styles are colwise, .*heads"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_plan_that_fits_no_model_is_refused_in_a_sentence(case: str):
    plan, sentence = REFUSED[case]
    with pytest.raises(UserError, match=sentence):
        tp.plan_for(llama(), plan)


MIXED_UP = {
    "an embedding as a matrix": (
        {"embed": "colwise"},
        r"gives 'embed' the style 'colwise', which needs torch.nn.Linear, but this is meshrun.recipes.llama.Emb",
    ),
    "a matrix as an embedding": (
        {"head": "embedding"},
        r"gives 'head' the style 'embedding', which needs torch.nn.Embedding, but this is ",
    ),
    "a norm as a matrix": (
        {"norm": "rowwise"},
        r"gives 'norm' the style 'rowwise', which needs torch.nn.Linear, but this is .*RMSNorm",
    ),
}


@pytest.mark.parametrize("case", MIXED_UP)
def test_a_style_for_another_kind_of_module_is_refused(case: str):
    plan, sentence = MIXED_UP[case]
    with pytest.raises(UserError, match=sentence):
        tp.check(llama(), tp.plan_for(llama(), plan), 2)


def test_heads_that_the_ranks_do_not_divide_are_refused():
    model = llama()
    plan = tp.plan_for(model, PLAN)
    tp.check(model, plan, 2)
    with pytest.raises(UserError, match=r"'blocks.0.attention.wk' has 2 heads of 4, which tp=4 does not divide; tp=2"):
        tp.check(model, plan, 4)


def test_other_sizes_that_the_ranks_do_not_divide_are_refused():
    for model, sentence in (
        (nn.Sequential(nn.Linear(4, 9), nn.ReLU(), nn.Linear(9, 2)), "'0' has 9 outputs, which tp=2 does not divide"),
        (nn.MultiheadAttention(9, 3), "'' has 3 heads, which tp=2 does not divide"),
    ):
        with pytest.raises(UserError, match=sentence):
            tp.check(model, tp.plan_for(model, None), 2)
    model = nn.ModuleDict({"words": nn.Embedding(9, 4)})
    with pytest.raises(UserError, match="'words' has 9 entries, which tp=2 does not divide"):
        tp.check(model, tp.plan_for(model, {"words": "embedding"}), 2)


def test_the_largest_tp_that_divides_is_advised():
    with pytest.raises(UserError, match=r"12 heads, which tp=8 does not divide; tp=6 would do \(--layout\)"):
        tp._divides(12, 8, "12 heads")
    with pytest.raises(UserError, match="7 heads, which tp=4 does not divide; use another axis"):
        tp._divides(7, 4, "7 heads")


@pytest.mark.parametrize(
    ("tokens", "layout", "fits"), [(8, "tp=2,cp=2", True), (6, "tp=2", True), (6, "tp=2,cp=2", False)]
)
def test_sequences_that_tp_and_cp_together_cannot_cut_are_refused(
    tokens: int, layout: str, fits: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(demands_module.cp, "tokens_of", lambda _: torch.zeros(2, tokens))
    demands = demands_of(small_llama.experiment())
    if fits:
        demands._check_sequence(parse(layout))
    else:
        with pytest.raises(UserError, match="6 tokens, which tp=2 and cp=2 cannot cut into 4 equal parts"):
            demands._check_sequence(parse(layout))


def test_dropouts_know_whether_they_have_a_part_of_the_sequence_or_of_the_features():
    model = nn.ModuleDict({"tokens": nn.Dropout(0.1), "between": nn.Dropout(0.1), "whole": nn.Dropout(0.1)})
    key_dropouts(model, Moment(0))
    mesh_of_two: Any = SimpleNamespace(size=lambda: 2)
    tp.apply(model, tp.Plan({"tokens": "sequence", "between": "features"}, "tensor_plan"), mesh_of_two, 1, False)
    parts = {name: (each.part_of_sequence, each.part_of_features) for name, each in model.items()}
    assert parts == {"tokens": ((1, 2), None), "between": (None, (1, 2)), "whole": (None, None)}


def test_a_layout_that_a_plan_forbids_is_refused_with_others_that_work():
    demands = demands_of(small_llama.experiment())
    demands.refuse(parse("tp=2"))
    with pytest.raises(UserError, match=r"which tp=4 does not divide; .*layouts of 4 ranks that work: .*\(--layout\)$"):
        demands.refuse(parse("tp=4"))


def test_torchs_own_encoder_layers_are_split():
    plan = tp.plan_for(on_meta(encoder.experiment().model), None)
    layer = {"self_attn": "heads", "linear1": "colwise", "dropout": "features", "linear2": "rowwise"}
    assert plan.styles == {f"encoder.layers.{i}.{name}": style for i in range(4) for name, style in layer.items()}
    assert plan.whole(on_meta(encoder.experiment().model)) == ["", "embed", "head"]


def test_torchs_own_decoder_layers_are_split():
    model = on_meta(lambda: nn.TransformerDecoderLayer(8, 2, 16))
    assert tp.plan_for(model, None).styles == {
        "self_attn": "heads",
        "multihead_attn": "heads",
        "linear1": "colwise",
        "dropout": "features",
        "linear2": "rowwise",
    }


def test_matrices_with_something_pointwise_between_them_are_split_in_pairs():
    model = nn.Sequential(
        *(nn.Linear(4, 8), nn.GELU(), nn.Dropout(0.1), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh()),
        *(nn.Linear(8, 4), nn.Linear(4, 4)),
    )
    plan = tp.plan_for(model, None)
    assert plan.styles == {
        "0": "colwise",
        "2": "features",
        "3": "rowwise",
        "5": "colwise",
        "7": "rowwise",
    }
    assert plan.whole(model) == ["8"]


@pytest.mark.parametrize(
    "between", [nn.LayerNorm(8), nn.Softmax(-1), nn.Flatten()], ids=lambda each: type(each).__name__
)
def test_matrices_with_something_between_that_mixes_features_stay_whole(between: nn.Module):
    assert tp.plan_for(nn.Sequential(nn.Linear(4, 8), between, nn.Linear(8, 2)), None).styles == {}


def test_a_model_of_hugging_face_brings_its_plan():
    model = on_meta(hf_llama.experiment().model)
    plan = tp.plan_for(model, None)
    assert plan.source == "the model's own plan"
    layer = {name.removeprefix("model.layers.2."): style for name, style in plan.styles.items() if ".2." in name}
    assert {
        name: layer[name] for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.up_proj")
    } == {**dict.fromkeys(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.up_proj"), "colwise")}
    assert layer["self_attn.o_proj"] == layer["mlp.down_proj"] == "rowwise"
    assert plan.styles["lm_head"] == "colwise_gather"
    tp.check(model, plan, 2)
    with pytest.raises(UserError, match=r"k_proj' has 2 heads of 4, which tp=4 does not divide"):
        tp.check(model, plan, 4)


class Other(nn.Module):
    """Nothing that a plan knows."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).relu())


@pytest.mark.ranks(2)
def test_what_stays_whole_is_said():
    mesh.use(mesh.Meeting(layout="tp=2", device="cpu"))
    here = mesh.start()

    def notes(experiment: Experiment) -> str:
        return " ".join(build(experiment, here, How()).notes)

    assert "tp by torch's transformer layers and MLPs: whole on every rank are " in notes(encoder.experiment())
    assert "embed, head" in notes(encoder.experiment())
    assert "tp: no plan covers this model" in notes(gpt2.experiment())
    assert "tp by tensor_plan" in notes(small_llama.experiment())
    assert "whole" not in notes(small_llama.experiment())


@pytest.mark.ranks(2)
def test_a_rank_holds_its_part_of_what_is_split_and_all_of_the_rest():
    mesh.use(mesh.Meeting(layout="tp=2", device="cpu"))
    here = mesh.start()
    placed = build(small_llama.experiment(), here, How())
    whole = dict(small_llama.experiment().model().named_parameters())
    split = {f"{name}.weight" for name in tp.plan_for(llama(), PLAN).styles}
    for each in placed.shards:
        is_split = each.name in split and whole[each.name].dim() > 1
        assert each.parameter.numel() == whole[each.name].numel() // (2 if is_split else 1), each.name
        assert each.copies == (1 if is_split else 2), each.name


def hidden(
    layout: str = "tp=2", backend: str = "cpu:gloo,cuda:nccl", compiled: bool = True, plan: object = PLAN
) -> str:
    found = tp.plan_for(llama(), plan)
    return tp_hidden.cannot_hide(found, backend, compiled, parse(layout).tp, ranks_of_node=4) or "hidden"


def test_messages_go_beside_products_where_compiled_code_on_one_node_keeps_parts_of_the_sequence():
    assert hidden() == hidden("tp=4") == "hidden"
    assert hidden(backend="gloo") == "the backend is gloo, not nccl"
    assert hidden(compiled=False) == "segments are not compiled (--compile)"
    assert hidden("tp=8") == "tp=8 goes across nodes of 4 ranks"
    assert hidden("tp=3") == "tp=3 goes across nodes of 4 ranks", "the second group has ranks of two nodes"
    whole = {"blocks.*.ffn.up": "colwise", "blocks.*.ffn.down": "rowwise"}
    assert hidden(plan=whole) == "the plan keeps no part of the sequence to a rank"


@pytest.mark.ranks(2)
def test_where_devices_share_no_memory_messages_are_waited_for():
    mesh.use(mesh.Meeting(layout="tp=2", device="cpu"))
    here = mesh.start()
    submesh = here.submesh("tp")
    assert submesh is not None
    assert not tp_hidden.hide(submesh, here.device)
    tp_hidden._reached = lambda *_: True
    assert not tp_hidden.hide(submesh, here.device)

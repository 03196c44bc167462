"""The summarize recipe: the numbers of Hugging Face's T5, real documents, learning that is the same on every mesh."""

from __future__ import annotations

import functools
import json
import sys
import typing
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from meshrun import Experiment, UserError, mesh, padded
from meshrun.data import staging
from meshrun.recipes import summarize as recipe
from meshrun.recipes.summarize import (
    DATA,
    END,
    PAD,
    PRESETS,
    T5,
    TOKENIZER,
    Pairs,
    Shape,
    TransformersT5,
    Words,
    bars,
    experiment,
    hf_config,
    hf_parameters,
    judged,
    lead,
    load_hf,
    rouge,
    split_of,
    stage_data,
    summarize,
    written,
)
from meshrun.train.interval import Every
from meshrun.train.loop import Trainer
from meshrun.train.recovery import Keeping
from tests.data.server import Server
from tests.ranks import run_on_ranks
from tests.train.whole import Result, assert_same

SMALL = Shape(64, 32, 2, 2, heads=4, head_size=8, ffn=48, furthest=20, document=40, summary=12)
KINDS = {
    "1.0": SMALL,
    "1.1": replace(SMALL, gated=True, tied=False),
    "uneven": replace(SMALL, layers=1, decoder_layers=3),
}
STEPS, CUT = 6, 3


def drawn(shape: Shape) -> T5:
    """A model whose norms scale too, so that a norm in the wrong place is seen."""
    torch.manual_seed(1)
    model = T5(shape).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(0.5, 1.5) if parameter.ndim == 1 else parameter.normal_(std=0.2)
    return model


def inputs(n: int = 3, s: int = 40, t: int = 12) -> dict[str, torch.Tensor]:
    """Documents of which the second ends early, and what summaries begin with."""
    generator = torch.Generator().manual_seed(2)
    made = {
        "input_ids": torch.randint(2, 64, (n, s), generator=generator),
        "attention_mask": torch.ones(n, s, dtype=torch.bool),
        "decoder_input_ids": torch.randint(2, 64, (n, t), generator=generator),
    }
    made["attention_mask"][1:2, 25:], made["input_ids"][1:2, 25:] = False, PAD
    return made


def kept(model: T5, folder: Path, **changes: Any) -> Path:
    """A folder of Hugging Face with these weights."""
    folder.mkdir(exist_ok=True)
    tensors = {name: each.detach().clone() for name, each in hf_parameters(model).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**hf_config(model.shape), **changes}))
    (folder / "tokenizer.json").write_bytes(TOKENIZER.read_bytes())
    return folder


@pytest.mark.parametrize(
    "preset, parameters", [("tiny", 1.346e6), ("small", 60.5e6), ("base", 222.9e6), ("large", 737.7e6)]
)
def test_presets_have_the_parameters_of_the_models_that_they_are_named_after(preset: str, parameters: float):
    with torch.device("meta"):
        model = T5(PRESETS[preset])
    assert sum(each.numel() for each in model.parameters()) == pytest.approx(parameters, rel=2e-3)


def test_every_preset_can_be_asked_for():
    assert typing.get_args(typing.get_type_hints(experiment)["preset"]) == tuple(PRESETS)


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_computes_the_same_numbers(kind: str, tmp_path: Path):
    ours = drawn(KINDS[kind])
    theirs = TransformersT5(KINDS[kind], kept(ours, tmp_path)).eval()
    with torch.no_grad():
        assert torch.allclose(ours(**inputs()), theirs(**inputs()), rtol=1e-5, atol=1e-5)
        longer = inputs(s=60)
        assert torch.allclose(ours(**longer), theirs(**longer), rtol=1e-5, atol=1e-5), "beyond the furthest distance"


def test_transformers_writes_the_same_summaries(tmp_path: Path):
    ours = drawn(SMALL)
    theirs = TransformersT5(SMALL, kept(ours, tmp_path)).eval()
    given = {name: each for name, each in inputs(n=6).items() if name != "decoder_input_ids"}
    found = ours.write(**given, most=9, beams=1)
    assert found.shape == (6, 9) and torch.equal(found, theirs.write(**given, most=9, beams=1))


@pytest.mark.parametrize("kind", KINDS)
def test_weights_of_a_folder_come_back(kind: str, tmp_path: Path):
    saved = drawn(KINDS[kind])
    kept(saved, tmp_path)
    shape = recipe.shape_of(tmp_path)
    assert replace(shape, document=40, summary=12) == KINDS[kind]
    model = T5(shape).eval()
    load_hf(model, tmp_path)
    assert torch.equal(model(**inputs()), saved(**inputs()))


def test_names_that_files_hold_beside_the_parameters_are_passed_over(tmp_path: Path):
    saved = drawn(SMALL)
    tensors = load_file(kept(saved, tmp_path) / "model.safetensors")
    table = tensors["shared.weight"]
    unused = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    tensors |= {name: table.clone() for name in ("encoder.embed_tokens.weight", "lm_head.weight")}
    save_file({**tensors, unused: torch.ones(32, 4)}, tmp_path / "model.safetensors")
    model = T5(SMALL)
    load_hf(model, tmp_path)
    assert torch.equal(model.embed.weight, table)


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda all: all.pop("encoder.final_layer_norm.weight"), "lack encoder.final_layer_norm.weight, which"),
        (lambda all: all.update({"decoder.more": torch.ones(1)}), "have decoder.more, which this model has not"),
        (
            lambda all: all.update({"shared.weight": torch.ones(8, 32)}),
            r"shared.weight in .* \[8, 32\] but .* \[64, 32\]",
        ),
    ],
)
def test_weights_that_do_not_fit_are_refused(change: Any, said: str, tmp_path: Path):
    tensors = load_file(kept(drawn(SMALL), tmp_path) / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=rf"{said}.*\(--weights\)"):
        load_hf(T5(SMALL), tmp_path)


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"model_type": "bart"}, "of type 'bart'; it must be t5"),
        ({"feed_forward_proj": "silu"}, "feed_forward_proj is 'silu' in .*; it must be relu or gated-gelu"),
        ({"d_model": "wide"}, "is not the config.json of a T5"),
    ],
)
def test_other_models_are_refused(changes: dict[str, Any], said: str, tmp_path: Path):
    with pytest.raises(UserError, match=rf"{said}.*\(--weights\)"):
        experiment(weights=kept(drawn(SMALL), tmp_path, **changes))


def test_folders_without_what_is_needed_and_pickles_are_refused(tmp_path: Path):
    with pytest.raises(UserError, match=r"there is no folder .*nowhere here, and .*meshrun stage.*\(--weights\)"):
        experiment(weights=tmp_path / "nowhere")
    kept(drawn(SMALL), tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"has no model.safetensors; .*no pickles are read \(--weights\)"):
        experiment(weights=tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not one")
    with pytest.raises(UserError, match=r"cannot read weights from .*\(--weights\)"):
        load_hf(T5(SMALL), tmp_path)


@pytest.mark.parametrize("shape", [SMALL, replace(SMALL, pointer=True)], ids=["plain", "pointer"])
def test_padding_changes_no_number(shape: Shape):
    model, given = drawn(shape), inputs()
    alone = {name: each[1:2] for name, each in given.items()}
    alone |= {name: alone[name][:, :25] for name in ("input_ids", "attention_mask")}
    assert torch.allclose(model(**alone), model(**given)[1:2], atol=1e-5)
    given["input_ids"][1, 25:] = 7
    assert torch.allclose(model(**alone), model(**given)[1:2], atol=1e-5), "whatever stands there"


@pytest.mark.parametrize("shape", [SMALL, replace(SMALL, pointer=True)], ids=["plain", "pointer"])
def test_no_token_of_a_summary_sees_those_after_it(shape: Shape):
    model, given = drawn(shape), inputs()
    before = model(**given)
    given["decoder_input_ids"][:, 7:] = (given["decoder_input_ids"][:, 7:] + 1) % 64
    after = model(**given)
    assert torch.equal(before[:, :7], after[:, :7]) and not torch.allclose(before[:, 7], after[:, 7])


@pytest.mark.parametrize("shape", [SMALL, replace(SMALL, pointer=True)], ids=["plain", "pointer"])
def test_writing_with_what_is_kept_is_writing_from_the_start(shape: Shape):
    model = drawn(shape)
    given = {name: each for name, each in inputs().items() if name != "decoder_input_ids"}
    found = model.write(**given, most=10, beams=1)
    tokens = torch.full((3, 1), PAD)
    for _ in range(found.shape[1]):
        logits = model(**given, decoder_input_ids=tokens)[:, -1]
        for n, row in enumerate(tokens.tolist()):
            logits[n, [b for a, b in pairwise(row) if a == row[-1]]] = -torch.inf
        tokens = torch.cat([tokens, logits.argmax(-1, keepdim=True)], 1)
    for ours, theirs in zip(found.tolist(), tokens[:, 1:].tolist(), strict=True):
        end = ours.index(END) + 1 if END in ours else len(ours)
        assert ours[:end] == theirs[:end] and not any(ours[end:])


def test_with_beams_enough_the_likeliest_of_all_summaries_is_written():
    """Of a vocabulary of five and up to three tokens; what counts is the mean logarithm of a token."""
    model = drawn(replace(SMALL, vocabulary=5))
    given = {"input_ids": torch.tensor([[2, 3, 4, 1], [4, 1, 0, 0]])}
    given["attention_mask"] = given["input_ids"] != PAD
    ended = [(*start, END) for k in (0, 1, 2) for start in product((0, 2, 3, 4), repeat=k)]
    texts = [text for text in (*ended, *product((0, 2, 3, 4), repeat=3)) if no_pair_twice(text)]
    for n, found in enumerate(model.write(**given, most=3, beams=40).tolist()):
        one = {name: each[n : n + 1] for name, each in given.items()}
        costs = {}
        for text in texts:
            before = torch.tensor([[PAD, *text[:-1]]])
            chances = model(**one, decoder_input_ids=before).log_softmax(-1)[0]
            costs[text] = -float(chances[range(len(text)), text].mean().detach())
        best = min(costs, key=costs.__getitem__)
        assert (*best, *[PAD] * (3 - len(best))) == (*found, *[PAD] * (3 - len(found)))


def no_pair_twice(text: tuple[int, ...]) -> bool:
    pairs = list(pairwise((PAD, *text)))
    return len(set(pairs)) == len(pairs)


def test_a_pointer_copies_what_follows_in_the_document():
    model = drawn(replace(SMALL, pointer=True))
    given = inputs(n=1)
    given["input_ids"][0, :4] = torch.tensor([10, 11, 12, 13])
    given["decoder_input_ids"] = torch.tensor([[PAD, 10, 11]])
    with torch.no_grad():
        model.pointer.going_on.weight.weight.zero_()
        model.pointer.going_on.weight.bias.fill_(0.0)
        plain = model(**given).log_softmax(-1)
        model.pointer.going_on.weight.bias.fill_(20.0)
        found = model(**given).log_softmax(-1)
    assert found[0, 1].argmax() == 11 and found[0, 2].argmax() == 12, "after 10 comes 11, after 10 11 comes 12"
    assert torch.allclose(found[0, 0], plain[0, 0], atol=1e-5), "nothing was written yet"


def test_in_bfloat16_masks_stay_finite_and_so_do_gradients():
    model = drawn(replace(SMALL, pointer=True))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = model(**inputs())
    bias = recipe.only(inputs()["attention_mask"], torch.zeros(3, 40)).bfloat16()
    assert bias.isfinite().all() and bias.min() < -1e8
    assert found.dtype == torch.float32 and torch.allclose(found, model(**inputs()), atol=0.3)
    torch.nn.functional.cross_entropy(found.flatten(0, 1), inputs()["decoder_input_ids"].flatten()).backward()
    assert all(each.grad.isfinite().all() for each in model.parameters())


def test_dropout_is_drawn_in_training_only():
    model = drawn(replace(SMALL, dropout=0.5))
    assert torch.equal(model(**inputs()), model(**inputs()))
    model.train()
    assert not torch.allclose(model(**inputs()), model(**inputs()))


PHRASES = (
    "the cat sat on the mat",
    "The cat, the mat: it sat-on!",
    "image viewer and organizer for X11",
    "",
    "…",
    "a a a b",
    "viewer image",
)


def test_rouge_is_that_of_the_package_rouge_score():
    scorer = pytest.importorskip("rouge_score.rouge_scorer").RougeScorer(["rouge1", "rouge2", "rougeL"])
    for wanted in PHRASES:
        for found in PHRASES:
            theirs = {name: score.fmeasure for name, score in scorer.score(wanted, found).items()}
            assert rouge(wanted, found) == pytest.approx(theirs), (wanted, found)


def test_the_lead_is_the_first_sentence_cut_to_some_words():
    assert lead("It is v1.2 of\nit. More! ") == "It is v1.2 of it."
    assert lead("It is v1.2 of it. More!", 3) == "It is v1.2"
    assert lead("no end", 5) == "no end"


def test_the_splits_hold_all_and_documents_that_begin_alike_are_in_one():
    made = corpus()
    rows = np.concatenate([each.rows for each in made.values()])
    assert np.array_equal(np.sort(rows), np.arange(24_555))
    assert {split: len(each) for split, each in made.items()} == {"train": 22_139, "val": 1_232, "test": 1_184}
    beginnings = {split: {row["document"][:40] for row in each.texts(range(len(each)))} for split, each in made.items()}
    assert len(set.union(*beginnings.values())) == sum(map(len, beginnings.values()))
    assert split_of("Tryton is a high-level general purpose application") == split_of(
        "Tryton is a high-level general purpose app"
    )


def test_a_sample_is_a_document_and_a_summary_that_is_guessed_token_by_token():
    data = corpus()["val"]
    words, text = data.words, data.texts([5])[0]
    (given, targets), longest = data[5], max(len(each[0]["input_ids"]) for each in data.__getitems__(range(50)))
    assert longest == data.shape.document and given["input_ids"][-1] == END
    assert targets[-1] == END and words.text(targets.tolist()) == text["summary"]
    assert given["decoder_input_ids"].tolist() == [PAD, *targets[:-1].tolist()]
    assert " ".join(text["document"].split()).startswith(words.text(given["input_ids"].tolist()))
    batch, labels = padded(fill=PAD, mask="attention_mask")(data.__getitems__([0, 1, 2, 3]))
    assert torch.equal(batch["attention_mask"], batch["input_ids"] != PAD)
    assert torch.equal(labels == -100, filled_up(batch["decoder_input_ids"]))


def filled_up(tokens: torch.Tensor) -> torch.Tensor:
    """Where a summary is filled up: PAD, but for its start."""
    filled = tokens == PAD
    filled[:, 0] = False
    return filled


@functools.cache
def corpus() -> dict[str, Pairs]:
    """The documents that come with the package, cut short."""
    return recipe.packages(Words(TOKENIZER), replace(PRESETS["tiny"], document=40, summary=16))


def test_the_tokenizer_has_learnt_from_training_documents_and_writes_any_text():
    words = Words(TOKENIZER)
    assert words.size == PRESETS["tiny"].vocabulary
    for text in ("Qt5 and C++", "naïve — 漢字 🙂", "tabs\tand  blanks"):
        tokens = words.of(text, 100)
        assert words.text(tokens) == text and tokens[-1] == END and PAD not in tokens
    assert words.of("viewer", 9)[:-1] == words.of_document("image viewer", 9)[-2:-1], "at the start as inside"
    assert len(words.of("one two three four five six", 4)) == 4


def test_source_and_licence_of_the_data_are_told_beside_it_and_it_is_small():
    text = (DATA.parent / "README.md").read_text()
    assert all(word in text for word in (DATA.name, TOKENIZER.name, "Debian", "licence"))
    assert DATA.stat().st_size + TOKENIZER.stat().st_size < 6e6


def small(rows: int = 600, batch: int = 16, **changes: Any) -> Experiment:
    """The recipe with a smaller model on the first rows of its data; SGD, since AdamW hides wrong scales."""
    shape = replace(PRESETS["tiny"], hidden=48, layers=1, decoder_layers=1, heads=2, head_size=16, ffn=64, dropout=0.1)
    made, data = experiment(corpus="packages", document=40, summary=16), {}
    for split, given in (("train", made.train), *made.evals.items()):
        assert isinstance(given, Pairs)
        data[split] = Pairs(given.table, given.rows[: rows if split == "train" else 40], given.words, given.shape)
    evals = {split: data[split] for split in ("val", "test")}
    return replace(made, model=lambda: T5(shape), train=data["train"], evals=evals, batch=batch, **changes)


@pytest.mark.ranks(2)
def test_two_ranks_learn_more_than_how_frequent_tokens_are():
    """Long before it is worth reading: guessing by frequency costs 6.5 of ln 4096 = 8.3."""
    mesh.use(mesh.Meeting(device="cpu"))
    made = small(rows=2000, steps=30)
    data = {"train": made.train, **made.evals}
    scores = Trainer(made, workers=0).train()["eval"]
    bar = bars(typing.cast(Any, data))["unigram_loss"]
    assert 6 < bar < 7.5 and scores["val"]["loss"] < bar - 0.5 and scores["test"]["loss"] < bar - 0.5


def with_sgd() -> Experiment:
    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.3, momentum=0.9)

    return small(rows=56, batch=14, epochs=1.5, steps=None, optimizer=optimizer)


def trainer_on(layout: str, folder: Path, every: Every) -> Trainer:
    mesh.use(mesh.Meeting(layout=layout, device="cpu"))
    return Trainer(with_sgd(), mesh.start(), keeping=Keeping(folder, every=every), workers=0)


def result_of(trainer: Trainer) -> tuple[Result, str]:
    found = trainer.train()
    weights = {name: each.clone() for name, each in trainer.placed.weights()}
    result = Result(found["losses"], found["grad_norms"], found["eval"]["val"], weights)
    return result, found["sample_ids_sha256"]


def by_ranks(layout: str, folder: Path, wanted: tuple[Result, str]) -> None:
    """Train, and stop on the way; then compare what was to come with the whole of one process."""
    whole, ids = result_of(trainer_on(layout, folder / "whole", Every(never=True)))
    assert_same(whole, wanted[0])
    assert ids == wanted[1]
    cut = trainer_on(layout, folder / "cut", Every(steps=CUT))
    for update in cut.steps():
        if update.step == CUT:
            break
    assert cut.keeper is not None
    cut.keeper.finish()


def gone_on(layout: str, folder: Path, wanted: tuple[Result, str]) -> None:
    trainer = trainer_on(layout, folder / "cut", Every(never=True))
    found = trainer.resume()
    assert found is not None and found["step"] == CUT and CUT % trainer.order.steps_per_epoch, "in the middle of one"
    result, ids = result_of(trainer)
    assert_same(result, wanted[0])
    assert ids == wanted[1], "each sample as if nothing had happened"


@pytest.fixture(scope="session")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Result, str]]:
    try:
        trainer = trainer_on("dp=1", tmp_path_factory.mktemp("one"), Every(never=True))
        epoch = np.concatenate([trainer.order.batch_ids(step) for step in range(trainer.order.steps_per_epoch)])
        assert np.array_equal(np.sort(epoch), np.arange(56)), "each once"
        yield result_of(trainer)
    finally:
        mesh.finish()
        mesh.use(mesh.Meeting())


@pytest.mark.parametrize(
    "layout, then, ranks", [pytest.param("dp=2", "dp=3", 3, marks=pytest.mark.every), ("fsdp=2", "dp=1", 1)]
)
def test_ranks_train_as_one_process_and_others_go_on(
    layout: str, then: str, ranks: int, tmp_path: Path, wanted: tuple[Result, str]
):
    run_on_ranks(__file__, "by_ranks", 2, {"layout": layout, "folder": tmp_path, "wanted": wanted}, 60)
    run_on_ranks(__file__, "gone_on", ranks, {"layout": then, "folder": tmp_path, "wanted": wanted}, 60)


def test_summaries_are_written_scored_and_shown(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    made = small()
    model = made.model()
    model.words, model.shape = made.train.words, replace(model.shape, summary=5)
    data: Any = {"train": made.train, **made.evals}
    found = judged(model.eval(), data, documents=12, shown=2)
    assert found["documents"] == 12 and set(found["rouge"]) == {"rouge1", "rouge2", "rougeL"}
    assert found["lead"]["rougeL"] > 0.15 and 5 < found["words"] < 8
    printed = capsys.readouterr().out
    assert printed.count("  written ") == printed.count("  wanted ") == 2 and "first 6 words" in printed
    texts = [row["document"] for row in made.evals["test"].texts(range(5))]
    assert written(model, texts) == [written(model, [text])[0] for text in texts], "one by one as together"
    (tmp_path / "document.txt").write_text(texts[0])
    assert summarize(model, str(tmp_path / "document.txt")) == summarize(model, texts[0])
    with pytest.raises(UserError, match=r"'nothing.txt' is no file, nor words; .*\(--text\)"):
        summarize(model, "nothing.txt")
    (tmp_path / "document.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match=r"cannot be read as text.*\(--text\)"):
        summarize(model, str(tmp_path / "document.txt"))


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> staging.Place:
    found = staging.Place(tmp_path / "staged", "meshrun stage summarize")
    monkeypatch.setattr(staging, "_place", found)
    return found


def parquet(path: Path, rows: int) -> bytes:
    pyarrow = pytest.importorskip("pyarrow")
    columns = {name: [f"{name} number {n}." for n in range(rows)] for name in ("document", "summary", "id")}
    pytest.importorskip("pyarrow.parquet").write_table(pyarrow.table(columns), path)
    return path.read_bytes()


def test_xsum_and_pretrained_weights_are_staged_and_then_taken(
    place: staging.Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with pytest.raises(UserError, match=r"xsum/train.parquet is not here; .*: meshrun stage summarize"):
        experiment(corpus="xsum")
    assert len(experiment().train) == 22_139
    weights = kept(drawn(replace(SMALL, vocabulary=4096)), tmp_path / "weights")
    files = {f"t5/{each.name}": each.read_bytes() for each in weights.iterdir()}
    files |= {f"x/{split}/0000.parquet": parquet(tmp_path / "t", 40) for split in recipe.XSUM_FILES.values()}
    with Server(files) as server, staging.staging(place.folder) as stage:
        monkeypatch.setattr(recipe, "XSUM", f"{server.url}/x")
        monkeypatch.setattr(recipe, "T5_SMALL", f"{server.url}/t5")
        stage_data(stage)
    made = experiment(weights=Path("t5-small"))
    assert (len(made.train), *(len(each) for each in made.evals.values())) == (40, 40, 40)
    given, targets = made.train[7]
    words = made.train.words
    assert words.text(given["input_ids"].tolist()) == "summarize: document number 7."
    assert words.text(targets.tolist()) == "summary number 7."
    model = made.model()
    assert torch.equal(model.embed.weight, load_file(weights / "model.safetensors")["shared.weight"])
    theirs = experiment(weights=Path("t5-small"), model="transformers").model().eval()
    batch, _ = padded(mask="attention_mask")(made.train.__getitems__([0, 30]))
    assert torch.allclose(model.eval()(**batch), theirs(**batch), atol=1e-4)


@pytest.mark.parametrize(
    "options, said",
    [
        ({"dropout": 1.0}, r"dropout is 1.0; it must be at least 0 and below 1 \(--dropout\)"),
        ({"document": 1}, r"document is 1; it must be at least 2 tokens.*\(--document\)"),
        ({"summary": 0}, r"summary is 0; .*\(--summary\)"),
        ({"model": "transformers"}, r"has no pointer; .*\(--model own\)"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any], said: str):
    with pytest.raises(UserError, match=said):
        experiment(corpus="packages", **options)


def test_libraries_that_are_not_installed_are_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UserError, match=r"transformers is not installed here; pip install transformers, .*--model own"):
        TransformersT5(SMALL, None)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UserError, match=r"tokenizers is not installed here, .*: pip install tokenizers"):
        Words(TOKENIZER)

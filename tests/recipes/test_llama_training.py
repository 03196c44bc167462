"""The llama recipe at work: it learns, to the same weights on any mesh, goes on where it was cut, and speaks."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from meshrun import Experiment, Schedule, UserError, mesh
from meshrun.cli.use import use_command
from meshrun.data.sources.token_format import write
from meshrun.layout import parse
from meshrun.recipes import llama
from meshrun.recipes.llama import DATA, PRESETS, Llama, experiment, generate
from meshrun.train.interval import Every
from meshrun.train.loop import Trainer
from meshrun.train.recovery import Keeping
from tests.launch.command import meshrun
from tests.ranks import run_on_ranks
from tests.train.small import start_on_cpu
from tests.train.whole import Result, assert_same, trained

STEPS, CUT = 3, 2


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first speech, cut into documents of 5 to 30 tokens, so that windows hold the ends of several."""
    with safe_open(DATA, framework="numpy") as file:
        tokens = file.get_tensor("tokens")[:1500]
    lengths = np.random.default_rng(0).integers(5, 30, 60)
    path = tmp_path_factory.mktemp("words") / "words.tokens"
    write(path, [tokens[: lengths.sum()]], lengths, vocabulary=2048)
    return path


def small(text: Path, separate: bool) -> Experiment:
    made = experiment(text=text, context=32, separate=separate, validation=0.2)
    shape = replace(PRESETS["tiny"], layers=4)
    return replace(made, model=lambda: Llama(shape), steps=STEPS, batch=7, clip=0.5)


def on_one_rank(text: Path, separate: bool) -> Result:
    start_on_cpu(1)
    try:
        return trained(small(text, separate))
    finally:
        mesh.finish()
        mesh.use(mesh.Meeting())


@pytest.fixture(scope="module")
def wanted(words: Path) -> dict[bool, Result]:
    return {separate: on_one_rank(words, separate) for separate in (False, True)}


@pytest.mark.parametrize(
    "layout",
    [pytest.param(each, marks=pytest.mark.ranks(parse(each).size)) for each in ("dp=2", "fsdp=2", "tp=2", "pp=2")],
)
def test_a_layout_trains_as_one_process_with_documents_apart_and_together(
    layout: str, words: Path, wanted: dict[bool, Result]
):
    mesh.use(mesh.Meeting(layout=layout, device="cpu"))
    for separate, result in wanted.items():
        assert_same(trained(small(words, separate)), result)


def test_documents_that_are_kept_apart_train_to_something_else(wanted: dict[bool, Result]):
    assert wanted[True].losses[0] != pytest.approx(wanted[False].losses[0], rel=1e-4)
    assert wanted[True].scores["count"] < wanted[False].scores["count"]


@pytest.mark.ranks(2)
def test_documents_are_not_kept_apart_over_ranks_that_share_a_sequence(words: Path):
    mesh.use(mesh.Meeting(layout="cp=2", device="cpu"))
    with pytest.raises(UserError, match=r"\(--separate\).*leave --separate away, or use a layout without cp"):
        trained(small(words, separate=True))


def one_epoch(layout: str, words: Path, folder: Path, stop: bool) -> None:
    """The body of a rank: trains up to the middle of an epoch, or from there; writes down the samples of each step."""
    mesh.use(mesh.Meeting(layout=layout, device="cpu"))
    here = mesh.start()

    def record(kind: str, **fields: object) -> None:
        if kind == "ids":
            with (folder / f"ids-{here.rank}-{'before' if stop else 'after'}").open("a") as file:
                print(json.dumps(fields), file=file)

    made = replace(small(words, separate=True), steps=None, epochs=1)
    keeping = Keeping(folder, every=Every(steps=CUT) if stop else Every(never=True))
    trainer = Trainer(made, here, keeping=keeping, record=record, record_ids=True)
    assert (trainer.resume() is None) == stop and trainer.step == (0 if stop else CUT)
    for update in trainer.steps():
        if stop and update.step == CUT:
            break
    assert trainer.keeper is not None
    trainer.keeper.finish()


def test_cut_in_the_middle_of_an_epoch_it_goes_on_elsewhere_with_each_window_once(tmp_path: Path, words: Path):
    for layout, stop in (("fsdp=2", True), ("dp=3", False)):
        arguments = {"layout": layout, "words": words, "folder": tmp_path, "stop": stop}
        run_on_ranks(__file__, "one_epoch", parse(layout).size, arguments, 60)
    read = [(path.name.endswith("before"), json.loads(line)) for path in tmp_path.glob("ids-*") for line in path.open()]
    used = [number for before, each in read if before == (each["step"] <= CUT) for number in each["ids"]]
    windows = len(small(words, separate=True).train)
    assert windows % 7 and sorted(used) == list(range(windows))


@pytest.mark.ranks(2)
def test_two_ranks_learn_more_than_how_frequent_tokens_are():
    mesh.use(mesh.Meeting(device="cpu"))
    made = experiment(context=32, lr=3e-3, dropout=0.0)
    shape = replace(PRESETS["tiny"], layers=1)
    made = replace(made, model=lambda: Llama(shape), steps=160, schedule=Schedule("cosine", warmup=10))
    scores = Trainer(made).train()["eval"]["val"]
    assert scores["count"] == 64 * 32 and scores["perplexity"] == pytest.approx(math.exp(scores["loss"]))
    assert scores["perplexity"] < 0.75 * unigram_perplexity(made)


def unigram_perplexity(made: Experiment) -> float:
    """Of a model that knows how frequent each token is in the training text, and nothing of what stands before it."""
    counts = made.train.batch_of(range(len(made.train)))[0].flatten().bincount(minlength=2048) + 1
    odds = counts / counts.sum()
    return math.exp(-odds.log()[made.evals["val"].batch_of(range(64))[1]].mean())


def speaker(context: int) -> Llama:
    """A model that speaks nonsense, always the same."""
    made = experiment(context=context)
    torch.manual_seed(7)
    model = made.model().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    return model


def likeliest(logits: torch.Tensor) -> int:
    return int(logits.argmax())


def test_what_is_kept_of_earlier_tokens_changes_nothing():
    model, ids = speaker(context=128), [0, 5, 17, 900]
    for _ in range(20):
        ids = [*ids, likeliest(model(torch.tensor([ids]))[0, -1])]
    assert llama._continued(model, [0, 5, 17, 900], 20, likeliest) == ids and len(set(ids)) > 10


def test_text_goes_on_beyond_a_context_from_the_second_half_of_it():
    model, ids, begin = speaker(context=8), list(range(12)), 4
    for _ in range(20):
        begin = begin if len(ids) - begin <= 8 else len(ids) - 4
        ids = [*ids, likeliest(model(torch.tensor([ids[begin:]]))[0, -1])]
    assert llama._continued(model, list(range(12)), 20, likeliest) == ids


def test_a_seed_is_a_text_and_the_likeliest_has_none():
    pytest.importorskip("tokenizers")
    model = speaker(context=32)
    said = [generate(model, "My fellow", tokens=8, seed=seed) for seed in (1, 1, 2)]
    assert said[0] == said[1] != said[2] and all(each.startswith("My fellow") for each in said)
    surest = {generate(model, tokens=8, temperature=0, seed=seed) for seed in (1, 2)}
    assert surest == {generate(model, tokens=8, top=1)}


@pytest.mark.parametrize("wrong", [{"tokens": 0}, {"temperature": -0.5}, {"top": 0}], ids=str)
def test_what_no_text_can_be_drawn_with_is_refused(wrong: dict[str, float]):
    ((name, value),) = wrong.items()
    with pytest.raises(UserError, match=rf"{name} is {value}; it must be at least . \(--{name}\)"):
        generate(speaker(context=32), **wrong)


def test_without_its_tokenizers_library_a_model_says_so_and_still_counts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    made, model = experiment(context=32), speaker(context=32)
    assert made.after is not None
    reached = made.after(model, Path())
    assert reached is not None and reached.keys() == {"perplexity"}
    assert "pip install 'meshrun[text]'" in capsys.readouterr().out
    made = experiment(context=32, separate=True)
    assert made.after is not None and made.after(model, Path()) == pytest.approx(reached, rel=1e-2)


def test_as_a_user_runs_it_it_learns_and_speaks(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("tokenizers")
    small = ("--steps", 30, "--batch", 8, "--context", 64, "--device", "cpu", "--threads", 1)
    ended = meshrun(tmp_path, "run", "llama", *small, "--no-tensorboard", "--json", "--runs", tmp_path)
    assert ended.status == 0, ended.err
    losses, val = ended.document["losses"], ended.document["eval"]["val"]
    assert losses[0] == pytest.approx(math.log(2048), abs=0.1), "it begins with no idea of which token follows"
    assert len(losses) == 30 and sum(losses[-5:]) / 5 < losses[0] - 0.3
    assert val["count"] == 64 * 64 and val["loss"] < losses[0] - 0.3
    after = json.loads((tmp_path / "llama-1" / "result.json").read_text())["after"]
    assert after["perplexity"] == pytest.approx(val["perplexity"], rel=1e-3)
    assert (
        after["text"].startswith("My fellow citizens")
        and after["text"].split() == ended.err.split()[-len(after["text"].split()) :]
    )
    assert use_command([str(tmp_path / "llama-1"), "generate", "--prompt", "We the people", "--device", "cpu"]) == 0
    assert capsys.readouterr().out.startswith("We the people")

"""What the data side adds to a training is the same on every mesh: orders, bad samples, augmentation, ragged texts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshrun import BadSample, Experiment, Here, RunFailed, mesh, padded, token_cross_entropy
from meshrun.data.draws import SampleDraws
from meshrun.data.order import Order
from meshrun.data.permutation import Ids
from meshrun.experiment import Draws
from meshrun.layout import parse
from meshrun.train.bad_samples import BadSamples, left_out, read_bad
from meshrun.train.bad_steps import Policy
from meshrun.train.loop import Trainer
from tests.train.small import (
    Course,
    difference,
    plainly,
    points,
    small,
    small_net,
    start_on_cpu,
    trained,
    updated,
)

LENGTH, BATCH, TOLERANCE = 20, 6, 1e-6
ORDER = Order(LENGTH, BATCH, 4)
BAD = {*ORDER.batch_ids(0)[3:].tolist(), *ORDER.batch_ids(1)[:1].tolist()}
"""All that the second of two ranks has in the first step, and one more."""


class Holes:
    """Points, some of which cannot be read: one of its own error, the others of the user's."""

    def __init__(self, length: int, bad: set[int]) -> None:
        self.data, self.bad = points(length), bad

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        if index in self.bad:
            raise BadSample(f"sample {index} cannot be read") if index % 2 else ValueError(f"bad {index}")
        return self.data[index]


class Without(Order):
    """The order less the bad samples."""

    def batch_ids(self, step: int) -> Ids:
        ids = super().batch_ids(step)
        return ids[~np.isin(ids, list(BAD))]


def on_layouts(*layouts: str) -> Any:
    cases = [pytest.param(each, marks=pytest.mark.ranks(parse(each).size), id=each) for each in layouts]
    return pytest.mark.parametrize("layout", cases)


def course_of(trainer: Trainer) -> Course:
    """What it went through; weights whole, and on rank 0 alone."""
    for _ in trainer.steps():
        pass
    weights = {name: value.clone() for name, value in trainer.placed.weights()}
    return Course(trainer.totals.losses, trainer.totals.grad_norms, weights)


def assert_same(course: Course, plain: Course, here: Here) -> None:
    if here.rank:
        plain = replace(plain, weights={})
    assert difference(course, plain) < TOLERANCE


def with_holes(**changes: Any) -> Experiment:
    evals = {"val": Holes(13, {0, 1, 2, 3, 7}), "whole": Holes(5, set())}
    return small(LENGTH, BATCH, train=Holes(LENGTH, BAD), evals=evals, **changes)


@on_layouts("dp=1", "dp=2", "fsdp=2", "pp=2", "dp=3")
def test_bad_samples_are_left_out_alike_on_every_mesh(layout: str, tmp_path: Path):
    mesh.use(mesh.Meeting(layout=layout, device="cpu"))
    here = mesh.start()
    plain = plainly(small(LENGTH, BATCH), order=Without(LENGTH, BATCH, 4))
    for micro in (None, 2):
        trainer = Trainer(with_holes(micro=micro), here, workers=0, skip_bad=True, bad=tmp_path / str(micro))
        assert_same(course_of(trainer), plain, here)
        scores = trainer.evaluate()
        assert (scores["val"]["count"], scores["val"]["skipped"]) == (8, 5)
        assert scores["whole"]["count"] == 5 and "skipped" not in scores["whole"]
        here.gathered(None)
        found = read_bad(tmp_path / str(micro))
        assert found is not None
        met = sum(int(np.isin(ORDER.batch_ids(step), list(BAD)).sum()) for step in range(6))
        assert found["count"] == met + 5, "each once, whoever else has met it"
        assert {(each["set"], each["id"]) for each in found["samples"]} == {
            *(("train", number) for number in BAD),
            *(("val", number) for number in (0, 1, 2, 3, 7)),
        }


def test_a_bad_sample_ends_a_training_that_was_not_told_to_go_on(alone: Here):
    with pytest.raises(BadSample, match=r"sample \d+"):
        trained(Trainer(with_holes(), alone, workers=0))


def test_a_batch_of_bad_samples_alone_is_told_and_can_be_skipped(alone: Here):
    bad = set(ORDER.batch_ids(1).tolist())
    experiment = small(LENGTH, BATCH, train=Holes(LENGTH, bad))
    with pytest.raises(RunFailed, match=r"loss is nan at step 2: nothing in it counts, .*--on-nan skip"):
        trained(Trainer(experiment, alone, workers=0, skip_bad=True))
    trainer = Trainer(experiment, alone, workers=0, skip_bad=True, policy=Policy(on_nan="skip"))
    trained(trainer)
    assert trainer.totals.skipped == [2]


def test_what_was_left_out_is_read_once_each(tmp_path: Path):
    assert read_bad(tmp_path / "nowhere") is None
    for rank in range(2):
        bad = BadSamples(tmp_path, rank)
        bad.add("train", 3, ((17, "why"), (4, "because")))
        bad.add("train", 3 + rank, ((17, "why"),))
        bad.add("val", 3, ())
    with (tmp_path / "rank-00001.jsonl").open("a") as file:
        file.write('{"set": "tr')
    BadSamples(tmp_path, 1).add("train", 5, ((4, "because"),))  # after half a line of the process before it
    assert read_bad(tmp_path) == {
        "count": 4,
        "samples": [{"set": "train", "id": 4, "why": "because"}, {"set": "train", "id": 17, "why": "why"}],
    }
    lines = (tmp_path / "rank-00000.jsonl").read_text().splitlines()
    assert json.loads(lines[0]) == {"set": "train", "step": 3, "id": 17, "why": "why"}


def test_who_leaves_samples_out_is_not_told_to_do_so():
    for why, shown in {
        "sample 1 cannot be read: a; b; convert again, or leave it out (--skip-bad-samples)": "cannot be read: a; b;",
        "ValueError: rotten; very": "of the first: ValueError: rotten; very; all are in",
    }.items():
        told = left_out({"count": 1, "samples": [{"set": "train", "id": 1, "why": why}]}, Path("bad"))
        assert shown in told and "leave it out" not in told


class Texts:
    """Sequences of 1 to 9 tokens, in chunks of four."""

    chunk = 4

    def __init__(self, length: int) -> None:
        generator = torch.Generator().manual_seed(2)
        self.tokens = torch.randint(0, 9, (length, 10), generator=generator)
        self.sizes = torch.randint(1, 10, (length,), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> tuple[dict[str, Tensor], Tensor]:
        tokens = self.tokens[index, : int(self.sizes[index]) + 1]
        return {"tokens": tokens[:-1]}, tokens[1:]

    def lengths(self, ids: Ids) -> Any:
        return self.sizes[torch.from_numpy(ids)].numpy()


class Reader(nn.Module):
    """Every token sees the mean of all real ones: a wrong mask would show."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(9, 8), nn.Linear(16, 9)

    def forward(self, tokens: Tensor, real: Tensor) -> Tensor:
        found = self.embed(tokens)
        mean = (found * real[..., None]).sum(1, keepdim=True) / real.sum(1)[:, None, None]
        return self.out(torch.cat([found, mean.expand_as(found)], -1))


def texts(shuffle: str) -> Experiment:
    changes = {"train": Texts(22), "model": Reader, "loss": token_cross_entropy, "shuffle": shuffle}
    return small(22, 5, steps=8, collate=padded(mask="real"), **changes)


def plain_texts(shuffle: str) -> Course:
    """One sample at a time, so without any padding."""
    experiment = texts(shuffle)
    torch.manual_seed(experiment.seed)
    model = experiment.model()
    optimizer = experiment.optimizer(model.parameters())
    order, course = Order.of(experiment.train, 5, experiment.seed, shuffle), Course([], [], {})
    for step in range(8):
        samples = [experiment.train[number] for number in order.batch_ids(step).tolist()]
        alone = [(model(x["tokens"][None], torch.ones(1, len(y))), y) for x, y in samples]
        total = sum(F.cross_entropy(scores[0], y, reduction="sum") for scores, y in alone)
        loss = total / sum(len(y) for _, y in alone)
        updated(course, model, optimizer, loss, experiment.clip or 1.0)
    course.weights = {name: value.clone() for name, value in model.state_dict().items()}
    return course


@on_layouts("dp=1", "dp=2", "dp=3")
def test_ragged_batches_in_any_order_are_those_of_single_samples(layout: str):
    here = start_on_cpu(parse(layout).size)
    for shuffle in ("window:8", "length:2"):
        plain = plain_texts(shuffle)
        for micro in (None, 2):
            trainer = Trainer(replace(texts(shuffle), micro=micro), here, workers=0)
            assert_same(course_of(trainer), plain, here)


@pytest.mark.parametrize("shuffle", ["window:8", "length:2", "none"])
def test_a_training_that_goes_on_amid_an_epoch_uses_each_id_once(shuffle: str, alone: Here):
    experiment = texts(shuffle)
    whole = Trainer(experiment, alone, workers=0)
    pieces = [update.pieces for update in whole.steps()]
    later = Trainer(experiment, alone, workers=0)
    later.step = 3
    assert [update.pieces for update in later.steps()] == pieces[3:]
    epoch = [number for step in pieces[:5] for piece in step for number in piece]
    assert sorted(epoch) == list(range(22))


SEEN: list[list[int]] = []


def noisy(inputs: Tensor, draws: Draws) -> Tensor:
    """Turns some points, and moves all."""
    assert isinstance(draws, SampleDraws)
    turned = torch.where(draws.uniform() < 0.3, -inputs, inputs)
    SEEN.append(list(draws.ids))
    return turned + 0.1 * draws.uniform(5)


def plainly_augmented(experiment: Experiment) -> Course:
    """As plain torch would do it, the whole batch at once; an epoch has four steps."""
    order = Order(LENGTH, BATCH, experiment.seed)
    torch.manual_seed(experiment.seed)
    model, course = experiment.model(), Course([], [], {})
    optimizer = experiment.optimizer(model.parameters())
    for step in range(experiment.steps or 0):
        ids = order.batch_ids(step).tolist()
        inputs, targets = zip(*(experiment.train[number] for number in ids), strict=True)
        draws = SampleDraws(experiment.seed, step // 4, ids, torch.device("cpu"))
        loss = F.cross_entropy(model(noisy(torch.stack(inputs), draws)), torch.stack(targets))
        updated(course, model, optimizer, loss, experiment.clip or 1.0)
    course.weights = {name: value.clone() for name, value in model.state_dict().items()}
    return course


@on_layouts("dp=1", "dp=2", "pp=2")
def test_samples_are_augmented_alike_on_every_mesh_and_in_training_only(layout: str):
    mesh.use(mesh.Meeting(layout=layout, device="cpu"))
    here = mesh.start()
    experiment = small(LENGTH, BATCH, steps=9, augment=noisy, evals={"val": points(7)}, model=small_net)
    plain = plainly_augmented(experiment)
    SEEN.clear()
    trainer = Trainer(replace(experiment, micro=2), here, workers=0)
    assert_same(course_of(trainer), plain, here)
    trained_on = len(SEEN)
    trainer.evaluate()
    assert len(SEEN) == trained_on

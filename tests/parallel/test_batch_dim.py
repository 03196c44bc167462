"""Which dimension is the batch: only one that grows as the number of samples does."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from meshrun import Experiment, RunFailed, mean_squared_error
from meshrun.data import seeding
from meshrun.parallel.batch_dim import BatchFinder, _sample, place_of, together
from meshrun.parallel.functional import key_functions
from meshrun.parallel.moment import Moment, Place
from meshrun.train.loop import Trainer
from tests.train.small import Course, start_on_cpu, trained


@pytest.mark.parametrize(
    ("few", "more", "place"),
    [
        ((3, 4), (5, 4), Place(0, (1, 4))),
        ((7, 3, 2), (7, 5, 2), Place(1, (7, 1, 2))),
        ((12, 9), (20, 9), Place(0, (4, 9))),
        ((4, 4), (4, 4), Place(None, (4, 4))),
    ],
)
def test_the_batch_is_found_with_the_entries_of_a_sample(few: tuple[int, ...], more: tuple[int, ...], place: Place):
    assert place_of(few, more) == place


@pytest.mark.parametrize(("few", "more"), [((3, 3), (5, 5)), ((4,), (6,)), ((3,), (9,)), ((6,), (5,))])
def test_what_grows_in_another_way_is_no_batch(few: tuple[int, ...], more: tuple[int, ...]):
    with pytest.raises(ValueError, match="for 3 and 5 samples"):
        place_of(few, more)


class Draws:
    def __getitem__(self, index: int) -> float:
        return random.random() + np.random.rand() + torch.rand(()).item() + index


def test_a_look_at_the_sample_leaves_all_generators_as_they_were():
    before = seeding.snapshot()
    _sample(SimpleNamespace(train=Draws()), 0)  # type: ignore[arg-type]
    assert before.same(seeding.snapshot())


class Halves(nn.Module):
    """Time first; a dropout of its own is called for many samples only, where it is asked to."""

    def __init__(self, choosy: bool) -> None:
        super().__init__()
        self.few, self.many = Dropped(), Dropped()
        self.choosy = choosy

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        turned = x.transpose(0, 1)
        turned = self.many(turned) if self.choosy and len(x) > 3 else self.few(turned)
        return turned, x.sum()


class Dropped(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.5, self.training)


def finder(model: nn.Module) -> BatchFinder:
    key_functions(model.eval(), Moment(0))
    experiment: Any = SimpleNamespace(train=[(torch.zeros(7, 2), torch.zeros(()))], collate=None)
    return BatchFinder.of(model, experiment)


def test_the_batch_is_found_in_each_call_of_a_dropout_and_in_the_outputs():
    found = finder(Halves(choosy=False)).find()
    assert found is not None
    assert found.calls == {"few": [Place(1, (7, 1, 2))]}
    assert found.outputs == [Place(1, (7, 1, 2)), Place(None, ())] and found.targets == [Place(0, (1,))]


class ByValue(Halves):
    """Asks for a random number, as layer drop does, and for one of its input."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if torch.rand([]) < 0 or x.sum().isnan():
            return x, x.sum()
        return super().forward(x * int(x.max()))


def test_code_that_asks_for_values_is_traced_and_what_it_may_not_have_called_is_not_guessed():
    looking = finder(ByValue(choosy=False))
    found = looking.find()
    assert found is not None and found.calls == {"few": [Place(1, (7, 1, 2))]}
    model, moment = ByValue(choosy=False), Moment(0, unplaced=looking.failure)
    key_functions(model, moment)
    moment.place(found.calls)
    moment.step, moment.ids = 1, torch.arange(7)
    model.few(torch.ones(7, 7, 2))
    with pytest.raises(RunFailed, match=r"'many' got .* both dim 0 and dim 1 .* because its code asks for values"):
        model.many(torch.ones(7, 7, 2))


def test_a_model_that_calls_other_modules_for_more_samples_is_not_taken_for_one_that_does_not():
    looking = finder(Halves(choosy=True))
    assert looking.find() is None
    assert "other modules for another number of samples" in (looking.failure or "")


class OneByOne(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.drop, self.last = Dropped(), Dropped()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(torch.stack([self.drop(sample) for sample in x]))
        return found


def test_a_dropout_of_one_sample_after_the_other_is_refused_whatever_the_sizes():
    looking, moment, model = finder(OneByOne()), Moment(0), OneByOne()
    assert looking.find() is None and looking.alone == {"drop"}
    key_functions(model, moment)
    moment.unplaced, moment.alone = looking.failure, looking.alone
    moment.step, moment.ids = 1, torch.arange(2)
    with pytest.raises(RunFailed, match=r"'drop' drops for one sample after the other, .* shape \(4, 3\)"):
        model(torch.ones(2, 4, 3))
    moment.batch_dim = 0
    model(torch.ones(2, 4, 3))  # as the user says


def test_the_order_of_outputs_and_targets_is_found_without_a_dropout():
    key_functions(nn.Module(), Moment(0))

    def collate(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        inputs, targets = (torch.stack(each, 1) for each in zip(*samples, strict=True))  # (time, batch, …)
        return inputs, targets.flatten()

    experiment: Any = SimpleNamespace(train=[(torch.ones(4, 2) * i, torch.ones(4) * i) for i in range(2)])
    for flat, output in ((True, Place(0, (4, 3), together=1)), (False, Place(1, (4, 1, 3)))):
        model = nn.Sequential(nn.Linear(2, 3), *([nn.Flatten(0, 1)] if flat else []))
        experiment.collate = collate
        found = BatchFinder.of(model, experiment).find()
        assert found is not None
        assert found.outputs == [output] and found.targets == [Place(0, (4,), together=1)]
    experiment.collate = lambda samples: (collate(samples)[0], torch.ones(len(samples), len(samples)))
    found = BatchFinder.of(nn.Linear(2, 3), experiment).find()
    assert found is not None and found.outputs == [Place(1, (4, 1, 3))] and found.targets is None


def test_a_model_is_traced_once(monkeypatch: pytest.MonkeyPatch):
    looking = finder(Halves(choosy=False))
    found = looking.find()
    monkeypatch.setattr(BatchFinder, "_traced", lambda _: pytest.fail("it was traced again"))
    assert looking.find() is found


def order(names: str) -> tuple[Tensor, Tensor]:
    """Entries of the samples a, b and c; b is another one in the second batch."""
    one = torch.tensor([ord(each) for each in names])
    return one[:, None], torch.where(one == ord("b"), 0, one)[:, None]


@pytest.mark.parametrize(
    ("names", "found"),
    [
        ("aaaabbbbcccc", None),
        ("abcabcabcabc", 1),
        ("aabbccaabbcc", 2),
        ("bbbbaaaacccc", 0),
        ("abccbacababc", 0),
        ("bbbbbbbbbbbb", None),  # mixed: nobody can tell
        ("aaaabcccbccc", 0),
    ],
)
def test_the_entries_that_differ_with_a_sample_say_in_which_order_they_are(names: str, found: int | None):
    assert together(Place(0, (4, 1)), *order(names)) == found


def test_what_tells_nothing_of_the_order_is_taken_for_one_sample_after_the_other():
    one, other = order("abcabcabcabc")
    assert together(Place(None, (12, 1)), one, other) is None
    assert together(Place(0, (1, 1)), one[:3], other[:3]) is None
    assert together(Place(0, (4, 1)), one, other[:9]) is None
    assert together(Place(0, (4, 1)), one.double() * torch.nan, other.double()) is None
    assert together(Place(0, (4, 1)), *(torch.where(each == ord("c"), 7, each) for each in (one, other))) == 1


class Shaped(nn.Module):
    """Drops what the function makes of (samples, time, features)."""

    def __init__(self, shape: str) -> None:
        super().__init__()
        self.linear, self.drop, self.shape = nn.Linear(4, 4), nn.Dropout(0.5), shape
        self.channels = nn.Dropout1d(0.5)
        self.attention = nn.MultiheadAttention(4, 2, dropout=0.5, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        n, time, _ = x.shape
        x = self.linear(x)
        match self.shape:
            case "(batch * time)":
                return self.drop(x.flatten(0, 1)).view(x.shape)
            case "(time * batch)":
                return self.drop(x.transpose(0, 1).flatten(0, 1)).view(time, n, 4).transpose(0, 1)
            case "two views":
                return self.drop(torch.cat([x, x.flip(1)])).view(2, n, time, 4).sum(0)
            case "heads first":
                heads = x.view(n, time, 2, 2).permute(2, 0, 1, 3).reshape(2 * n, time, 2)
                found = F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.5 * self.training)
                return found.view(2, n, time, 2).permute(1, 2, 0, 3).flatten(2)
            case "channels of two views":
                return self.channels(torch.cat([x, x.flip(1)])).view(2, n, time, 4).sum(0)
            case "by value":
                rows = x.flatten(0, 1)
                return self.drop(rows[rows.sum(1).argsort()]).view(x.shape)
            case _:  # attention of windows
                windows = x.reshape(n * 3, time // 3, 4)
                return self.attention(windows, windows, windows)[0].reshape(x.shape)


def course_of(shape: str, micro: int | None) -> Course:
    experiment = Experiment(
        model=lambda: Shaped(shape),
        train=TensorDataset(*torch.randn(2, 8, 6, 4, generator=torch.Generator().manual_seed(0))),
        loss=mean_squared_error,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch=8,
        steps=1,
        micro=micro,
    )
    return trained(Trainer(experiment, start_on_cpu(1)))


SHAPES = ("(batch * time)", "(time * batch)", "two views", "heads first", "channels of two views", "windows")


@pytest.mark.ranks(1)
@pytest.mark.parametrize("shape", SHAPES)
def test_entries_of_a_sample_may_stand_anywhere(shape: str):
    assert course_of(shape, 3).losses == pytest.approx(course_of(shape, None).losses, rel=1e-6)


@pytest.mark.ranks(1)
def test_entries_in_no_order_are_refused():
    with pytest.raises(RunFailed, match="the entries of each sample in the same order, must be the batch"):
        course_of("by value", None)

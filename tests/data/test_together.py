"""Small steps that come together: the same steps as one by one, and only where that is certain."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import TensorDataset, default_collate

from meshrun import ImageFolder, random_crop, random_flip
from meshrun.data import together
from meshrun.data.draws import SampleDraws
from meshrun.data.loader import Loader, Reading, StepData
from meshrun.data.order import Cut, Order
from meshrun.data.shuffle import NONE
from meshrun.data.together import Augment, apart, coming, grouped
from tests.data.test_image_folder import written

CPU = torch.device("cpu")
ALONE = [1] * together.TRIED
"""Steps at the beginning, which show what samples are like."""


class Way:
    """A lane that leads back to the host."""

    def __init__(self) -> None:
        self.arrivals: list[int] = []

    def open(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def copy(self, tensor: Tensor) -> Tensor:
        return tensor.clone()

    def sent(self) -> None: ...

    def arrived(self, _: None, tensors: list[Tensor]) -> None:
        self.arrivals.append(len(tensors[0]) if tensors else 0)


class Handy:
    """Pairs in memory, of which some cannot be read, or are longer than the others."""

    light = True

    def __init__(self, length: int, bad: tuple[int, ...] = (), longer: tuple[int, ...] = ()) -> None:
        self.length, self.bad, self.longer = length, bad, longer

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[dict[str, Tensor], int]:
        if index in self.bad:
            raise ValueError("torn")
        return {"place": torch.arange(3.0 + (index in self.longer)) + index}, index * index


def unchanged(_step: int, inputs: Any, _ids: list[int]) -> Any:
    return inputs


def loader_of(data: Any, batch: int, part: int = 0, of: int = 1, **reading: Any) -> Loader:
    return Loader(data, Order(len(data), batch, 3), part, of, Reading(**reading))


def leaves(data: StepData) -> list[Tensor]:
    found = []
    for inputs, targets in data.batches:
        found += [*(inputs.values() if isinstance(inputs, dict) else [inputs]), targets]
    return found


def assert_same(found: list[StepData], expected: list[StepData]) -> None:
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert (a.step, a.pieces, a.real, a.bad) == (b.step, b.pieces, b.real, b.bad)
        assert a.ids.tolist() == b.ids.tolist() and len(a.batches) == len(b.batches)
        for x, y in zip(leaves(a), leaves(b), strict=True):
            assert x.dtype == y.dtype and x.stride() == y.stride() and torch.equal(x, y)
            assert x.data_ptr() % 64 == 0 or not a.augmented


def sizes(loader: Loader, start: int, stop: int) -> list[int]:
    """How many steps come together."""
    return [len(group.steps) for group in grouped(loader, start, stop)]


@pytest.mark.parametrize("start", [0, 5, 69])
@pytest.mark.parametrize("batch", [1, 3])
def test_steps_that_come_together_are_those_that_come_one_by_one(batch: int, start: int):
    loader, way = loader_of(Handy(70), batch), Way()
    found = list(coming(loader, start, 150, way, unchanged))
    assert_same(found, list(loader.steps(start, 150)))
    assert len(way.arrivals) < 25 and max(way.arrivals) <= 64 < sum(way.arrivals)
    assert sum(each.waited > 0 for each in found) == len(way.arrivals), "others were brought along"


def test_what_a_step_was_waited_for_is_told_by_the_last_one_who_held_it_up():
    step = StepData(0, torch.arange(1).numpy(), [], [], [], 0.5)
    assert step.waited == 0.5 and step.after(0.25).waited == 0.25


def test_steps_of_two_epochs_do_not_come_together():
    loader = loader_of(Handy(70), 3)  # an epoch has 24 steps, the last one of a single sample
    assert sizes(loader, 0, 60) == [*ALONE, 16, 21, 3, 12]
    groups = list(grouped(loader, 20, 50))
    assert all(len({data.step // 24 for data in group.steps}) == 1 for group in groups)


def test_a_group_has_no_more_samples_and_bytes_than_it_may(monkeypatch: pytest.MonkeyPatch):
    data = TensorDataset(torch.zeros(200, 1000), torch.zeros(200))
    assert sizes(loader_of(data, 1), 0, 200) == [*ALONE, 64, 64, 64]
    monkeypatch.setattr(together, "MOST_BYTES", 40_040)
    assert sizes(loader_of(data, 1), 0, 25) == [*ALONE, 10, 7]
    assert sizes(loader_of(data, 5), 0, 12) == [*ALONE, 2, 2]
    assert sizes(loader_of(data, 6), 0, 12) == [1] * 12


@pytest.mark.parametrize(
    ("batch", "reading"),
    [(33, {}), (64, {}), (4, {"cut": Cut(micro=2)}), (2, {"collate": default_collate}), (2, {"workers": 1})],
    ids=["more than half of the most", "large", "micro-batches", "collate", "readers that were asked for"],
)
def test_other_steps_come_one_by_one_as_they_did(batch: int, reading: dict[str, Any]):
    loader, way = loader_of(Handy(130), batch, **reading), Way()
    assert sizes(loader, 0, 6) == [1] * 6
    found = list(coming(loader, 0, 6, way, unchanged))
    assert_same(found, list(loader.steps(0, 6)))
    assert not any(each.augmented for each in found)


def test_a_dataset_that_may_be_slow_is_read_step_by_step():
    data = Handy(20)
    data.light = False
    assert sizes(loader_of(data, 1), 0, 20) == [1] * 20


def test_without_a_lane_nothing_comes_together_and_there_is_no_thread():
    loader = loader_of(Handy(20), 1)
    found = coming(loader, 0, 20, None, unchanged)
    assert [len(next(found).batches[0][1]) for _ in range(5)] == [1] * 5
    assert not any(each.name == "feed" for each in threading.enumerate())


@pytest.mark.parametrize("cut", [Cut(), Cut(in_step=True), Cut(in_step=True, equal=True)])
def test_replicas_get_their_parts_and_what_only_fills_up_comes_alone(cut: Cut):
    for part in range(3):  # the last step of an epoch has 2 samples for 3 replicas
        loader = loader_of(Handy(47), 5, part, 3, cut=cut)
        found = list(coming(loader, 0, 30, Way(), unchanged))
        assert_same(found, list(loader.steps(0, 30)))
    assert max(sizes(loader, 0, 30)) == (1 if cut.equal else 9)


def test_samples_that_cannot_be_read_are_left_out_of_their_own_step():
    loader = loader_of(Handy(70, bad=(11, 40)), 2, skip_bad=True)
    found = list(coming(loader, 0, 70, Way(), unchanged))
    assert_same(found, list(loader.steps(0, 70)))
    assert [each.bad[0][0] for each in found if each.bad].count(11) == 2
    loader = loader_of(Handy(300, bad=(11,)), 2, skip_bad=True)
    first = next(data.step for data in loader.steps(0, 150) if data.bad)
    assert any(len(group.steps) > 1 and group.steps[0].step > first for group in grouped(loader, 0, 300))
    with pytest.raises(ValueError, match="torn") as raised:
        list(coming(loader_of(Handy(70, bad=(11,)), 2), 0, 35, Way(), unchanged))
    assert "sample 11 " in raised.value.__notes__[0]


def test_an_error_comes_after_all_steps_before_it():
    loader = Loader(Handy(70, bad=(25,)), Order(70, 2, shuffle=NONE), 0, 1, Reading())
    steps = coming(loader, 0, 35, Way(), unchanged)
    assert [next(steps).step for _ in range(12)] == list(range(12))
    with pytest.raises(ValueError, match="torn"):
        next(steps)


def test_samples_of_unequal_shapes_come_one_by_one():
    loader = loader_of(Handy(70, longer=(11, 40)), 1)
    assert_same(list(coming(loader, 0, 140, Way(), unchanged)), list(loader.steps(0, 140)))
    assert set(sizes(loader, 0, 140)) == {1}


def test_a_batch_that_is_made_as_long_as_its_longest_sample_comes_alone():
    class Filled(Handy):
        def batch_of(self, ids: list[int]) -> tuple[Tensor, Tensor]:
            made = torch.nn.utils.rnn.pad_sequence([torch.ones(1 + each % 7) for each in ids], batch_first=True)
            return made, torch.tensor(ids)

    loader = Loader(Filled(70), Order(70, 2, shuffle=NONE), 0, 1, Reading())
    assert_same(list(coming(loader, 0, 35, Way(), unchanged)), list(loader.steps(0, 35)))
    assert_same(list(coming(loader, 2, 35, Way(), unchanged)), list(loader.steps(2, 35)))  # the longest one first


def test_who_ends_early_ends_the_thread():
    steps = coming(loader_of(Handy(500), 1), 0, 500, Way(), unchanged)
    assert [next(steps).step for _ in range(70)] == list(range(70))
    steps.close()
    assert not any(each.name == "feed" for each in threading.enumerate())


@pytest.mark.filterwarnings("ignore:'pin_memory' argument")
def test_pictures_come_together_as_soon_as_all_are_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("meshrun.data.samples.pin_memory", lambda batch: batch)
    names = [f"{name}/{number}.png" for name in "ab" for number in range(10)]
    data, expected = ImageFolder(written(tmp_path, *names), 8), ImageFolder(tmp_path, 8, keep=False)
    order = Order(20, 1, seed=1)
    groups = list(grouped(Loader(data, order, 0, 1, Reading(workers=2, pin=True)), 0, 60))
    found = list(apart((each for each in groups), unchanged))
    assert_same(found, list(Loader(expected, order, 0, 1, Reading()).steps(0, 60)))
    many = [len(group.steps) for group in groups]
    assert many[:5] == [1] * 5 and many[-1] == 20 and sum(many) == 60 and data.decoded
    middle = next(number for number, count in enumerate(many) if count > 1)
    assert many[middle:] == [-sum(many[:middle]) % 20 or 20, *[20] * (len(many) - middle - 1)]


def pictures(count: int) -> TensorDataset:
    drawn = torch.randint(0, 256, (count, 3, 24, 24), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    return TensorDataset(drawn, torch.arange(count))


class Cropped:
    """Random parts of pictures, as a training gets them; remembers of which."""

    def __init__(self, per_epoch: int) -> None:
        self.per_epoch, self.asked = per_epoch, list[list[int]]()

    def __call__(self, step: int, inputs: Tensor, ids: list[int]) -> Tensor:
        self.asked.append(ids)
        draws = SampleDraws(5, step // self.per_epoch, ids, CPU)
        return random_flip(random_crop(inputs, 16, draws), draws)


def augmented_one_by_one(loader: Loader, start: int, stop: int, augment: Augment) -> Iterator[Tensor]:
    for data in loader.steps(start, stop):
        yield augment(data.step, data.batches[0][0], data.pieces[0])


@pytest.mark.parametrize("batch", [1, 3])
def test_pictures_are_augmented_once_a_group_and_become_what_they_become_alone(batch: int):
    loader = loader_of(pictures(40), batch)
    augment, alone = (Cropped(loader.order.steps_per_epoch) for _ in range(2))
    found = list(coming(loader, 2, 90, Way(), augment))
    expected = list(augmented_one_by_one(loader, 2, 90, alone))
    assert [each.augmented for each in found] == [*[False] * 8, *[True] * 80]
    for data, changed in zip(found[8:], expected[8:], strict=True):
        assert torch.equal(data.batches[0][0], changed)
    groups = [group for group in grouped(loader, 2, 90) if group.batch is not None]
    ids = [[number for data in group.steps for number in data.pieces[0]] for group in groups]
    tried = [ids[0], groups[0].steps[-1].pieces[0]]
    assert augment.asked == tried + ids, "and twice more at first, to see that it is the same"


def turned_by_mean(_step: int, inputs: Tensor, _ids: list[int]) -> Tensor:
    return inputs.float() - inputs.float().mean()


def of_the_first(_step: int, inputs: Tensor, _ids: list[int]) -> Tensor:
    return inputs[:1].float()


def for_one_only(_step: int, inputs: Tensor, _ids: list[int]) -> Tensor:
    if len(inputs) > 1:
        raise ValueError("one at a time")
    return inputs + 1


def in_place(_step: int, inputs: Tensor, _ids: list[int]) -> Tensor:
    return inputs.add_(1)


@pytest.mark.parametrize("augment", [turned_by_mean, of_the_first, for_one_only, in_place])
def test_whatever_a_function_does_with_a_batch_it_does_with_that_of_each_step(augment: Augment):
    loader = loader_of(pictures(30), 1)
    found = [
        data.batches[0][0] if data.augmented else augment(data.step, data.batches[0][0], data.pieces[0])
        for data in coming(loader, 0, 60, Way(), augment)
    ]
    assert all(map(torch.equal, found, augmented_one_by_one(loader, 0, 60, augment)))


@pytest.mark.parametrize(
    ("forms", "found"),
    [("a" * 8, ("a", 8)), ("a" * 7 + "b" + "a" * 8, (None, 0)), ("aa-aaaaaa", ("a", 9)), ("a" * 7, (None, 0))],
    ids=["alike", "the last one tried is another", "one that cannot come together", "too few"],
)
def test_steps_come_together_after_so_many_that_were_alike(
    forms: str, found: tuple[str | None, int], monkeypatch: pytest.MonkeyPatch
):
    assert together.TRIED == 8
    monkeypatch.setattr(
        together, "_form_to_group", lambda _, data: None if forms[data.step] == "-" else forms[data.step]
    )
    loader: Any = None
    steps = (StepData(step, torch.arange(1).numpy(), [], [], [], 0.0) for step in range(len(forms)))
    trying = together._first(loader, steps)
    with pytest.raises(StopIteration) as ended:
        while True:
            next(trying)
    assert ended.value.value == found

"""The way of batches to the device: ahead, in order, with every error, and with an end."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from collections import namedtuple
from collections.abc import Generator, Iterator
from typing import Any

import pytest
import torch

from meshrun.data.feed import CudaLane, fed, mapped, on
from meshrun.data.loader import Loader, Reading, StepData
from meshrun.data.order import Order
from meshrun.data.shuffle import NONE
from tests.data.test_loader import Squares
from tests.launch.command import wait_until


class Road:
    """A lane to nowhere that writes down what is asked of it."""

    def __init__(self) -> None:
        self.log: list[Any] = []

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        self.log.append("open")
        yield
        self.log.append("closed")

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        self.log.append(("copy", threading.current_thread().name))
        return tensor + 100

    def sent(self) -> int:
        return len(self.log)

    def arrived(self, mark: int, tensors: list[torch.Tensor]) -> None:
        self.log.append(("arrived", mark, [each.tolist() for each in tensors], threading.current_thread().name))


def numbers(count: int, read: list[int], closed: list[bool] | None = None) -> Generator[torch.Tensor, None, None]:
    try:
        for number in range(count):
            read.append(number)
            yield torch.tensor(number)
    finally:
        if closed is not None:
            closed.append(True)


def move(item: Any, to: Any) -> Any:
    return to(item)


def test_every_batch_comes_in_order_copied_by_the_thread_and_awaited_by_the_caller():
    road, read = Road(), []
    assert [each.item() for each in fed(numbers(5, read), road, move)] == [100, 101, 102, 103, 104]
    assert {each[1] for each in road.log if each[0] == "copy"} == {"feed"}
    arrivals = [each for each in road.log if each[0] == "arrived"]
    assert [each[2] for each in arrivals] == [[100], [101], [102], [103], [104]]
    assert {each[3] for each in arrivals} == {threading.current_thread().name}
    assert road.log[0] == "open" and "closed" in road.log


@pytest.mark.parametrize("depth", [1, 3])
def test_so_many_batches_are_ahead_and_no_more(depth: int):
    read: list[int] = []
    items = fed(numbers(20, read), Road(), move, depth)
    for taken in range(1, 5):
        next(items)
        wait_until(lambda taken=taken: len(read) == taken + depth, 30)
    time.sleep(0.05)
    assert len(read) == 4 + depth
    items.close()


def test_an_error_of_the_thread_comes_after_the_batches_before_it():
    def failing() -> Generator[torch.Tensor, None, None]:
        yield torch.tensor(1)
        raise FileNotFoundError("7.jpg")

    items = fed(failing(), Road(), move)
    assert next(items).item() == 101
    with pytest.raises(FileNotFoundError, match=r"7\.jpg"):
        next(items)


def test_who_ends_early_ends_the_thread_and_closes_what_was_read():
    closed: list[bool] = []
    source = numbers(100, [], closed)  # which others may hold as well
    items = fed(source, Road(), move)
    next(items)
    (thread,) = [each for each in threading.enumerate() if each.name == "feed"]
    items.close()
    assert closed == [True] and not thread.is_alive()


def test_who_ends_while_a_batch_takes_long_does_not_wait_for_it():
    begun, let_go = threading.Event(), threading.Event()

    def slow() -> Generator[torch.Tensor, None, None]:
        yield torch.tensor(0)
        begun.set()
        let_go.wait(60)
        yield torch.tensor(1)

    items = fed(slow(), Road(), move)
    next(items)
    begun.wait(30)
    began = time.perf_counter()
    items.close()
    assert time.perf_counter() - began < 30
    let_go.set()
    wait_until(lambda: not any(each.name == "feed" for each in threading.enumerate()), 30)


def test_what_the_caller_was_held_up_is_told():
    def slow() -> Generator[torch.Tensor, None, None]:
        yield torch.tensor(0)
        time.sleep(1)
        yield torch.tensor(1)

    times = list(fed(slow(), Road(), move, waited=lambda _, seconds: seconds))
    assert times[0] < 0.5 < times[1]


def test_who_may_not_leave_it_to_a_thread_reads_and_copies_when_it_asks():
    road, read, closed = Road(), [], []
    source = numbers(5, read, closed)  # held here, so that only `fed` closes it
    items = fed(source, road, move, waited=lambda item, _: item + 1000, aside=False)
    assert [next(items).item() for _ in range(3)] == [1100, 1101, 1102] and read == [0, 1, 2]
    here = threading.current_thread().name
    assert road.log[:2] == ["open", ("copy", here)] and road.log[2] == "closed" and road.log[3][3] == here
    assert not any(each.name == "feed" for each in threading.enumerate()) and not closed
    items.close()
    assert closed == [True]
    assert len(list(fed(numbers(5, []), Road(), move, aside=False))) == 5


def test_without_a_lane_there_is_no_thread():
    assert on(torch.device("cpu")) is None
    items = fed(numbers(3, []), None, move)
    assert next(items).item() == 0 and not any(each.name == "feed" for each in threading.enumerate())


@pytest.mark.parametrize("workers", [0, 1])
def test_steps_of_a_loader_go_down_a_lane(workers: int):
    steps = Loader(Squares(10), Order(10, 4, shuffle=NONE), 0, 1, Reading(workers=workers)).steps(0, 3)
    found = list(fed(steps, Road(), StepData.moved, waited=StepData.after))
    assert [each.batches[0][0].tolist() for each in found] == [[100, 101, 102, 103], [104, 105, 106, 107], [108, 109]]
    assert [each.step for each in found] == [0, 1, 2] and all(each.waited >= 0 for each in found)


@pytest.mark.gpu
def test_batches_are_on_the_device_and_whole_however_far_the_computation_is_behind():
    device = torch.device("cuda", 0)
    width, count = 1 << 20, 24

    def batches() -> Generator[torch.Tensor, None, None]:
        for number in range(count):
            yield torch.full((width,), float(number)).pin_memory()

    sums = []
    weight = torch.randn(4096, 4096, device=device)
    for batch in fed(batches(), CudaLane(device), move):
        for _ in range(6):  # the computation is late: memory that is used again too early would show
            weight = weight @ weight
            weight /= weight.norm()
        assert batch.device == device
        sums.append(batch.sum() + 0 * weight[0, 0])
        del batch
    assert torch.stack(sums).tolist() == [float(number * width) for number in range(count)]


@pytest.mark.gpu
@pytest.mark.parametrize("workers", [0, 2])
def test_a_training_on_a_gpu_is_fed_and_gives_up_its_readers(workers: int):
    device = torch.device("cuda", 0)
    loader = Loader(Squares(400), Order(400, 8, 1), 0, 1, Reading(workers=workers, pin=True))
    read = []
    for data in fed(loader.steps(0, 50), on(device), StepData.moved, waited=StepData.after):
        inputs, targets = data.batches[0]
        assert inputs.device == device and torch.equal(targets, inputs * inputs)
        read += inputs.tolist()
    assert sorted(read) == list(range(400))
    early = fed(loader.steps(0, 50), on(device), StepData.moved)
    next(early)
    began = time.perf_counter()
    early.close()
    gc.collect()
    assert time.perf_counter() - began < 20
    assert not any(each.name == "feed" for each in threading.enumerate())


def test_batches_keep_their_kind_wherever_their_tensors_go():
    pair = namedtuple("pair", "inputs targets")
    batch = {"a": pair(torch.ones(1), "text"), "b": [torch.ones(1), (torch.ones(1), 3)]}
    assert mapped(batch, lambda each: int(each) + 1) == {"a": pair(2, "text"), "b": [2, (2, 3)]}
    assert type(mapped(batch, lambda each: each)["a"]) is pair

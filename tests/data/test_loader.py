"""The loader: the parts of all replicas are the global batch, from any step on, and nothing else is its state."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import tracemalloc
from collections import UserDict, namedtuple
from collections.abc import Callable

import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Subset

from meshrun.data import cache
from meshrun.data import loader as loader_module
from meshrun.data import readers as readers_module
from meshrun.data.feed import to_device
from meshrun.data.loader import Loader, Reading, StepData, evaluation_batches
from meshrun.data.order import Cut, Order
from meshrun.data.readers import ReaderLost, has_lost_a_reader
from meshrun.data.shuffle import NONE
from meshrun.errors import RunFailed
from tests.launch.command import is_alive, wait_until

ALONE = Reading()


class Squares:
    """Sample i is (i, i squared)."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tensor(index), torch.tensor(index * index)


class Broken(Squares):
    """Sample 13 cannot be read."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if index == 13:
            raise ValueError("bad jpeg")
        return super().__getitem__(index)


class Slow(Squares):
    """All but the first four take a minute each."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        time.sleep(0 if index < 4 else 60)
        return super().__getitem__(index)


class ManyAtOnce(Squares):
    """Reads a whole piece with one call, as databases like it."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.asked: list[list[int]] = []

    def __getitem__(self, index: int):
        raise AssertionError("samples are to be asked for together")

    def __getitems__(self, ids: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        self.asked.append(ids)
        return [(torch.tensor(number), torch.tensor(number * number)) for number in ids]


def samples_of(data: StepData) -> list[int]:
    return [number for inputs, _ in data.batches for number in inputs.tolist()]


@pytest.mark.parametrize("micro", [None, 1, 2, 5])
@pytest.mark.parametrize("of", [1, 2, 3, 7])
def test_the_parts_of_all_replicas_are_the_global_batch_in_order(of: int, micro: int | None):
    order = Order(50, 11, seed=3)
    parts = [list(Loader(Squares(50), order, part, of, Reading(Cut(micro))).steps(0, 10)) for part in range(of)]
    for step in range(10):
        whole = [number for part in parts for number in samples_of(part[step])]
        assert whole == order.batch_ids(step).tolist() == parts[0][step].ids.tolist()
        for part in parts:
            data = part[step]
            assert data.step == step and data.waited >= 0
            assert data.real == [len(piece) for piece in data.pieces]
            assert [len(inputs) for inputs, _ in data.batches] == [len(piece) for piece in data.pieces]
            assert [number for piece in data.pieces for number in piece] == samples_of(data)
            assert all(len(piece) <= (micro or 11) for piece in data.pieces)
            for inputs, targets in data.batches:
                assert torch.equal(targets, inputs * inputs)


@pytest.mark.parametrize("workers", [0, 2])
def test_resuming_at_any_step_goes_on_as_if_it_had_never_stopped(workers: int):
    reading = Reading(Cut(micro=2), workers=workers)
    whole = [samples_of(data) for data in Loader(Squares(20), Order(20, 7, 5), 1, 2, Reading(Cut(micro=2))).steps(0, 9)]
    for start in range(9) if workers == 0 else (0, 4, 8):
        resumed = Loader(Squares(20), Order(20, 7, 5), 1, 2, reading).steps(start, 9)
        assert [samples_of(data) for data in resumed] == whole[start:]


def test_reading_ahead_does_not_move_the_cursor():
    """A loop that stops early has read more than it used: the next loop must not miss those samples."""
    loader = Loader(Squares(40), Order(40, 8, 1), 0, 1, Reading(workers=2, prefetch=3))
    steps = loader.steps(0, 5)
    first = [samples_of(next(steps)) for _ in range(2)]
    steps.close()
    rest = [samples_of(data) for data in loader.steps(2, 5)]
    assert sorted(number for ids in first + rest for number in ids) == list(range(40))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_replica_without_samples_gets_a_step_without_batches(workers: int):
    order = Order(10, 4)  # the last batch of an epoch has 2 samples for 3 replicas
    steps = list(Loader(Squares(10), order, 2, 3, Reading(workers=workers)).steps(0, 6))
    assert [len(data.batches) for data in steps] == [1, 1, 0, 1, 1, 0]
    assert steps[2].pieces == [] and steps[2].ids.tolist() == order.batch_ids(2).tolist()


@given(length=st.integers(1, 120), of=st.integers(1, 9), size=st.integers(1, 40))
@settings(max_examples=60)
def test_evaluation_reads_every_sample_once_in_order_on_any_number_of_parts(length: int, of: int, size: int):
    read = []
    for part in range(of):
        for each in evaluation_batches(Squares(length), part, of, size, ALONE):
            assert 1 <= len(each.ids) <= size and each.real == len(each.ids), "nothing is padded where nobody must wait"
            assert each.ids == each.batch[0].tolist()
            read += each.ids
    assert read == list(range(length))


@given(length=st.integers(1, 60), of=st.integers(1, 9), size=st.integers(1, 20), equal=st.booleans())
@settings(max_examples=60)
def test_evaluation_in_step_counts_every_sample_once_in_as_many_batches_on_every_part(
    length: int, of: int, size: int, equal: bool
):
    reading = Reading(Cut(in_step=True, equal=equal))
    parts = [list(evaluation_batches(Squares(length), part, of, size, reading)) for part in range(of)]
    assert [number for part in parts for each in part for number in each.ids[: each.real]] == list(range(length))
    assert len({len(part) for part in parts}) == 1
    for batches in zip(*parts, strict=True):
        for each in batches:
            assert each.ids == each.batch[0].tolist() and 0 <= each.real <= len(each.ids) <= size and each.ids
        if equal:
            assert len({len(each.ids) for each in batches}) == 1
    if equal:
        assert sum(len(each.ids) for each in parts[0]) == -(-length // of), "no row more than the largest part has"


def test_evaluation_by_worker_processes_reads_the_same():
    found = evaluation_batches(Squares(23), 0, 2, 5, Reading(workers=2))
    read = [number for each in found for number in each.batch[0].tolist()]
    assert read == list(range(12))


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_in_a_dataset_names_the_sample(workers: int):
    with pytest.raises(ValueError, match="bad jpeg") as caught:
        list(Loader(Broken(20), Order(20, 4), 0, 1, Reading(workers=workers)).steps(0, 5))
    assert "while reading sample 13" in said_by(caught.value)
    assert str(caught.value) == "bad jpeg", "not what torch makes of it"
    if workers:
        assert "test_loader.py" in said_by(caught.value) and "in __getitem__" in said_by(caught.value)
        assert 'raise ValueError("bad jpeg")' in str(caught.value.__cause__), "the whole traceback is for the log"


class Ending(Squares):
    """Sample 13 ends the program."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if index == 13:
            raise SystemExit("no such file")
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_dataset_that_calls_sys_exit_is_told_with_its_sample_and_not_as_a_lost_reader(workers: int):
    with pytest.raises(SystemExit, match="no such file") as caught:
        list(Loader(Ending(20), Order(20, 4), 0, 1, Reading(workers=workers)).steps(0, 5))
    assert "while reading sample 13" in said_by(caught.value)


class Odd(Exception):
    """Cannot be sent to another process: it is made of two words, and says one."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(first + second)


class Oddly(Squares):
    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        raise Odd("odd", "ly")


def test_an_error_that_cannot_be_sent_is_told_as_torch_does():
    with pytest.raises(Exception, match="oddly"):
        list(Loader(Oddly(20), Order(20, 4), 0, 1, Reading(workers=1)).steps(0, 5))


class Missing(Exception):
    """A copy of it says more than it did: it is made of a name, and says a sentence."""

    def __init__(self, name: str) -> None:
        super().__init__(f"there is no {name}")


class Incomplete(Squares):
    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        raise Missing("picture")


def test_an_error_that_would_be_sent_in_other_words_is_told_as_torch_does():
    with pytest.raises(Exception, match="there is no picture") as caught:
        list(Loader(Incomplete(20), Order(20, 4), 0, 1, Reading(workers=1)).steps(0, 5))
    assert "there is no there is no" not in str(caught.value)


def test_an_error_in_a_dataset_that_reads_many_at_once_names_the_sample():
    """torch's Subset, which random_split makes, reads so."""
    data = Subset(Broken(20), [12, 13, 14, 15])
    with pytest.raises(ValueError, match="bad jpeg") as caught:
        list(Loader(data, Order(4, 4, shuffle=NONE), 0, 2, ALONE).steps(0, 1))
    assert "while reading sample 1 (" in said_by(caught.value)


def said_by(error: BaseException) -> str:
    """The message and its notes; from a worker process both come as one text."""
    return "\n".join([str(error), *getattr(error, "__notes__", [])])


def test_a_dataset_that_reads_many_at_once_is_asked_once_a_micro_batch():
    data = ManyAtOnce(12)
    (step,) = Loader(data, Order(12, 12, shuffle=NONE), 0, 2, Reading(Cut(micro=4))).steps(0, 1)
    assert samples_of(step) == [0, 1, 2, 3, 4, 5] and data.asked == [[0, 1, 2], [3, 4, 5]]


def test_the_users_collate_makes_the_batches():
    reading = Reading(collate=lambda samples: ([int(x) for x, _ in samples], len(samples)))
    (step,) = Loader(Squares(6), Order(6, 6, shuffle=NONE), 0, 2, reading).steps(0, 1)
    assert step.batches == [([0, 1, 2], 3)]


Pair = namedtuple("Pair", "first second")


def test_to_device_moves_every_tensor_and_keeps_the_structure():
    meta = torch.device("meta")
    tensor = torch.ones(2)
    batch = {"a": [tensor, 3], "b": (tensor, {"c": tensor}), "d": Pair(tensor, "name"), "e": "text", "f": None}
    moved = to_device(batch, meta)
    tensors = [moved["a"][0], moved["b"][0], moved["b"][1]["c"], moved["d"].first]
    assert all(each.device == meta and each.shape == (2,) for each in tensors)
    assert isinstance(moved["a"], list) and isinstance(moved["b"], tuple) and isinstance(moved["d"], Pair)
    assert (moved["a"][1], moved["d"].second, moved["e"], moved["f"]) == (3, "name", "text", None)
    assert to_device(b"bytes", meta) == b"bytes"


def test_to_device_moves_what_is_in_a_mapping_that_is_no_dict():
    """Tokenizers give such ones; the model is called with a plain dict."""
    moved = to_device(UserDict(ids=torch.ones(2)), torch.device("meta"))
    assert type(moved) is dict and moved["ids"].device.type == "meta"


class Fragile(Squares):
    """Sample 13 kills the process that reads it, and sample 14 is not where it should be."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if index == 13:
            os.kill(os.getpid(), signal.SIGKILL)
        if index == 14:
            raise FileNotFoundError("14.jpeg")
        return super().__getitem__(index)


@pytest.mark.parametrize(("first", "lost"), [(13, True), (14, False)])
def test_a_reader_that_was_killed_is_told_from_an_error_of_the_dataset(first: int, lost: bool):
    data = Subset(Fragile(20), range(first, 20))  # type: ignore[arg-type,var-annotated]
    steps = Loader(data, Order(len(data), 2, shuffle=NONE), 0, 1, Reading(workers=1)).steps(0, 2)
    with pytest.raises((ReaderLost, RuntimeError) if lost else FileNotFoundError) as error:
        list(steps)
    assert has_lost_a_reader(error.value) == lost


class Ended:
    """What torch's DataLoader gives when the connection to a reader has ended."""

    _workers: tuple[()] = ()

    def __next__(self) -> None:
        raise EOFError("read 0 bytes")

    def _shutdown_workers(self) -> None:
        pass


def test_a_connection_to_a_reader_that_has_ended_is_a_lost_reader():
    with pytest.raises(ReaderLost, match="read 0 bytes"):
        next(readers_module._heard(Ended()))


def test_readers_draw_nothing_from_the_generator_of_the_program():
    before = torch.get_rng_state()
    list(Loader(Squares(20), Order(20, 4), 0, 1, Reading(workers=1)).steps(0, 2))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_signal_for_ranks_that_comes_while_readers_are_forked_is_held_back():
    with readers_module._birth():
        assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) >= set(readers_module.FOR_RANKS)
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()) & set(readers_module.FOR_RANKS)


@pytest.fixture
def readers() -> Callable[[], list[psutil.Process]]:
    """The readers that a test has made, once they have read."""
    before = psutil.Process().children()
    return lambda: [each for each in psutil.Process().children() if each not in before]


def test_readers_hear_their_rank_alone(readers):
    """Slurm signals all processes of a job, and ranks need their readers to stop after a whole step."""
    loader = Loader(Squares(40), Order(40, 8, 1), 0, 1, Reading(workers=2, prefetch=1))
    steps = loader.steps(0, 5)
    read = samples_of(next(steps))
    found = readers()
    assert len(found) == 2
    for name in ("TERM", "USR2"):
        subprocess.run(["kill", f"-{name}", *(str(each.pid) for each in found)], check=True)
    for data in steps:
        read += samples_of(data)
    assert sorted(read) == list(range(40))
    assert not any(is_alive(each.pid) for each in found)


def test_readers_end_when_their_rank_says_so_whatever_they_are_at(readers):
    steps = Loader(Slow(8), Order(8, 4, 1, shuffle=NONE), 0, 1, Reading(workers=1)).steps(0, 2)
    next(steps)
    (reader,) = readers()
    reader.terminate()
    wait_until(lambda: not is_alive(reader.pid), 30)
    steps.close()


def test_readers_go_with_a_rank_that_is_killed():
    command = [sys.executable, "-c", "from tests.data.test_loader import keep_readers_busy; keep_readers_busy()"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as rank:
        assert rank.stdout is not None and rank.stdout.readline() == "read\n"
        (reader,) = psutil.Process(rank.pid).children()
        rank.kill()
        try:
            wait_until(lambda: not is_alive(reader.pid), 30)
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):
                reader.kill()


def keep_readers_busy() -> None:
    """In a process of its own: one reader, in the middle of something long."""
    steps = Loader(Slow(8), Order(8, 4, 1, shuffle=NONE), 0, 1, Reading(workers=1)).steps(0, 2)
    next(steps)
    print("read", flush=True)
    signal.pause()


def test_what_a_dataset_draws_goes_by_the_epoch_of_a_step():
    loader = Loader(Squares(10), Order(10, 4), 0, 1, ALONE)
    assert [loader.plan(step)[1][0].epoch for step in (0, 2, 3, 7)] == [0, 0, 1, 2]


def test_nothing_is_kept_a_sample_of_an_evaluation():
    tracemalloc.start()
    try:
        found = next(evaluation_batches(Squares(10**6), 0, 1, 4, ALONE))
        assert found.ids == [0, 1, 2, 3] and tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_an_evaluation_has_no_more_readers_than_batches(monkeypatch: pytest.MonkeyPatch):
    asked: list[int] = []
    monkeypatch.setattr(loader_module, "_read", lambda _data, _pieces, reading: asked.append(reading.workers))
    for length in (3, 40):
        evaluation_batches(Squares(length), 0, 1, 2, Reading(workers=4))
    assert asked == [2, 4]


def test_the_time_for_which_a_training_waited_for_its_data_is_known():
    class Sleepy(Squares):
        def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
            time.sleep(0.02)
            return super().__getitem__(index)

    for data in Loader(Sleepy(8), Order(8, 4, shuffle=NONE), 0, 1, ALONE).steps(0, 2):
        assert 0.08 <= data.waited < 30
        time.sleep(0.3)
        assert data.effort.seconds >= 0.08


def test_samples_that_were_left_out_are_neither_in_the_pieces_nor_counted():
    reading = Reading(Cut(micro=4), skip_bad=True)
    order = Order(16, 8, shuffle=NONE)
    (_, second) = Loader(Broken(16), order, 0, 1, reading).steps(0, 2)
    assert second.pieces == [[8, 9, 10, 11], [12, 14, 15]] and second.real == [4, 3]
    assert [number for number, _ in second.bad] == [13] and len(second.ids) == 8
    batches = list(evaluation_batches(Broken(16), 0, 1, 4, reading))
    assert [(each.ids, each.real) for each in batches[2:]] == [([8, 9, 10, 11], 4), ([12, 14, 15], 3)]
    assert [number for each in batches for number, _ in each.bad] == [13]


def test_readers_need_room_for_all_that_torch_makes_for_them(monkeypatch: pytest.MonkeyPatch):
    left = 0

    def take() -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(readers_module.multiprocessing, "Lock", take)
    needed = 6 * 3 + 2 * 6  # six a reader, and twice as many for all of them
    for room, why in ((needed, ""), (needed - 1, "No space left on device")):
        left = room
        assert readers_module.no_room_for(3) == why


def test_without_room_for_readers_in_shared_memory_a_rank_reads_by_itself_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch,
):
    def full() -> None:
        raise OSError(28, "No space left on device")

    notes: list[str] = []
    monkeypatch.setattr(readers_module.multiprocessing, "Lock", full)
    monkeypatch.setattr(loader_module, "_told", set())
    cache.use(None, None, notes.append)
    try:
        for _ in range(2):
            alone, ahead = (
                list(Loader(Squares(16), Order(16, 4, 1), 0, 1, Reading(workers=workers)).steps(0, 4))
                for workers in (0, 2)
            )
            assert [each.batches[0][1].tolist() for each in alone] == [each.batches[0][1].tolist() for each in ahead]
        with pytest.raises(RunFailed, match=r"No space left on device.*; make room there, then resume the run"):
            # Beside a GPU a thread would read, and what it draws would be missing to the model.
            Loader(Squares(16), Order(16, 4, 1), 0, 1, Reading(workers=2, pin=True)).steps(0, 4)
    finally:
        cache.use(None, None)
    assert len(notes) == 1 and "/dev/shm" in notes[0] and "No space left on device" in notes[0]


def test_a_step_is_planned_once_and_readers_draw_by_the_seed(monkeypatch: pytest.MonkeyPatch):
    planned, given = list[int](), list[dict[str, object]]()
    plan = Loader.plan
    monkeypatch.setattr(Loader, "plan", lambda loader, step: planned.append(step) or plan(loader, step))
    order = Order(12, 4, seed=1)
    list(Loader(list(range(12)), order, 0, 1, Reading()).steps(0, 3))
    assert planned == [0, 1, 2]
    monkeypatch.setattr(loader_module, "by_readers", lambda *_, **named: given.append(named))
    Loader(list(range(12)), order, 0, 1, Reading(workers=2, prefetch=3, seed=5)).steps(0, 3)
    assert given == [{"count": 2, "ahead": 3, "pin": False, "seed": 5}]

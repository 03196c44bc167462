"""Reads the samples that `order` names: this rank's micro-batches of each step, from any step on.

    loader = Loader(dataset, order, part=1, of=3, reading=Reading(micro=16))
    for step in loader.steps(start=0, stop=100):
        for batch in step.batches: …

The cursor, a step number, is the loader's only state: to resume is to start there. torch's DataLoader does the reading
in other processes, pins memory and keeps batches ready; which samples it reads is decided here.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from meshrun.data.order import Cut, Order, slice_of
from meshrun.data.permutation import Ids
from meshrun.errors import RunFailed
from meshrun.experiment import MapDataset

_BY_A_READER = "in DataLoader worker process"
"""What torch adds to errors of the dataset itself."""

FOR_RANKS = (signal.SIGTERM, signal.SIGUSR2)
"""What Slurm sends to all processes of a job that is to end."""


class ReaderLost(RunFailed):
    """A process that reads for this rank was killed."""


@dataclass(frozen=True)
class Reading:
    """How a rank reads: pieces as `cut` says, by `workers` processes that keep `prefetch` pieces ready."""

    cut: Cut = field(default_factory=Cut)
    workers: int = 0
    prefetch: int = 2
    pin: bool = False
    collate: Callable[[list[Any]], Any] | None = None
    seed: int = 0
    """Of what the reading processes draw."""


@dataclass(frozen=True)
class StepData:
    """What this rank computes in one step. `waited` is the time that reading it held up the training, in seconds."""

    step: int
    ids: Ids
    """The whole global batch."""
    pieces: list[list[int]]
    """This rank's part of it, one list a micro-batch."""
    real: list[int]
    """How many samples of each piece count: those after them only fill it up."""
    batches: list[Any]
    waited: float


Plan = tuple[Ids, list[tuple[list[int], int]]]
"""The global batch, and a replica's pieces of it: sample ids, and how many of them count."""


class Loader:
    """The micro-batches of one of `of` replicas."""

    def __init__(self, dataset: MapDataset, order: Order, part: int, of: int, reading: Reading) -> None:
        self.dataset, self.order, self.part, self.of, self.reading = dataset, order, part, of, reading

    def plan(self, step: int) -> Plan:
        """The global batch of a step, and this replica's micro-batches of it."""
        ids = self.order.batch_ids(step)
        return ids, self.reading.cut.of(ids, self.part, self.of)

    def steps(self, start: int, stop: int) -> Iterator[StepData]:
        """Every step from `start` up to `stop`, read ahead."""
        # Readers plan ahead of the loop, or just behind it where there are none: whoever comes second finds the plan.
        plans: dict[int, Plan] = {}

        def ahead() -> Iterator[list[int]]:
            for step in range(start, stop):
                plan = plans.get(step) or self.plan(step)
                if plan[1]:
                    plans[step] = plan
                yield from (piece for piece, _ in plan[1])

        batches = _read(self.dataset, ahead(), self.reading)
        for step in range(start, stop):
            ids, pieces = plans[step] = plans.get(step) or self.plan(step)
            began = time.perf_counter()
            read = [next(batches) for _ in pieces]
            del plans[step]
            waited = time.perf_counter() - began
            yield StepData(step, ids, [piece for piece, _ in pieces], [real for _, real in pieces], read, waited)


def evaluation_batches(
    dataset: MapDataset, part: int, of: int, size: int, reading: Reading
) -> Iterator[tuple[list[int], int, Any]]:
    """Every sample exactly once over all parts: this part's share in batches of at most `size`, in order.

    Each comes with its sample ids and how many of them count. In step, every part has as many batches.
    """
    mine = slice_of(range(len(dataset)), part, of)
    most = -(-len(dataset) // of) if reading.cut.in_step else len(mine)
    pieces = []
    for start in range(0, most, size):
        piece = list(mine[start : start + size])
        short = min(size, most - start) - len(piece) if reading.cut.equal else int(not piece)
        pieces.append((piece + [piece[-1] if piece else 0] * short, len(piece)))
    batches = _read(dataset, (piece for piece, _ in pieces), reading)
    return ((piece, real, batch) for (piece, real), batch in zip(pieces, batches, strict=True))


def _read(dataset: MapDataset, pieces: Iterator[list[int]], reading: Reading) -> Iterator[Any]:
    """The batches of these samples: by torch's DataLoader where others read, without its detours where nobody does."""
    numbered = _Numbered(dataset)
    if reading.workers or reading.pin:
        loader: DataLoader[Any] = DataLoader(
            numbered,
            batch_sampler=pieces,
            collate_fn=reading.collate,
            num_workers=reading.workers,
            pin_memory=reading.pin,
            prefetch_factor=reading.prefetch if reading.workers else None,
            # Of its own: it would else draw from the program's, once more for every time that a run goes on.
            generator=torch.Generator().manual_seed(reading.seed),
            worker_init_fn=partial(_listen_to_the_rank_alone, os.getpid()),
        )
        if not reading.workers:
            return iter(loader)
        with _birth():
            return _by_readers(iter(loader))
    collate = reading.collate or default_collate
    return (collate(numbered.__getitems__(piece)) for piece in pieces)


@contextlib.contextmanager
def _birth() -> Iterator[None]:
    """Around the forks of readers, who inherit what holds here.

    Signals for ranks are blocked. And what the rank has no more use for is not theirs to clear away: a group of ranks
    that is taken apart in a reader waits for threads that only the rank has, and aborts.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, FOR_RANKS)
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _listen_to_the_rank_alone(rank: int, _number: int) -> None:
    """In a reader: what announces the end of a job is for ranks, who still need their readers to finish a step.

    A reader ends when its rank tells it to, or is gone. Programs that a dataset starts inherit this.
    """
    if sys.platform != "linux":  # where no Slurm is, and nobody says who has sent a signal
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FOR_RANKS)
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, FOR_RANKS)  # one from a server of forks was not born so
    threading.Thread(target=_end_when_told_by, args=(rank,), name="sigterm", daemon=True).start()
    with contextlib.suppress(OSError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    parent = multiprocessing.parent_process()
    if parent is not None and not parent.is_alive():  # it went before that, and the kernel tells nobody
        os._exit(1)


def _end_when_told_by(rank: int) -> None:
    assert sys.platform == "linux"
    while signal.sigwaitinfo([signal.SIGTERM]).si_pid != rank:
        pass
    os._exit(0)


def _by_readers(batches: Iterator[Any]) -> Iterator[Any]:
    """What other processes read; the many ways in which torch tells that one of them is gone become one."""
    while True:
        try:
            batch = next(batches)
        except StopIteration:
            return
        except (RuntimeError, OSError, EOFError) as error:
            of_dataset = isinstance(error, RuntimeError) or _BY_A_READER in str(error)
            if has_lost_a_reader(error) or not of_dataset:
                raise ReaderLost(f"a process that reads data was lost: {error}") from error
            raise
        yield batch


def has_lost_a_reader(error: BaseException) -> bool:
    """Whether a reader's end is the cause. torch also raises that by itself, wherever the program is just then."""
    killed = isinstance(error, RuntimeError) and str(error).startswith("DataLoader worker (pid")
    return killed or isinstance(error, ReaderLost)


class _Numbered(Dataset[Any]):
    """The user's dataset, with the sample's number added to whatever goes wrong in it."""

    def __init__(self, dataset: MapDataset) -> None:
        self.dataset = dataset
        self.many: Callable[[list[int]], list[Any]] | None = getattr(dataset, "__getitems__", None)

    def __getitems__(self, ids: list[int]) -> list[Any]:
        if self.many is None:
            return [self[number] for number in ids]
        try:
            return self.many(ids)
        except Exception as error:
            error.add_note(f"while reading samples {', '.join(map(str, ids))}")
            raise

    def __getitem__(self, number: int) -> Any:
        try:
            return self.dataset[number]
        except Exception as error:
            error.add_note(f"while reading sample {number}")
            raise


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch with every tensor in it on the device, copied beside the computation where memory is pinned."""
    if device.type == "cpu":
        return batch
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device) for value in batch))
    if isinstance(batch, Sequence) and not isinstance(batch, str | bytes):
        return type(batch)(to_device(value, device) for value in batch)  # type: ignore[call-arg]
    return batch

"""Processes that read for a rank, ahead of it: torch's DataLoader, with an end that the rank decides.

    batches = by_readers(samples, wanted, count=4, ahead=2, pin=True, seed=0)
    next(batches)
    batches.close()                     # the readers are gone

An error comes to the rank as it was met; a reader that is gone is `ReaderLost`.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Generator, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from meshrun.data.effort import measured
from meshrun.data.samples import Read, Samples, Wanted
from meshrun.data.sending import is_without_room, not_shared, packed, unpacked
from meshrun.errors import RunFailed, UserError

_BY_A_READER = "in DataLoader worker process"
"""What torch adds to errors of the dataset itself."""

FOR_RANKS = (signal.SIGTERM, signal.SIGUSR2)
"""What Slurm sends to all processes of a job that is to end."""

_OURS = str(Path(__file__).parent)
_FRAMES = 3
"""Lines of a traceback that are shown with an error: the innermost ones of the dataset."""

OF_A_READER = 6
"""Semaphores that torch makes for each reader, and twice as many for all of them; each is a file in /dev/shm."""

_PATIENCE = 0.2
"""Seconds that a reader has to end by itself."""


class ReaderLost(RunFailed):
    """A process that reads for this rank was killed."""


def by_readers(
    samples: Samples, wanted: Iterator[Wanted], count: int, ahead: int, pin: bool, seed: int
) -> Generator[Read, None, None]:
    """These micro-batches, in order, by `count` processes that keep `ahead` each ready; they are forked at once."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This DataLoader will create")  # more than cores, as was asked for
        loader: DataLoader[Read] = DataLoader(
            _Told(samples),
            sampler=wanted,
            batch_size=None,
            collate_fn=_as_it_is,  # type: ignore[arg-type]
            num_workers=count,
            pin_memory=pin,
            prefetch_factor=ahead,
            # Of its own: it would else draw from the program's, once more for every time that a run goes on.
            generator=torch.Generator().manual_seed(seed),
            worker_init_fn=partial(_listen_to_the_rank_alone, os.getpid()),
        )
    with _birth():
        return _heard(iter(loader))


def no_room_for(count: int) -> str:
    """Why so many readers cannot be started, where /dev/shm has no room for what they wait on each other with."""
    try:
        _ = [multiprocessing.Lock() for _ in range(OF_A_READER * (count + 2))]
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _as_it_is(read: Read) -> Read:
    return read


class InReader(Exception):
    """Where an error came from that was met in another process: its traceback there."""


class _Told(Dataset[Read]):
    """In a reader: an error is sent as it is, and not as the text that torch makes of it and of its traceback."""

    def __init__(self, samples: Samples) -> None:
        self.samples = samples

    def __getitem__(self, wanted: Wanted) -> Read:
        try:
            read = self._read(wanted)
            return replace(read, batch=packed(read.batch))
        except (UserError, RunFailed) as error:
            # One of ours: a class of the dataset's own may not be made of a sentence alone.
            kind = next(each for each in type(error).__mro__ if each.__module__ == UserError.__module__)
            return Read(None, error=(kind(str(error)), ""))
        except KeyboardInterrupt:  # CTRL-C reaches the rank too
            raise
        except BaseException as error:  # also sys.exit() in the dataset, which would end the reader in silence
            sent = _as_sent(error)
            if sent is None:
                raise
            return Read(None, error=(sent, "".join(traceback.format_exception(error))))

    def _read(self, wanted: Wanted) -> Read:
        try:
            return measured(self.samples, wanted)
        except RuntimeError as error:
            if not is_without_room(error):
                raise
        with not_shared():  # others have filled /dev/shm: what is large goes through a pipe, as what is small does
            return measured(self.samples, wanted)


def _as_sent(error: BaseException) -> BaseException | None:
    """The error as another process gets it, with a note of the line where it was; None if that is another one."""
    try:
        pickle.dumps(error)
        sent = copy.copy(error)  # made anew as the other process makes it
    except Exception:  # whatever the class of the user's thinks of being sent
        return None
    if type(sent) is not type(error) or str(sent) != str(error):
        return None
    own = [each for each in traceback.extract_tb(error.__traceback__) if not each.filename.startswith(_OURS)]
    lines = [f"{each.filename}:{each.lineno} in {each.name}: {each.line}" for each in own[-_FRAMES:]]
    sent.__notes__ = [*lines, *getattr(error, "__notes__", [])]
    return sent


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


def _heard(reads: Any) -> Generator[Read, None, None]:
    """What other processes read; the many ways in which torch tells that one of them is gone become one."""
    try:
        while True:
            try:
                read: Read = next(reads)
            except StopIteration:
                return
            except (RuntimeError, OSError, EOFError) as error:
                of_dataset = isinstance(error, RuntimeError) or _BY_A_READER in str(error)
                if has_lost_a_reader(error) or not of_dataset:
                    raise ReaderLost(f"a process that reads data was lost: {error}") from error
                raise
            if read.error is not None:
                met, text = read.error
                raise met from (InReader(f"in a reader:\n{text}") if text else None)
            yield replace(read, batch=unpacked(read.batch))
    finally:
        _shut(reads)


def _shut(reads: Any) -> None:
    """torch waits 5 s for readers that are in the middle of something: these are told to end before that."""
    late = threading.Timer(_PATIENCE, lambda: [reader.terminate() for reader in reads._workers])
    late.daemon = True
    late.start()
    reads._shutdown_workers()
    late.cancel()


def has_lost_a_reader(error: BaseException) -> bool:
    """Whether a reader's end is the cause. torch also raises that by itself, wherever the program is just then."""
    killed = isinstance(error, RuntimeError) and str(error).startswith("DataLoader worker (pid")
    return killed or isinstance(error, ReaderLost)

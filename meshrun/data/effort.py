"""How much of the time of reading is computing: who computes little while it reads waits for a disk, or for a network.

    read = measured(samples, wanted)
    read.effort                     # Effort(seconds=0.8, busy=0.02)

Where readers wait, more of them help, and more cores do not.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from meshrun.data.samples import Effort, Read, Samples, Wanted


def measured(samples: Samples, wanted: Wanted) -> Read:
    """A micro-batch, with what it took this thread to read it; where that is next to nothing, without."""
    if getattr(samples.dataset, "light", False):
        return samples[wanted]
    with _kept_from_a_core() as kept:
        began, computed, held_up = time.perf_counter(), _computed(), kept()
        read = samples[wanted]
        # Who would have computed, had a core been free, does not wait for what it reads from.
        busy = _computed() - computed + kept() - held_up
        return replace(read, effort=Effort(time.perf_counter() - began, busy))


def _computed() -> float:
    """Only beside a main thread is something else computed; what that one reads may have threads of its own."""
    return time.process_time() if threading.current_thread() is threading.main_thread() else time.thread_time()


@contextlib.contextmanager
def _kept_from_a_core() -> Iterator[Callable[[], float]]:
    """Asks for the seconds that this thread was ready to compute and had no core; 0 where no kernel tells."""
    try:
        file = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
    except OSError:
        yield lambda: 0.0
        return
    try:
        # Empty where something only plays a kernel.
        yield lambda: int((os.pread(file, 100, 0).split() or [b"0", b"0"])[1]) / 1e9
    finally:
        os.close(file)

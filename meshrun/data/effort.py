"""How much of the time of reading is computing: who computes little while it reads waits for a disk, or for a network.

    read = measured(samples, wanted)
    read.effort                     # Effort(seconds=0.8, busy=0.02)

Where readers wait, more of them help, and more cores do not.
"""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path

from meshrun.data.samples import Effort, Read, Samples, Wanted


def measured(samples: Samples, wanted: Wanted) -> Read:
    """A micro-batch, with what it took this thread to read it."""
    began, busy = time.perf_counter(), _busy()
    read = samples[wanted]
    return replace(read, effort=Effort(time.perf_counter() - began, _busy() - busy))


def _busy() -> float:
    """Seconds that this thread has computed, or could have if a core had been free.

    Only beside a main thread is something else computed; what that one reads may have threads of its own.
    """
    alone = threading.current_thread() is threading.main_thread()
    return (time.process_time() if alone else time.thread_time()) + _kept_from_a_core()


def _kept_from_a_core() -> float:
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):  # no kernel that tells
        return 0.0

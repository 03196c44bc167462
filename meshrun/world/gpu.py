"""A GPU, opened while Python is still importing.

    opened = open_early(local_rank=0)    # returns at once
    …                                    # imports
    opened.join()

To open a GPU takes its driver up to a second, in which Python has nothing to do. What the driver has opened for a
process is what torch then finds. Without a driver nothing happens, and where it refuses, torch will say so.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading

DRIVER = "libcuda.so.1"


def open_early(local_rank: int, driver: str = DRIVER) -> threading.Thread:
    """Begin to open the GPU that the process with this place among those of its node computes on."""
    thread = threading.Thread(target=_open, args=(local_rank, driver), name="gpu", daemon=True)
    thread.start()
    return thread


def _open(local_rank: int, driver: str) -> None:
    with contextlib.suppress(OSError, AttributeError):
        cuda = ctypes.CDLL(driver)  # its calls leave the interpreter to other threads
        count, device, context = ctypes.c_int(0), ctypes.c_int(0), ctypes.c_void_p()
        if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)) or count.value == 0:
            return
        if cuda.cuDeviceGet(ctypes.byref(device), local_rank % count.value) == 0:
            cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)

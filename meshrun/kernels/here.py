"""Whether kernels written in Triton run on a device.

if available(parameter.device): ...
"""

from __future__ import annotations

import functools
import importlib.util

import torch


def available(device: torch.device) -> bool:
    """On NVIDIA GPUs that compute in bfloat16, where triton is installed."""
    return device.type == "cuda" and _runs_on(device.index if device.index is not None else torch.cuda.current_device())


@functools.cache
def _runs_on(index: int) -> bool:
    if torch.version.hip is not None or importlib.util.find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(index) >= (8, 0)

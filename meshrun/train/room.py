"""What a GPU has left, beside what a step takes.

free, taken = room(here.device)
"""

from __future__ import annotations

import torch


def room(device: torch.device) -> tuple[int, int]:
    """Bytes that nobody uses, and those that steps took at most beside what stays between them."""
    used, peak = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - used, peak - used

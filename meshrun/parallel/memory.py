"""Memory for a model that was made without values, with every parameter and buffer the object that it was.

    if cannot_stay(model) is None:        # else it must be made with its values from the start
        give_memory(model, device)

A constructor may have put a parameter elsewhere too: in a closure, in a list of its own, with a note on it that the
optimizer looks for (`weight.no_decay = True`). torch's `Module.to_empty` makes new parameters for a model on the meta
device, and all that is lost without a word. Here each one changes where it lies and stays what it is. Hooks do not come
along: torch keeps them with the old memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import torch
from torch import Tensor, nn


def cannot_stay(model: nn.Module) -> str | None:
    """Why something of this model would be lost if it were given memory, or None."""
    for name, tensor in _named(model):
        if not _is_bare(tensor):
            return f"{name} has a hook, a view, a gradient or a class of its own"
    return None


def _is_bare(tensor: Tensor) -> bool:
    hooked = tensor._backward_hooks or tensor._post_accumulate_grad_hooks
    # More than one use is a view of it, or its place in a graph.
    held = weakref.getweakrefs(tensor) or tensor._use_count() > 1 or tensor.grad is not None  # type: ignore[attr-defined]
    return type(tensor) in (nn.Parameter, Tensor) and tensor.is_leaf and not hooked and not held


@torch.no_grad()
def give_memory(model: nn.Module, device: torch.device) -> None:
    """Put all of a model on a device, without values."""
    for _, tensor in _named(model):
        notes, empty = vars(tensor), _empty_like(tensor, device)
        if isinstance(tensor, nn.Parameter):
            empty = nn.Parameter(empty, requires_grad=tensor.requires_grad)
        torch.utils.swap_tensors(tensor, empty.requires_grad_(tensor.requires_grad))
        vars(tensor).update(notes)


def _empty_like(tensor: Tensor, device: torch.device) -> Tensor:
    """As torch has it, which for a tensor without values imports an algebra system: not for one that lies in order."""
    if tensor.layout is not torch.strided or not tensor.is_contiguous():
        return torch.empty_like(tensor, device=device)
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


def _named(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Each once, also where it has several names."""
    yield from model.named_parameters()
    yield from model.named_buffers()

"""Whether a tensor is one of torch's DTensors, of which ranks hold parts: asked without their import.

    local = tensor.to_local() if is_dtensor(tensor) else tensor

`torch.distributed.tensor` imports an algebra system, which takes half as long as torch itself. Where nothing is
split over ranks, as in one process, there are plain tensors and parameters only, and it is never imported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs


def is_dtensor(tensor: Any) -> TypeIs[DTensor]:
    """Whether it is one. By types alone, so that a compiler can follow: a parameter that is a DTensor has its type."""
    if tensor is None or type(tensor) is Tensor or type(tensor) is nn.Parameter:
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)

"""Placeholders for tensors that another pipeline stage computes: their shape and type, without memory for their values.

    x = placeholder(spark, like)             # depends on `spark` as the real tensor depends on parameters
    with Writes() as writes:                 # the model's own code may write into placeholders, as in-place ReLU does
        writes.watch(x, "layer1.0")
        x.relu_()
    writes.seen                              # {"layer1.0"}

All elements of a placeholder share one number, so torch refuses to write into it; under `Writes` a write does nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only


def placeholder(spark: Tensor, like: Tensor) -> Tensor:
    """A tensor of that shape that takes no memory; it requires a gradient where the real one would."""
    if like.is_floating_point() or like.is_complex():
        found: Tensor = _Repeated.apply(spark, like.dtype, like.shape)
        return found
    return _repeated(torch.zeros((), dtype=like.dtype, device=spark.device), like.shape)


class _Repeated(torch.autograd.Function):
    """One number in a shape. Not a view as `expand` makes, which autograd refuses to change in place."""

    @staticmethod
    def forward(ctx: Any, spark: Tensor, dtype: torch.dtype, shape: torch.Size) -> Tensor:
        del ctx
        return _repeated(spark.to(dtype, copy=True), shape)


def _repeated(number: Tensor, shape: torch.Size) -> Tensor:
    empty = torch.empty(0, dtype=number.dtype, device=number.device)
    return empty.set_(number.untyped_storage(), 0, shape, [0] * len(shape))


class Writable(torch.autograd.Function):
    """The values of a leaf in the same memory, as a tensor that may be changed in place."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        del ctx
        empty = torch.empty(0, dtype=leaf.dtype, device=leaf.device)
        return empty.set_(leaf.untyped_storage(), leaf.storage_offset(), leaf.shape, leaf.stride())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        del ctx
        return gradients[0]


class Writes(TorchDispatchMode):
    """Lets a model write into placeholders, which changes nothing, and notes which watched tensors are written."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()
        """Names of watched tensors that were written."""
        self.spoiled: set[str] = set()
        """Those of them into which a NaN was written."""
        self._names: dict[int, tuple[torch.UntypedStorage, str]] = {}

    def watch(self, tensor: Tensor, name: str) -> None:
        """Note writes into a tensor or a view of it. Its storage is kept: while it lives, no other has its identity."""
        storage = tensor.untyped_storage()
        self._names[id(storage)] = storage, name

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not func._schema.is_mutable:
            return func(*args, **kwargs)
        given = dict(zip((each.name for each in func._schema.arguments), args, strict=False)) | kwargs
        changed = [
            each.name for each in func._schema.arguments if each.alias_info is not None and each.alias_info.is_write
        ]
        written = [leaf for name in changed for leaf in tree_leaves(given.get(name)) if isinstance(leaf, Tensor)]
        sources = [leaf for name, value in given.items() if name not in changed for leaf in tree_leaves(value)]
        for tensor in written:
            self._note(tensor, sources)
        if not any(map(_is_repeated, written)):
            return func(*args, **kwargs)
        # An operation in place returns the tensor that it was to change.
        return written[0] if func._schema.returns else None

    def _note(self, tensor: Tensor, sources: list[Any]) -> None:
        _, name = self._names.get(id(tensor.untyped_storage()), (None, None))
        if name is not None:
            self.seen.add(name)
            if any(isinstance(each, Tensor) and has_nan(each) for each in sources):
                self.spoiled.add(name)


_BY_SHAPE = ("new_zeros", "new_ones", "new_full", "new_empty", "zeros_like", "ones_like", "full_like", "empty_like")
"""Operations that ask a tensor for its shape and type only."""


class Uses(TorchDispatchMode):
    """Notes where a model's code computes with a module's parameters or buffers outside of the module's own forward.

    `F.linear(x, self.embed.weight)` is such a use. What has no values gives way to a placeholder there.
    """

    def __init__(self, used: Callable[[str], None]) -> None:
        super().__init__()
        self._used = used
        self._owners: dict[int, set[str]] = {}
        self._inside: list[str] = []
        """Modules that are computing, the innermost last."""

    def watch(self, name: str, module: nn.Module) -> None:
        """Note uses of a module's tensors, and know when it computes itself."""
        for tensor in (*module.parameters(), *module.buffers()):
            self._owners.setdefault(id(tensor), set()).add(name)
        forward = module.forward

        def watched(*inputs: Any, **named: Any) -> Any:
            self._inside.append(name)
            try:
                return forward(*inputs, **named)
            finally:
                self._inside.pop()

        module.forward = watched

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def given(tensor: Tensor) -> Tensor:
            owners = self._owners.get(id(tensor), set())
            if not owners or not owners.isdisjoint(self._inside):
                return tensor
            if func.overloadpacket.__name__ not in _BY_SHAPE:
                for name in owners:
                    self._used(name)
            # A module that computes gets all that it needs without values.
            return tensor if self._inside else _repeated(torch.zeros((), dtype=tensor.dtype), tensor.shape)

        args, kwargs = tree_map_only(Tensor, given, (args, kwargs or {}))
        return func(*args, **kwargs)


def has_nan(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and not tensor.is_meta and bool(tensor.isnan().any())


def _is_repeated(tensor: Tensor) -> bool:
    return any(extent > 1 and stride == 0 for extent, stride in zip(tensor.shape, tensor.stride(), strict=True))

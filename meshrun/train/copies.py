"""Copies of a model's buffers after every step, in few operations: a step that is cut off may have changed them.

    copier = Copier()                        # one a model: which tensors belong together is found once
    kept = copier(placed.own_buffers())      # a mapping of names to copies

Models with BatchNorm have many small buffers, and each copy would be an operation of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from operator import is_

import torch
from torch import Tensor


class Copies(Mapping[str, Tensor]):
    """Copies of many small tensors, in a few that are cut apart for who looks at them, which is rare."""

    def __init__(self, names: list[str], joined: list[tuple[list[str], list[int], Tensor]]) -> None:
        self._names, self._joined = names, joined
        self._apart: dict[str, Tensor] | None = None

    def __len__(self) -> int:
        return len(self._names)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __getitem__(self, name: str) -> Tensor:
        if self._apart is None:
            parts = (zip(names, _parts(whole, sizes), strict=True) for names, sizes, whole in self._joined)
            self._apart = dict(each for pairs in parts for each in pairs)
        return self._apart[name]


def _parts(whole: Tensor, sizes: list[int]) -> tuple[Tensor, ...]:
    return whole.split(sizes) if sizes else whole.unbind()


class Copier:
    """Copies a model's buffers in few operations; which of them belong together is found once."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._seen: list[Tensor] = []
        self._shapes: list[torch.Size] = []
        self._kinds: list[tuple[list[str], list[int], list[Tensor]]] = []

    @torch.no_grad()
    def __call__(self, tensors: Mapping[str, Tensor]) -> Copies:
        names, found = list(tensors), list(tensors.values())
        shapes = [each.shape for each in found]  # a module may change that of a buffer which stays the same object
        if names != self._names or shapes != self._shapes or not all(map(is_, found, self._seen)):
            self._names, self._seen, self._shapes = names, found, shapes
            self._kinds = [(alike, sizes, [tensors[name] for name in alike]) for alike, sizes in self._sorted(tensors)]
        joined = [
            (alike, sizes, torch.cat(parts) if sizes else torch.stack(parts)) for alike, sizes, parts in self._kinds
        ]
        return Copies(names, joined)

    def _sorted(self, tensors: Mapping[str, Tensor]) -> list[tuple[list[str], list[int]]]:
        """Names of rows of one type, with their lengths, and of others of one type and shape, without."""
        rows: dict[torch.dtype, tuple[list[str], list[int]]] = {}
        others: dict[tuple[torch.dtype, torch.Size], tuple[list[str], list[int]]] = {}
        for name, each in tensors.items():
            if each.dim() == 1:
                names, sizes = rows.setdefault(each.dtype, ([], []))
                names.append(name)
                sizes.append(len(each))
            else:
                others.setdefault((each.dtype, each.shape), ([], []))[0].append(name)
        return [*rows.values(), *others.values()]

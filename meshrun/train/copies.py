"""Copies of a model's buffers after every step, in few operations: a step that is cut off may have changed them.

    copier = Copier()                        # one a model: which tensors belong together is found once
    kept = copier(placed.own_buffers())      # a mapping of names to copies

Models with BatchNorm have many small buffers, and each copy would be an operation of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

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
        self._seen: list[tuple[str, torch.dtype, torch.Size]] = []
        self._kinds: list[tuple[list[str], list[int]]] = []

    @torch.no_grad()
    def __call__(self, tensors: Mapping[str, Tensor]) -> Copies:
        seen = [(name, each.dtype, each.shape) for name, each in tensors.items()]  # a module may change a shape
        if seen != self._seen:
            self._seen, self._kinds = seen, self._sorted(tensors)
        joined = []
        for alike, sizes in self._kinds:
            found = [tensors[name] for name in alike]
            joined.append((alike, sizes, torch.cat(found) if sizes else torch.stack(found)))
        return Copies(list(tensors), joined)

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

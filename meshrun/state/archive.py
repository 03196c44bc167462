"""Writes what `torch.save` writes, without the tensors in memory: a zip of a description and the tensors' bytes.

    with Archive(path) as archive:
        archive.describe({"weight": Spec("weight", torch.float32, (2, 3))}, tied={"head.weight": "weight"})
        archive.add("weight", [some_bytes, more_bytes])

The description is a pickle, as torch wants it; it names tensors and nothing else, so that `weights_only` loads it.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch._utils import _rebuild_tensor_v2, _rebuild_tensor_v3
from torch.storage import _dtype_to_storage_type_map

from meshrun.state.shards import Spec

_ALIGN = 64
_ROOT = "archive"
_DATE = (1980, 1, 1, 0, 0, 0)


class _Storage:
    """Stands for a tensor's bytes in the description."""

    def __init__(self, key: str, spec: Spec) -> None:
        # Types that came late have no storage class of their own.
        name = _dtype_to_storage_type_map().get(spec.dtype, "UntypedStorage")
        self.kind = getattr(torch, name)
        self.key = key
        self.size = spec.bytes if self.kind is torch.UntypedStorage else spec.bytes // spec.dtype.itemsize


class _Described:
    """Pickles as a tensor that lies in a storage from its beginning."""

    def __init__(self, storage: _Storage, spec: Spec) -> None:
        self.storage, self.spec = storage, spec

    def __reduce__(self) -> tuple[Any, ...]:
        strides, step = [], 1
        for extent in reversed(self.spec.shape):
            strides.append(step)
            step *= max(1, extent)
        common: tuple[Any, ...] = (self.storage, 0, self.spec.shape, tuple(reversed(strides)), False, OrderedDict())
        if self.storage.kind is torch.UntypedStorage:
            return _rebuild_tensor_v3, (*common, self.spec.dtype)
        return _rebuild_tensor_v2, common


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, _Storage):
            return "storage", obj.kind, obj.key, "cpu", obj.size
        return None


class Archive:
    """A file that torch loads as a state dict."""

    def __init__(self, path: Path) -> None:
        self._zip = zipfile.ZipFile(path, "w", zipfile.ZIP_STORED, allowZip64=True)
        self._keys: dict[str, str] = {}

    def __enter__(self) -> Archive:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._zip.close()

    def describe(self, specs: Mapping[str, Spec], tied: Mapping[str, str]) -> None:
        """Say which tensors there are; names that are tied share the bytes of others."""
        self._keys = {name: str(number) for number, name in enumerate(specs)}
        storages = {name: _Storage(self._keys[name], spec) for name, spec in specs.items()}
        state = OrderedDict((name, _Described(storages[name], spec)) for name, spec in specs.items())
        state.update({name: _Described(storages[other], specs[other]) for name, other in tied.items()})
        described = io.BytesIO()
        _Pickler(described, protocol=2).dump(state)
        self._entry("data.pkl", [described.getbuffer()])
        self._entry("byteorder", [memoryview(b"little")])
        self._entry("version", [memoryview(b"3\n")])

    def add(self, name: str, parts: Iterable[memoryview]) -> None:
        """The bytes of a tensor."""
        self._entry(f"data/{self._keys[name]}", parts)

    def _entry(self, name: str, parts: Iterable[memoryview]) -> None:
        info = zipfile.ZipInfo(f"{_ROOT}/{name}", _DATE)
        assert self._zip.fp is not None
        # A tensor in a mapped file must be aligned. Ahead of it: the header, its name, 20 bytes for large sizes, this.
        ahead = self._zip.fp.tell() + 30 + len(info.filename) + 20 + 4
        padding = -ahead % _ALIGN
        info.extra = b"FB" + padding.to_bytes(2, "little") + b"Z" * padding
        with self._zip.open(info, "w", force_zip64=True) as entry:
            for part in parts:
                entry.write(part)

"""A checkpoint's weights for other programs, from any layout, by one process that holds little of them at a time.

    to_safetensors(checkpoint, Path("model.safetensors"))
    to_hf(checkpoint, Path("folder"), config={"model_type": "llama", …}, rename=hf_name)
    to_torch(checkpoint, Path("model.pt"), tied={"head.weight": "embed.weight"})

Parameters come under the model's own names. Of a buffer each replica has its own, as running statistics are of what a
replica has seen: the mean goes out. A weight that a model uses in two places is in a checkpoint once.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshrun.state.archive import Archive
from meshrun.state.checkpoint import BadCheckpoint, Checkpoint
from meshrun.state.region import Region
from meshrun.state.shards import Spec, bytes_of, plan, write_buffers
from meshrun.state.weights import whole

PART = 64 << 20
"""Bytes of a tensor that are in memory at a time."""
MOST_IN_A_FILE = 5_000_000_000
ABOUT = {"format": "pt"}

Rename = Callable[[str], str]


@dataclass(frozen=True)
class Weight:
    """A tensor to export, and what it is made of."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    sources: tuple[str, ...]
    """Its names in the checkpoint: one, or one a replica."""

    @property
    def spec(self) -> Spec:
        return Spec(self.name, self.dtype, self.shape)


def weights_of(checkpoint: Checkpoint) -> list[Weight]:
    """The state dict of the model, less second names of tied weights."""
    sources: dict[str, list[str]] = {}
    for name in checkpoint.tensors:
        kind, _, rest = name.partition("/")
        if kind == "model":
            sources.setdefault(rest, []).append(name)
        elif kind == "buffer":
            sources.setdefault(rest.rpartition("@")[0] or rest, []).append(name)
    if not sources:
        raise BadCheckpoint(f"checkpoint {checkpoint.path} holds no model")
    found = []
    for name, names in sources.items():
        info = checkpoint.tensors[names[0]]
        found.append(Weight(name, info.dtype, info.shape, tuple(names)))
    return found


def to_safetensors(checkpoint: Checkpoint, path: Path) -> int:
    """One safetensors file; returns its bytes."""
    return _write_file(checkpoint, weights_of(checkpoint), path)


def to_hf(
    checkpoint: Checkpoint,
    folder: Path,
    config: Mapping[str, Any] | None = None,
    rename: Rename = str,
    most: int = MOST_IN_A_FILE,
) -> int:
    """A folder as Hugging Face has it: config.json, and safetensors files of a limited size with their index."""
    weights = weights_of(checkpoint)
    parts = _divided(weights, most)
    total, places = 0, {}
    for number, part in enumerate(parts, 1):
        name = "model.safetensors" if len(parts) == 1 else f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        renamed = [replace(weight, name=rename(weight.name)) for weight in part]
        total += _write_file(checkpoint, renamed, folder / name)
        places.update({weight.name: name for weight in renamed})
    if len(parts) > 1:
        size = sum(weight.spec.bytes for weight in weights)
        _write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": size}, "weight_map": places})
    if config is not None:
        _write_json(folder / "config.json", config)
    return total


def to_torch(checkpoint: Checkpoint, path: Path, tied: Mapping[str, str] | None = None) -> int:
    """What `torch.save(model.state_dict(), path)` writes; `tied` are second names of weights."""
    weights = weights_of(checkpoint)
    with whole(path) as beside, Archive(beside) as archive:
        specs = {weight.name: weight.spec for weight in weights}
        again = {name: other for name, other in (tied or {}).items() if other in specs and name not in specs}
        archive.describe(specs, again)
        for weight in weights:
            archive.add(weight.name, _parts(checkpoint, weight))
    return path.stat().st_size


def _divided(weights: Sequence[Weight], most: int) -> list[list[Weight]]:
    parts: list[list[Weight]] = [[]]
    held = 0
    for weight in weights:
        if parts[-1] and held + weight.spec.bytes > most:
            parts.append([])
            held = 0
        parts[-1].append(weight)
        held += weight.spec.bytes
    return parts


def _write_file(checkpoint: Checkpoint, weights: Sequence[Weight], path: Path) -> int:
    laid = plan((weight.spec for weight in weights), ABOUT)
    in_order = sorted(weights, key=lambda weight: laid.offsets[weight.name])

    def buffers() -> Iterator[memoryview]:
        yield memoryview(laid.header)
        for weight in in_order:
            yield from _parts(checkpoint, weight)

    with whole(path) as beside:
        write_buffers(beside, buffers(), sync=False)
    return laid.bytes


def _parts(checkpoint: Checkpoint, weight: Weight) -> Iterator[memoryview]:
    """A weight's bytes, in parts that fit into memory."""
    rows = weight.shape[0] if weight.shape else 1
    row = math.prod(weight.shape[1:]) * weight.dtype.itemsize
    at_once = max(1, PART // max(1, row))
    for first in range(0, rows, at_once):
        size = (min(at_once, rows - first), *weight.shape[1:]) if weight.shape else ()
        start = (first, *(0 for _ in weight.shape[1:])) if weight.shape else ()
        yield bytes_of(_read(checkpoint, weight, start, size))


def _read(checkpoint: Checkpoint, weight: Weight, start: tuple[int, ...], size: tuple[int, ...]) -> Tensor:
    def one(source: str) -> Tensor:
        part = torch.empty(size, dtype=weight.dtype)
        checkpoint.read(Region(source, part, weight.shape, start))
        return part

    first = one(weight.sources[0])
    if len(weight.sources) == 1 or not weight.dtype.is_floating_point:
        return first
    total = first.double()
    for source in weight.sources[1:]:
        total += one(source)
    return (total / len(weight.sources)).to(weight.dtype)


def _write_json(path: Path, document: Mapping[str, Any]) -> None:
    with whole(path) as beside:
        beside.write_text(json.dumps(dict(document), indent=2) + "\n")

"""Checkpoints, copies of state in memory, and files of weights."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from meshrun.cli.inspect import document
from meshrun.errors import UserError
from meshrun.state.checkpoint import Checkpoint
from meshrun.state.export import to_safetensors, to_torch
from meshrun.state.manifest import File, Index, Manifest, laid_out
from meshrun.state.memory import memory_files
from meshrun.state.region import Region
from meshrun.state.shards import bytes_of, write_buffers
from meshrun.state.weights import load_weights, save_weights
from tests.fuzz.data_formats import put
from tests.fuzz.engine import Format, WrongValue
from tests.fuzz.mutations import changed, of_json, written

SHARD = "rank-00000.safetensors"


@functools.cache
def _tensors() -> dict[str, torch.Tensor]:
    return {
        "model/weight": torch.arange(600, dtype=torch.float32).reshape(20, 30),
        "model/bias": torch.arange(7, dtype=torch.bfloat16),
        "optimizer/step": torch.tensor(3),
    }


def _checkpoint(folder: Path) -> tuple[bytes, bytes, bytes]:
    """The manifest, the shard and the index of a checkpoint of one rank."""
    regions = [Region.whole(name, tensor) for name, tensor in _tensors().items()]
    laid, entries = laid_out(regions, {"step": "6"})
    ordered = sorted(entries, key=lambda each: each.offset)
    buffers = [memoryview(laid.header), *(bytes_of(_tensors()[each.name]) for each in ordered)]
    blocks = write_buffers(folder / SHARD, buffers, sync=False)
    state = {"epoch": 1, "loss": float("nan"), "losses": [2.5, 1.5], "order": {"seed": 3, "position": [6, 0]}}
    index = Index(0, 6, "dp=1", 1, state, SHARD, File(laid.bytes, blocks), entries)
    return Manifest.of([index]).encode(), (folder / SHARD).read_bytes(), index.encode()


@functools.cache
def _original(folder: Path) -> tuple[bytes, bytes, bytes]:
    folder.mkdir(exist_ok=True)
    return _checkpoint(folder)


def _read_checkpoint(manifest: bytes, shard: bytes, folder: Path) -> Any:
    step = folder / "step-00000006"
    put(step, "manifest.json", manifest)
    put(step, SHARD, shard)
    checkpoint = Checkpoint.open(step)
    problems = checkpoint.verify()
    if problems:
        raise UserError(problems[0])
    found = {name: checkpoint.whole(name) for name in checkpoint.tensors}
    return checkpoint.step, checkpoint.layout, checkpoint.world, checkpoint.state, found


def _read_manifest(data: bytes, folder: Path) -> Any:
    return _read_checkpoint(data, _original(folder / "original")[1], folder)


def _inspect_and_export(data: bytes, folder: Path) -> Any:
    """What people see of a checkpoint, and what other programs get."""
    step = folder / "step-00000006"
    put(step, "manifest.json", data)
    put(step, SHARD, _original(folder / "original")[1])
    checkpoint = Checkpoint.open(step)
    shown = document(checkpoint, checkpoint.verify())
    for write, name in ((to_safetensors, "all.safetensors"), (to_torch, "all.pt")):
        write(checkpoint, folder / name)
    return json.dumps(shown)


def _read_shard(data: bytes, folder: Path) -> Any:
    return _read_checkpoint(_original(folder / "original")[0], data, folder)


def _check_same(_: bytes, value: Any) -> None:
    """What has a checksum is refused, or is what was written."""
    step, layout, world, state, tensors = value
    same = (step, layout, world, state["epoch"], state["losses"]) == (6, "dp=1", 1, 1, [2.5, 1.5])
    same = same and tensors.keys() == _tensors().keys()
    if not same or any(not torch.equal(tensors[name], each) for name, each in _tensors().items()):
        raise WrongValue("a damaged checkpoint was read, and is not what was written")


def _resealed(rng: random.Random, examples: Sequence[bytes]) -> bytes:
    """A manifest that says something else, under the right checksum."""
    body = json.loads(rng.choice(examples))["body"]
    for _ in range(rng.choice((1, 1, 2, 3))):
        body = changed(rng, body)
    text = written(rng, body).decode()
    with contextlib.suppress(ValueError, RecursionError):
        text = json.dumps(json.loads(text), separators=(",", ":"))
    digest = hashlib.sha256(text.encode()).hexdigest()
    return f'{{"format":1,"sha256":"{digest}","body":{text}}}\n'.encode()


def _read_index(data: bytes, folder: Path) -> Any:
    memory = folder / "memory"
    put(memory, SHARD, _original(folder / "original")[1])
    put(memory, "rank-00000.json", data)
    found = memory_files(memory)
    if not found:
        raise UserError("passed over")
    checkpoint = Checkpoint.from_memory([memory], found[0].step)
    return {name: checkpoint.whole(name) for name in checkpoint.tensors}


def _model() -> nn.Module:
    model = nn.Linear(30, 20)
    with torch.no_grad():
        model.weight.copy_(_tensors()["model/weight"])
        model.bias.zero_()
    return model


def _weights(folder: Path) -> list[bytes]:
    save_weights(dict(_model().named_parameters()), folder / "best.safetensors", {"step": 120, "loss": 0.07})
    return [(folder / "best.safetensors").read_bytes()]


def _read_weights(data: bytes, folder: Path) -> Any:
    model = nn.Linear(30, 20)
    about = load_weights(model, put(folder, "best.safetensors", data))
    if not isinstance(about, dict):
        raise WrongValue(f"what was written about the weights is {type(about).__name__}")
    return model.weight.sum().item()


def _of_original(place: int) -> Any:
    return lambda folder: [_checkpoint(folder)[place]]


FORMATS = [
    Format("manifest", _of_original(0), _read_manifest, of_json, _check_same),
    Format("manifest-resealed", _of_original(0), _read_manifest, _resealed),
    Format("checkpoint-shown", _of_original(0), _inspect_and_export, _resealed),
    Format("shard", _of_original(1), _read_shard, check=_check_same),
    Format("memory-index", _of_original(2), _read_index, _resealed),
    Format("weights", _weights, _read_weights),
]

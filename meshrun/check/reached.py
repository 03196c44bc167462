"""What a run has come to, and how that differs from what another one has.

    reached = Reached.read(run)
    others(reached, reference, tolerance=0.0)      # ["losses of result.json"]; nothing where all is bitwise the same
    differences(reached.ids, reference.ids)        # samples used too rarely, and too often

A run whose number of ranks has changed on the way adds in another order, so that its last bits are others: for such a
one there is a tolerance. What it has read must be the same to the last sample in any case.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshrun import strict_json
from meshrun.config import RunDirectory
from meshrun.observe.events import read_events

if TYPE_CHECKING:
    from torch import Tensor

TOLD = ("losses", "grad_norms", "eval", "best", "skipped", "samples", "sample_ids_sha256")


@dataclass(frozen=True)
class Reached:
    """What a run has come to."""

    weights: dict[str, Path]
    result: dict[str, Any]
    ids: dict[int, Counter[int]]
    """How often each sample was used in a step: in the last computation of it, the one that counts."""

    @classmethod
    def read(cls, run: RunDirectory) -> Reached:
        weights = {path.name: path for path in sorted(run.weights.glob("*.safetensors"))}
        return cls(weights, strict_json.loads((run.path / "result.json").read_text()), used_ids(run))


def others(reached: Reached, reference: Reached, tolerance: float) -> list[str]:
    """What is not the same, by name."""
    weights = [
        name
        for name, path in reference.weights.items()
        if name not in reached.weights or not _same_weights(reached.weights[name], path, tolerance)
    ]
    told = [name for name in TOLD if not alike(reached.result[name], reference.result[name], tolerance)]
    return [*weights, *(f"{name} of result.json" for name in told)]


def alike(found: Any, wanted: Any, tolerance: float) -> bool:
    """Whether two documents say the same, with fractions as near to each other as the tolerance."""
    if isinstance(wanted, dict):
        same = isinstance(found, dict) and found.keys() == wanted.keys()
        return same and all(alike(found[name], wanted[name], tolerance) for name in wanted)
    if isinstance(wanted, list):
        same = isinstance(found, list) and len(found) == len(wanted)
        return same and all(alike(*pair, tolerance) for pair in zip(found, wanted, strict=True))
    if isinstance(wanted, float) and isinstance(found, float) and tolerance:
        return math.isclose(found, wanted, rel_tol=tolerance, abs_tol=tolerance)
    return bool(found == wanted)


def _same_weights(found: Path, wanted: Path, tolerance: float) -> bool:
    return tensors_of(found) == tensors_of(wanted) or (tolerance > 0 and _near(found, wanted, tolerance))


def _near(found: Path, wanted: Path, tolerance: float) -> bool:
    """Whether every tensor is as near to the other as the tolerance, measured by its largest value."""
    from safetensors.torch import load_file

    one, other = load_file(found), load_file(wanted)
    return one.keys() == other.keys() and all(_near_tensor(one[name], other[name], tolerance) for name in other)


def _near_tensor(found: Tensor, wanted: Tensor, tolerance: float) -> bool:
    """Whole numbers and truth values must be the same, as must infinities, which are no measure for other values."""
    if (found.shape, found.dtype) != (wanted.shape, wanted.dtype):
        return False
    changed = found != wanted
    if not (found.is_floating_point() and changed.any()):
        return not changed.any()
    apart, sizes = (found - wanted)[changed].abs().max(), wanted[wanted.isfinite()].abs()
    return float(apart) <= tolerance * (float(sizes.max()) if sizes.numel() else 0.0)


def tensors_of(path: Path) -> bytes:
    """What a safetensors file holds, less what is written about it: header and bytes of all tensors."""
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = strict_json.loads(data[8:end])
    header.pop("__metadata__", None)
    return json.dumps(header, sort_keys=True).encode() + data[end:]


def used_ids(run: RunDirectory) -> dict[int, Counter[int]]:
    """The samples of each step: of each rank, those that it said last before it computed the step.

    Ranks that the run no longer had when a step was computed for the last time do not count in it.
    """
    worlds = _worlds(run)
    said = [_said(run, rank) for rank in range(max(worlds.values(), default=0))]
    return {
        step: Counter(id for rank in range(ranks) for id in said[rank].get(step, ())) for step, ranks in worlds.items()
    }


def _worlds(run: RunDirectory) -> dict[int, int]:
    """How many ranks a step had when it was computed for the last time."""
    worlds, now = {}, 0
    for event in read_events(run.events_of(0)):
        if event["kind"] == "start":
            now = event["world"]
        elif event["kind"] == "ids":
            worlds[event["step"]] = now
    return worlds


def _said(run: RunDirectory, rank: int) -> dict[int, list[int]]:
    """The samples of each step that a rank said last."""
    return {event["step"]: event["ids"] for event in read_events(run.events_of(rank)) if event["kind"] == "ids"}


def differences(found: dict[int, Counter[int]], wanted: dict[int, Counter[int]]) -> tuple[int, int]:
    """How many samples were used too rarely, and how many too often."""
    nothing: Counter[int] = Counter()
    steps = found.keys() | wanted.keys()
    lost = sum((wanted.get(step, nothing) - found.get(step, nothing)).total() for step in steps)
    repeated = sum((found.get(step, nothing) - wanted.get(step, nothing)).total() for step in steps)
    return lost, repeated

"""Samples that could not be read and were left out: who has met which, written down before the step is computed.

    bad = BadSamples(run / "bad-samples", rank=3)
    bad.add("train", step=12, samples=((17, "sample 17 of train (cat.jpg) cannot be read: …"),))
    read_bad(run / "bad-samples")          # {"count": 1, "samples": [{"set": "train", "id": 17, "why": "…"}]}

Ranks that share samples write the same, and a step that is computed again is written again: each is counted once.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshrun import strict_json
from meshrun.observe.events import LineFile

SHOWN = 20
NAMED = 5


@dataclass(frozen=True)
class _Line:
    """A sample that was left out, as it is written down."""

    set: str
    step: int
    id: int
    why: str


class BadSamples:
    """What one rank has left out."""

    def __init__(self, folder: Path | None, rank: int) -> None:
        self._path = None if folder is None else folder / f"rank-{rank:05d}.jsonl"
        self._file: LineFile | None = None

    def add(self, name: str, step: int, samples: tuple[tuple[int, str], ...]) -> None:
        """Samples of a set, by number, with the reason for each. `step` counts from 1."""
        if not samples or self._path is None:
            return
        self._file = self._file or LineFile(self._path)
        for number, why in samples:
            self._file.add(json.dumps({"set": name, "step": step, "id": number, "why": why}).encode())


def read_bad(folder: Path) -> dict[str, Any] | None:
    """All that the ranks of a run have left out: how often, and the first samples with the reason; None if nothing."""
    met: set[tuple[str, int, int]] = set()
    why: dict[tuple[str, int], str] = {}
    for path in sorted(folder.glob("rank-*.jsonl")):
        for line in path.read_bytes().splitlines():
            try:
                found = strict_json.of_type(_Line, strict_json.loads(line), "it")
            except ValueError:  # the last line of a rank that was killed
                continue
            met.add((found.set, found.step, found.id))
            why.setdefault((found.set, found.id), found.why)
    shown = [{"set": name, "id": number, "why": text} for (name, number), text in sorted(why.items())[:SHOWN]]
    return {"count": len(met), "samples": shown} if met else None


def left_out(bad: dict[str, Any], folder: Path) -> str:
    """A sentence for the end of a run that has left samples out."""
    times, first = bad["count"], bad["samples"][0]
    named = ", ".join(f"{each['set']} {each['id']}" for each in bad["samples"][:NAMED])
    more = ", …" if len(bad["samples"]) > NAMED else ""
    # What to do about it, the end of such sentences, was done.
    why = first["why"].rpartition("; ")[0] if first["why"].endswith("(--skip-bad-samples)") else first["why"]
    return (
        f"{times} time{'s' * (times > 1)} a sample was left out, since it cannot be read (--skip-bad-samples): "
        f"{named}{more}; of the first: {why}; all are in {folder}"
    )

"""What was left to meshrun of how a step is computed, and what it has decided, in words.

    decisions({"compile": False, "compile_why": "the device is cpu"})     # [Decision("Compiled", "no", "the device …")]
    in_a_line({"precision": "bf16", "compile": True})                     # "in bf16, compiled"; "" where all is plain

Whoever decides something puts it under a name of its own into `placed.chosen`, its reason beside it under that name and
`_why`. A name that is not known here is shown too, as it is written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

NAMES = {
    "precision": "Precision",
    "compile": "Compiled",
    "recompute": "Activations recomputed",
    "ample": "Gated activations kept",
    "attention": "Attention",
    "channels_last": "Channels last",
    "update": "Optimizer's step",
    "states": "Optimizer's state",
    "update_in_backward": "Updated in backward",
    "graphs": "CUDA graphs",
}
"""In the order in which they are shown."""
WORDS = {
    ("compile", "tried"): "where it could be",
    ("recompute", "auto"): "not settled yet",
    ("recompute", "none"): "none",
    ("recompute", "full"): "every segment",
    ("attention", "cudnn"): "cuDNN's",
    ("attention", "torch"): "torch's",
    ("update", "torch"): "torch's own",
    ("update", "fused"): "torch's own, fused",
    ("update", "one-pass"): "in one pass over memory",
    ("states", "8bit"): "8 bits",
    ("graphs", "auto"): "where it pays",
}
IN_A_LINE = {
    ("precision", "bf16"): "in bf16",
    ("precision", "float8"): "in float8",
    ("compile", True): "compiled",
    ("compile", "tried"): "compiled where it could be",
    ("attention", "cudnn"): "with cuDNN's attention",
    ("channels_last", True): "with channels last",
    ("update", "one-pass"): "updated in one pass",
    ("states", "8bit"): "with its optimizer's state in 8 bits",
    ("update_in_backward", True): "updated in backward",
    ("graphs", True): "replayed as CUDA graphs",
}
"""What is worth a word where there is little room."""


@dataclass(frozen=True)
class Decision:
    """What was decided, and why."""

    name: str
    value: str
    why: str


def decisions(chosen: Mapping[str, Any]) -> list[Decision]:
    """Every decision that was recorded."""
    decided = {name: value for name, value in chosen.items() if value is not None and not name.endswith("_why")}
    ordered = [name for name in NAMES if name in decided] + [name for name in decided if name not in NAMES]
    return [
        Decision(
            NAMES.get(name, name.replace("_", " ").capitalize()),
            _value(name, decided[name]),
            str(chosen.get(f"{name}_why") or ""),
        )
        for name in ordered
    ]


def in_a_line(chosen: Mapping[str, Any]) -> str:
    """What makes a step another one than torch computes by itself."""
    said = [words for (name, value), words in IN_A_LINE.items() if chosen.get(name) == value]
    level = chosen.get("recompute", "none")
    return ", ".join([*said, *([f"activations computed twice: {level}"] if level not in ("none", "auto") else [])])


def _value(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return WORDS.get((name, str(value)), str(value))

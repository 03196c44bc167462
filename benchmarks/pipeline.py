"""How long the ranks of a pipeline are idle, against the formula of its schedule; drawn, too.

    python benchmarks/pipeline.py
    python benchmarks/pipeline.py --svg pipelines.svg --json

Eight equal segments that sleep instead of computing are cut over 2 and 4 ranks, so that ranks need no cores of their
own: forward for one unit a micro-batch and rank, backward for two, or one and one where the schedule splits it (zb).
Segments note when they sleep. A rank is busy while its segments sleep, and idle else, be it that it waits for a message
or that meshrun is at work; a step lasts from the first rank's first sleep to the last rank's last. Formulas are of
p ranks with c chunks each, and m micro-batches:

    gpipe, 1f1b    (p-1) / (m + p-1)
    interleaved    (p-1) / (c m + p-1)
    zb             (p-1) / (3 m + p-1)
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Hashable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from common import on_ranks, print_table
from torch import Tensor, nn

from meshrun import Experiment, Loss, Trainer
from meshrun.layout import parse
from meshrun.mesh import Here
from meshrun.parallel.later import Later
from meshrun.parallel.meshed import Meshed
from meshrun.parallel.pipeline import Event
from meshrun.parallel.schedule import chunks_of, idle_share

SEGMENTS, WIDTH, MICRO_BATCHES = 8, 8, 2
"""Micro-batches a step are so many a rank."""
VARIANTS = ("gpipe", "1f1b", "interleaved", "zb")
BAR = 0.10


def main() -> int:
    options = parsed()
    if options.unit < 5 or options.steps < 1:
        print("--unit must be at least 5 ms and --steps at least 1", file=sys.stderr)
        return 2
    rows, drawings = [], []
    for layout in (f"pp={ranks}:{variant}" for ranks in (2, 4) for variant in VARIANTS):
        of_ranks = on_ranks(layout, recorded, options.unit / 1e3, options.steps)
        steps = [list(ranks) for ranks in zip(*of_ranks, strict=True)]
        rows.append(summary(layout, steps))
        drawings.append((layout, steps[-1]))
    result = {
        "rows": rows,
        "ratios": {row["layout"]: row["idle"] / row["formula"] for row in rows},
        "bar": BAR,
        "setting": {"unit_ms": options.unit, "steps": options.steps},
    }
    if options.svg:
        options.svg.write_text(svg(drawings))
    if options.json:
        print(json.dumps(result, indent=2))
    else:
        show(result, drawings)
    return 0


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--unit", type=float, default=200, help="ms of a micro-batch's forward pass on a rank (200)")
    parser.add_argument("--steps", type=int, default=3, help="steps that are measured, after one that is not (3)")
    parser.add_argument("--svg", type=Path, help="draw the last step of every schedule into this file")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    return parser.parse_args()


class Busy(NamedTuple):
    """A pass of a micro-batch through a stage: forward (F), backward (B), or its halves for inputs (I), weights (W)."""

    kind: str
    stage: int
    piece: int
    began: float
    ended: float


SLEEPS: list[tuple[float, float]] = []
"""When this rank's segments were asleep."""


def sleep(seconds: float) -> None:
    began = time.perf_counter()
    time.sleep(seconds)
    SLEEPS.append((began, time.perf_counter()))


class Slept(torch.autograd.Function):
    """Passes its input on, and takes its time."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, forward: float, backward: float) -> Tensor:
        ctx.seconds = backward
        if not inputs.is_meta:
            sleep(forward)
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        sleep(ctx.seconds)
        return gradients[0], None, None


class Sleeper(nn.Module):
    """A segment. Its matrix is what zb puts off the gradient of, and with it that half of the time."""

    def __init__(self, forward: float, backward: float) -> None:
        super().__init__()
        self.times = forward, backward
        # Before the matrix, so that the first segment's matrix too has inputs that need a gradient.
        self.shift = nn.Parameter(torch.zeros(WIDTH))
        self.matrix = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        slept: Tensor = Slept.apply(self.matrix(inputs + self.shift), *self.times)
        return slept


def sleep_for_weights(seconds: float) -> None:
    """Let the gradient of each matrix that was put off take that long when its turn comes."""
    plainly = Later.now

    def now(self: Later, place: Hashable) -> None:
        for _ in self._left.get(place, ()):
            sleep(seconds)
        plainly(self, place)

    Later.now = now  # type: ignore[method-assign]


class Points:
    """Samples that are all alike."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.ones(WIDTH), torch.zeros(())


def recorded(here: Here, unit: float, steps: int) -> list[list[Busy]]:
    """One rank: what it was busy with, a list a step."""
    ranks, splits = here.layout.pp, here.layout.pp_variant == "zb"
    each = unit * ranks / SEGMENTS
    if splits:
        sleep_for_weights(each)
    experiment = Experiment(
        model=lambda: nn.Sequential(*(Sleeper(each, each if splits else 2 * each) for _ in range(SEGMENTS))),
        train=Points(),
        loss=lambda outputs, _: Loss(outputs.square().sum(), len(outputs)),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0),
        batch=MICRO_BATCHES * ranks,
        micro=1,
        steps=1 + steps,
    )
    trainer = Trainer(experiment, here)
    assert isinstance(trainer.placed, Meshed)
    pipeline = trainer.placed.pipeline
    found = []
    for _ in trainer.steps():
        found.append(list(busy(pipeline.events or [])))
        pipeline.events = []
        SLEEPS.clear()
        dist.barrier()
    return found[1:]


def busy(events: Iterable[Event]) -> Iterator[Busy]:
    """Of each recorded pass, the time from its first sleep to its last: before and after it, it waits and sends."""
    for action, began, _, ended in events:
        inside = [each for each in SLEEPS if began <= each[0] and each[1] <= ended]
        if inside:
            yield Busy(action.kind, action.stage, action.piece, inside[0][0], inside[-1][1])


def summary(layout: str, steps: list[list[list[Busy]]]) -> dict[str, Any]:
    """The row of a layout, from what each rank did in each step."""
    parsed = parse(layout)
    idle = [1 - sum(map(length, every(step))) / (len(step) * duration(step)) for step in steps]
    pieces = MICRO_BATCHES * parsed.pp
    formula = idle_share(parsed.pp_variant, parsed.pp, chunks_of(parsed), pieces)
    row = {"layout": layout, "micro_batches": pieces, "idle": statistics.median(idle), "formula": formula}
    return row | {"idle_of_steps": idle, "step_ms": 1e3 * statistics.median(map(duration, steps))}


def every(ranks: list[list[Busy]]) -> list[Busy]:
    return [each for rank in ranks for each in rank]


def length(each: Busy) -> float:
    return each.ended - each.began


def duration(ranks: list[list[Busy]]) -> float:
    """Of a step. All ranks read the same clock."""
    return max(each.ended for each in every(ranks)) - min(each.began for each in every(ranks))


def show(result: dict[str, Any], drawings: list[tuple[str, list[list[Busy]]]]) -> None:
    for name, ranks in drawings:
        print(f"{name}\n{text(ranks)}\n")
    print("forward 0 1 2 …, backward a b c …, gradients of weights A B C … of micro-batches; idle .\n")
    rows = []
    for row in result["rows"]:
        ratio = result["ratios"][row["layout"]]
        verdict = "ok" if abs(ratio - 1) <= result["bar"] else "MISSED"
        figures = (f"{100 * row['idle']:.2f} %", f"{100 * row['formula']:.2f} %", f"{ratio:.3f}", verdict)
        rows.append((row["layout"], str(row["micro_batches"]), f"{row['step_ms']:,.0f}", *figures))
    print_table(("layout", "micro-batches", "ms a step", "idle", "formula", "ratio", f"within {BAR}"), rows)


def text(ranks: list[list[Busy]], width: int = 110) -> str:
    """A line a rank, a character an equal part of the step."""
    start, whole = min(each.began for each in every(ranks)), duration(ranks)
    lines = []
    for number, rank in enumerate(ranks):
        line = ["."] * width
        for each in rank:
            letter = {"F": "0", "W": "A"}.get(each.kind, "a")
            first, last = ((moment - start) / whole * width for moment in (each.began, each.ended))
            for place in range(round(first), round(last)):
                line[place] = chr(ord(letter) + each.piece)
        lines.append(f"  rank {number} {''.join(line)}")
    return "\n".join(lines)


COLOURS = {"F": "#7aa6da", "B": "#e5986c", "I": "#e5986c", "W": "#e9cf6d"}


def svg(drawings: list[tuple[str, list[list[Busy]]]]) -> str:
    """All schedules under each other, with one scale of time."""
    scale = 1000 / max(duration(ranks) for _, ranks in drawings)
    parts: list[str] = []
    y = 10
    for name, ranks in drawings:
        start = min(each.began for each in every(ranks))
        parts.append(f'<text x="10" y="{y + 12}" font-weight="bold">{name}</text>')
        y += 18
        for number, rank in enumerate(ranks):
            parts.append(f'<text x="10" y="{y + 14}">rank {number}</text>')
            parts.append(f'<rect x="70" y="{y}" width="{duration(ranks) * scale:.1f}" height="20" fill="#eeeeee"/>')
            for each in rank:
                x, wide = 70 + (each.began - start) * scale, length(each) * scale
                about = f"{each.kind} of micro-batch {each.piece} on stage {each.stage}, {1e3 * length(each):.1f} ms"
                parts.append(
                    f'<rect x="{x:.1f}" y="{y}" width="{wide:.1f}" height="20" fill="{COLOURS[each.kind]}" '
                    f'stroke="white" stroke-width="0.5"><title>{about}</title></rect>'
                    f'<text x="{x + wide / 2:.1f}" y="{y + 14}" text-anchor="middle">{each.piece}</text>'
                )
            y += 22
        y += 12
    legend = "forward blue, backward orange, gradients of weights yellow, idle grey; numbers are micro-batches"
    parts.append(f'<text x="10" y="{y + 12}">{legend}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="1090" height="{y + 30}" font-family="sans-serif" '
        f'font-size="11"><rect width="100%" height="100%" fill="white"/>\n{"".join(parts)}\n</svg>\n'
    )


if __name__ == "__main__":
    sys.exit(main())

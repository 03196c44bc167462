"""Curves over steps as inline SVG: pure functions from numbers to text.

    curve(Curve("Loss", steps, losses, trend=smooth(losses, window(len(losses))), log=True))

A drawing takes the width of its place without scaling its text: lines live in a stretched inner SVG, labels are placed
in per cent. It is complete as it stands; `SCRIPT` adds that the pointer shows step and value. A million steps cost no
more than `MOST` points, which hold the extremes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate, pairwise

MOST = 600
"""Points of a line."""
MOST_MARKS = 100
TINIEST, HUGEST = 1e-100, 1e100
"""What is drawn lies between them or is zero: beyond them the arithmetic of axes overflows."""
LOG_FROM = 20
"""Largest over smallest value from which a logarithmic axis shows more."""

STYLE = """
.curve { margin: 0; min-width: 0; break-inside: avoid; }
.curve output { display: block; }
@media (min-width: 45rem) { .tall figcaption { display: flex; justify-content: space-between; align-items: baseline; } }
.curve output, .legend { color: var(--muted); font-size: .8125rem; font-variant-numeric: tabular-nums; }
.legend { display: flex; flex-wrap: wrap; gap: .125rem 1rem; margin-top: .25rem; }
.legend svg { width: 18px; height: 10px; margin-right: .375rem; overflow: visible; }
.plot { padding: 2rem .75rem 1.75rem 3rem; }
.plot > svg { display: block; width: 100%; height: 11rem; overflow: visible; touch-action: pan-y; }
.tall .plot > svg { height: 20rem; }
.plot text { fill: var(--muted); font-size: 11px; font-variant-numeric: tabular-nums; }
.grid { stroke: var(--line); }
.axis { stroke: var(--muted); }
.values, .trend { fill: none; stroke: var(--accent); stroke-width: 1.75; stroke-linejoin: round;
  stroke-linecap: round; }
.faint { stroke-width: 1; opacity: .35; }
.mark { fill: var(--ink); stroke: var(--ink); stroke-width: 1.5; }
.mark.hollow { fill: var(--paper); }
.start { stroke: var(--muted); stroke-width: 1.5; stroke-dasharray: 4 3; }
.cursor { visibility: hidden; pointer-events: none; }
.cursor line { stroke: var(--muted); }
.cursor circle { fill: var(--accent); stroke: var(--paper); stroke-width: 1.5; }
"""

SCRIPT = """
for (const plot of document.querySelectorAll(".plot")) {
  const steps = plot.dataset.steps.split(" "), values = plot.dataset.values.split(" ");
  const numbers = plot.querySelector(".values").getAttribute("d").slice(1).split(" ").map(Number);
  const svg = plot.querySelector("svg"), cursor = plot.querySelector(".cursor");
  const output = plot.parentElement.querySelector("output"), resting = output.textContent;
  const read = event => {
    const box = svg.getBoundingClientRect(), x = 1000 * (event.clientX - box.left) / box.width;
    let best = 0;
    steps.forEach((_, i) => { if (Math.abs(numbers[2 * i] - x) < Math.abs(numbers[2 * best] - x)) best = i; });
    const at = [numbers[2 * best] / 10 + "%", numbers[2 * best + 1] / 10 + "%"];
    const [line, dot] = cursor.children;
    line.setAttribute("x1", at[0]); line.setAttribute("x2", at[0]);
    dot.setAttribute("cx", at[0]); dot.setAttribute("cy", at[1]);
    cursor.style.visibility = "visible";
    output.textContent = "step " + steps[best] + ": " + values[best];
  };
  plot.addEventListener("pointermove", read);
  plot.addEventListener("pointerdown", read);
  plot.addEventListener("pointerleave", () => { cursor.style.visibility = "hidden"; output.textContent = resting; });
}
"""

_SHAPES = (
    ("M-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0z", "mark"),
    ("M-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0z", "mark hollow"),
    ("M-4 -4h8v8h-8z", "mark"),
    ("M-4 -4h8v8h-8z", "mark hollow"),
    ("M0 -5l5 5l-5 5l-5 -5z", "mark"),
    ("M0 -5l5 5l-5 5l-5 -5z", "mark hollow"),
)


@dataclass(frozen=True)
class Marks:
    """Single points beside a line, under a name."""

    name: str
    steps: Sequence[float]
    values: Sequence[float]


@dataclass(frozen=True)
class Start:
    """A step after which a run was started anew."""

    step: float
    name: str


@dataclass(frozen=True)
class Curve:
    """Drawable values over ascending steps. `trend` has a value for each of them, or none."""

    title: str
    steps: Sequence[float]
    values: Sequence[float]
    trend: Sequence[float] = ()
    trend_name: str = ""
    """Without it there is no key to the lines: one curve on a page is enough to explain them."""
    marks: Sequence[Marks] = ()
    starts: Sequence[Start] = ()
    log: bool = False
    """The axis may be logarithmic; it is where the values span a wide range."""
    from_zero: bool = False
    tall: bool = False


@dataclass(frozen=True)
class Scale:
    """Values to their place between 0 and 1."""

    low: float
    high: float
    log: bool
    ticks: list[tuple[float, str]]

    def __call__(self, value: float) -> float:
        if self.log:
            return (math.log(value) - math.log(self.low)) / (math.log(self.high) - math.log(self.low))
        return (value - self.low) / (self.high - self.low)


def thin(values: Sequence[float], most: int = MOST) -> list[int]:
    """Indices of at most `most` values: the first, the last, and the smallest and largest of every bucket between."""
    if len(values) <= most:
        return list(range(len(values)))
    buckets = (most - 2) // 2
    edges = [len(values) * each // buckets for each in range(buckets + 1)]
    kept = {0, len(values) - 1}
    for low, high in pairwise(edges):
        kept.add(min(range(low, high), key=values.__getitem__))
        kept.add(max(range(low, high), key=values.__getitem__))
    return sorted(kept)


def drawable(value: float) -> bool:
    """Whether a value has a place on an axis."""
    return value == 0 or TINIEST < abs(value) < HUGEST


def window(length: int) -> int:
    """How many of so many values a smoothed one stands for: odd, 1 where there is too little to smooth."""
    return 2 * (length // 50) + 1 if length >= 50 else 1


def smooth(values: Sequence[float], width: int) -> list[float]:
    """Means over a centred window: narrower towards the start, where values change fast, one-sided at the end."""
    sums = list(accumulate(values, initial=0.0))
    spans = [(max(0, at - width // 2), min(len(values), at + min(width // 2, at) + 1)) for at in range(len(values))]
    return [(sums[high] - sums[low]) / (high - low) for low, high in spans]


def short(value: float) -> str:
    """A number to be read: four digits, or all of a large one."""
    if abs(value) >= 1000:
        return f"{value:,.0f}" if abs(value) < 1e9 else f"{value:.3e}"
    return _plain_exponent(f"{value:.4g}")


def curve(what: Curve) -> str:
    """The curve as a figure; a sentence where there is nothing to draw."""
    tall = " tall" if what.tall else ""
    title = f"<h3>{escape(what.title)}</h3>"
    if not what.values:
        nothing = '<p class="none">Nothing recorded.</p>'
        return f'<figure class="curve{tall}"><figcaption>{title}</figcaption>{nothing}</figure>'
    across, up = _across(what), _up(what)
    read = thin(what.values) if len(what.values) > 1 else [0, 0]
    ends = {"last": what.values[-1], "lowest": min(what.values), "highest": max(what.values)}
    said = ", ".join(
        f"{name} {short(value)}" for name, value in ends.items() if name == "last" or value != ends["last"]
    )
    steps = " ".join(f"{what.steps[index]:,}" for index in read)
    values = " ".join(short(what.values[index]) for index in read)
    return (
        f'<figure class="curve{tall}"><figcaption>{title}<output>{said}</output></figcaption>{_legend(what)}'
        f'<div class="plot" data-steps="{steps}" data-values="{values}">'
        f'<svg role="img" aria-label="{escape(what.title)} over steps: {said}">'
        f"{_axes(across, up, what)}{_starts(what, across)}"
        '<svg viewBox="0 0 1000 1000" preserveAspectRatio="none" width="100%" height="100%" overflow="visible">'
        f"{_lines(what, across, up, read)}</svg>"
        f"{''.join(_marks(each, index, across, up) for index, each in enumerate(what.marks))}"
        '<g class="cursor"><line y1="0" y2="100%"/><circle r="4.5"/></g>'
        "</svg></div></figure>"
    )


def linear(low: float, high: float, most: int = 5) -> Scale:
    """A scale between round numbers, with a tick at each end."""
    size = max(abs(low), abs(high))
    if high - low <= 1e-12 * size:
        # Nothing but rounding between them: a level, drawn in the middle.
        low, high = (low - size / 10, high + size / 10) if size else (0.0, 1.0)
    step = _round_step((high - low) / (most - 1))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = [each * step for each in range(first, last + 1)]
    return Scale(ticks[0], ticks[-1], False, [(tick, _tick(tick, step)) for tick in ticks])


def logarithmic(low: float, high: float) -> Scale:
    """A scale between values of 1, 2 and 5 times a power of ten; only such powers where there are many."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1, 2, 5) if high / low < 1000 else (1,)
    every = max(1, len(decades) // 6)
    candidates = [factor * 10.0**decade for decade in decades[::every] for factor in factors]
    if candidates[-1] < high:
        candidates.append(10.0 ** (decades[::every][-1] + every))
    bottom = max(each for each in candidates if each <= low * (1 + 1e-9))
    top = min(each for each in candidates if each >= high * (1 - 1e-9))
    ticks = [(each, _tick(each, each)) for each in candidates if bottom <= each <= top]
    return Scale(bottom, top, True, ticks)


def _across(what: Curve) -> Scale:
    """The steps that were made, from edge to edge: round ticks only inside."""
    low, high = what.steps[0], what.steps[-1]
    if low == high:
        return Scale(low - 0.5, high + 0.5, False, [(low, _tick(low, 1))])
    step = max(1.0, _round_step((high - low) / 6, (1, 2, 2.5, 5, 10) if high - low >= 60 else (1, 2, 5, 10)))
    ticks = [each * step for each in range(math.ceil(low / step), math.floor(high / step) + 1)]
    return Scale(low, high, False, [(tick, _tick(tick, step)) for tick in ticks])


def _up(what: Curve) -> Scale:
    every = [*what.values, *(value for marks in what.marks for value in marks.values)]
    low, high = min(every), max(every)
    if what.log and low > TINIEST and high / low > LOG_FROM:
        return logarithmic(low, high)
    return linear(min(low, 0.0) if what.from_zero else low, max(high, 0.0) if what.from_zero else high)


def _round_step(least: float, factors: Sequence[float] = (1, 2, 5, 10)) -> float:
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in factors if factor * power >= least * (1 - 1e-9))


def _tick(value: float, step: float) -> str:
    if abs(value) < step / 2:
        return "0"
    for least, size, letter in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if least <= abs(value) < 1e12:
            return f"{value / size:.6g}{letter}"
    if step < 1e-4 or abs(value) >= 1e12:
        digits, exponent = f"{value:.2e}".split("e")
        return f"{float(digits):g}e{int(exponent)}"
    return f"{value:,.{max(0, -math.floor(math.log10(step) + 1e-9))}f}"


def _plain_exponent(text: str) -> str:
    return text.replace("e-0", "e-").replace("e+0", "e+")


def _percent(share: float) -> str:
    return f"{100 * share:.2f}%"


def _axes(across: Scale, up: Scale, what: Curve) -> str:
    parts = []
    for value, label in up.ticks:
        y = _percent(1 - up(value))
        parts.append(f'<line class="grid" x1="0" x2="100%" y1="{y}" y2="{y}"/>')
        parts.append(f'<text x="-8" y="{y}" dy="4" text-anchor="end">{label}</text>')
    parts.append('<line class="axis" x1="0" x2="100%" y1="100%" y2="100%"/>')
    for value, label in across.ticks:
        parts.append(
            f'<svg x="{_percent(across(value))}" y="100%" overflow="visible"><path class="axis" d="M0 0v4"/>'
            f'<text y="17" text-anchor="middle">{label}</text></svg>'
        )
    name = escape(what.title[:1].lower() + what.title[1:]) + (" (log)" if up.log else "")
    parts.append(f'<text x="-48" y="-14">{name}</text>')
    parts.append('<text x="-8" y="100%" dy="17" text-anchor="end">step</text>')
    return "".join(parts)


def _lines(what: Curve, across: Scale, up: Scale, read: list[int]) -> str:
    parts = [_line("values faint" if what.trend else "values", what.steps, what.values, read, across, up)]
    if what.trend:
        parts.append(_line("trend", what.steps, what.trend, thin(what.trend), across, up))
    return "".join(parts)


def _line(kind: str, steps: Sequence[float], values: Sequence[float], kept: list[int], across: Scale, up: Scale) -> str:
    points = " ".join(f"{1000 * across(steps[each]):.1f} {1000 * (1 - up(values[each])):.1f}" for each in kept)
    return f'<path class="{kind}" vector-effect="non-scaling-stroke" d="M{points}"/>'


def _marks(marks: Marks, index: int, across: Scale, up: Scale) -> str:
    outline, kind = _SHAPES[index % len(_SHAPES)]
    parts = []
    for each in thin(marks.values, MOST_MARKS):
        step, value = marks.steps[each], marks.values[each]
        parts.append(
            f'<svg x="{_percent(across(step))}" y="{_percent(1 - up(value))}" overflow="visible">'
            f'<path class="{kind}" d="{outline}">'
            f"<title>{escape(marks.name)}, step {step:,}: {short(value)}</title></path></svg>"
        )
    return "".join(parts)


def _starts(what: Curve, across: Scale) -> str:
    inside = [start for start in what.starts if what.steps[0] <= start.step <= what.steps[-1]]
    return "".join(
        f'<line class="start" x1="{_percent(across(start.step))}" x2="{_percent(across(start.step))}" y1="0" y2="100%">'
        f"<title>{escape(start.name)}, after step {start.step:,}</title></line>"
        for start in inside[:MOST_MARKS]
    )


def _legend(what: Curve) -> str:
    keys = []
    if what.trend_name:
        keys.append(('<path class="values faint" d="M0 5h18"/>', "each step"))
        keys.append(('<path class="trend" d="M0 5h18"/>', what.trend_name))
    for index, marks in enumerate(what.marks):
        outline, kind = _SHAPES[index % len(_SHAPES)]
        keys.append((f'<path class="{kind}" transform="translate(9 5)" d="{outline}"/>', marks.name))
    if what.starts:
        keys.append(('<path class="start" d="M9 -2v14"/>', "started anew"))
    drawn = "".join(f'<span><svg aria-hidden="true">{key}</svg>{escape(name)}</span>' for key, name in keys)
    return f'<div class="legend">{drawn}</div>' if keys else ""

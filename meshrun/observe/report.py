"""A run as one page that needs nothing but itself: what it reached, how it went, what failed.

    write_report(Path("runs/digits-3"))          # runs/digits-3/report.html

Whatever part of a run directory is there is shown, so that a run that failed or still goes on has a report too.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import shlex
from base64 import b64encode
from collections.abc import Iterable, Sequence
from datetime import datetime
from html import escape
from pathlib import Path
from typing import Any

from meshrun.config import HIDDEN, is_secret, without_password, without_secrets, write_whole
from meshrun.errors import UserError
from meshrun.observe import drawing
from meshrun.observe.chosen import decisions
from meshrun.observe.drawing import Curve, Marks, Start, curve, drawable, short, smooth, window
from meshrun.observe.history import Failure, History, Rank, Track, cut, read, table
from meshrun.observe.numbers import number, whole

MOST_ROWS = 60
MOST_FAILURES = 8
NO_METRICS = ("loss", "count", "skipped", "step")

STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1b1f24; --muted: #59636e; --line: #e2e6ea; --accent: #0a66c2;
  --bad: #b3261e; --tint: #f6f8fa; }
@media screen and (prefers-color-scheme: dark) { :root { --paper: #14171b; --ink: #e6e9ec; --muted: #9ba5af;
  --line: #2c3238; --accent: #62adff; --bad: #ff8a80; --tint: #1c2025; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); line-height: 1.5;
  font-family: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; }
main { max-width: 68rem; margin: 0 auto; padding: clamp(1.5rem, 5vw, 4rem) clamp(1rem, 4vw, 2.5rem); }
h1 { margin: 0; font-size: clamp(1.375rem, 3.4vw, 2rem); font-weight: 600; line-height: 1.25; letter-spacing: -.01em;
  text-wrap: balance; overflow-wrap: anywhere; }
h2 { margin: 0 0 1rem; font-size: 1.125rem; font-weight: 600; }
h3 { margin: 0; font-size: .9375rem; font-weight: 600; }
section { margin-top: clamp(2.25rem, 5vw, 3.5rem); }
.origin, .none, .aside { color: var(--muted); font-size: .875rem; overflow-wrap: anywhere; }
.origin { margin: .625rem 0 0; }
.none, .aside { margin: .5rem 0; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(7rem, 1fr)); gap: 1.5rem 1.25rem; margin: 0;
  padding: 1.5rem 0; border: solid var(--line); border-width: 1px 0; }
.figures dt, .figures .under { color: var(--muted); font-size: .8125rem; }
.figures dd { margin: 0; overflow-wrap: anywhere; }
.figures .value { font-size: 1.375rem; font-weight: 600; line-height: 1.35; font-variant-numeric: tabular-nums; }
.curves { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(15rem, 100%), 1fr)); gap: 1.5rem 2rem;
  margin-top: 1.5rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums; }
th, td { padding: .4375rem 1.75rem .4375rem 0; border-bottom: 1px solid var(--line); text-align: left;
  vertical-align: baseline; white-space: nowrap; }
th { color: var(--muted); font-weight: 500; }
@media (max-width: 40rem) { th, td { padding-right: 1rem; } table { font-size: .8125rem; } }
.number { text-align: right; }
.tag { color: var(--accent); font-weight: 500; }
.why { color: var(--muted); white-space: normal; overflow-wrap: anywhere; }
.config td { white-space: normal; overflow-wrap: anywhere; font-size: .8125rem;
  font-family: ui-monospace, "SF Mono", Menlo, Consolas, monospace; }
.failure { margin-top: 1.5rem; padding: 1rem 1.25rem; background: var(--tint); border-left: 3px solid var(--bad);
  break-inside: avoid; }
.failure h2 { margin: 0; color: var(--bad); font-size: .9375rem; }
.failure p { margin: .375rem 0 0; overflow-wrap: anywhere; white-space: pre-line; }
pre { margin: .75rem 0 0; white-space: pre-wrap; overflow-wrap: anywhere; color: var(--muted); font-size: .8125rem;
  font-family: ui-monospace, "SF Mono", Menlo, Consolas, monospace; }
.picture { display: block; max-width: 100%; margin-top: 1.25rem; }
.notes { margin: 0; padding-left: 1.125rem; }
.notes li { overflow-wrap: anywhere; }
summary { cursor: pointer; font-size: 1.125rem; font-weight: 600; }
summary.aside { font-size: .875rem; font-weight: 500; }
details > .wide { margin-top: 1rem; }
@media print { :root { font-size: 12px; } main { max-width: none; padding: 0; } .wide { overflow: visible; }
  tr { break-inside: avoid; } h2, summary { break-after: avoid; }
  details::details-content { content-visibility: visible; display: block; } }
"""


def write_report(run: Path) -> Path:
    """Write report.html into the run directory, whole or not at all."""
    page = _page(read(run))
    path = run / "report.html"
    try:
        write_whole(path, page.encode(errors="backslashreplace").decode())  # of names that are no UTF-8
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None
    return path


def _page(history: History) -> str:
    failures, rest = _failure_parts(history.failures), [_figures(history), _curves(history), _evaluations(history)]
    rest += [_after(history), _how(history), _starts(history), _rank_table(history.ranks), _notes(history.ranks)]
    parts = [failures, *rest, _configuration(history.config), _program(history.config)]
    # A number and its unit stay on one line.
    headline = re.sub(r"(?<=\d) (?=(?:s|min|h|%)(?: |$))", "&nbsp;", escape(_headline(history)))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(history.name)}</title>\n<style>{STYLE}{drawing.STYLE}</style></head>\n<body><main>"
        f"<header><h1>{headline}</h1>{_origin(history)}</header>\n"
        + "\n".join(part for part in parts if part)
        + f"\n</main><script>{drawing.SCRIPT}</script></body></html>\n"
    )


def _headline(history: History) -> str:
    total = whole(history.start.get("total_steps"))
    steps = f"{history.steps:,} of {total:,} steps" if history.steps < total else f"{history.steps:,} steps"
    where = f"on {_count(history.world, 'rank')}" + (f" ({history.fact('layout')})" if history.fact("layout") else "")
    if len(history.legs) > 1:
        where = f"in {len(history.legs):,} starts, the last {where}"
    took = f"in {_duration(history.seconds)} {where}" if math.isfinite(history.seconds) else where
    if history.result:
        return f"{history.name} reached {_reached(history)} after {steps} {took}"
    if history.failures:
        return f"{history.name} failed on {_named(history.failures[0].ranks)} after {steps} {took}"
    return f"{history.name} has no result yet: {steps} {took}"


def _reached(history: History) -> str:
    """The set named test, or else the first; its first metric, or else its loss."""
    scores = history.scores()
    if scores:
        chosen = "test" if "test" in scores else next(iter(scores))
        metrics = [name for name in scores[chosen] if name not in NO_METRICS]
        name = metrics[0] if metrics else "loss"
        return f"{chosen} {name} {_score(name, scores[chosen].get(name, math.nan), 1)}"
    losses = history.track.series("loss")[1]
    return f"training loss {short(losses[-1])}" if losses else "its end"


def _origin(history: History) -> str:
    asked = history.config.get("config")
    target = history.start.get("target") or (asked.get("target") if isinstance(asked, dict) else None)
    began = min((rank.first_time for rank in history.ranks), default=math.inf)
    moment = f"started {_moment(began)}" if _moment(began) else ""
    source = history.start.get("launcher") or history.start.get("source")
    launcher = f"under {source}" if source and source != "none" else ""
    parts = [cut(part) for part in (target, moment, launcher) if part]
    words = asked.get("command") if isinstance(asked, dict) else None
    typed = shlex.join(map(str, words)) if isinstance(words, list) and words else ""
    command = f'<p class="origin"><code>{escape(cut(typed))}</code></p>' if typed else ""
    return (f'<p class="origin">{escape(" · ".join(parts))}</p>' if parts else "") + command


def _failure_parts(failures: list[Failure]) -> str:
    causes = [each for each in failures if not each.secondary]
    consequences = [each for each in failures if each.secondary]
    parts = [_failure(each) for each in causes[:MOST_FAILURES]]
    if len(causes) > MOST_FAILURES:
        parts.append(f'<p class="aside">{len(causes) - MOST_FAILURES:,} more failures are in events/.</p>')
    if consequences:
        ranks = sum(len(each.ranks) for each in consequences)
        inner = "".join(_failure(each) for each in consequences[:MOST_FAILURES])
        said = (
            f"{_count(ranks, 'rank')} ended because of it" if causes else f"{_count(ranks, 'rank')} lost another rank"
        )
        parts.append(f'<details class="aside"><summary class="aside">{said}</summary>{inner}</details>')
    return f'<section aria-label="Failures">{"".join(parts)}</section>' if parts else ""


def _failure(failure: Failure) -> str:
    who = _named(failure.ranks) + (f" on {failure.host}" if failure.host else "")
    when = f"after step {failure.step:,}" if failure.step else "before its first step was done"
    lines = f"<pre>{escape(chr(10).join(failure.lines))}</pre>" if failure.lines else ""
    title = escape(who[:1].upper() + who[1:])
    return f'<div class="failure"><h2>{title}, {when}</h2><p>{escape(failure.sentence)}</p>{lines}</div>'


def _figures(history: History) -> str:
    first = history.ranks[0] if history.ranks else Rank(0)
    losses = history.track.series("loss")[1]
    rate = number(history.result.get("samples_per_s"), first.samples / first.seconds if first.seconds else math.nan)
    waited = number(history.result.get("data_wait"), first.waited / first.seconds if first.seconds else math.nan)
    found = history.result.get("data_waits")
    waits = [number(each, 0.0) for each in found] if isinstance(found, list) else []
    worst = f" on rank {waits.index(max(waits))}" if len(waits) > 1 and max(waits) else ""
    hosts = {rank.host for rank in history.ranks if rank.host}
    best, about = _best(history)
    rows = [
        ("Final loss", short(losses[-1]) if losses else "", "training" if losses else ""),
        ("Best evaluation", best, about),
        ("Samples/s", short(float(f"{rate:.3g}")) if math.isfinite(rate) else "", ""),
        ("Waited for data", f"{100 * waited:.1f} %" if math.isfinite(waited) else "", f"of the time{worst}"),
        ("Ranks", f"{history.world:,}" if history.world else "", f"on {_count(len(hosts), 'node')}" if hosts else ""),
        ("Layout", history.fact("layout"), ""),
        ("Device", history.fact("device"), ""),
    ]
    cells = [
        f'<div><dt>{name}</dt><dd class="value">{escape(cut(value, 80)) or "—"}</dd>'
        + (f'<dd class="under">{escape(under)}</dd>' if under and value else "")
        + "</div>"
        for name, value, under in rows
    ]
    return f'<section aria-label="Key figures"><dl class="figures">{"".join(cells)}</dl></section>'


def _best(history: History) -> tuple[str, str]:
    """The lowest loss of the first evaluation set, and what it is."""
    name = next(iter(history.scores()), "")
    best = table({"": history.result.get("best")}).get("") or {}
    step = _best_step(history.track)
    if not best and step is not None:
        best = {"step": step, **table(history.track.evals[step]["scores"]).get(name, {})}
    if "loss" not in best:
        return "", ""
    rest = [f"{each} {_score(each, value, 2)}" for each, value in best.items() if each not in NO_METRICS]
    at = f"at step {whole(best.get('step')):,}"
    return short(best["loss"]), ", ".join([f"{name} loss {at}".strip(), *rest[:1]])


def _best_step(track: Track) -> int | None:
    found = {step: next(iter(table(event["scores"]).values()), {}).get("loss") for step, event in track.evals.items()}
    known = {step: loss for step, loss in found.items() if loss is not None and math.isfinite(loss)}
    return min(known, key=known.__getitem__) if known else None


def _curves(history: History) -> str:
    track = history.track
    steps, losses = track.series("loss")
    norm_steps, norms = track.series("grad_norm")
    width, norm_width = window(len(losses)), window(len(norms))
    main = Curve(
        "Loss",
        steps,
        losses,
        smooth(losses, width) if width > 1 else (),
        f"mean of {width:,} steps" if width > 1 else "",
        _eval_marks(track),
        [Start(leg.first_step, f"start {number} on {leg.layout}") for number, leg in enumerate(history.legs, 1)][1:],
        log=True,
        tall=True,
    )
    others = [
        Curve("Gradient norm", norm_steps, norms, smooth(norms, norm_width) if norm_width > 1 else (), log=True),
        Curve("Learning rate", *track.series("lr"), from_zero=True),
        _speed(track),
    ]
    return (
        f'<section aria-label="Curves">{curve(main)}<div class="curves">{"".join(map(curve, others))}</div></section>'
    )


def _speed(track: Track) -> Curve:
    rows = list(zip(track.steps, track.columns["samples"], track.columns["seconds"], strict=True))[1:]
    rows = [row for row in rows if row[2] > 0 and math.isfinite(row[1])]
    samples, seconds = [row[1] for row in rows], [row[2] for row in rows]
    width = window(len(rows))
    # A mean of rates would favour short steps: samples and seconds are summed first.
    trend = [a / b for a, b in zip(smooth(samples, width), smooth(seconds, width), strict=True)] if width > 1 else ()
    rates = [a / b for a, b in zip(samples, seconds, strict=True)]
    return Curve("Samples/s", [row[0] for row in rows], rates, trend, from_zero=True)


def _eval_marks(track: Track) -> list[Marks]:
    found: dict[str, tuple[list[int], list[float]]] = {}
    last = track.steps[-1] if track.steps else 0
    for step, event in sorted(track.evals.items()):
        for name, scores in table(event["scores"]).items():
            if drawable(scores.get("loss", math.nan)) and track.steps and track.steps[0] <= step <= last:
                steps, losses = found.setdefault(name, ([], []))
                steps.append(step)
                losses.append(scores["loss"])
    return [Marks(f"{name} loss", *points) for name, points in found.items()]


def _evaluations(history: History) -> str:
    evals = {step: table(event["scores"]) for step, event in sorted(history.track.evals.items())}
    if not evals and history.result.get("eval"):
        evals = {history.steps: history.scores()}
    if not evals:
        return ""
    best = _best_step(history.track)
    rows = sorted({*_spread(list(evals), MOST_ROWS), *([] if best is None else [best])})
    names = list(dict.fromkeys(name for scores in evals.values() for name in scores))
    columns = {
        name: list(
            dict.fromkeys(
                metric
                for scores in evals.values()
                for metric in scores.get(name, {})
                if metric not in ("count", "skipped")
            )
        )
        for name in names
    }
    head = "".join(
        f'<th class="number" scope="col">{escape(f"{name} {metric}")}</th>'
        for name in names
        for metric in columns[name]
    )
    cells = {
        (name, metric): _column(metric, [evals[step].get(name, {}).get(metric, math.nan) for step in rows])
        for name in names
        for metric in columns[name]
    }
    body = "".join(
        f'<tr><td class="number">{step:,}</td>'
        + "".join(f'<td class="number">{column[index]}</td>' for column in cells.values())
        + f"<td>{_tag('best') if step == best and len(rows) > 1 else ''}</td></tr>"
        for index, step in enumerate(rows)
    )
    counts = [
        f"{name}: {whole(scores.get('count')):,}"
        + (
            f" ({whole(scores['skipped']):,} sample{'s' * (scores['skipped'] != 1)} skipped)"
            if scores.get("skipped")
            else ""
        )
        for name, scores in history.scores().items()
        if scores.get("count")
    ]
    aside = (
        f"{len(rows)} of {len(evals):,} evaluations, the best and the last among them. "
        if len(rows) < len(evals)
        else ""
    )
    aside += f"Counted in each evaluation: {', '.join(counts)}." if counts else ""
    return _section(
        "Evaluations",
        f'<div class="wide"><table><thead><tr><th class="number" scope="col">step</th>{head}<th></th></tr></thead>'
        f"<tbody>{body}</tbody></table></div>" + (f'<p class="aside">{escape(aside)}</p>' if aside else ""),
    )


def _after(history: History) -> str:
    """What was printed and drawn after the training."""
    printed = next((rank.after for rank in history.ranks if rank.after), "")
    # Each as an image of its own, so that one's styles do not reach another, nor the page.
    drawn = [
        f'<img class="picture" alt="{escape(name)}" src="data:image/svg+xml;base64,{b64encode(picture).decode()}"/>'
        for name, picture in history.pictures.items()
    ]
    if not printed.strip() and not drawn:
        return ""
    text = f"<pre>{escape(printed.rstrip())}</pre>" if printed.strip() else ""
    return _section("After the training", text + "".join(drawn))


def _how(history: History) -> str:
    """What was decided about how a step is computed, by the user or by us, and why."""
    resolved = history.config.get("resolved")
    resolved = resolved if isinstance(resolved, dict) else {}
    found = resolved.get("chosen") or history.start.get("chosen")
    if not isinstance(found, dict):
        return ""
    body = "".join(
        f'<tr><th scope="row">{escape(cut(row.name, 80))}</th><td>{escape(cut(row.value, 80))}</td>'
        f'<td class="why">{escape(cut(row.why, 300))}</td></tr>'
        for row in decisions({"precision": resolved.get("precision"), **found})
    )
    return _section("How a step was computed", f'<div class="wide"><table><tbody>{body}</tbody></table></div>')


def _starts(history: History) -> str:
    """Each start of a run that has had several: it was resumed, or ranks were lost."""
    if len(history.legs) < 2:
        return ""
    shown = _spread(list(range(len(history.legs))), MOST_ROWS)
    body = "".join(
        f'<tr><td class="number">{index + 1:,}</td><td>{_moment(leg.began)}</td>'
        f'<td class="number">{leg.first_step:,} to {leg.last_step:,}</td><td>{escape(cut(leg.layout, 80))}</td>'
        f'<td class="number">{leg.world:,}</td><td>{escape(cut(leg.launcher, 80))}</td>'
        f'<td class="number">{_duration(leg.seconds)}</td></tr>'
        for index, leg in ((index, history.legs[index]) for index in shown)
    )
    head = "".join(
        f'<th class="{kind}" scope="col">{name}</th>'
        for name, kind in (
            *(("start", "number"), ("began", ""), ("steps", "number"), ("layout", "")),
            *(("ranks", "number"), ("launcher", ""), ("time", "number")),
        )
    )
    return _section(
        "Starts",
        f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>',
    )


def _moment(time: float) -> str:
    with contextlib.suppress(OverflowError, OSError, ValueError):  # infinite, or in no year that there is
        return f"{datetime.fromtimestamp(time).astimezone():%Y-%m-%d %H:%M %Z}"
    return ""


def _rank_table(ranks: list[Rank]) -> str:
    if not ranks:
        return ""
    timed = sorted((rank for rank in ranks if rank.steps), key=lambda rank: rank.step_time)
    slowest = timed[-1] if len(timed) > 1 else None
    over = f", {100 * (slowest.step_time / timed[0].step_time - 1):.1f} % over the fastest" if slowest else ""
    shown = (
        ranks
        if len(ranks) <= MOST_ROWS
        else sorted(timed[-MOST_ROWS:], key=lambda rank: rank.number) or ranks[:MOST_ROWS]
    )
    body = "".join(
        f'<tr><td class="number">{rank.number:,}</td><td>{escape(cut(rank.host, 80))}</td>'
        f"<td>{escape(cut(rank.start.get('device', ''), 80))}</td>"
        f'<td class="number">{_milliseconds(rank.step_time)}</td><td class="number">{_milliseconds(rank.wait)}</td>'
        f'<td class="number">{f"{100 * rank.waited / rank.seconds:.1f} %" if rank.seconds else "—"}</td>'
        f"<td>{_tag('slowest' + over) if rank is slowest else ''}</td></tr>"
        for rank in shown
    )
    head = '<th class="number" scope="col">rank</th><th scope="col">host</th><th scope="col">device</th>' + "".join(
        f'<th class="number" scope="col">{name}</th>' for name in ("mean step, ms", "data wait, ms", "share")
    )
    aside = f'<p class="aside">The {len(shown)} slowest of {len(ranks):,} ranks.</p>' if len(shown) < len(ranks) else ""
    return _section(
        "Ranks",
        f'<div class="wide"><table><thead><tr>{head}<th></th></tr></thead><tbody>{body}</tbody></table></div>{aside}',
    )


def _notes(ranks: list[Rank]) -> str:
    said: dict[str, list[int]] = {}
    for rank in ranks:
        for text in dict.fromkeys(rank.notes):
            said.setdefault(text, []).append(rank.number)
    if not said:
        return ""
    items = [
        f"<li>{escape(text)}" + ("" if len(who) == len(ranks) or who == [0] else f" ({_named(who)})") + "</li>"
        for text, who in list(said.items())[:MOST_ROWS]
    ]
    more = f'<p class="aside">{len(said) - MOST_ROWS:,} more notes are in events/.</p>' if len(said) > MOST_ROWS else ""
    return _section("Notes", f'<ul class="notes">{"".join(items)}</ul>{more}')


def _configuration(document: dict[str, Any]) -> str:
    if not document:
        return ""
    resolved = document.get("resolved")
    resolved = {} if not isinstance(resolved, dict) else resolved
    resolved = {name: value for name, value in resolved.items() if name != "program"}
    config = document.get("config", document)
    words = config.get("arguments") if isinstance(config, dict) else None
    if isinstance(words, list):
        config = {**config, "arguments": without_secrets(map(str, words))}
    asked, came = _flat(config), _flat(resolved)
    names = list(dict.fromkeys([*asked, *came]))[:300]
    for values in (asked, came):
        values.update({name: HIDDEN if is_secret(name) else without_password(text) for name, text in values.items()})
    body = "".join(
        f"<tr><td>{escape(cut(name, 80))}</td><td>{escape(cut(asked.get(name, ''), 200)) or '—'}</td>"
        f"<td>{escape(cut(came.get(name, ''), 200)) or '—'}</td></tr>"
        for name in names
    )
    head = '<th scope="col">name</th><th scope="col">asked for</th><th scope="col">came to</th>'
    return (
        '<section><details><summary>Configuration</summary><div class="wide"><table class="config">'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div></details></section>"
    )


def _program(document: dict[str, Any]) -> str:
    """The text of the program that was run, and where it was."""
    resolved = document.get("resolved")
    program = resolved.get("program") if isinstance(resolved, dict) else None
    if not isinstance(program, dict):
        return ""
    git = program.get("git")
    about = [str(program.get("path", "")), f"sha256 {program.get('sha256')}"]
    if isinstance(git, dict):
        about.append(f"commit {git.get('commit')}{' with changes' * bool(git.get('modified'))}")
        about += ["not in git"] * (git.get("tracked") is False)
    text = f"<pre>{escape(str(program['text']))}</pre>" if program.get("text") else ""
    return (
        f'<section><details><summary>Program</summary><p class="aside">{escape(cut(" · ".join(about)))}</p>'
        f"{text}</details></section>"
    )


def _flat(value: Any, prefix: str = "") -> dict[str, str]:
    if isinstance(value, dict):
        inner = [_flat(each, f"{prefix}.{name}" if prefix else str(name)) for name, each in value.items()]
        return {name: text for part in inner for name, text in part.items()}
    return {prefix: "" if value is None else value if isinstance(value, str) else json.dumps(value)}


def _section(title: str, inner: str) -> str:
    return f"<section><h2>{title}</h2>{inner}</section>"


def _tag(text: str) -> str:
    return f'<span class="tag">{escape(text)}</span>'


def _named(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:8]))}" + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


def _duration(seconds: float) -> str:
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60:,} h {minutes % 60} min"


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:,.1f}" if math.isfinite(seconds) else "—"


def _score(name: str, value: float, digits: int) -> str:
    return f"{100 * value:.{digits}f} %" if _is_share(name, [value]) else short(value)


def _is_share(name: str, values: Iterable[float]) -> bool:
    return "acc" in name.lower() and all(0 <= value <= 1 for value in values if math.isfinite(value))


def _column(name: str, values: list[float]) -> list[str]:
    """The numbers of a column with the same decimals, so that their points stand below each other."""
    if _is_share(name, values):
        return [f"{100 * value:.2f} %" if math.isfinite(value) else "—" for value in values]
    least = min((abs(value) for value in values if value and math.isfinite(value)), default=1.0)
    decimals = max(0, 3 - math.floor(math.log10(least)))
    return [
        "—" if math.isnan(value) else f"{value:,.{decimals}f}" if decimals < 8 else f"{value:.3e}" for value in values
    ]


def _spread(items: list[int], most: int) -> list[int]:
    """At most so many of them, evenly spaced, the first and the last among them."""
    if len(items) <= most:
        return items
    return [items[index * (len(items) - 1) // (most - 1)] for index in range(most)]

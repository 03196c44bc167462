"""What `meshrun bench` found, as its JSON document and as what people read.

    document = document_of(about, taken, left_out)
    show(document, about)              # a line a side, and what bounds meshrun's step
    show_bound(document, about)        # only the latter

A side whose first losses are others trains something else, and gets no ratio.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from meshrun.cli.bench_sides import MESHRUN, About

if TYPE_CHECKING:
    from meshrun.check.bench_roofline import Shares
    from meshrun.check.bench_side import Taken

TOLERANCES = {"fp32": 1e-3, "tf32": 1e-2, "bf16": 2e-2, "float8": 5e-2}
"""How far the first losses of sides may be from each other, relatively."""
OF_DRAWS = 5e-2
"""And how much further where each draws a dropout of its own."""


def document_of(about: About, taken: dict[str, Taken], left_out: dict[str, str]) -> dict[str, Any]:
    ours = taken[MESHRUN]
    rows = [_row(about, ours, each) for each in taken.values()]
    document: dict[str, Any] = {
        "batch": about.batch,
        "precision": about.precision,
        "device": dataclasses.asdict(about.device),
        "counts": about.counts and dataclasses.asdict(about.counts),
        "chosen": ours.built.chosen if ours.built is not None else {},
        "notes": list(ours.built.notes) if ours.built is not None else [],
        "rows": rows,
        "ratios": {f"vs_{row['side'].replace('-', '_')}": row["ratio"] for row in rows if row["side"] != MESHRUN},
        "left_out": [{"side": name, "why": why} for name, why in left_out.items()],
    }
    if (shares := _shares(about, ours)) is not None:
        from meshrun.check.bench_roofline import sentence

        document["roofline"] = {**dataclasses.asdict(shares), "sentence": sentence(shares)}
    return document


def _shares(about: About, ours: Taken) -> Shares | None:
    from meshrun.check.bench_roofline import shares_of

    if about.counts is None or ours.step_s is None:
        return None
    waits = [turn.data_wait for turn in ours.turns]
    return shares_of(about.counts, about.device, ours.step_s, about.precision, sum(waits) / len(waits))


def _row(about: About, ours: Taken, side: Taken) -> dict[str, Any]:
    """A side's line of the table, and its entry in the document."""
    from meshrun.check.bench_turns import apart, ratios

    note, agrees = side.error, None
    if side.built is not None and ours.built is not None:
        difference = apart(ours.built, side.built)
        agrees = difference <= TOLERANCES[about.precision] + (OF_DRAWS if about.draws else 0.0)
        if not agrees:
            note = note or f"void: its first losses differ by {difference:.1%}, so it trains something else"
    found = ratios(ours, side) if agrees else None
    rate, step_s = side.rate, side.step_s
    flops = about.counts.flops if about.counts is not None else None
    return {
        "side": side.entry.name,
        "samples_per_s": rate,
        "tokens_per_s": rate * about.tokens if rate and about.tokens else None,
        "ratio": found and found[0],
        "ratio_quartiles": found and [found[1], found[2]],
        "mfu": flops / about.device.products / step_s if flops and step_s else None,
        "peak_gib": side.built.peak / (1 << 30) if side.built is not None and side.built.peak else None,
        "first_step_s": side.built.first_step_s if side.built is not None else None,
        "cpu_s_per_sample": side.cpu_s,
        "losses": side.built.losses if side.built is not None else [],
        "losses_agree": agrees,
        "note": note,
    }


def show(document: dict[str, Any], about: About) -> None:
    from rich.console import Console
    from rich.table import Table

    from meshrun.check.bench_peers import PEERS

    console = Console()
    console.width = max(console.width, 110)  # cut names and numbers help nobody
    title = f"{document['target']}: {document['precision']}, batch {document['batch']}, on {document['device']['name']}"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("side", no_wrap=True)
    unit = "tokens/s" if about.tokens else "samples/s"
    columns = (unit, "meshrun is times it", "of peak", "GiB", "first step", "CPU a sample")
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for row in document["rows"]:
        ratio, quartiles = row["ratio"], row["ratio_quartiles"]
        times = f"{ratio:.2f} ({quartiles[0]:.2f}-{quartiles[1]:.2f})" if ratio else "-"
        rate = row["tokens_per_s"] if about.tokens else row["samples_per_s"]
        table.add_row(
            PEERS[row["side"]].title if row["side"] in PEERS else row["side"],
            f"{rate:,.0f}" if rate else "-",
            "" if row["side"] == MESHRUN else times,
            f"{row['mfu']:.2f}" if row["mfu"] else "-",
            f"{row['peak_gib']:.1f}" if row["peak_gib"] else "-",
            f"{row['first_step_s']:.1f} s" if row["first_step_s"] is not None else "-",
            f"{1000 * row['cpu_s_per_sample']:.3f} ms" if row["cpu_s_per_sample"] is not None else "-",
        )
    console.print(table)
    for row in document["rows"]:
        if row["note"]:
            print(f"{row['side']}: {row['note']}")
    for each in document["left_out"]:
        print(f"left out: {each['side']}: {each['why']}")
    if document["precision"] == "float8":
        print("peers compute in bf16: none of them has float8 by itself")
    show_bound(document, about)


def show_bound(document: dict[str, Any], about: About) -> None:
    from meshrun.check.bench_roofline import facts, unsteady

    print(f"meshrun's step is {in_words(document['chosen'])}")
    for note in document["notes"]:
        print(note)
    if about.counts is None:
        print(about.uncounted)
        return
    for line in facts(about.counts, about.device):
        print(line)
    step = document["rows"][0]["samples_per_s"]
    print(f"a step takes {1000 * about.batch / step:,.1f} ms: {document['roofline']['sentence']}")
    if (warning := unsteady(about.device)) is not None:
        print(warning)


def in_words(chosen: dict[str, Any]) -> str:
    how = {True: "compiled", "tried": "compiled where it could be"}.get(chosen.get("compile"), "not compiled")
    return f"{how}; activations computed twice: {chosen.get('recompute', 'none')}"

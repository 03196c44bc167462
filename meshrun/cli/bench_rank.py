"""`meshrun bench rank`: one rank of a job that is not there, measured and told.

    found = one_rank(asked)            # its other ranks are made up
    show_rank(asked.target.label, found)

The time of messages is not in it, and the words say so.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from meshrun.cli.bench_sides import device_of
from meshrun.cli.bench_table import in_words
from meshrun.cli.command import Asked
from meshrun.cli.target import make

if TYPE_CHECKING:
    from meshrun.check.bench_rank import OneRank


def one_rank(asked: Asked) -> OneRank:
    import torch

    from meshrun.check.bench_rank import fitted, measured, resolved
    from meshrun.cli.configured import how_of, override
    from meshrun.layout import parse

    config, of = asked.config, asked.beyond["of"]
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    layout = resolved(parse(asked.beyond["layout"]), of)
    experiment, _, _ = override(make(asked.target, config.options, config.data), replace(config, batch=None))
    experiment = fitted(experiment, layout, config.batch, asked.beyond["steps"])
    return measured(experiment, how_of(config), layout, asked.beyond["place"], device_of(config), asked.beyond["steps"])


def show_rank(label: str, found: OneRank) -> None:
    job = f"{found.layout}, {found.precision}, global batch {found.batch:,}"
    print(f"{label}: rank {found.place} of {found.of} on {job}; measured on {found.device}")
    print(f"  holds {found.parameters:,} parameters")
    if found.peak_gib is not None:
        print(f"  needs {found.peak_gib:.2f} GiB at most; torch had taken {found.reserved_gib:.2f} GiB of the device")
    else:
        print("  no memory figure on a CPU")
    rate = f"{found.tokens_per_s:,.0f} tokens/s" if found.tokens_per_s else f"{found.samples_per_s:,.1f} samples/s"
    print(f"  computes a step in {1000 * found.seconds:,.1f} ms, {rate} of this rank alone, without any communication")
    print(f"  {in_words(found.chosen)}")
    for note in found.notes:
        print(f"  {note}")

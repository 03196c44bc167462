"""`meshrun bench`: how fast a training is here, beside what other tools make of it and what the device could do.

    meshrun bench llama --preset 1b --precision bf16                 # what bounds a step, and how far from it
    meshrun bench train llama --preset 1b --peers bare,fabric        # the same training through other tools, in turns
    meshrun bench rank llama --preset 8b --of 64 --layout fsdp=64    # one rank of a job that is not there

`train` compares with every peer that can be imported; each side has a process of its own (`check.bench_turns`). A side
whose first losses are others trains something else, and gets no ratio.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from meshrun.cli.command import GENERAL, Asked, Command, options_in, parse_words
from meshrun.cli.options import REQUIRED, Option, run_options
from meshrun.cli.target import find, make
from meshrun.config import RunConfig
from meshrun.errors import RunFailed, UserError
from meshrun.world import detect

if TYPE_CHECKING:
    import torch

    from meshrun.check.bench_count import Counts
    from meshrun.check.bench_rank import OneRank
    from meshrun.check.bench_roofline import Device, Shares
    from meshrun.check.bench_task import Side, Task
    from meshrun.check.bench_turns import Taken

OF_RUN = (
    *("batch", "scale_lr", "seed", "clip", "precision", "recompute", "compile", "graphs", "states"),
    *("update_in_backward", "shuffle", "device", "threads", "workers", "data"),
)
"""Options of a run that say what a step is, and how it is computed."""
STEPS = Option("steps", int, 20, "Updates a turn.")
OF_TRAIN = [
    Option("peers", str, None, "What to compare with, such as bare,fabric; all that can be imported when absent."),
    Option("rounds", int, 5, "Turns of each side."),
    STEPS,
]
OF_RANK = [
    Option("of", int, REQUIRED, "Ranks of the job."),
    Option("layout", str, REQUIRED, "Arrangement of these ranks, such as fsdp=64 or fsdp=8,tp=8; with fsdp, tp or cp."),
    Option("place", int, 0, "Which rank of them to be."),
    Option("steps", int, 5, "Updates to time."),
]
HELP = (
    "What bounds a step of TARGET, and how far it is from that. `bench train TARGET` compares with other tools, "
    "`bench rank TARGET --of N --layout …` is one rank of a job of any size; --help after these lists their options."
)
TOLERANCES = {"fp32": 1e-3, "bf16": 2e-2, "float8": 5e-2}
"""How far the first losses of sides may be from each other, relatively."""
OF_DRAWS = 5e-2
"""And how much further where each draws a dropout of its own."""
MESHRUN = "meshrun"


def bench_command(words: list[str]) -> int:
    """Returns the exit status."""
    if detect(os.environ).size > 1:
        raise UserError("bench starts its own processes, but it was started as several; start it once")
    match words:
        case ["train", *rest]:
            return _train(rest)
        case ["rank", *rest]:
            return _rank(rest)
        case ["--help"]:
            options_in(["--help"], [("General", GENERAL)], HELP, "meshrun bench [train|rank] TARGET")
            return 0
        case [target, *_] if not target.startswith("-"):
            _refuse_unknown(target)
    return _bound(words)


def _refuse_unknown(target: str) -> None:
    """What is no target may be a misspelt part of the command."""
    try:
        find(target)
    except UserError as error:
        raise UserError(f"{error}; bench takes a TARGET, train TARGET, or rank TARGET") from None


def _parsed(name: str, does: str, own: list[Option], more: tuple[str, ...], words: list[str]) -> Asked | None:
    names = {*OF_RUN, *more} - {each.name for each in own}
    options = [*own, *(each for each in run_options() if each.name in names)]
    command = Command(name, does, options, beyond=tuple(each.name for each in own))
    with _stdout_kept("--json" in words and "--help" not in words):
        asked = parse_words(command, words)
    if asked is not None:
        for option in own:
            if asked.beyond.get(option.name) is REQUIRED:
                raise UserError(f"{name} needs {option.flag}: {option.help[0].lower()}{option.help[1:-1]}")
        for each in ("rounds", "steps", "of"):
            if asked.beyond.get(each, 1) < 1:
                raise UserError(f"{each} is {asked.beyond[each]}; it must be at least 1 (--{each})")
    return asked


@contextlib.contextmanager
def _stdout_kept(keeps: bool) -> Iterator[None]:
    """Standard output is for the JSON document; what programs print goes beside it."""
    with contextlib.redirect_stdout(sys.stderr) if keeps else contextlib.nullcontext():
        yield


@dataclass(frozen=True)
class About:
    """What is known of a training before any side of it has had a turn."""

    batch: int
    tokens: float
    """Of a sample of the first batch, in the mean; 0 where inputs are no tokens."""
    precision: str
    draws: bool
    """Whether the model has dropout."""
    counts: Counts | None
    uncounted: str
    """Why there are no counts."""
    device: Device


def _bound(words: list[str]) -> int:
    asked = _parsed("bench", "Find what bounds a step of", [STEPS], (), words)
    if asked is None:
        return 0
    with _stdout_kept(asked.as_json):
        about, taken = _measured(asked, [MESHRUN], rounds=3)
    document = {"target": asked.target.label, **_document(about, taken, {})}
    if asked.as_json:
        print(json.dumps(document))
    else:
        _show_bound(document, about)
    return 0


def _train(words: list[str]) -> int:
    asked = _parsed("bench train", "Compare with other tools the training of", OF_TRAIN, (), words)
    if asked is None:
        return 0
    with _stdout_kept(asked.as_json):
        names, left_out = _peers_of(asked.beyond.get("peers"), _device_of(asked.config))
        about, taken = _measured(asked, [MESHRUN, *names], asked.beyond["rounds"])
    document = {"target": asked.target.label, "rounds": asked.beyond["rounds"], "steps": asked.beyond["steps"]}
    document |= _document(about, taken, left_out)
    if asked.as_json:
        print(json.dumps(document))
    else:
        _show(document, about)
    return 0


def _peers_of(given: str | None, device: torch.device) -> tuple[list[str], dict[str, str]]:
    """The peers to compare with, and why the others are left out."""
    from meshrun.check.bench_peers import PEERS

    asked = [each.strip() for each in given.split(",") if each.strip()] if given is not None else list(PEERS)
    left_out: dict[str, str] = {}
    names = []
    for name in asked:
        if asked.count(name) > 1:
            raise UserError(f"peer {name!r} is named {asked.count(name)} times; name each once (--peers)")
        if name not in PEERS:
            raise UserError(f"peer {name!r} is not known; peers are {', '.join(PEERS)} (--peers)")
        if (why := PEERS[name].missing) is not None:
            if given is not None:
                raise UserError(f"cannot compare with {name}: {why} (--peers)")
            left_out[name] = why
        elif given is None and PEERS[name].compiles and device.type == "cpu":
            left_out[name] = f"compiling seldom pays on a CPU; --peers {name} compares with it all the same"
        else:
            names.append(name)
    return names, left_out


def _device_of(config: RunConfig) -> torch.device:
    """Where sides compute, found without touching it."""
    import torch

    gpus = torch.cuda.device_count() if config.device != "cpu" else 0
    if config.device == "cuda" and not gpus:
        raise UserError("no GPU is visible; --device cpu measures without")
    return torch.device("cuda", 0) if gpus else torch.device("cpu")


def _measured(asked: Asked, names: list[str], rounds: int) -> tuple[About, dict[str, Taken]]:
    """Have every side take its turns."""
    from meshrun.check import bench_turns
    from meshrun.check.bench_peers import COMPILER, PEERS

    config, steps = asked.config, asked.beyond["steps"]
    device, needed = _device_of(config), (steps + 8) * (rounds + 1)
    with bench_turns.Process(device) as process:
        try:
            about: About = process.ask(_about, config, device)
        except bench_turns.Refused as error:
            raise UserError(str(error)) from None
        except bench_turns.SideFailed as error:
            raise RunFailed(f"{asked.target.label} cannot be measured: {error}") from error
    entries = [
        bench_turns.Entry(
            name,
            functools.partial(_side, config, device, name, needed),
            about.batch,
            PEERS[name].packages if name in PEERS else COMPILER if device.type == "cuda" else (),
            needed=name == MESHRUN,
        )
        for name in names
    ]
    say = functools.partial(print, file=sys.stderr, flush=True)
    try:
        return about, bench_turns.take_turns(entries, rounds, steps, device, say=lambda text: say(f"bench: {text}"))
    except bench_turns.Refused as error:
        raise UserError(str(error)) from None
    except bench_turns.SideFailed as error:
        raise RunFailed(f"{asked.target.label} cannot be trained: {error}") from error


def _side(config: RunConfig, device: torch.device, name: str, steps: int) -> Side:
    """In a side's process: its training."""
    from meshrun.check.bench_peers import MESHRUN as OURS
    from meshrun.check.bench_peers import PEERS

    return iter({MESHRUN: OURS, **PEERS}[name].make(_task(config, device).lasting(steps)))


def _task(config: RunConfig, device: torch.device) -> Task:
    import torch

    from meshrun.check.bench_task import Task
    from meshrun.cli.rank import how_of, override
    from meshrun.train.loop import readers_for
    from meshrun.world import detect
    from meshrun.world.environment import inherited

    if config.threads is not None:
        torch.set_num_threads(config.threads)
    experiment, scale, _ = override(make(find(config.target), config.options, config.data), config)
    if experiment.micro is not None and experiment.micro < experiment.batch:
        # Peers divide by what is in a micro-batch, meshrun by what is in the batch: that is not the same training.
        experiment = replace(experiment, micro=None)
    workers = config.workers
    if workers is None:
        workers = readers_for(experiment.train, detect(inherited()), device)
    return Task(experiment, how_of(config), device, workers, scale)


def _about(config: RunConfig, device: torch.device) -> About:
    """In a process of its own: what the training is, and what the device can do."""
    import torch
    from torch import nn

    from meshrun.check.bench_count import count
    from meshrun.check.bench_rank import tokens_of
    from meshrun.check.bench_roofline import measured
    from meshrun.parallel.demands import demands_of

    task = _task(config, device)
    experiment = task.experiment
    model = demands_of(experiment).model
    draws = any(isinstance(each, nn.Dropout) and each.p > 0 for each in model.modules())
    ids = task.order.batch_ids(0).tolist()[:32]
    tokens = sum(tokens_of(experiment.train[number][0]) for number in ids) / len(ids)
    counts, uncounted = None, ""
    for where in dict.fromkeys((device, torch.device("cpu"))):  # kernels of a GPU may want real tensors
        try:
            counts = count(experiment, where, task.how.states)
            break
        except Exception as error:  # a model that must see numbers: all else can be measured
            why = str(error).partition("\n")[0]
            uncounted = f"the step cannot be counted without values: {type(error).__name__}: {why}"
    return About(
        experiment.batch, tokens, experiment.precision, draws, counts, uncounted, measured(device, experiment.precision)
    )


def _document(about: About, taken: dict[str, Taken], left_out: dict[str, str]) -> dict[str, Any]:
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


def _show(document: dict[str, Any], about: About) -> None:
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
    _show_bound(document, about)


def _show_bound(document: dict[str, Any], about: About) -> None:
    from meshrun.check.bench_roofline import facts, unsteady

    print(f"meshrun's step is {_how(document['chosen'])}")
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


def _how(chosen: dict[str, Any]) -> str:
    how = {True: "compiled", "tried": "compiled where it could be"}.get(chosen.get("compile"), "not compiled")
    return f"{how}; activations computed twice: {chosen.get('recompute', 'none')}"


def _rank(words: list[str]) -> int:
    more = ("micro", "offload", "sync_batchnorm", "allow_tp_across_nodes")
    asked = _parsed("bench rank", "Be one rank of a job of", OF_RANK, more, words)
    if asked is None:
        return 0
    with _stdout_kept(True):
        found = _one_rank(asked)
    if asked.as_json:
        print(json.dumps({"target": asked.target.label, "rows": [dataclasses.asdict(found)], "ratios": {}}))
    else:
        _show_rank(asked.target.label, found)
    return 0


def _one_rank(asked: Asked) -> OneRank:
    import torch

    from meshrun.check.bench_rank import fitted, measured, resolved
    from meshrun.cli.rank import how_of, override
    from meshrun.layout import parse

    config, of = asked.config, asked.beyond["of"]
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    layout = resolved(parse(asked.beyond["layout"]), of)
    experiment, _, _ = override(make(asked.target, config.options, config.data), replace(config, batch=None))
    experiment = fitted(experiment, layout, config.batch, asked.beyond["steps"])
    return measured(
        experiment, how_of(config), layout, asked.beyond["place"], _device_of(config), asked.beyond["steps"]
    )


def _show_rank(label: str, found: OneRank) -> None:
    job = f"{found.layout}, {found.precision}, global batch {found.batch:,}"
    print(f"{label}: rank {found.place} of {found.of} on {job}; measured on {found.device}")
    print(f"  holds {found.parameters:,} parameters")
    if found.peak_gib is not None:
        print(f"  needs {found.peak_gib:.2f} GiB at most; torch had taken {found.reserved_gib:.2f} GiB of the device")
    else:
        print("  no memory figure on a CPU")
    rate = f"{found.tokens_per_s:,.0f} tokens/s" if found.tokens_per_s else f"{found.samples_per_s:,.1f} samples/s"
    print(f"  computes a step in {1000 * found.seconds:,.1f} ms, {rate} of this rank alone, without any communication")
    print(f"  {_how(found.chosen)}")
    for note in found.notes:
        print(f"  {note}")

"""`meshrun bench`: how fast a training is here, beside what other tools make of it and what the device could do.

    meshrun bench llama --preset 1b --precision bf16                 # what bounds a step, and how far from it
    meshrun bench train llama --preset 1b --peers bare,fabric        # the same training through other tools, in turns
    meshrun bench rank llama --preset 8b --of 64 --layout fsdp=64    # one rank of a job that is not there

`train` compares with every peer that can be imported; each side has a process of its own (`check/bench_side.py`). What
the command takes is said here; `bench_sides.py` measures, and `bench_table.py` tells.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from collections.abc import Iterator

from meshrun import strict_json
from meshrun.cli.bench_rank import one_rank, show_rank
from meshrun.cli.bench_sides import MESHRUN, device_of, measured, peers_of
from meshrun.cli.bench_table import document_of, show, show_bound
from meshrun.cli.command import GENERAL, Asked, Command, options_in, parse_words
from meshrun.cli.options import REQUIRED, Option, run_options
from meshrun.cli.target import find
from meshrun.errors import UserError
from meshrun.world import detect

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


def _bound(words: list[str]) -> int:
    asked = _parsed("bench", "Find what bounds a step of", [STEPS], (), words)
    if asked is None:
        return 0
    with _stdout_kept(asked.as_json):
        about, taken = measured(asked, [MESHRUN], rounds=3)
    document = {"target": asked.target.label, **document_of(about, taken, {})}
    if asked.as_json:
        print(strict_json.dumps(document))
    else:
        show_bound(document, about)
    return 0


def _train(words: list[str]) -> int:
    asked = _parsed("bench train", "Compare with other tools the training of", OF_TRAIN, (), words)
    if asked is None:
        return 0
    with _stdout_kept(asked.as_json):
        names, left_out = peers_of(asked.beyond.get("peers"), device_of(asked.config))
        about, taken = measured(asked, [MESHRUN, *names], asked.beyond["rounds"])
    document = {"target": asked.target.label, "rounds": asked.beyond["rounds"], "steps": asked.beyond["steps"]}
    document |= document_of(about, taken, left_out)
    if asked.as_json:
        print(strict_json.dumps(document))
    else:
        show(document, about)
    return 0


def _rank(words: list[str]) -> int:
    more = ("micro", "offload", "sync_batchnorm", "allow_tp_across_nodes")
    asked = _parsed("bench rank", "Be one rank of a job of", OF_RANK, more, words)
    if asked is None:
        return 0
    with _stdout_kept(True):
        found = one_rank(asked)
    if asked.as_json:
        print(strict_json.dumps({"target": asked.target.label, "rows": [dataclasses.asdict(found)], "ratios": {}}))
    else:
        show_rank(asked.target.label, found)
    return 0

"""From the words of `submit` to the job that they ask for: its runs, what it asks Slurm for, and its script's contents.

    plan = planned(["digits", "--nodes", "2"], here=lambda: cluster_here(PATIENCE))
    script(plan.submission)              # nothing is made or imported for it

`rehearse` reads the same words.
"""

from __future__ import annotations

import itertools
import re
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from meshrun.cli.command import Asked
from meshrun.cli.job_options import options_in_text, parse_submit
from meshrun.cli.options import run_options
from meshrun.config import RunConfig, seconds_in, whole_number, without_secrets
from meshrun.data.shuffle import Shuffle
from meshrun.errors import UserError
from meshrun.files import read_plain
from meshrun.launch import limits, probe
from meshrun.launch.submission import LINKS, Element, Resources, Rules, Submission, rules_of
from meshrun.layout import Layout, parse
from meshrun.train.interval import parse as parse_interval
from meshrun.world import walltime
from meshrun.world.environment import flags_of_python, inherited
from meshrun.world.profile import Site
from meshrun.world.sites import found_here, load
from meshrun.world.slurm import has_account

Here = Callable[[], Site | None]

PATIENCE = 2.0
"""Seconds that who only looks at a job waits for Slurm."""
MOST_ELEMENTS = 1000
"""Runs of a sweep: more of them is a typing error, or a cluster's whole queue."""


@dataclass(frozen=True)
class Choice:
    """One run to be: its options, and in words what a sweep has chosen for it."""

    config: RunConfig
    values: str = ""


@dataclass(frozen=True)
class Plan:
    """All that the words of a command line come to, before anything is made of it."""

    asked: Asked
    choices: tuple[Choice, ...]
    submission: Submission
    """With the directories that the runs would get now."""
    site: Site | None


def cluster_here(patience: float) -> Site | None:
    """What Slurm says of the cluster that this machine is part of; if it does not, the user is told so."""
    site, why_not = probe.found(patience)
    if why_not:
        unknown = "so it is not known here which partitions, limits and GPUs there are"
        print(f"meshrun: {why_not}, {unknown}", file=sys.stderr)
    return site


def planned(words: list[str], command: str = "submit", static: bool = True, here: Here = lambda: None) -> Plan | None:
    """What the words ask for; None when they only asked for help. `here` says what Slurm says of this cluster."""
    asked = parse_submit(words, command, static)
    if asked is None:
        return None
    found = here()
    site = _site(asked.config.site, found)
    resources = _resources(asked, site)
    limits.refuse(resources, site, found.partitions if found else site.partitions if site else (), found is not None)
    limits.refuse_without_account(resources, site, has_account(inherited()))
    chosen = _chosen(asked, words, command, static)
    choices = tuple(replace(each, config=_for_job(each.config, resources, site)) for each in chosen)
    return Plan(asked, choices, _submission(asked, words, command, choices, resources, site), site)


def _site(name: str | None, here: Site | None) -> Site | None:
    """The site that was named, or the one whose profile matches this machine, or what Slurm says of it."""
    if name is not None:
        return load(name)
    return found_here(inherited(), here.cluster if here else None, socket.gethostname()) or here


def _resources(asked: Asked, site: Site | None) -> Resources:
    given, config = asked.beyond, asked.config
    gpus = given.get("gpus_per_node")
    partition = given.get("partition") or (site.get("partition") if site else None)
    if gpus is None and config.device != "cpu":
        known = site.partition(partition) if site and partition else None
        gpus = (known.gpus_per_node if known else None) or (site.get("gpus_per_node") if site else None)
        if gpus is None:
            raise UserError(
                "how many GPUs a node has is not known here; say how many the job is to have, "
                "or 0 for one that computes on CPUs (--gpus-per-node)"
            )
    gpus = gpus or 0
    if gpus and config.procs not in (None, gpus):
        raise UserError(
            f"procs is {config.procs}, but each of the {gpus} GPUs of a node gets one rank; leave --procs away"
        )
    procs = gpus or config.procs or 1
    return Resources(
        nodes=given["nodes"],
        gpus_per_node=gpus,
        procs=procs,
        seconds=_seconds(given["time"]),
        cpus_per_node=_cpus(given.get("cpus_per_gpu"), gpus, procs, site),
        partition=partition,
        account=given.get("account"),
        qos=given.get("qos") or (site.get("qos") if site else None),
        constraint=given.get("constraint") or (site.get("constraint") if site else None),
        more=tuple(_rejoined(given["sbatch"], lambda part: part.startswith("--"))),
    )


def _cpus(given: int | None, gpus: int, procs: int, site: Site | None) -> int | None:
    """Hardware threads of a node's launcher and ranks."""
    if given is not None:
        return given * procs
    if not gpus:
        return procs
    if site is None or not site.get("cores_per_gpu"):
        return None
    threads = 1 if site.get("hint") == "nomultithread" else site.get("threads_per_core") or 1
    return int(site.get("cores_per_gpu") * threads * gpus)


def _seconds(text: str) -> int:
    days = re.fullmatch(r"([0-9]{1,4})\s*d", text.strip())
    try:
        seconds = 86400 * int(days[1]) if days else seconds_in(text) or walltime.parse(text)
    except ValueError:
        raise UserError(
            f"time is {text!r}; it must be one such as 90min, 12h, 2:30:00 or 1-12:00:00 (--time)"
        ) from None
    if seconds is None:
        raise UserError("time has no limit; a job needs one, such as 24h (--time)")
    return int(seconds)


def _chosen(asked: Asked, words: list[str], command: str, static: bool) -> list[Choice]:
    """One run, or one for each combination of a sweep's values, each read as if it had been typed."""
    if not asked.beyond["sweep"]:
        return [Choice(asked.config)]
    known = {option.name for option in (*run_options(), *options_in_text(asked.target))}
    texts = _rejoined(asked.beyond["sweep"], lambda part: part.partition("=")[0].replace("-", "_") in known)
    sweep = [_sweep(text) for text in texts]
    if len({name for name, _ in sweep}) < len(sweep):
        raise UserError("a sweep names an option twice; give all its values at once: lr=1e-3,3e-4 (--sweep)")
    combinations = list(itertools.islice(itertools.product(*(values for _, values in sweep)), MOST_ELEMENTS + 1))
    if len(combinations) > MOST_ELEMENTS:
        raise UserError(f"the sweep has more than {MOST_ELEMENTS} combinations; give fewer values (--sweep)")
    chosen = []
    for values in combinations:
        given = [(name, value) for (name, _), value in zip(sweep, values, strict=True)]
        typed = parse_submit([*words, *(_typed(name, value) for name, value in given)], command, static)
        assert typed is not None
        chosen.append(Choice(typed.config, ", ".join(f"{name}={value}" for name, value in given)))
    if chosen[0].config == asked.config and len(chosen) > 1 and chosen[1].config == asked.config:
        raise UserError(f"the sweep over {sweep[0][0]} changes nothing in the run; give an option of the run (--sweep)")
    return chosen


def _sweep(text: str) -> tuple[str, list[str]]:
    name, equals, values = text.partition("=")
    # Values that have commas themselves, such as layouts, are separated by semicolons.
    listed = [value.strip() for value in values.split(";" if ";" in values else ",")]
    if not equals or not all(listed) or not name.replace("-", "_").isidentifier():
        raise UserError(f"sweep is {text!r}; it must be an option and its values, such as lr=1e-3,3e-4 (--sweep)")
    return name, listed


def _typed(name: str, value: str) -> str:
    flag = "--" + name.replace("_", "-")
    return {"true": flag, "false": f"--no-{flag[2:]}"}.get(value.lower(), f"{flag}={value}")


def _rejoined(parts: Sequence[str], begins: Callable[[str], bool]) -> list[str]:
    """Texts that had commas in them, which the command line has split there."""
    joined: list[str] = []
    for part in parts:
        if begins(part) or not joined:
            joined.append(part)
        else:
            joined[-1] += f",{part}"
    return joined


def _for_job(config: RunConfig, asked: Resources, site: Site | None) -> RunConfig:
    """The run as its job starts it: ranks of a node, nodes, and all paths as every node sees them."""
    parse_interval(config.checkpoint)
    if config.shuffle is not None:
        Shuffle.parse(config.shuffle)
    layout = parse(config.layout)
    layout.resolve(asked.ranks, asked.procs, config.allow_tp_across_nodes)
    fewer = any(_fits(layout, nodes * asked.procs, config) for nodes in range(1, asked.nodes))
    nodes = f"1:{asked.nodes}" if fewer else str(asked.nodes)
    known = site.name if site is not None and site.file is not None else None
    return replace(config, procs=asked.procs, nodes=nodes, runs=config.runs.resolve(), site=known)


def _fits(layout: Layout, ranks: int, config: RunConfig) -> bool:
    try:
        layout.resolve(ranks, config.procs, config.allow_tp_across_nodes)
    except UserError:
        return False
    return True


def _submission(
    asked: Asked, words: list[str], command: str, choices: Sequence[Choice], resources: Resources, site: Site | None
) -> Submission:
    given = asked.beyond
    runs, name = choices[0].config.runs, choices[0].config.run_name
    sweep: tuple[Element, ...] = ()
    if len(choices) == 1:
        run = runs / f"{name}-{_free(runs, name)}"
    else:
        run, first = runs / f"{name}-sweep-{_free(runs, f'{name}-sweep')}", _free(runs, name)
        sweep = tuple(Element(runs / f"{name}-{first + at}", each.values) for at, each in enumerate(choices))
    if given.get("links") is not None and not given["until_done"]:
        raise UserError(f"links is {given['links']}, which bounds a chain of jobs; ask for one as well (--until-done)")
    return Submission(
        name=run.name,
        run=run,
        # As it is typed to submit it, so that what is shown is what would be sent.
        command=("meshrun", command, *without_secrets(word for word in words if word != "--dry-run")),
        python=sys.executable,
        python_flags=flags_of_python(),
        resources=resources,
        rules=rules_of(site) if site is not None else Rules(),
        sweep=sweep,
        setup=_setup(given.get("setup")),
        offline=given["offline"],
        links=given.get("links", LINKS) if given["until_done"] else 1,
    )


def _free(runs: Path, name: str) -> int:
    """The number that a run of this name would get."""
    taken = [path.name.removeprefix(f"{name}-") for path in (runs.iterdir() if runs.is_dir() else ())]
    return max((each for text in taken if (each := whole_number(text)) is not None), default=0) + 1


def _setup(path: Path | None) -> str:
    try:
        return read_plain(path).decode() if path is not None else ""
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"cannot read {path}: {getattr(error, 'strerror', None) or 'it is no text'} (--setup)"
        ) from None

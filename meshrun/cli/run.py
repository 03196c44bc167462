"""`meshrun run TARGET`: train, on this process or on several local ones, or as a rank under another launcher.

meshrun run digits
meshrun run digits --procs 4 --steps 30 --json
torchrun --nproc-per-node=2 -m meshrun run digits
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from rich.console import Console

from meshrun.cli.target import Target, make
from meshrun.config import RunConfig, RunDirectory
from meshrun.errors import RunFailed, SharedError, UserError
from meshrun.launch.local import Interrupted, Job, launch
from meshrun.layout import parse
from meshrun.observe.events import Event
from meshrun.observe.failures import first_failure
from meshrun.observe.report import write_report
from meshrun.observe.story import Follow, Story
from meshrun.world import World, detect


def run_command(config: RunConfig, target: Target, as_json: bool) -> dict[str, Any] | None:
    """Returns the result on the one process that should print it."""
    world = detect(os.environ)
    if world.source != "none" and not (world.size == 1 and config.procs):
        return _as_rank(config, target, world, as_json)
    procs = config.procs or _default_procs(config)
    config = replace(config, procs=procs)
    _check_before_start(config, target, procs)
    return _alone(config, target, as_json) if procs == 1 else _launched(config, target, procs, as_json)


def _as_rank(config: RunConfig, target: Target, world: World, as_json: bool) -> dict[str, Any] | None:
    """Another launcher has started the ranks: this process is one of them."""
    if config.procs and config.procs != world.local_size:
        raise SharedError(
            f"procs is {config.procs} but {world.source} has started {world.local_size} ranks on {world.host}; "
            f"leave --procs away under another launcher"
        )
    result = _alone(config, target, as_json, shown=world.rank == 0)
    return result if world.rank == 0 else None


def _alone(config: RunConfig, target: Target, as_json: bool, shown: bool = True) -> dict[str, Any]:
    """Train in this process."""
    from meshrun.cli.rank import run_script, work

    with Story(Console(stderr=True)) as story, _kept_for_the_document() if as_json else contextlib.nullcontext():
        if target.entry is not None:
            return work(config, target, story.tell if shown else _ignore)
        run_script(config, target)
        return {"run": None, "world": detect(os.environ).size}


@contextlib.contextmanager
def _kept_for_the_document() -> Iterator[None]:
    """What the user's program prints must not get between scripts and the one document on standard output."""
    own = os.dup(1)
    sys.stdout.flush()
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(own, 1)
        os.close(own)


def _launched(config: RunConfig, target: Target, procs: int, as_json: bool) -> dict[str, Any]:
    """Start the ranks, tell their story, and say which failed first."""
    run = RunDirectory.create(config)
    job = Job(["-m", "meshrun", "rank", str(run.path), str(os.getpid())], procs, config.port or 0)
    console = Console(stderr=True)
    try:
        with Story(console, None if as_json else sys.stdout) as story, Follow(story, run.events_of(0), run.log_of(0)):
            failures = launch(job)
    except Interrupted as stopped:
        raise RunFailed(f"stopped by {stopped}; what was reached is in {run.path}") from stopped
    if failures:
        with contextlib.suppress(Exception):  # a picture of what was reached, where there is enough for one
            write_report(run.path)
        failed = first_failure(run, {each.rank: each.how for each in failures}, socket.gethostname())
        raise (UserError if failed.by_user else RunFailed)(failed.text)
    if target.entry is None:
        return {"run": str(run.path), "world": procs}
    result: dict[str, Any] = json.loads((run.path / "result.json").read_text())
    return result


def _check_before_start(config: RunConfig, target: Target, procs: int) -> None:
    """Refuse what cannot work while nothing has been started yet."""
    from meshrun.mesh import too_few_gpus

    layout = parse(config.layout).resolve(procs)
    if target.entry is not None and layout.dp < layout.size:
        from meshrun.cli.rank import how_of, override
        from meshrun.train.loop import refuse

        refuse(override(make(target, config.options), config)[0], layout, how_of(config))
    if config.device == "cuda" and config.backend != "gloo":
        import torch

        gpus = torch.cuda.device_count()
        if gpus < procs:
            raise UserError(too_few_gpus(procs, gpus, socket.gethostname()))


def _default_procs(config: RunConfig) -> int:
    """Every local GPU, or one process."""
    if config.device == "cpu":
        return 1
    import torch

    return max(1, torch.cuda.device_count())


def _ignore(event: Event) -> None:
    """Ranks other than 0 tell no story."""

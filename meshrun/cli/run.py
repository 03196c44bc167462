"""`meshrun run TARGET`: train, on this process or on several local ones, or as a rank under another launcher.

meshrun run digits
meshrun run digits --procs 4 --steps 30 --json
torchrun --nproc-per-node=2 -m meshrun run digits
srun -N 2 --ntasks-per-node=1 python -m meshrun run digits --procs 4

The last one starts one task a node, which becomes the launcher of its ranks: lost ones are replaced, lost nodes too.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from meshrun.cli.collecting import importing
from meshrun.cli.command import Asked, shared_with
from meshrun.cli.launcher import OpenHub, as_agent, join, lead, wanted_of
from meshrun.cli.target import make
from meshrun.config import RunConfig, RunDirectory
from meshrun.data.shuffle import Shuffle
from meshrun.errors import SharedError, UserError
from meshrun.launch.agents import ranks_to_start
from meshrun.launch.head import Wanted
from meshrun.launch.job import Tell
from meshrun.launch.nodes import Hub, nodes_of
from meshrun.launch.post import Post
from meshrun.launch.ranks import Nursery
from meshrun.layout import parse
from meshrun.observe.events import Event
from meshrun.observe.story import Story
from meshrun.store.server import LOOPBACK, Server
from meshrun.train.interval import parse as parse_interval
from meshrun.world import World, detect
from meshrun.world.environment import inherited, joining_at, of_foreign_rank, of_lone_rank, only
from meshrun.world.gpu import open_early


def run_command(asked: Asked, nursery: Nursery | None = None) -> dict[str, Any] | None:
    """Returns the result on the one process that should print it."""
    world, config = detect(os.environ), asked.config
    if asked.target.entry is None and world.rank == 0:
        _tell_of_shared_options(asked)
    procs = config.procs
    if world.source != "none":
        procs = ranks_to_start(world, config, inherited()) or (procs if world.size == 1 else None)
        if procs is None:
            return _as_rank(asked, world)
    asked = replace(asked, config=replace(config, procs=procs or _default_procs(config)))
    if config.join is not None:
        _join(asked, config.join, nursery)
        return None
    if world.nodes > 1:
        return _as_agent(asked, world, nursery)
    wanted = wanted_of(config)
    _check_before_start(asked, wanted)
    several = wanted.most > 1
    return lead(asked, nursery, wanted, _hub_of(config)) if several or asked.config.procs != 1 else _alone(asked)


def _tell_of_shared_options(asked: Asked) -> None:
    """An option of a script that meshrun has taken for its own is one that the script silently does not get."""
    for flag in shared_with(asked.target.path, asked.config.command):
        print(
            f"meshrun: {flag} was taken as an option of meshrun run, and {asked.target.label} has one of that name "
            f"too; the script gets what stands behind --: meshrun run {asked.target.label} -- {flag} …",
            file=sys.stderr,
            flush=True,
        )


def _as_rank(asked: Asked, world: World) -> dict[str, Any] | None:
    """Another launcher has started the ranks: this process is one of them."""
    procs = asked.config.procs
    if procs and procs != world.local_size:
        if asked.run is None:
            raise SharedError(
                f"procs is {procs} but {world.source} has started {world.local_size} ranks on {world.host}; "
                f"leave --procs away under another launcher"
            )
        asked = replace(asked, config=replace(asked.config, procs=None))  # as it was before, under our own
    result = _alone(asked, shown=world.rank == 0)
    return result if world.rank == 0 else None


def _alone(asked: Asked, shown: bool = True) -> dict[str, Any]:
    """Train in this process."""
    trains = asked.target.entry is not None
    # A script may fork processes that open the GPU themselves, which they cannot if this one has.
    opened = open_early(detect(os.environ).local_rank) if trains and asked.config.device != "cpu" else None
    with importing():
        from meshrun.cli.rank import work
        from meshrun.cli.script_rank import run_script

        if asked.config.compile:
            import torch._dynamo  # noqa: F401 - while imports are made quickly
        elif trains:
            from meshrun.train.uncompiled import leave_out_the_compiler

            leave_out_the_compiler()
    if opened is not None:
        opened.join()

    quiet = _kept_for_the_document() if asked.as_json else contextlib.nullcontext()
    with Story(Console(stderr=True), None if asked.as_json else sys.stdout) as story, quiet:
        if trains:
            return work(asked.config, asked.target, story.tell if shown else _ignore, asked.run, asked.document)
        world = detect(os.environ)
        with _as_torchrun_would(world, asked.config) if world.source != "torchrun" else contextlib.nullcontext():
            run_script(asked.config, asked.target)
        return {"run": None, "world": world.size}


@contextlib.contextmanager
def _as_torchrun_would(world: World, config: RunConfig) -> Iterator[None]:
    """Give a plain script in this process the variables of torchrun, and serve the store that they name."""
    if world.size > 1:
        from meshrun.cli.configured import meeting_of
        from meshrun.mesh import meet_for_script

        met = meet_for_script(world, meeting_of(config)) if world.address is None else None
        with only({**inherited(), **of_foreign_rank(world, (met.host, met.port) if met else None)}):
            yield
        return
    with Server() as store, only({**inherited(), **of_lone_rank(LOOPBACK, store.port)}), joining_at(store.port):
        yield


@contextlib.contextmanager
def _kept_for_the_document() -> Iterator[None]:
    """What the user's program prints must not get between scripts and the one document on standard output."""
    own, stream = os.dup(1), sys.stdout
    stream.flush()
    os.dup2(2, 1)
    try:
        yield
    finally:
        for each in {stream, sys.stdout} - {None}:  # the program may have put another one in its place
            with contextlib.suppress(ValueError):  # or have closed it
                each.flush()
        os.dup2(own, 1)
        os.close(own)


def _as_agent(asked: Asked, world: World, nursery: Nursery | None) -> dict[str, Any] | None:
    """This task is the only one of its node: it starts the node's ranks."""
    wanted = wanted_of(asked.config, world)
    return as_agent(asked, world, wanted, nursery, lambda: _check_before_start(asked, wanted))


def _join(asked: Asked, where: str, nursery: Nursery | None) -> None:
    """Take part in the run of a node that the user names."""
    procs = asked.config.procs
    assert procs is not None

    def accept(run: Path) -> None:
        target = RunDirectory(run).config().target
        if target != asked.config.target:
            raise UserError(
                f"the run at {where}, {run}, trains {target} and not {asked.config.target}; a node joins with the "
                f"command that the first one was started with (TARGET, --join)"
            )

    post = Post.reach(where, procs, asked.config.timeout, accept)
    join(post, nursery, Story(Console(stderr=True)), asked.config.timeout)


def _hub_of(config: RunConfig) -> OpenHub:
    """Opens the place where other nodes join, where the run has any."""

    def open_hub(run: RunDirectory, tell: Tell) -> Hub | None:
        if nodes_of(config.nodes)[1] == 1:
            return None
        hub = Hub(config.port or 0, run.path)
        tell("note", text=f"on each other node start the same command with --join {socket.gethostname()}:{hub.port}")
        return hub

    return open_hub


def _check_before_start(asked: Asked, wanted: Wanted) -> None:
    """Refuse what cannot work while nothing has been started yet."""
    from meshrun.mesh import too_few_gpus

    config, target = asked.config, asked.target
    assert config.procs is not None
    parse_interval(config.checkpoint)
    if config.shuffle is not None:
        Shuffle.parse(config.shuffle)
    # All nodes that were started together are to have a part in it; where others may come, some number must suit it.
    nodes = [wanted.expected] if wanted.expected else range(wanted.least, wanted.most + 1)
    sizes = [config.procs * each for each in nodes]
    size = next(filter(wanted.fits, sizes), sizes[0])
    layout = parse(config.layout).resolve(size)
    if target.entry is not None and layout.dp < layout.size:
        from meshrun.cli.configured import how_of, override
        from meshrun.train.refusals import refuse

        refuse(override(make(target, config.options, config.data), config)[0], layout, how_of(config))
    if config.device == "cuda" and config.backend != "gloo":
        import torch

        gpus = torch.cuda.device_count()
        if gpus < config.procs:
            raise UserError(too_few_gpus(config.procs, gpus, socket.gethostname()))


def _default_procs(config: RunConfig) -> int:
    """Every local GPU, or one process."""
    if config.device == "cpu":
        return 1
    import torch

    return max(1, torch.cuda.device_count())


def _ignore(event: Event) -> None:
    """Ranks other than 0 tell no story."""

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
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from meshrun.cli.command import Asked
from meshrun.cli.target import make
from meshrun.config import RunConfig, RunDirectory
from meshrun.errors import RunFailed, SharedError, UserError
from meshrun.launch.head import Wanted
from meshrun.launch.job import PARENT, Interrupted, Job, Tell, Verdict
from meshrun.launch.local import launch
from meshrun.launch.lock import lock
from meshrun.launch.memory import Memory
from meshrun.launch.nodes import Hub, Post, nodes_of
from meshrun.launch.ranks import Nursery
from meshrun.layout import parse
from meshrun.observe.events import Event, EventFile
from meshrun.observe.failures import first_failure
from meshrun.observe.report import write_report
from meshrun.observe.story import Follow, Story
from meshrun.observe.watch import Watcher
from meshrun.train.interval import parse as parse_interval
from meshrun.world import World, detect


def run_command(asked: Asked, nursery: Nursery | None = None) -> dict[str, Any] | None:
    """Returns the result on the one process that should print it."""
    world = detect(os.environ)
    if world.source != "none" and not (world.size == 1 and asked.config.procs):
        return _as_rank(asked, world)
    asked = replace(asked, config=replace(asked.config, procs=asked.config.procs or _default_procs(asked.config)))
    if asked.config.join is not None:
        _join(asked, asked.config.join, nursery)
        return None
    several = nodes_of(asked.config.nodes)[1] > 1
    _check_before_start(asked)
    return _launched(asked, nursery) if several or asked.config.procs != 1 else _alone(asked)


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
    from meshrun.cli.rank import run_script, work

    quiet = _kept_for_the_document() if asked.as_json else contextlib.nullcontext()
    with Story(Console(stderr=True)) as story, quiet:
        if asked.target.entry is not None:
            return work(asked.config, asked.target, story.tell if shown else _ignore, asked.run)
        run_script(asked.config, asked.target)
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


def _launched(asked: Asked, nursery: Nursery | None) -> dict[str, Any]:
    """Start the ranks, tell their story, and say which failed first."""
    config = asked.config
    assert config.procs is not None
    run = asked.run or RunDirectory.create(config)
    began = [time.time()]
    try:
        with lock(run), _scene(run, str(os.getpid()), asked.as_json, began) as (memory, tell):
            if asked.run is not None:
                run.renew_config(config)
            hub = _hub(config, run, tell)
            job = _job(config, run, memory, config.procs)
            failures = launch(job, Watching(memory, run, config, tell), tell, nursery, hub, _wanted(config))
    except Interrupted as stopped:
        raise RunFailed(f"stopped by {stopped}; what was reached is in {run.path}") from stopped
    if failures:
        with contextlib.suppress(Exception):  # a picture of what was reached, where there is enough for one
            write_report(run.path)
        ended = {each.rank: each.how for each in failures}
        failed = first_failure(run, ended, socket.gethostname(), since=began[0])
        raise (UserError if failed.by_user else RunFailed)(failed.text)
    if asked.target.entry is None:
        return {"run": str(run.path), "world": config.procs}
    result: dict[str, Any] = json.loads((run.path / "result.json").read_text())
    return result


def _join(asked: Asked, where: str, nursery: Nursery | None) -> None:
    """Take part in a run that another node has begun; its own words decide but for this node's number of ranks."""
    procs = asked.config.procs
    assert procs is not None
    post = Post.reach(where, procs, asked.config.timeout)
    run = RunDirectory(post.run)
    config = run.config()
    try:
        with (
            _scene(run, post.id, True, [0.0], follow=False) as (memory, tell),
            contextlib.nullcontext(nursery) if nursery else Nursery(config.target) as warm,
        ):
            post.serve(_job(config, run, memory, procs), Watching(memory, run, config, tell), tell, warm)
    except Interrupted as stopped:
        raise RunFailed(f"stopped by {stopped}; the other nodes go on in {run.path}") from stopped


def _job(config: RunConfig, run: RunDirectory, memory: Path, procs: int) -> Job:
    words = ["-m", "meshrun", "rank", str(run.path), PARENT, str(memory)]
    return Job(words, procs, config.port or 0, config.target, memory, config.restarts)


def _hub(config: RunConfig, run: RunDirectory, tell: Tell) -> Hub | None:
    """The place where other nodes join, where the run has any."""
    if nodes_of(config.nodes)[1] == 1:
        return None
    hub = Hub(config.port or 0, run.path)
    tell("note", text=f"on each other node start the same command with --join {socket.gethostname()}:{hub.port}")
    return hub


def _wanted(config: RunConfig) -> Wanted:
    least, most = nodes_of(config.nodes)

    def fits(size: int) -> bool:
        try:
            parse(config.layout).resolve(size)
        except UserError:
            return False
        return True

    return Wanted(least, most, fits, config.timeout)


@contextlib.contextmanager
def _scene(
    run: RunDirectory, node: str, as_json: bool, began: list[float], follow: bool = True
) -> Iterator[tuple[Path, Tell]]:
    """The run's folder in memory, and a way to tell what the launcher does, beside what rank 0 tells."""
    with (
        Memory(run, node) as memory,
        contextlib.closing(EventFile(run.events / f"launcher-{node}.jsonl")) as events,
        Story(Console(stderr=True), None if as_json else sys.stdout) as story,
        Follow(story, run.events_of(0), run.log_of(0)) if follow else contextlib.nullcontext(),
    ):

        def tell(kind: str, **fields: Any) -> None:
            if kind == "restart":
                began[0] = time.time()
            events.write(kind, **fields)
            story.tell({"kind": kind, **fields})

        yield memory.path, tell


class Watching:
    """The watcher of ranks, in the launcher's words."""

    def __init__(self, memory: Path, run: RunDirectory, config: RunConfig, tell: Tell) -> None:
        self._watcher = Watcher(memory, run.path, config, socket.gethostname())
        self._action, self._tell = config.on_hang, tell
        self.started = self._watcher.started
        self.progress, self.patience = self._watcher.progress, self._watcher.patience

    def look(self) -> Verdict | None:
        found = self._watcher.look()
        for sentence in self._watcher.notes():
            self._tell("straggler", sentence=sentence)
        return Verdict(found.rank, found.sentence, self._action) if found is not None else None


def _check_before_start(asked: Asked) -> None:
    """Refuse what cannot work while nothing has been started yet."""
    from meshrun.mesh import too_few_gpus

    config, target = asked.config, asked.target
    assert config.procs is not None
    parse_interval(config.checkpoint)
    least, most = nodes_of(config.nodes)
    sizes = [config.procs * nodes for nodes in range(least, most + 1)]
    size = next(filter(_wanted(config).fits, sizes), sizes[0])
    layout = parse(config.layout).resolve(size)
    if target.entry is not None and layout.dp < layout.size:
        from meshrun.cli.rank import how_of, override
        from meshrun.train.loop import refuse

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

"""The launcher of a node: starts its ranks, tells their story, and says which failed first.

lead(asked, nursery, wanted, open_hub)   # on the first node, or the only one
join(post, nursery, story, patience)     # on another one, whose connection to the first is `post`
as_agent(asked, world, wanted, nursery)  # where Slurm or MPI has started one task a node: one of the two
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from meshrun import strict_json
from meshrun.cli.command import Asked
from meshrun.cli.node_cache import kept_on_node
from meshrun.cli.target import find
from meshrun.config import RunConfig, RunDirectory, remove
from meshrun.errors import CutOff, RunFailed, SharedError, UserError, printable
from meshrun.launch import agents
from meshrun.launch.anew import run_of
from meshrun.launch.head import Wanted
from meshrun.launch.job import PARENT, Failure, Interrupted, Job, Tell, Verdict
from meshrun.launch.local import Lookout, launch
from meshrun.launch.lock import lock
from meshrun.launch.memory import Memory
from meshrun.launch.nodes import Hub, nodes_of
from meshrun.launch.orphans import Orphan
from meshrun.launch.post import Ends, Post, take_part
from meshrun.launch.ranks import Nursery
from meshrun.layout import parse
from meshrun.observe.events import EventFile
from meshrun.observe.failures import first_failure, notes_in
from meshrun.observe.legs import legs_of
from meshrun.observe.report import write_report
from meshrun.observe.story import Follow, Story
from meshrun.observe.watch import ScriptWatcher, Watcher
from meshrun.train.deadline import deadline_of
from meshrun.world import World, detect
from meshrun.world.environment import inherited
from meshrun.world.rendezvous import own_address
from meshrun.world.sites import load
from meshrun.world.slurm import in_job, job_id

ANSWER_WITHIN = 2.0
"""Seconds that Slurm gets to say whether the job still ends when it was to."""
ASK_EVERY = 5.0
"""Seconds between two questions to Slurm of a node that does not reach the first one; of many nodes few ask often."""

RESTARTS = 3
"""How often in a row lost ranks of a training are replaced."""
NOT_AGAIN = (
    "; a plain script has no checkpoint of meshrun's, so that it is started again, from its beginning, only where "
    "--restarts N asks for it"
)

OpenHub = Callable[[RunDirectory, Tell], Hub | None]
"""Makes the place where other nodes join a run, where there are any."""


def lead(asked: Asked, nursery: Nursery | None, wanted: Wanted, open_hub: OpenHub) -> dict[str, Any]:
    """Start the ranks of this node, decide for all nodes, and return the result."""
    config = asked.config
    assert config.procs is not None
    run = asked.run or run_of(config, detect(inherited()), inherited())
    began, ends = [time.time()], Ends(run)
    story = Story(Console(stderr=True), None if asked.as_json else sys.stdout)
    try:
        with (
            lock(run, _say),
            _obeyed(run),
            _renewed(asked, run),
            _scene(config, run, str(os.getpid()), story, began) as (memory, tell),
            Follow(story, run.events_of(0), run.log_of(0), notes=notes_in(memory, 0)),
        ):
            remove(run.stopped_file)  # else a signal now would seem to have been obeyed
            hub = open_hub(run, tell)
            job = _job(config, run, memory, config.procs)
            watch = Watching(memory, run, config, tell, several=hub is not None)
            wanted = replace(wanted, folder=str(run.path))
            if asked.target.entry is None:
                ranks = f"{config.procs} rank{'s' * (config.procs != 1)}"
                tell("note", text=f"{asked.target.label}: a plain script on {ranks}  ->  {run.path}/logs")
            failures = launch(job, watch, tell, nursery, hub, wanted, lookout_of(run, config, inherited()))
            if failures:
                raise _failure_of(run, memory, failures, began[0], config)
    except Interrupted as stopped:
        return _stopped_in_time(run, stopped, ends)
    if asked.target.entry is None:
        return {"run": str(run.path), "world": config.procs}
    return _reached(run)


def _renewed(asked: Asked, run: RunDirectory) -> contextlib.AbstractContextManager[None]:
    """Writes the configuration of a run that is resumed; who enters it holds the run's lock."""
    return run.renewed(asked.config, asked.document) if asked.run is not None else contextlib.nullcontext()


def _failure_of(
    run: RunDirectory, memory: Path, failures: list[Failure], since: float, config: RunConfig
) -> UserError | RunFailed:
    """Why the run has failed: what the first of its ranks said that failed."""
    with contextlib.suppress(Exception):  # a picture of what was reached, where there is enough for one
        # Of a run with a result it is there, and a start that was refused adds nothing to it.
        if run.result() is None or any(leg.began >= since for leg in legs_of(run.events_of(0))):
            write_report(run.path)
    ended = {each.rank: each.how for each in failures}
    of_script = {"stepless": ""} if find(config.target).entry is None else {}
    failed = first_failure(run, ended, socket.gethostname(), since=since, memory=memory, **of_script)
    if of_script and config.restarts is None and all(each.is_lost for each in failures):
        failed = replace(failed, sentence=failed.sentence + NOT_AGAIN)
    if failed.by_user:
        return UserError(failed.text)
    return (CutOff if all(each.is_lost for each in failures) else RunFailed)(failed.text)


def _say(text: str) -> None:
    """What is to be told before there is a story to tell it in."""
    print(f"meshrun: {printable(text)}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _obeyed(run: RunDirectory) -> Iterator[None]:
    """What asks the run to stop is not to stop the next start of it, should this one have come to its end before."""
    try:
        yield
    finally:
        remove(run.stop_file)


def _stopped_in_time(run: RunDirectory, by: Interrupted, ends: Ends) -> dict[str, Any]:
    """Slurm's signals announce the job's end: who has kept its state by then has done what was asked for."""
    announced = in_job(inherited()) and by.number != signal.SIGINT
    if (announced or by.number == signal.SIGUSR2) and ends.written():
        return _reached(run)
    raise (CutOff if announced else RunFailed)(f"stopped by {by}; {run.what_is_left()}") from by


def lookout_of(run: RunDirectory, config: RunConfig, env: Mapping[str, str]) -> Lookout:
    """What ranks would look at if there were any: the file that asks the run to stop, and the clock."""
    deadline = deadline_of(config, env, time.time())

    def is_over() -> bool:
        return deadline is not None and time.time() + deadline.slack > deadline.end

    def look() -> str:
        if run.stop_file.exists():
            return f"{run.stop_file} was made"
        if deadline is None:
            return ""
        deadline.ask_while_unknown()
        if is_over():
            deadline.ask()  # limits get extended
            deadline.wait(ANSWER_WITHIN)
        return deadline.why if is_over() else ""

    return look


def _reached(run: RunDirectory) -> dict[str, Any]:
    """The result of a run that has stopped in time or come to its end."""
    return (run.stopped() or {}).get("result") or strict_json.read(run.path / "result.json")


def join(
    post: Post,
    nursery: Nursery | None,
    story: Story,
    patience: float,
    as_one: bool = False,
    is_orphan: Callable[[], bool] = lambda: False,
) -> None:
    """Take part in a run that another node has begun; its own words decide but for this node's number of ranks.

    `as_one` and `is_orphan` are as in `take_part`.
    """
    run = RunDirectory(post.run)
    config = run.config()
    try:
        with (
            _scene(config, run, post.id, story, [0.0]) as (memory, tell),
            contextlib.nullcontext(nursery) if nursery else Nursery(config.target) as warm,
        ):
            watch = Watching(memory, run, config, tell, several=True)
            take_part(post, _job(config, run, memory, post.ranks), watch, tell, warm, patience, as_one, is_orphan)
    except Interrupted as stopped:
        raise RunFailed(f"stopped by {stopped}; the other nodes go on in {run.path}") from stopped


def as_agent(
    asked: Asked, world: World, wanted: Wanted, nursery: Nursery | None, check: Callable[[], None]
) -> dict[str, Any] | None:
    """Be the launcher of this node, where Slurm or MPI has started one task on each: the first node's leads.

    `check` refuses what cannot work, on the first node for all.
    """
    config = asked.config
    runs = asked.run.path.parent if asked.run is not None else config.runs
    if world.node > 0:
        _follow(asked, world, runs, nursery)
        return None

    def open_hub(run: RunDirectory, _tell: Tell) -> Hub:
        return agents.open_hub(world, runs, run.path, own_address(world, config.site), config.port)

    agents.begin(world, runs)
    try:
        check()
        result = lead(asked, nursery, wanted, open_hub)
    except BaseException:
        agents.give_up(world, runs)
        raise
    agents.close_hub(world, runs)
    return result


def _follow(asked: Asked, world: World, runs: Path, nursery: Nursery | None) -> None:
    """Standard output and the story are the first node's; what goes wrong here alone is said on standard error."""
    config, orphan = asked.config, _orphan(world)
    assert config.procs is not None
    try:
        try:
            post = agents.find_hub(world, runs, config.procs, config.timeout)
        except SharedError as error:  # where the disk is the same there, the first node has given up too
            agents.excuse(world, runs, str(error))
            raise
        is_orphan = seldom(orphan.is_one, ASK_EVERY * (1 + world.node // 8)) if orphan is not None else lambda: False
        join(post, nursery, Story(Console(quiet=True)), config.timeout, as_one=True, is_orphan=is_orphan)
    except (UserError, RunFailed) as error:
        if str(error) and not isinstance(error, SharedError):
            _say(str(error))
        if isinstance(error, RunFailed) and orphan is not None and orphan.is_one():
            print(f"meshrun: {orphan.requeue()}", file=sys.stderr)
        raise type(error)("") from error


def _orphan(world: World) -> Orphan | None:
    """Who to ask whether the job has lost its first node: Slurm, in a job of which that node is known."""
    job = job_id(inherited())
    return Orphan(job, world.hosts[0]) if job is not None and world.hosts else None


def seldom(ask: Callable[[], bool], seconds: float) -> Callable[[], bool]:
    """A question that is asked only after so many seconds; until then the answer is no."""
    due = [time.monotonic() + seconds]

    def asked() -> bool:
        if time.monotonic() < due[0]:
            return False
        found = ask()
        due[0] = time.monotonic() + seconds
        return found

    return asked


def wanted_of(config: RunConfig, world: World | None = None) -> Wanted:
    """How many nodes a run takes; in a world of several tasks all of these are expected at its start."""
    least, most = nodes_of(config.nodes)
    expected = 0
    if world is not None and world.nodes > 1:
        if least > world.nodes:
            raise SharedError(
                f"nodes is {config.nodes} but {world.source} has started this on {world.nodes} nodes; ask for as many, "
                f"or leave --nodes away"
            )
        most = most if most > 1 else world.nodes
        expected = min(most, world.nodes)

    def fits(size: int) -> bool:
        try:
            parse(config.layout).resolve(size)
        except UserError:
            return False
        return True

    hosts = world.hosts if world is not None else ()
    return Wanted(least, most, fits, config.timeout, expected, hosts, f"the layout {config.layout}")


def _job(config: RunConfig, run: RunDirectory, memory: Path, procs: int) -> Job:
    words = ["-m", "meshrun", "rank", str(run.path), PARENT, str(memory)]
    restarts = config.restarts
    if restarts is None:
        restarts = 0 if find(config.target).entry is None else RESTARTS
    return Job(words, procs, config.port or 0, config.target, memory, restarts, config.timeout)


@contextlib.contextmanager
def _scene(
    config: RunConfig, run: RunDirectory, node: str, story: Story, began: list[float]
) -> Iterator[tuple[Path, Tell]]:
    """The run's folder in memory, and a way to tell what the launcher does, beside what rank 0 tells."""
    with (
        Memory(run, node) as memory,
        kept_on_node(config, run, load(config.site) if config.site is not None else None, memory.path),
        contextlib.closing(EventFile(run.events / f"launcher-{node}.jsonl")) as events,
        story,
    ):

        def tell(kind: str, **fields: Any) -> None:
            if kind == "restart":
                began[0] = time.time()
            events.write(kind, **fields)
            story.tell({"kind": kind, **fields})

        yield memory.path, tell


class Watching:
    """The watcher of ranks, in the launcher's words."""

    def __init__(self, memory: Path, run: RunDirectory, config: RunConfig, tell: Tell, several: bool) -> None:
        script = find(config.target).entry is None
        kind = ScriptWatcher if script else Watcher
        self._watcher = kind(memory, run.path, config, socket.gethostname(), others=several)
        # Ranks of a script may be idle for good reasons, such as a rank of another node that computes.
        only_told = script and (config.hang_after is None or several)
        self._action: Literal["restart", "end", "report"] = "report" if only_told else config.on_hang
        self._tell = tell
        self.started = self._watcher.started
        self.progress, self.patience = self._watcher.progress, self._watcher.patience
        self.takes_long = self._watcher.takes_long

    def look(self) -> Verdict | None:
        found = self._watcher.look()
        for sentence in self._watcher.notes():
            self._tell("straggler", sentence=sentence)
        return Verdict(found.rank, found.sentence, self._action) if found is not None else None

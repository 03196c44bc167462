"""A rank of a run: `meshrun rank RUN` under our own launcher, or `meshrun run` under somebody else's.

    work(config, target, tell)                 # a rank that somebody else has started; returns the result
    rank_command(run.path, launcher, memory)   # one that our launcher has started, which never returns a failure

Not for people: `run` starts it. What a rank does between its start and its end is in `training.py`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from meshrun import mesh
from meshrun.cli.configured import start_rank
from meshrun.cli.node_cache import kept_on_node, leave_node
from meshrun.cli.recorder import Recorder, Tell
from meshrun.cli.script_rank import leave, run_watched
from meshrun.cli.streams import lose_what_is_refused
from meshrun.cli.target import Target, find
from meshrun.cli.training import afterwards, hear_of_no_reader, refuse_unsaved, train
from meshrun.config import RunConfig, RunDirectory
from meshrun.data.readers import has_lost_a_reader
from meshrun.errors import CutOff, RunFailed, SharedError, StoppedByHand, UserError
from meshrun.launch.anew import run_of
from meshrun.launch.job import WORTH_A_RESTART
from meshrun.launch.local import die_with_launcher
from meshrun.launch.lock import lock
from meshrun.launch.parting import let_go_when_told
from meshrun.observe.beside import LATE, Beside, told
from meshrun.observe.events import read_events
from meshrun.observe.hang import Finding
from meshrun.observe.pulse import Pulse
from meshrun.observe.watch import Watcher
from meshrun.train.ending import Signals
from meshrun.train.loop import Stopped
from meshrun.world import detect
from meshrun.world.environment import inherited


def rank_command(folder: Path, launcher: int, memory: Path | None = None) -> None:
    """`meshrun rank RUN PID MEMORY`: a process that our launcher has started through process PID."""
    die_with_launcher(launcher)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # which process PID ignores, and one that is no fork of it inherits
    run, world = RunDirectory(folder), detect(os.environ)
    rank = world.rank
    print_to(run.log_of(rank))
    config = run.config()
    target = find(config.target)
    recorder = Recorder(run, rank, None, memory)
    pulse, formed_group = None, False
    try:
        if target.entry is None:
            formed_group = run_watched(config, target, recorder, memory)
        else:
            if memory is not None:
                pulse = Pulse.open(memory, rank, world.attempt)
                mesh.listen(pulse.waiting)
                let_go_when_told(memory, world.attempt)
            with Signals() as signals:
                trained = train(config, run, target, recorder, memory, pulse, signals)
                mesh.finish()
            afterwards(trained, run, recorder, pulse)
            refuse_unsaved(trained)
        recorder("end")
        recorder.close()
        if formed_group:
            leave()
    except BaseException as error:
        hear_of_no_reader()
        recorder.failure(error, rank)
        sys.stdout.flush()
        sys.stderr.flush()
        # Without the clean-up at the end of a process: it waits for ranks that may be gone.
        os._exit(2 if isinstance(error, UserError) else WORTH_A_RESTART if _may_go_away(error) else 1)


def _may_go_away(error: BaseException) -> bool:
    """Whether the same ranks, started anew, may get further: others, a reader, a device or the network were lost."""
    gone = isinstance(error, mesh.PeerLost | Stopped | torch.AcceleratorError)
    return gone or mesh.of_collectives(error) or has_lost_a_reader(error)


def work(
    config: RunConfig,
    target: Target,
    tell: Tell,
    again: RunDirectory | None = None,
    document: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Train as a rank that meshrun did not start (torchrun, MPI, Slurm, or alone), in a new run or in one `again`.

    `document` is the config.json of that one, from which the configuration was made.
    """
    here = start_rank(config)
    with contextlib.ExitStack() as held:
        made, refusal = _owned(config, here, again, document or {}, held) if here.rank == 0 else (None, "")
        made, refusal = here.from_rank_0((made, refusal))
        if refusal:
            raise SharedError(refusal)
        run = RunDirectory(Path(made))
        if not (run.path / "config.json").is_file():
            raise UserError(
                f"rank {here.rank} on {here.world.host} cannot see {run.path}; it must be on a shared disk (--runs)"
            )
        try:
            return _work_in(run, here, target, tell)
        except KeyboardInterrupt:
            if here.rank:
                raise
            raise StoppedByHand(f"stopped by CTRL-C; {run.what_is_left()}") from None


def _work_in(run: RunDirectory, here: mesh.Here, target: Target, tell: Tell) -> dict[str, Any]:
    began, config = time.time(), run.config()
    recorder = Recorder(run, here.rank, tell if here.rank == 0 else None)
    signals = Signals()
    of_node = kept_on_node(config, run, here.site, None) if here.world.local_rank == 0 else contextlib.nullcontext()
    try:
        with of_node:
            with signals:
                with _watched(config, run, here, recorder) as pulse:
                    trained = train(config, run, target, recorder, None, pulse, signals)
                mesh.finish()
            result = afterwards(trained, run, recorder, None)
            refuse_unsaved(trained)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # also sys.exit() in the program, which would end the run in silence
        if isinstance(error, mesh.PeerLost) and (hang := told(run.path)):
            error = RunFailed(hang)
        failed = recorder.failure(error, here.rank)
        lost = isinstance(error, mesh.PeerLost)
        if lost and signals.by == signal.SIGTERM:
            # Its launcher ends it because another rank is gone, and has nothing to hear from it.
            os.kill(os.getpid(), signal.SIGTERM)
        said = _said_elsewhere(run, here, failed.sentence, lost, began)
        # Of many exit statuses the launcher passes the highest on: where another rank tells the cause, so does its own.
        cut_off = _may_go_away(error) and not said
        kind = UserError if failed.by_user else CutOff if cut_off else RunFailed
        raise kind("" if said else failed.text) from error
    finally:
        leave_node()
    recorder("end")
    recorder.close()
    return result


@contextlib.contextmanager
def _watched(config: RunConfig, run: RunDirectory, here: mesh.Here, recorder: Recorder) -> Iterator[Pulse | None]:
    """Without a launcher of ours the first two ranks of a node watch its ranks; each also watches the other."""
    if here.size == 1:
        yield None
        return
    world = here.world
    folder = run.path / "pulse" / world.host
    pulse = Pulse.open(folder, here.rank, world.attempt)
    mesh.listen(pulse.waiting)
    with contextlib.ExitStack() as watched:
        if world.local_rank < 2:
            late = LATE * world.local_rank
            watcher = Watcher(folder, run.path, config, world.host, others=world.nodes > 1, late=late)
            found = partial(_found, recorder)
            watched.enter_context(
                Beside(watcher, folder, world.local_size, world.attempt, found, end=config.on_hang != "report")
            )
        yield pulse
        pulse.close()


def _found(recorder: Recorder, finding: Finding) -> None:
    recorder("hang", rank=finding.rank, sentence=finding.sentence)


def _owned(
    config: RunConfig,
    here: mesh.Here,
    again: RunDirectory | None,
    document: dict[str, Any],
    held: contextlib.ExitStack,
) -> tuple[str | None, str]:
    """On rank 0: the run directory, whose owner this process is from now on, or why it cannot be."""
    run = again or run_of(config, here.world, inherited())
    try:
        held.enter_context(lock(run, lambda text: print(f"meshrun: {text}", file=sys.stderr, flush=True)))
        if again is not None:
            held.enter_context(run.renewed(config, document))
    except SharedError as error:
        return None, str(error)
    return str(run.path), ""


def _said_elsewhere(
    run: RunDirectory, here: mesh.Here, sentence: str, is_consequence: bool, since: float, patience: float = 2.0
) -> bool:
    """Whether another rank tells the user: rank 0 the same, so that a thousand need not, or some rank the cause."""
    if here.rank == 0 and not is_consequence:
        return False
    others = [0] if here.rank else range(1, here.size)
    give_up = time.monotonic() + patience
    while time.monotonic() < give_up:
        events = (event for rank in others for event in read_events(run.events_of(rank)))
        for event in (event for event in events if event["kind"] == "failure" and event["time"] >= since):
            if event["sentence"] == sentence or (is_consequence and (here.rank or not event["secondary"])):
                return True
        time.sleep(0.1)
    return False


def print_to(log: Path) -> None:
    """Send all that this process prints to its log, also what libraries print; what a disk refuses of it is lost."""
    try:
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError:
        file = os.open(os.devnull, os.O_WRONLY)
    os.dup2(file, 1)
    os.dup2(file, 2)
    lose_what_is_refused()

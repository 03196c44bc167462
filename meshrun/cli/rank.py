"""A rank of a run: `meshrun rank RUN` under our own launcher, or `meshrun run` under somebody else's.

    work(config, run)                    # this rank's whole life; returns the result

Not for people: `run` starts it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import platform
import runpy
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Subset

import meshrun
from meshrun import mesh
from meshrun.cli.after import finish_with
from meshrun.cli.node_cache import kept_on_node, not_copied, use_node
from meshrun.cli.target import Target, find, make, place_of
from meshrun.config import RunConfig, RunDirectory, write_json
from meshrun.data.readers import has_lost_a_reader
from meshrun.data.staging import missing_of, use
from meshrun.errors import CutOff, RunFailed, SharedError, StoppedByHand, UserError
from meshrun.experiment import Experiment
from meshrun.launch.anew import run_of
from meshrun.launch.job import WORTH_A_RESTART
from meshrun.launch.local import die_with_launcher
from meshrun.launch.lock import lock
from meshrun.launch.parting import let_go_when_told
from meshrun.observe.beside import LATE, Beside, told
from meshrun.observe.board import Board
from meshrun.observe.events import Event, EventFile, read_events
from meshrun.observe.failures import FirstFailure, of_reader, write_traceback
from meshrun.observe.hang import Finding
from meshrun.observe.pulse import Pulse
from meshrun.observe.report import write_report
from meshrun.observe.stragglers import sniff_on
from meshrun.observe.watch import Watcher
from meshrun.parallel import compiled
from meshrun.parallel.choose import Choosing
from meshrun.parallel.how import How
from meshrun.train.bad_samples import left_out, read_bad
from meshrun.train.bad_steps import Policy
from meshrun.train.data_wait import waited_for_data
from meshrun.train.deadline import deadline_of
from meshrun.train.ending import Ending, Signals, begin_anew
from meshrun.train.interval import parse as parse_interval
from meshrun.train.loop import Stopped, Trainer
from meshrun.train.recovery import Keeping
from meshrun.world import World, detect, slurm
from meshrun.world.environment import inherited

Tell = Callable[[Event], None]


@dataclasses.dataclass(frozen=True)
class Trained:
    """What a rank has at the end of the training."""

    result: dict[str, Any]
    experiment: Experiment
    here: mesh.Here


_NOT_THE_USERS = (str(Path(meshrun.__file__).parent), str(Path(torch.__file__).parent), "<frozen")
"""Where lines of a traceback come from that say nothing to the user."""


class Recorder:
    """Hands each event to the events file and, on rank 0, to TensorBoard and to whoever shows it."""

    def __init__(self, run: RunDirectory, rank: int, tell: Tell | None) -> None:
        self._run, self._file, self._tell = run, EventFile(run.events_of(rank)), tell
        self.board: Board | None = None
        self.step = 0

    def __call__(self, kind: str, **fields: Any) -> None:
        self._file.write(kind, **fields)
        self.step = fields.get("step", self.step)
        for listener in (self.board.add if self.board else None, self._tell):
            if listener is not None:
                listener({"kind": kind, **fields})

    def failure(self, error: BaseException, rank: int) -> FirstFailure:
        """Write down why this rank ends: a sentence in the events, the traceback in the log."""
        host, log = socket.gethostname(), self._run.log_of(rank)
        sentence, lines = str(error), list[str]()
        if not isinstance(error, UserError | RunFailed):
            with log.open("a") as file:
                write_traceback(error, file)
            step = f" at step {self.step + 1}" if self.step else ""
            said, lines = of_reader(str(error), _NOT_THE_USERS) or (
                f"{type(error).__name__}: {str(error).strip() or 'no message'}",
                _last_lines(error),
            )
            said = missing_of(error) or said
            sentence = f"rank {rank} on {host} failed{step}: {said}"
        by_user, secondary = isinstance(error, UserError), isinstance(error, mesh.PeerLost)
        about = {"rank": rank, "host": host, "step": self.step, "by_user": by_user, "secondary": secondary}
        self("failure", sentence=sentence, lines=lines, **about)
        return FirstFailure(sentence, lines, log, by_user)

    def close(self) -> None:
        self._file.close()
        if self.board is not None:
            self.board.close()


def rank_command(folder: Path, launcher: int, memory: Path | None = None) -> None:
    """`meshrun rank RUN PID MEMORY`: a process that our launcher has started through process PID."""
    die_with_launcher(launcher)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # which process PID ignores, and one that is no fork of it inherits
    run, world = RunDirectory(folder), detect(os.environ)
    rank = world.rank
    print_to(run.log_of(rank))
    config = run.config()
    target = find(config.target)
    recorder = Recorder(run, rank, None)
    pulse = None
    try:
        if target.entry is None:
            run_script(config, target)
        else:
            if memory is not None:
                pulse = Pulse.open(memory, rank, world.attempt)
                mesh.listen(pulse.waiting)
                let_go_when_told(memory, world.attempt)
            with Signals() as signals:
                trained = _train(config, run, target, recorder, memory, pulse, signals)
                mesh.finish()
            _afterwards(trained, run, recorder, pulse)
        recorder("end")
        recorder.close()
    except BaseException as error:
        if isinstance(error, SystemExit) and error.code in (0, None):
            raise
        _hear_of_no_reader()
        recorder.failure(error, rank)
        sys.stdout.flush()
        sys.stderr.flush()
        # Without the clean-up at the end of a process: it waits for ranks that may be gone.
        os._exit(2 if isinstance(error, UserError) else WORTH_A_RESTART if _may_go_away(error) else 1)


def _may_go_away(error: BaseException) -> bool:
    """Whether the same ranks, started anew, may get further: others, a reader, a device or the network were lost."""
    gone = isinstance(error, mesh.PeerLost | Stopped | torch.AcceleratorError)
    return gone or mesh.of_collectives(error) or has_lost_a_reader(error)


def _hear_of_no_reader() -> None:
    """A rank that ends must not be interrupted by what torch raises whenever a reader is gone."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def work(config: RunConfig, target: Target, tell: Tell, again: RunDirectory | None = None) -> dict[str, Any]:
    """Train as a rank that meshrun did not start (torchrun, MPI, Slurm, or alone), in a new run or in one `again`."""
    here = start_rank(config)
    with contextlib.ExitStack() as held:
        made, refusal = _owned(config, here, again, held) if here.rank == 0 else (None, "")
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
                    trained = _train(config, run, target, recorder, None, pulse, signals)
                mesh.finish()
            result = _afterwards(trained, run, recorder, None)
    except Exception as error:
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
    config: RunConfig, here: mesh.Here, again: RunDirectory | None, held: contextlib.ExitStack
) -> tuple[str | None, str]:
    """On rank 0: the run directory, whose owner this process is from now on, or why it cannot be."""
    run = again or run_of(config, here.world, inherited())
    try:
        held.enter_context(lock(run, lambda text: print(f"meshrun: {text}", file=sys.stderr, flush=True)))
    except SharedError as error:
        return None, str(error)
    if again is not None:
        run.renew_config(config)
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


def run_script(config: RunConfig, target: Target) -> None:
    """Run a plain script as if Python had been given it; `meshrun.start()` in it finds this rank's place."""
    mesh.use(_meeting(config))
    use(place_of(target, {}, config.data))
    sys.argv = [str(target.path), *config.arguments]
    sys.path.insert(0, str(target.path.parent))
    runpy.run_path(str(target.path), run_name="__main__")


def _train(
    config: RunConfig,
    run: RunDirectory,
    target: Target,
    recorder: Recorder,
    memory: Path | None,
    pulse: Pulse | None,
    signals: Signals,
) -> Trained:
    began = time.monotonic()
    here = start_rank(config)
    restarted = here.world.source == "torchrun" and here.world.attempt > 0
    deadline = None
    if here.rank == 0:
        # What a job's shell was told while ranks were starting holds; it has removed what was there before.
        begin_anew(run, again=restarted or slurm.in_job(inherited()))
        deadline = deadline_of(config, inherited(), _start_of_run(here.world, memory is not None))
    if pulse is not None:
        pulse.sniff = sniff_on(here.device)
    use_node(config, run, here.site, memory, lambda text: recorder("note", text=text))
    experiment, scale, note = override(make(target, config.options, config.data), config)
    trainer = _trainer(config, run, experiment, scale, recorder, memory, pulse)
    # Each element once, however many ranks hold it.
    parameters = sum(here.gathered(sum(each.parameter.numel() / each.copies for each in trainer.placed.shards)))
    if here.rank == 0:
        resolved = {**_resolved(trainer), "parameters": round(parameters)}
        save = partial(run.save_config, config, resolved)
        save()
        _hear_choice(trainer, recorder, save)
        recorder.board = Board.open(run.path / "tensorboard") if config.tensorboard else None
    _tell_start(recorder, run, target, trainer)
    notes = [*([note] if note else []), *not_copied(config, experiment.train)]
    for text in (*notes, *here.notes, *trainer.placed.notes):
        recorder("note", text=text)
    resumed = trainer.resume()
    if resumed is not None:
        recorder("resumed", **resumed)
    trainer.ending = ending = Ending(trainer, run, signals, deadline, memory, slurm.in_job(inherited()))
    result = {
        "run": str(run.path),
        "world": here.size,
        "layout": str(here.layout),
        "device": str(here.device),
        **_trained(trainer, ending, restarted),
    }
    result["seconds"] = time.monotonic() - began
    result["chosen"] = {"precision": experiment.precision, **trainer.placed.chosen}
    if here.rank == 0:
        save()  # some of it is only known when steps were done
    result |= waited_for_data(trainer, config.cache != "none")
    if here.rank == 0 and (bad := read_bad(run.path / "bad-samples")) is not None:
        result["bad_samples"] = bad
        recorder("note", text=left_out(bad, run.path / "bad-samples"))
    stopped = result.get("stopped")
    if stopped is not None:
        recorder("stopped", **stopped)
    if here.rank == 0 and stopped is not None:
        write_json(run.stopped_file, {**stopped, "result": result})
    elif here.rank == 0:
        write_json(run.path / "result.json", result)
        run.stop_file.unlink(missing_ok=True)  # whoever made it came too late, and means no later start
        _draw_report(run, recorder)
    return Trained(result, experiment, here)


def _afterwards(trained: Trained, run: RunDirectory, recorder: Recorder, pulse: Pulse | None) -> dict[str, Any]:
    """When all is kept and the ranks have parted: rank 0 does what the experiment wants done with its model."""
    result, experiment, here = trained.result, trained.experiment, trained.here
    if here.rank != 0 or experiment.after is None or "stopped" in result:
        return result
    if pulse is not None:
        pulse.mark("after", result["steps"])
    mesh.stay(here)
    result = finish_with(experiment, run, result, recorder, here.device)
    _draw_report(run, recorder)
    return result


def _tell_start(recorder: Recorder, run: RunDirectory, target: Target, trainer: Trainer) -> None:
    here = trainer.here
    recorder(
        "start",
        rank=here.rank,
        world=here.size,
        host=here.world.host,
        source=here.world.source,
        device=str(here.device),
        layout=str(here.layout),
        pid=os.getpid(),
        cores=sorted(os.sched_getaffinity(0)),
        target=target.label,
        total_steps=trainer.total_steps,
        run=str(run.path),
        chosen=trainer.placed.chosen,
    )


def _hear_choice(trainer: Trainer, recorder: Recorder, save: Callable[[], None]) -> None:
    """What is computed twice, and whether all could be compiled, is known after the first step: it is told then, and
    written down.
    """

    def tell(text: str | None) -> None:
        if text is not None:
            recorder("note", text=text)
        save()

    if isinstance(trainer.placed.step, Choosing):
        trainer.placed.step.tell = tell
    if trainer.placed.chosen["compile"]:
        compiled.hear(trainer.placed.chosen, tell)


def _start_of_run(world: World, ours: bool) -> float:
    """When this start of the run began, in seconds since 1970, which is when who has started this rank was started."""
    # Where torchrun's variables were exported by hand, that is a shell, which may be old.
    launched = world.agent_store or world.source not in ("torchrun", "none")
    try:
        found = _stat(os.getppid() if launched else os.getpid())
        if ours:  # through a process that it replaces when that is lost
            found = _stat(int(found[1]))
    except OSError:  # in a container of its own it does not see who has started it
        return time.time()
    ticks = int(found[19])
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")


def _stat(pid: int) -> list[str]:
    """What Linux says of a process, from its state on; its name, which comes before that, may have spaces."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _trainer(
    config: RunConfig,
    run: RunDirectory,
    experiment: Experiment,
    lr_scale: float,
    recorder: Recorder,
    memory: Path | None,
    pulse: Pulse | None,
) -> Trainer:
    """A trainer as the configuration wants it."""
    here = mesh.start()
    return Trainer(
        experiment,
        here,
        workers=config.workers,
        prefetch=config.prefetch,
        eval_every=config.eval_every,
        lr_scale=lr_scale,
        weights=run.weights,
        record=recorder,
        how=how_of(config),
        keeping=Keeping(
            run.checkpoints,
            memory if config.spare else None,
            parse_interval(config.checkpoint),
            config.keep,
            config.mtbf,
            here.world.attempt,
            config.timeout,
        ),
        policy=Policy(config.on_nan, config.on_spike, config.spike),
        life=pulse,
        record_ids=config.record_ids,
        skip_bad=config.skip_bad_samples,
        bad=run.path / "bad-samples",
    )


def _trained(trainer: Trainer, ending: Ending, restarted: bool) -> dict[str, Any]:
    """What it reaches; a training that is cut off leaves its state to who goes on with it."""
    try:
        try:
            ending.begin(restarted)
            return trainer.train()
        except Stopped as stopped:
            return {"stopped": ending.conclude(stopped), **trainer.totals.result()}
    except (RuntimeError, RunFailed, KeyboardInterrupt) as error:
        _hear_of_no_reader()
        graceful = isinstance(error, Stopped | KeyboardInterrupt) or has_lost_a_reader(error)
        lost = isinstance(error, mesh.PeerLost) or mesh.of_collectives(error)
        if trainer.keeper is not None and (graceful or lost):
            trainer.keeper.leave(graceful)
        raise


def _draw_report(run: RunDirectory, recorder: Recorder) -> None:
    """The training is done and kept: a picture of it that cannot be drawn must not make it a failure."""
    try:
        write_report(run.path)
    except Exception as error:
        recorder("note", text=f"the report could not be drawn: {type(error).__name__}: {error}")


def override(experiment: Experiment, config: RunConfig) -> tuple[Experiment, float, str]:
    """The experiment with what the command line changes; the factor for learning rates; what to tell the user."""
    names = ("steps", "epochs", "batch", "micro", "seed", "clip", "precision", "shuffle")
    changes = {name: getattr(config, name) for name in names if getattr(config, name) is not None}
    if "epochs" in changes and "steps" not in changes:
        changes["steps"] = None
    if (first := config.eval_first) is not None:
        changes["evals"] = {
            name: Subset(data, range(min(first, len(data))))  # type: ignore[arg-type]
            for name, data in experiment.evals.items()
        }
    changed = dataclasses.replace(experiment, **changes)
    ratio = changed.batch / experiment.batch
    if ratio == 1.0:
        return changed, 1.0, ""
    asked = f"batch {experiment.batch} -> {changed.batch}"
    if config.scale_lr:
        return changed, ratio, f"{asked}: learning rates times {ratio:g} (--scale-lr)"
    return (
        changed,
        1.0,
        f"{asked}: the linear scaling rule would multiply learning rates by {ratio:g} (--scale-lr does)",
    )


def _resolved(trainer: Trainer) -> dict[str, Any]:
    experiment, here = trainer.experiment, trainer.here
    names = ("batch", "micro", "seed", "clip", "precision", "epochs")
    return {
        **{name: getattr(experiment, name) for name in names},
        "shuffle": str(trainer.order.shuffle),
        "steps": trainer.total_steps,
        "eval_every": trainer.eval_every,
        "schedule": dataclasses.asdict(experiment.schedule)
        if dataclasses.is_dataclass(experiment.schedule) and not isinstance(experiment.schedule, type)
        else str(experiment.schedule),
        "layout": str(here.layout),
        "world": here.size,
        "launcher": here.world.source,
        "device": str(here.device),
        "chosen": trainer.placed.chosen,
        "workers": trainer.reading.workers,
        "train_samples": len(experiment.train),
        "eval_samples": {name: len(data) for name, data in experiment.evals.items()},
        "versions": {"meshrun": meshrun.__version__, "torch": torch.__version__, "python": platform.python_version()},
    }


def start_rank(config: RunConfig) -> mesh.Here:
    mesh.use(_meeting(config))
    return mesh.start()


def _meeting(config: RunConfig) -> mesh.Meeting:
    names = ("layout", "device", "backend", "timeout", "threads", "runs", "allow_tp_across_nodes", "site")
    return mesh.Meeting(**{name: getattr(config, name) for name in names})


def how_of(config: RunConfig) -> How:
    """What the options say on how a step is computed."""
    names = {each.name for each in dataclasses.fields(How)} & {each.name for each in dataclasses.fields(config)}
    return How(**{name: getattr(config, name) for name in names})


def print_to(log: Path) -> None:
    """Send all that this process prints to its log, also what libraries print."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def _last_lines(error: BaseException, most: int = 4) -> list[str]:
    """Where it happened in the user's own program, the innermost call last, and the notes on it."""
    frames, notes = list(traceback.extract_tb(error.__traceback__)), getattr(error, "__notes__", [])
    own = [frame for frame in frames if not frame.filename.startswith(_NOT_THE_USERS)]
    frames = own if own or notes else frames  # what a reader has met has the user's lines as notes
    return [*(f"{frame.filename}:{frame.lineno} in {frame.name}: {frame.line}" for frame in frames[-most:]), *notes]

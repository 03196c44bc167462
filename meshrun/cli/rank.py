"""A rank of a run: `meshrun rank RUN` under our own launcher, or `meshrun run` under somebody else's.

    work(config, run)                    # this rank's whole life; returns the result

Not for people: `run` starts it.
"""

from __future__ import annotations

import dataclasses
import os
import platform
import runpy
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import meshrun
from meshrun import mesh
from meshrun.cli.target import Target, find, make
from meshrun.config import RunConfig, RunDirectory, write_json
from meshrun.errors import RunFailed, UserError
from meshrun.experiment import Experiment
from meshrun.launch.local import die_with_launcher
from meshrun.observe.board import Board
from meshrun.observe.events import Event, EventFile, read_events
from meshrun.observe.failures import FirstFailure
from meshrun.observe.report import write_report
from meshrun.parallel.build import How
from meshrun.train.loop import Trainer
from meshrun.world import detect

Tell = Callable[[Event], None]


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
        sentence, lines = str(error), []
        if not isinstance(error, UserError | RunFailed):
            with log.open("a") as file:
                traceback.print_exception(error, file=file)
            step = f" at step {self.step + 1}" if self.step else ""
            sentence = (
                f"rank {rank} on {host} failed{step}: {type(error).__name__}: {str(error).strip() or 'no message'}"
            )
            lines = _last_lines(error)
        by_user, secondary = isinstance(error, UserError), isinstance(error, mesh.PeerLost)
        about = {"rank": rank, "host": host, "step": self.step, "by_user": by_user, "secondary": secondary}
        self("failure", sentence=sentence, lines=lines, **about)
        return FirstFailure(sentence, lines, log, by_user)

    def close(self) -> None:
        self._file.close()
        if self.board is not None:
            self.board.close()


def rank_command(folder: Path, launcher: int) -> None:
    """`meshrun rank RUN PID`: a process that our launcher, process PID, has started."""
    die_with_launcher(launcher)
    run, rank = RunDirectory(folder), detect(os.environ).rank
    print_to(run.log_of(rank))
    config = run.config()
    target = find(config.target)
    recorder = Recorder(run, rank, None)
    try:
        if target.entry is None:
            run_script(config, target)
        else:
            _train(config, run, target, recorder)
            mesh.finish()
        recorder("end")
        recorder.close()
    except BaseException as error:
        if isinstance(error, SystemExit) and error.code in (0, None):
            raise
        recorder.failure(error, rank)
        sys.stdout.flush()
        sys.stderr.flush()
        # Without the clean-up at the end of a process: it waits for ranks that may be gone.
        os._exit(2 if isinstance(error, UserError) else 1)


def work(config: RunConfig, target: Target, tell: Tell) -> dict[str, Any]:
    """Train as a rank that meshrun did not start (torchrun, MPI, Slurm, or this process alone)."""
    here = start_rank(config)
    made = str(RunDirectory.create(config).path) if here.rank == 0 else None
    run = RunDirectory(Path(here.from_rank_0(made)))
    if not (run.path / "config.json").is_file():
        raise UserError(
            f"rank {here.rank} on {here.world.host} cannot see {run.path}; it must be on a shared disk (--runs)"
        )
    recorder = Recorder(run, here.rank, tell if here.rank == 0 else None)
    try:
        result = _train(run.config(), run, target, recorder)
    except Exception as error:
        failed = recorder.failure(error, here.rank)
        said = _said_elsewhere(run, here, failed.sentence, isinstance(error, mesh.PeerLost))
        raise (UserError if failed.by_user else RunFailed)("" if said else failed.text) from error
    mesh.finish()
    recorder("end")
    recorder.close()
    return result


def _said_elsewhere(
    run: RunDirectory, here: mesh.Here, sentence: str, is_consequence: bool, patience: float = 2.0
) -> bool:
    """Whether another rank tells the user: rank 0 the same, so that a thousand need not, or some rank the cause."""
    if here.rank == 0 and not is_consequence:
        return False
    others = [0] if here.rank else range(1, here.size)
    give_up = time.monotonic() + patience
    while time.monotonic() < give_up:
        events = (event for rank in others for event in read_events(run.events_of(rank)))
        for event in (event for event in events if event["kind"] == "failure"):
            if event["sentence"] == sentence or (is_consequence and (here.rank or not event["secondary"])):
                return True
        time.sleep(0.1)
    return False


def run_script(config: RunConfig, target: Target) -> None:
    """Run a plain script as if Python had been given it; `meshrun.start()` in it finds this rank's place."""
    mesh.use(_meeting(config))
    sys.argv = [str(target.path), *config.arguments]
    sys.path.insert(0, str(target.path.parent))
    runpy.run_path(str(target.path), run_name="__main__")


def _train(config: RunConfig, run: RunDirectory, target: Target, recorder: Recorder) -> dict[str, Any]:
    began = time.time()
    here = start_rank(config)
    experiment, scale, note = override(make(target, config.options), config)
    trainer = Trainer(
        experiment,
        here,
        workers=config.workers,
        prefetch=config.prefetch,
        eval_every=config.eval_every,
        lr_scale=scale,
        weights=run.weights,
        record=recorder,
        how=how_of(config),
    )
    # Each element once, however many ranks hold it.
    parameters = sum(here.gathered(sum(each.parameter.numel() / each.copies for each in trainer.placed.shards)))
    if here.rank == 0:
        run.save_config(config, {**_resolved(trainer), "parameters": round(parameters)})
        recorder.board = Board.open(run.path / "tensorboard") if config.tensorboard else None
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
    )
    for text in (*([note] if note else []), *trainer.placed.notes):
        recorder("note", text=text)
    result = {
        "run": str(run.path),
        "world": here.size,
        "layout": str(here.layout),
        "device": str(here.device),
        **trainer.train(),
    }
    result["seconds"] = time.time() - began
    if here.rank == 0:
        write_json(run.path / "result.json", result)
        _draw_report(run, recorder)
    return result


def _draw_report(run: RunDirectory, recorder: Recorder) -> None:
    """The training is done and kept: a picture of it that cannot be drawn must not make it a failure."""
    try:
        write_report(run.path)
    except Exception as error:
        recorder("note", text=f"the report could not be drawn: {type(error).__name__}: {error}")


def override(experiment: Experiment, config: RunConfig) -> tuple[Experiment, float, str]:
    """The experiment with what the command line changes; the factor for learning rates; what to tell the user."""
    names = ("steps", "epochs", "batch", "micro", "seed", "clip", "precision")
    changes = {name: getattr(config, name) for name in names if getattr(config, name) is not None}
    if "epochs" in changes and "steps" not in changes:
        changes["steps"] = None
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
        "steps": trainer.total_steps,
        "eval_every": trainer.eval_every,
        "schedule": dataclasses.asdict(experiment.schedule)
        if dataclasses.is_dataclass(experiment.schedule) and not isinstance(experiment.schedule, type)
        else str(experiment.schedule),
        "layout": str(here.layout),
        "world": here.size,
        "launcher": here.world.source,
        "device": str(here.device),
        "workers": trainer.reading.workers,
        "train_samples": len(experiment.train),
        "eval_samples": {name: len(data) for name, data in experiment.evals.items()},
        "versions": {"meshrun": meshrun.__version__, "torch": torch.__version__, "python": platform.python_version()},
    }


def start_rank(config: RunConfig) -> mesh.Here:
    mesh.use(_meeting(config))
    return mesh.start()


def _meeting(config: RunConfig) -> mesh.Meeting:
    names = ("layout", "device", "backend", "timeout", "threads", "runs", "allow_tp_across_nodes")
    return mesh.Meeting(**{name: getattr(config, name) for name in names})


def how_of(config: RunConfig) -> How:
    """What the options say on how a step is computed."""
    return How(**{each.name: getattr(config, each.name) for each in dataclasses.fields(How)})


def print_to(log: Path) -> None:
    """Send all that this process prints to its log, also what libraries print."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def _last_lines(error: BaseException, most: int = 4) -> list[str]:
    """Where it happened in the user's own program, the innermost call last, and the notes on it."""
    frames = list(traceback.extract_tb(error.__traceback__))
    own = [frame for frame in frames if not frame.filename.startswith(_NOT_THE_USERS)]
    frames = (own or frames)[-most:]
    where = [f"{frame.filename}:{frame.lineno} in {frame.name}: {frame.line}" for frame in frames]
    return [*where, *getattr(error, "__notes__", [])]

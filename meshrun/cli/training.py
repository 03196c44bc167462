"""The training of one rank, from its place in the mesh to what the run directory keeps of it.

    trained = train(config, run, target, recorder, memory, pulse, signals)
    mesh.finish()
    afterwards(trained, run, recorder, pulse)              # on rank 0: what the experiment wants done with its model

Who has started the rank makes no difference here; `rank.py` knows that.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import platform
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import meshrun
from meshrun import mesh
from meshrun.cli.after import finish_with
from meshrun.cli.configured import how_of, override, start_rank
from meshrun.cli.model_record import record_of
from meshrun.cli.node_cache import not_copied, use_node
from meshrun.cli.provenance import name_of, options_used, program_of
from meshrun.cli.recorder import Recorder
from meshrun.cli.target import Target, make
from meshrun.config import RunConfig, RunDirectory, remove, write_json
from meshrun.data.readers import has_lost_a_reader
from meshrun.errors import RunFailed, UserError
from meshrun.experiment import Experiment
from meshrun.observe.board import Board
from meshrun.observe.legs import legs_of
from meshrun.observe.pulse import Pulse
from meshrun.observe.report import write_report
from meshrun.observe.stragglers import sniff_on
from meshrun.parallel import compiled
from meshrun.parallel.choose import Choosing
from meshrun.train.bad_samples import left_out, read_bad
from meshrun.train.bad_steps import Policy
from meshrun.train.data_wait import waited_for_data
from meshrun.train.deadline import deadline_of, start_of_run
from meshrun.train.ending import Ending, Signals, begin_anew
from meshrun.train.interval import parse as parse_interval
from meshrun.train.loop import Stopped, Trainer
from meshrun.train.recovery import Keeping
from meshrun.world import World, slurm
from meshrun.world.environment import inherited


@dataclasses.dataclass(frozen=True)
class Trained:
    """What a rank has at the end of the training."""

    result: dict[str, Any]
    experiment: Experiment
    here: mesh.Here
    unsaved: str | None = None
    """Why the last checkpoint could not be kept; None if it was, or none was due."""


def train(
    config: RunConfig,
    run: RunDirectory,
    target: Target,
    recorder: Recorder,
    memory: Path | None,
    pulse: Pulse | None,
    signals: Signals,
) -> Trained:
    """Start, go on from where the run was, train, and keep what came of it."""
    began, since = time.monotonic(), time.time()
    here = start_rank(config)
    restarted = here.world.source == "torchrun" and here.world.attempt > 0
    deadline = None
    if here.rank == 0:
        # What a job's shell was told while ranks were starting holds; it has removed what was there before.
        begin_anew(run, again=restarted or slurm.in_job(inherited()))
        deadline = deadline_of(config, inherited(), start_of_run(here.world, memory is not None))
    if pulse is not None:
        pulse.sniff = sniff_on(here.device)
    use_node(config, run, here.site, memory, lambda text: recorder("note", text=text))
    experiment, scale, note = override(make(target, config.options, config.data), config)
    trainer = _trainer(config, run, experiment, scale, recorder, memory, pulse)
    # Each element once, however many ranks hold it.
    parameters = sum(here.gathered(sum(each.parameter.numel() / each.copies for each in trainer.placed.shards)))
    if here.rank == 0:
        _describe_model(run, trainer)
        launcher = launcher_of(here.world, memory is not None)
        resolved = {**_resolved(trainer, target, config, launcher), "parameters": round(parameters)}
        save = partial(_save_config, run, config, resolved, recorder)
        save()
        _hear_choice(trainer, recorder, save)
        recorder.board = Board.open(run.path / "tensorboard", run.events_of(0)) if config.tensorboard else None
    _tell_start(recorder, run, target, trainer, launcher_of(here.world, memory is not None), since)
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
    if here.rank == 0:
        result |= _whole_run(run, result)
    result["chosen"] = {"precision": experiment.precision, **trainer.placed.chosen}
    if here.rank == 0:
        save()  # some of it is only known when steps were done
    result |= waited_for_data(trainer, config.cache != "none")
    _leave(run, here, result, recorder, trainer.unwritten)
    return Trained(result, experiment, here, trainer.keeper.unsaved if trainer.keeper is not None else None)


def _save_config(run: RunDirectory, config: RunConfig, resolved: dict[str, Any], recorder: Recorder) -> None:
    try:
        run.save_config(config, resolved)
    except OSError as error:
        recorder("note", text=f"cannot write {run.path / 'config.json'}: {error.strerror}; the training goes on")
    except UserError as error:  # it was damaged since the run began, and says no more how that went on before
        recorder("note", text=f"{error}; the training goes on")


def refuse_unsaved(trained: Trained) -> None:
    """At the very end, on rank 0: a run that could not keep the checkpoint which was due is no success."""
    if trained.here.rank == 0 and trained.unsaved is not None and "stopped" not in trained.result:
        raise RunFailed(
            f"the training has reached its end, and its weights and result are in {trained.result['run']}, but its "
            f"last checkpoint could not be kept: {trained.unsaved}"
        )


def _leave(
    run: RunDirectory, here: mesh.Here, result: dict[str, Any], recorder: Recorder, unwritten: list[str]
) -> None:
    """Write down what the training has reached, or why it has stopped before its end.

    There is no result without all weights (`unwritten` says which are missing): the run can be resumed for them.
    """
    if here.rank == 0 and (bad := read_bad(run.path / "bad-samples")) is not None:
        result["bad_samples"] = bad
        recorder("note", text=left_out(bad, run.path / "bad-samples"))
    stopped = result.get("stopped")
    if stopped is not None:
        recorder("stopped", **stopped)
    if here.rank == 0 and stopped is not None:
        _write(run.stopped_file, {**stopped, "result": result}, [])
    elif here.rank == 0:
        _write(run.path / "result.json", result, unwritten)
        remove(run.stop_file)  # whoever made it came too late, and means no later start
        _draw_report(run, recorder)


def _write(path: Path, document: dict[str, Any], unwritten: list[str]) -> None:
    """Write the last document of a run, unless a file that it speaks of is missing."""
    missing = list(unwritten)
    try:
        if not missing:
            write_json(path, document)
    except OSError as error:
        missing.append(f"cannot write {path}: {error.strerror}")
    if missing:
        again = "" if RunDirectory(path.parent).saved_step() is not None else " --from-start"
        raise RunFailed(
            f"the training has ended, but not all of it is kept: {'; '.join(missing)}; {_cure(missing)} and "
            f"`meshrun resume {path.parent}{again}`"
        )


def _cure(missing: list[str]) -> str:
    """What to do before files can be written that could not be, by what the system said of them."""
    said = "; ".join(missing)
    if os.strerror(errno.EISDIR) in said:
        return "move the directory that is in its place"
    full = any(os.strerror(code) in said for code in (errno.ENOSPC, errno.EDQUOT))
    return "make room" if full else "see to it that it can be written"


def afterwards(trained: Trained, run: RunDirectory, recorder: Recorder, pulse: Pulse | None) -> dict[str, Any]:
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
        hear_of_no_reader()
        graceful = isinstance(error, Stopped | KeyboardInterrupt) or has_lost_a_reader(error)
        lost = isinstance(error, mesh.PeerLost) or mesh.of_collectives(error)
        if trainer.keeper is not None and (graceful or lost):
            trainer.keeper.leave(graceful)
        raise


def hear_of_no_reader() -> None:
    """A rank that ends must not be interrupted by what torch raises whenever a reader is gone."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def _describe_model(run: RunDirectory, trainer: Trainer) -> None:
    """Write down what exports need to know of the model."""
    with contextlib.suppress(Exception):  # a training must not end because an export would lack something
        record_of(trainer.placed.whole).write(run.path)


def launcher_of(world: World, ours: bool) -> str:
    """Who has started the ranks, as people call it; meshrun's own ranks get torchrun's variables, and say so."""
    if not ours:
        return world.source
    return "meshrun in slurm" if slurm.in_job(inherited()) else "meshrun"


def _whole_run(run: RunDirectory, result: dict[str, Any]) -> dict[str, Any]:
    """The time of all starts of a run, and which these were, where there is more than this one."""
    legs = legs_of(run.events_of(0))
    if len(legs) < 2:
        return {}
    now = dataclasses.replace(legs[-1], seconds=result["seconds"], last_step=result["steps"])
    legs = [*legs[:-1], now]
    return {"seconds": sum(leg.seconds for leg in legs), "legs": [dataclasses.asdict(leg) for leg in legs]}


def _resolved(trainer: Trainer, target: Target, config: RunConfig, launcher: str) -> dict[str, Any]:
    experiment, here = trainer.experiment, trainer.here
    names = ("batch", "micro", "seed", "clip", "precision", "epochs")
    return {
        **{name: getattr(experiment, name) for name in names},
        "shuffle": str(trainer.order.shuffle),
        "steps": trainer.total_steps,
        "eval_every": trainer.eval_every,
        "schedule": dataclasses.asdict(experiment.schedule)
        if dataclasses.is_dataclass(experiment.schedule) and not isinstance(experiment.schedule, type)
        else experiment.schedule and name_of(experiment.schedule),
        "options": options_used(target.function(), config.options),
        "model": type(trainer.placed.whole).__name__,
        "optimizer": {"class": type(trainer.optimizer).__name__, "groups": trainer.made_groups},
        "program": program_of(target.path),
        "layout": str(here.layout),
        "world": here.size,
        "launcher": launcher,
        "device": str(here.device),
        "chosen": trainer.placed.chosen,
        "workers": trainer.reading.workers,
        "train_samples": len(experiment.train),
        "eval_samples": {name: len(data) for name, data in experiment.evals.items()},
        "versions": {"meshrun": meshrun.__version__, "torch": torch.__version__, "python": platform.python_version()},
    }


def _tell_start(
    recorder: Recorder, run: RunDirectory, target: Target, trainer: Trainer, launcher: str, began: float
) -> None:
    here = trainer.here
    recorder(
        "start",
        rank=here.rank,
        world=here.size,
        host=here.world.host,
        source=here.world.source,
        launcher=launcher,
        began=round(began, 4),
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


def _draw_report(run: RunDirectory, recorder: Recorder) -> None:
    """The training is done and kept: a picture of it that cannot be drawn must not make it a failure."""
    try:
        write_report(run.path)
    except Exception as error:
        recorder("note", text=f"the report could not be drawn: {type(error).__name__}: {error}")

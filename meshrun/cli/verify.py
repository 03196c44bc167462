"""`meshrun verify TARGET`: train in one process and on every layout, and prove that all compute the same.

    meshrun verify digits.py --layouts "dp=2; fsdp=2,tp=2; pp=4"
    meshrun verify llama --dropout 0.2 --steps 50 --json

Each training is a launch of its own; its ranks run `meshrun probe FOLDER PID` (`probe_command`), which people need not
know. The first training is one process's, the second its twin with other sums (`check.verify` says why). All but the
twin save a checkpoint a few steps before their end, which is resumed (`check.resumed`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from meshrun import strict_json
from meshrun.cli.command import Asked
from meshrun.cli.target import find, make
from meshrun.config import ON_A_NODE, RunConfig, RunDirectory
from meshrun.errors import RunFailed, UserError
from meshrun.launch.local import PARENT, Interrupted, Job, die_with_launcher, launch
from meshrun.launch.ranks import Nursery
from meshrun.layout import Layout, parse
from meshrun.observe.failures import FirstFailure, first_failure
from meshrun.world import detect

if TYPE_CHECKING:
    from meshrun.check.probe import Found
    from meshrun.check.verify import Allowed, Measured
    from meshrun.experiment import Experiment
    from meshrun.parallel.demands import Demands
    from meshrun.parallel.how import How

COVERING = (
    *("dp=2", "dp=3", "fsdp=2", "tp=2", "pp=2", "cp=2"),
    *("dp=2,fsdp=2", "fsdp=2,tp=2", "pp=2,fsdp=2", "pp=2,tp=2", "pp=4", "pp=2,fsdp=2,tp=2"),
)
"""Every axis alone, one number of ranks that divides no batch, and the products that differ in how they are built."""
BACKWARDS = "backwards"
"""The word for a rank that takes each batch from its end."""
SAVES = "saves"
"""The word for a rank that saves a checkpoint; the folder of one process may follow it, whose checkpoint is resumed."""


@dataclass(frozen=True)
class Resumed:
    """How a training that was resumed from a checkpoint compares with one process."""

    saved_on: str
    resumed_on: str
    step: int
    ok: bool
    loss_diff: float | None = None
    grad_norm_diff: float | None = None
    weight_diff: float | None = None
    cause: str | None = None


@dataclass(frozen=True)
class Row:
    """A layout's line of the table, and its entry in the JSON document."""

    layout: str
    ok: bool
    loss_diff: float | None = None
    grad_norm_diff: float | None = None
    weight_diff: float | None = None
    eval_diff: float | None = None
    ids_equal: bool | None = None
    first_step: int | None = None
    first_parameter: str | None = None
    cause: str | None = None
    seconds: float | None = None
    resumed: list[Resumed] = field(default_factory=list)
    """From its own checkpoint and from one process's, and in one process from its own."""
    judged: bool = True
    """False where the trainings agree, but one process and its twin differ so much that this proves nothing."""


@dataclass(frozen=True)
class Outcome:
    """All that a verification found."""

    steps: int
    tolerance: float
    rows: list[Row]
    noise: Measured | None
    allowed: Allowed
    left_out: dict[str, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return all(row.ok for row in self.rows)

    def document(self) -> dict[str, Any]:
        noise, allowed = self.noise, self.allowed
        return {
            "ok": self.ok,
            "steps": self.steps,
            "tolerance": self.tolerance,
            "layouts": [dataclasses.asdict(row) for row in self.rows],
            "noise": noise
            and {
                "loss_diff": noise.loss,
                "grad_norm_diff": noise.grad_norm,
                "weight_diff": noise.weight,
                "eval_diff": noise.evals,
                "depends_on_micro": allowed.depends_on_micro,
            },
            "allowed": {
                "loss_diff": allowed.losses[-1],
                "grad_norm_diff": allowed.grad_norms[-1],
                "weight_diff": allowed.weight,
                "eval_diff": allowed.evals,
            },
            "left_out": [{"layout": layout, "why": why} for layout, why in self.left_out.items()],
        }


def verify_command(asked: Asked) -> int:
    """Returns the exit status: 0 if all layouts agree, 1 if one does not."""
    world = detect(os.environ)
    if world.size > 1:
        raise UserError(f"verify starts its own processes, but {world.source} has started {world.size}; start it once")
    tolerance, keep = asked.beyond.get("tolerance"), asked.beyond.get("keep")
    if tolerance is not None and not tolerance > 0:
        raise UserError(f"tolerance is {tolerance}; it must be above 0 (--tolerance)")
    wanted = asked.beyond.get("layouts")
    layouts = _layouts_of(wanted) if wanted is not None else None
    with _folder(keep) as folder, contextlib.redirect_stdout(sys.stderr):
        outcome = _verify(asked, layouts, tolerance, folder)
    if asked.as_json:
        print(strict_json.dumps(outcome.document()))
    else:
        _show(outcome, asked.target.label, Console())
    return 0 if outcome.ok else 1


def _layouts_of(text: str) -> list[Layout]:
    try:
        layouts = [parse(part.strip()) for part in text.split(";") if part.strip()]
    except UserError as error:
        raise UserError(str(error).replace("(--layout)", "(--layouts)")) from None
    if not layouts:
        raise UserError(f'layouts is {text!r}; it must name at least one, such as "dp=2; fsdp=2,tp=2" (--layouts)')
    for layout in layouts:
        if layout.star is not None:
            raise UserError(f"layout '{layout}' is open; verify needs a number for each axis (--layouts)")
        if layout.size > ON_A_NODE:
            raise UserError(
                f"layout '{layout}' needs {layout.size:,} ranks, which verify starts on this machine; it must be at "
                f"most {ON_A_NODE:,} (--layouts)"
            )
    return layouts


@contextlib.contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    with (
        tempfile.TemporaryDirectory(prefix="meshrun-verify-") if keep is None else contextlib.nullcontext(keep) as made
    ):
        folder = Path(made)
        try:
            str(folder.absolute()).encode()
        except UnicodeEncodeError:  # safetensors opens no other
            raise UserError(
                f"verify keeps weights in {folder}, whose name is not UTF-8; name another folder (--keep, TMPDIR)"
            ) from None
        yield folder


@dataclass(frozen=True)
class Alone:
    """The trainings in one process: what layouts are compared with, and what they may differ by."""

    folder: Path
    found: Found
    noise: Measured | None
    allowed: Allowed


def _verify(asked: Asked, layouts: list[Layout] | None, tolerance: float | None, folder: Path) -> Outcome:
    from meshrun.check.verify import TOLERANCE
    from meshrun.cli.configured import how_of, override
    from meshrun.parallel.demands import demands_of

    config = replace(asked.config, runs=folder, checkpoint="auto" if asked.beyond.get("resume") else "none")
    experiment, _, _ = override(make(asked.target, config.options, config.data), config)
    tolerance = tolerance or TOLERANCE[experiment.precision]
    demands = demands_of(experiment)
    left_out: dict[str, str] = {}
    if layouts is None:
        layouts = list(_covering(demands, config, left_out))
    objections = [_objection(demands, layout, how_of(config)) for layout in layouts]
    trainings = 2 + objections.count(None)
    with Nursery(config.target) as nursery, _Shown(Console(stderr=True), asked.target.label, trainings) as shown:
        alone = _alone(config, experiment, tolerance, shown, nursery)
        rows = [
            _row(config, layout, alone, shown, nursery)
            if objection is None
            else Row(str(layout), False, cause=objection)
            for layout, objection in zip(layouts, objections, strict=True)
        ]
    return Outcome(len(alone.found.losses), tolerance, rows, alone.noise, alone.allowed, left_out)


def _alone(config: RunConfig, experiment: Experiment, tolerance: float, shown: _Shown, nursery: Nursery) -> Alone:
    from meshrun.check.probe import Found
    from meshrun.check.verify import allow, measure

    config = replace(config, offload=False)  # without shards there is nothing to offload
    folder = _trained(config, Layout(), "one process", shown, nursery, _saving(config))
    if isinstance(folder, FirstFailure):
        raise (UserError if folder.by_user else RunFailed)(folder.text)
    found = Found.read(folder)
    if config.sync_batchnorm:
        twin = _trained(config, Layout(), "one process, batches backwards", shown, nursery, (BACKWARDS,))
    else:
        # Three pieces: other sums than those of two or four equal parts, and uneven where the batch is no multiple.
        micro = -(-min(experiment.micro or experiment.batch, experiment.batch) // 3)
        twin = _trained(replace(config, micro=micro), Layout(), "one process, other micro-batches", shown, nursery)
    noise = measure(found, Found.read(twin), (folder, twin)) if isinstance(twin, Path) else None
    return Alone(folder, found, noise, allow(tolerance, noise, len(found.losses)))


def _row(config: RunConfig, layout: Layout, alone: Alone, shown: _Shown, nursery: Nursery) -> Row:
    """Train on a layout, and compare."""
    from meshrun.check.causes import likely_cause, why_unjudged
    from meshrun.check.probe import Found
    from meshrun.check.verify import judge, measure

    began = time.monotonic()
    trained = _trained(config, layout, str(layout), shown, nursery, _saving(config, str(alone.folder)))
    seconds = round(time.monotonic() - began, 2)
    if isinstance(trained, FirstFailure):
        return Row(str(layout), False, cause=_in_one_line(trained), seconds=seconds)
    found = Found.read(trained)
    measured = measure(alone.found, found, (alone.folder, trained))
    verdict = judge(measured, alone.allowed)
    cause = None if verdict.ok else likely_cause(alone.found, found, measured, alone.allowed, verdict)
    unjudged = why_unjudged(alone.found, alone.noise, alone.allowed) if verdict.ok else None
    resumed = _resumed(alone, found, trained) if verdict.ok and unjudged is None else []
    cause = cause or unjudged or next((each.cause for each in resumed if each.cause), None)
    return Row(
        layout=str(layout),
        ok=cause is None,
        loss_diff=measured.loss,
        grad_norm_diff=measured.grad_norm,
        weight_diff=measured.weight,
        eval_diff=measured.evals,
        ids_equal=measured.ids_equal,
        first_step=verdict.first_step,
        first_parameter=verdict.first_parameter,
        cause=cause,
        seconds=seconds,
        judged=unjudged is None,
        resumed=resumed,
    )


def _saving(config: RunConfig, *source: str) -> tuple[str, ...]:
    """The words for ranks that save a checkpoint, unless the user wants none."""
    return () if config.checkpoint == "none" else (SAVES, *source)


def _resumed(alone: Alone, found: Found, folder: Path) -> list[Resumed]:
    """What the trainings that a layout has resumed have come to, the first difference first."""
    from meshrun.check.resumed import Resumption

    rows = [
        Resumed(each.layout, each.layout, each.saved or 0, False, cause=each.loss_of_checkpoint)
        for each in (alone.found, found)
        if each.loss_of_checkpoint
    ]
    for weights, resumption in Resumption.all_in(folder).items():
        where = resumption.saved_on, resumption.resumed_on, resumption.step
        if resumption.failure is not None:
            rows.append(Resumed(*where, False, cause=f"{resumption}, fails: {resumption.failure}"))
            continue
        compared = resumption.compared(alone.found, found, (alone.folder, weights), alone.allowed)
        measured = compared.measured
        numbers = measured.loss, measured.grad_norm, measured.weight
        rows.append(Resumed(*where, compared.verdict.ok, *numbers, compared.cause))
    return sorted(rows, key=lambda row: row.ok)


def _covering(demands: Demands, config: RunConfig, left_out: dict[str, str]) -> Iterator[Layout]:
    """The layouts that this machine and this model can have; the others go to `left_out`, each with its reason."""
    most = _most_ranks(config)
    from meshrun.cli.configured import how_of

    for layout in map(parse, COVERING):
        objection = _objection(demands, layout, how_of(config))
        if layout.size > most:
            left_out[str(layout)] = f"{layout.size} ranks are more than suit this machine ({most})"
        elif objection is not None:
            left_out[str(layout)] = objection.partition("; layouts of ")[0]
        elif layout.tp > 1 and not demands.plan.styles:
            left_out[str(layout)] = "no tensor plan covers this model, so tp would split nothing"
        else:
            yield layout


def _objection(demands: Demands, layout: Layout, how: How) -> str | None:
    """Why the program cannot be trained on a layout, or None."""
    from meshrun.parallel.how import refuse_how
    from meshrun.train.optim import refuse_unless_separate

    try:
        demands.refuse(layout)
        refuse_how(demands.experiment, layout, how)
        refuse_unless_separate(demands.experiment.optimizer, layout)
    except UserError as error:
        return str(error).removesuffix(" (--layout)")
    return None


def _most_ranks(config: RunConfig) -> int:
    """Two a core on CPUs, where ranks only take turns; one a GPU where NCCL is used."""
    import torch

    from meshrun.world.cores import granted

    if config.device != "cpu" and config.backend != "gloo" and torch.cuda.is_available():
        return torch.cuda.device_count()
    return min(8, max(2, 2 * len(granted())))


def _trained(
    config: RunConfig, layout: Layout, what: str, shown: _Shown, nursery: Nursery, words: tuple[str, ...] = ()
) -> Path | FirstFailure:
    """Train on a layout; returns the folder in which ranks have written what they found."""
    shown.begin(what)
    twin = "-twin" if what.startswith("one process,") else ""
    name = str(layout).replace(",", "-").replace("=", "").replace(":", "-") + twin
    run = RunDirectory.create(replace(config, procs=layout.size, layout=str(layout), name=name))
    try:
        failures = launch(
            Job(["-m", "meshrun", "probe", str(run.path), PARENT, *words], layout.size, target=config.target),
            nursery=nursery,
        )
    except Interrupted as stopped:
        raise RunFailed(f"stopped by {stopped} while it trained on {what}") from stopped
    shown.end()
    if failures:
        return first_failure(run, {each.rank: each.how for each in failures}, socket.gethostname())
    return run.path


def _in_one_line(failed: FirstFailure) -> str:
    return f"{failed.sentence} ({failed.lines[-1].strip()})" if failed.lines and not failed.by_user else failed.sentence


class _Shown:
    """Says which training of how many is under way: a bar on a terminal, else a line each."""

    def __init__(self, console: Console, label: str, trainings: int) -> None:
        self._console, self._label, self._trainings = console, label, trainings
        self._progress = Progress(
            TextColumn("verify {task.fields[label]}"),
            BarColumn(),
            TextColumn("{task.fields[number]} of {task.total:.0f}: {task.description}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
        )
        self._task = self._progress.add_task("", total=trainings, label=label, number=0)
        self._number, self._began, self._what = 0, 0.0, ""

    def __enter__(self) -> _Shown:
        if self._console.is_terminal:
            self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._console.is_terminal:
            self._progress.stop()

    def begin(self, what: str) -> None:
        self._number, self._began, self._what = self._number + 1, time.monotonic(), what
        self._progress.update(self._task, description=what, number=self._number)

    def end(self) -> None:
        self._progress.advance(self._task)
        if not self._console.is_terminal:
            seconds = time.monotonic() - self._began
            text = f"verify {self._label}: {self._number} of {self._trainings}, {self._what} ({seconds:.1f} s)"
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def _show(outcome: Outcome, label: str, console: Console) -> None:
    table = Table(title=f"{label}: {outcome.steps} steps against one process", title_justify="left")
    table.add_column("layout", no_wrap=True)
    for name in ("losses", "norms", "weights", "eval"):
        table.add_column(name, justify="right")
    table.add_column("samples")
    table.add_column("resumed")
    table.add_column("verdict")
    for row in outcome.rows:
        numbers = (row.loss_diff, row.grad_norm_diff, row.weight_diff, row.eval_diff)
        samples = "-" if row.ids_equal is None else "same" if row.ids_equal else "others"
        resumed = "-" if not row.resumed else "same" if all(each.ok for each in row.resumed) else "differs"
        table.add_row(row.layout, *map(_number, numbers), samples, resumed, _verdict(row))
    console.print(table)
    say: Callable[[str], None] = lambda text: console.print(text, markup=False, highlight=False, soft_wrap=True)  # noqa: E731
    for reason, layouts in _reasons(outcome.rows).items():
        say(f"{'; '.join(layouts)}: {reason}")
    say(_of_noise(outcome))
    for layout, why in outcome.left_out.items():
        say(f"left out: {layout}: {why}")
    unjudged = sum(not row.judged for row in outcome.rows)
    bad = sum(not row.ok for row in outcome.rows) - unjudged
    count = len(outcome.rows)
    if unjudged:
        say(f"{unjudged} of {count} layouts could not be judged")
    if bad or not unjudged:
        say(f"{bad} of {count} layouts do not train as one process does" if bad else _all_same(outcome))


def _verdict(row: Row) -> str:
    if row.ok:
        return "[green]same[/green]"
    if not row.judged:
        return "[yellow]cannot judge[/yellow]"
    return "[red]differs[/red]" if row.seconds else "[red]cannot[/red]"


def _reasons(rows: list[Row]) -> dict[str, list[str]]:
    """Where and why layouts differ -> those of which it is true."""
    found: dict[str, list[str]] = {}
    for row in rows:
        if not row.ok:
            where = [f"step {row.first_step}"] * bool(row.first_step)
            where += [f"parameter {row.first_parameter}"] * bool(row.first_parameter)
            reason = (f"first at {', '.join(where)}; " if where else "") + str(row.cause)
            found.setdefault(reason, []).append(row.layout)
    return found


def _all_same(outcome: Outcome) -> str:
    count = len(outcome.rows)
    return f"{'all ' * (count > 1)}{count} layout{'s' * (count != 1)} train{'s' * (count == 1)} as one process does"


def _of_noise(outcome: Outcome) -> str:
    noise, tolerance = outcome.noise, f"tolerance {outcome.tolerance:g}"
    if noise is None:
        return f"{tolerance}; this model's own rounding could not be measured: its twin in one process failed"
    numbers = zip(
        ("losses", "gradient norms", "weights", "evaluation"),
        (noise.loss, noise.grad_norm, noise.weight, noise.evals),
        strict=True,
    )
    figures = ", ".join(f"{name} {_number(value)}" for name, value in numbers)
    if outcome.allowed.depends_on_micro:
        return f"{tolerance}; in one process other micro-batches change the result, by more than rounding: {figures}"
    return f"{tolerance}, or 10 times this model's own rounding in one process where that is more: {figures}"


def _number(value: float | None) -> str:
    return "-" if value is None else "0" if value == 0 else f"{value:.1e}"


def probe_command(folder: Path, launcher: int, *words: str) -> None:
    """`meshrun probe FOLDER PID [backwards] [saves [SOURCE]]`: a rank of one training of `verify`, process PID."""
    die_with_launcher(launcher)
    from meshrun import mesh
    from meshrun.check.probe import Probing, probe
    from meshrun.check.resumed import resume
    from meshrun.cli.configured import how_of, override, start_rank
    from meshrun.cli.rank import print_to
    from meshrun.cli.recorder import Recorder

    run, rank = RunDirectory(folder), detect(os.environ).rank
    print_to(run.log_of(rank))
    config = run.config()
    recorder = Recorder(run, rank, None)
    try:
        here = start_rank(config)
        experiment, scale, _ = override(make(find(config.target), config.options, config.data), config)
        probing = Probing(run.path, how_of(config), scale, recorder, BACKWARDS in words, SAVES in words)
        probe(experiment, here, probing)
        if SAVES in words and words[-1] != SAVES:
            here.gathered(None)  # rank 0 has written what was found
            resume(experiment, here, probing, run.path, 0)
            resume(experiment, here, probing, Path(words[-1]), 1)
        mesh.finish()
        if SAVES in words and words[-1] != SAVES and rank == 0:
            resume(experiment, mesh.stay(here), probing, run.path, 2)
        recorder.close()
    except BaseException as error:
        recorder.failure(error, rank)
        sys.stdout.flush()
        sys.stderr.flush()
        # Without the clean-up at the end of a process: it waits for ranks that may be gone.
        os._exit(2 if isinstance(error, UserError) else 1)

"""`meshrun rehearse TARGET`: play a job on this machine as it would be submitted: mistakes show before the queue.

    meshrun rehearse digits --nodes 2 --gpus-per-node 4          # options as for submit
    meshrun rehearse my.py --nodes 4 --gpus-per-node 4 --site juwels-booster --layout fsdp=4,tp=4 --setup env.sh

The script that `submit` would hand to Slurm is run by bash, with stand-ins for Slurm's commands: the same nodes, ranks,
layout and mesh, with gloo on this machine's cores. A few steps are trained, stopped in time after the first ones, and
gone on with in a second link. `REHEARSAL = {"preset": "tiny"}` in the target's file gives options of a small model;
without it the model is as large as in the job.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from meshrun import strict_json
from meshrun.cli.job_plan import PATIENCE as WAIT_FOR_SLURM
from meshrun.cli.job_plan import Plan, cluster_here, planned
from meshrun.cli.options import Option, options_of, run_options, to_document
from meshrun.cli.target import Target
from meshrun.config import RunConfig, RunDirectory, write_whole
from meshrun.errors import RunFailed, UserError
from meshrun.experiment import Experiment
from meshrun.launch.chain import Record
from meshrun.launch.rehearsal import Link, Rehearsal
from meshrun.launch.script import script
from meshrun.launch.submission import Element, Submission
from meshrun.layout import Layout, parse
from meshrun.observe.events import read_events
from meshrun.observe.failures import told_in

ENTRY = "REHEARSAL"
STEPS = 3
PATIENCE = 120.0
"""Seconds that ranks wait for each other: here all of them are near."""
A_RANK = 250 << 20
"""Bytes of host memory that a rank needs before it has any model: Python, torch and gloo."""
OF_ONE_ELEMENT = 16
"""Bytes that a parameter of fp32 needs with its gradient and AdamW's two moments."""


@dataclass(frozen=True)
class Small:
    """A run that a rehearsal can afford, and what it leaves away of the one that was asked for."""

    config: RunConfig
    layout: Layout
    notes: tuple[str, ...]


def rehearse_command(words: list[str]) -> int:
    """Returns 0; a job that fails is an error in its own words."""
    as_json = "--json" in words and "--help" not in words
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        plan = planned(words, "rehearse", static=False, here=lambda: cluster_here(WAIT_FOR_SLURM))
        if plan is None:
            return 0
        small = _small(plan)
    tell = _silent if as_json else _say
    for note in small.notes:
        tell(f"meshrun: {note}")
    folder = Path(tempfile.mkdtemp(prefix="meshrun-rehearsal-"))
    try:
        document = _play(plan, small, folder, words, tell)
    except KeyboardInterrupt:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)
    print(strict_json.dumps(document) if as_json else _told(document))
    return 0


def _play(plan: Plan, small: Small, folder: Path, words: list[str], tell: Callable[[str], None]) -> dict[str, Any]:
    began = time.monotonic()
    run = RunDirectory.create(replace(small.config, runs=folder / "runs"))
    asked = replace(plan.submission, command=("meshrun", "submit", *words))
    submission = _placed(asked, run, folder / "runs")
    write_whole(submission.script_path, script(submission))
    for path in {submission.run, run.path}:
        Record(submission, index=0 if submission.sweep else None).save(path)
    resources = submission.resources
    keeps = small.config.checkpoint != "none"
    links: list[Link] = []
    for link in Rehearsal(folder).links(
        submission.script_path, resources.gpus_per_node, partial(_pass_on, folder, tell), warn_first=keeps
    ):
        links.append(link)
        _refuse_failed(link, folder)
        if (run.path / "result.json").exists():
            break
    else:
        raise RunFailed(f"the job was stopped {len(links)} times and never came to its end; its files are in {folder}")
    return {
        "ok": True,
        "target": plan.asked.config.target,
        "run": str(asked.run),
        "nodes": resources.nodes,
        "ranks": resources.ranks,
        **_reached(run, small.layout),
        "links": [{"job": link.job, "status": link.status, "told": link.told} for link in links],
        "runs": max(1, len(plan.choices)),
        "notes": list(small.notes),
        "script": script(asked),
        "seconds": time.monotonic() - began,
    }


def _placed(submission: Submission, run: RunDirectory, runs: Path) -> Submission:
    """The submission with its runs in another folder; of a sweep the first one is there."""
    if not submission.sweep:
        return replace(submission, run=run.path)
    folder = runs / submission.run.name
    folder.mkdir(mode=0o770, parents=True)  # as run directories are
    (folder / "logs").mkdir()
    elements = [Element(runs / each.run.name, each.values) for each in submission.sweep]
    elements[0] = replace(elements[0], run=run.path)
    return replace(submission, run=folder, sweep=tuple(elements))


def _pass_on(folder: Path, tell: Callable[[str], None], line: str) -> None:
    """What the job prints, less what holds for no rehearsal: its batch is our choice, its folder will be gone."""
    here = re.escape(str(folder))
    line = re.sub(rf"(; |^)(meshrun resume|sbatch) {here}/\S* goes on[^;]*|(^report:|  -> ) {here}/.*", "", line)
    if line and "the linear scaling rule would" not in line:
        tell(line)


def _small(plan: Plan) -> Small:
    """The run with few steps, samples and threads, on this machine's cores; the mesh and all else stay."""
    config, resources = plan.choices[0].config, plan.submission.resources
    layout = parse(config.layout).resolve(resources.ranks, resources.procs, config.allow_tp_across_nodes)
    notes = []
    if len(plan.choices) > 1:
        notes.append(f"of the {len(plan.choices)} runs of the sweep the first one is played: {plan.choices[0].values}")
    shrunk, of_run = _shrunk(plan.asked.target)
    if shrunk is None:
        label = plan.asked.target.label
        notes.append(f"{label} has no {ENTRY} = {{…options of a small model…}}: its model is played as it is")
    if config.compile:
        notes.append("nothing is compiled in a rehearsal")
    changed = replace(
        config,
        options={**config.options, **(shrunk or {})},
        steps=STEPS,
        epochs=None,
        eval_first=resources.ranks,
        device="cpu",
        backend="gloo",
        compile=False,
        threads=1,
        workers=0,
        # Rules for addresses and interfaces hold for nodes of the site.
        site=None,
        timeout=min(config.timeout, PATIENCE),
        tensorboard=False,
        data=config.data.absolute(),
    )
    changed = replace(changed, **of_run)
    experiment = _built(plan.asked.target, changed)
    if experiment is not None:
        _refuse_too_large(plan.asked.target, _elements(experiment), layout)
        changed = replace(changed, batch=min(experiment.batch, _needed(layout)))
    return Small(changed, layout, tuple(notes))


def _needed(layout: Layout) -> int:
    """Samples of a batch that leaves nobody idle: one for each replica, or more for the stages of a pipeline."""
    return layout.dp * layout.fsdp * (2 * layout.pp if layout.pp > 1 else 1)


def _built(target: Target, config: RunConfig) -> Experiment | None:
    """The experiment; None where its own code fails, which the ranks will tell in their words."""
    from meshrun.cli.configured import override
    from meshrun.cli.target import make

    try:
        return override(make(target, config.options, config.data), config)[0]
    except UserError:
        raise
    except Exception:
        return None


def _shrunk(target: Target) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """What the target's file says for a small model: its own options, and those of a run."""
    function = target.function()
    found = getattr(sys.modules[function.__module__], ENTRY, None)
    if found is None:
        return None, {}
    if not isinstance(found, dict):
        raise UserError(f"{ENTRY} of {target.label} is {type(found).__name__}; it must be a dict of options")
    own = {option.name: option for option in options_of(function)}
    of_run = {option.name: option for option in run_options()}
    for name in found:
        if name not in own and name not in of_run:
            known = ", ".join(own) or "none"
            raise UserError(f"{ENTRY} of {target.label} has {name!r}, which is no option of it; its own are: {known}")
    options = {name: to_document(_read(own[name], value)) for name, value in found.items() if name in own}
    return options, {name: _read(of_run[name], value) for name, value in found.items() if name not in own}


def _read(option: Option, value: Any) -> Any:
    return option.from_document(to_document(value))


def _refuse_too_large(target: Target, elements: int, layout: Layout) -> None:
    """Say so if all ranks of the job do not fit into this machine, as far as that can be told beforehand."""
    free = _free_memory()
    # Sharded axes hold the model once between them; each dp and cp rank holds it anew.
    needed = layout.size * A_RANK + elements * OF_ONE_ELEMENT * layout.dp * layout.cp
    if free is None or needed <= free:
        return
    raise UserError(
        f"{layout.size} ranks of {target.label} with {elements:,} parameters need about {needed / 1e9:.1f} GB, and "
        f"this machine has {free / 1e9:.1f} GB free; give options of a smaller model as {ENTRY} = {{…}} in its file, "
        f"or rehearse fewer nodes (--nodes)"
    )


def _elements(experiment: Experiment) -> int:
    """Parameters of the model, which is not filled for that; 0 where it cannot be built."""
    from meshrun.parallel.demands import demands_of

    try:
        return sum(each.numel() for each in demands_of(experiment).model.parameters())
    except Exception:
        return 0


def _free_memory(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes that processes may still take: the machine's, or what is left of a container's limit."""
    found = []
    with contextlib.suppress(OSError, ValueError, IndexError):
        line = next(each for each in meminfo.read_text().splitlines() if each.startswith("MemAvailable:"))
        found.append(int(line.split()[1]) * 1024)
    with contextlib.suppress(OSError, ValueError):
        found.append(int((cgroup / "memory.max").read_text()) - int((cgroup / "memory.current").read_text()))
    return min(found, default=None)


def _refuse_failed(link: Link, folder: Path) -> None:
    """The first thing that the job says is wrong, in its own words."""
    if link.status == 0:
        return
    said = told_in(link.log.splitlines())
    last = [line for line in link.log.splitlines() if line.strip()][-3:]
    sentence = next(iter(said), " / ".join(last) or f"the job ended with exit status {link.status}")
    error = UserError if link.status == 2 else RunFailed
    raise error(f"{sentence}; the job's log and run are in {folder}")


def _reached(run: RunDirectory, layout: Layout) -> dict[str, Any]:
    """What the training has done, from what it has left behind."""
    result = run.result()
    if result is None:
        raise RunFailed(f"the job has ended well, but left no result that can be read in {run.path}")
    events = list(read_events(run.events_of(0)))
    steps = [event["seconds"] for event in events if event["kind"] == "step" and "seconds" in event]
    resumed = [event for event in events if event["kind"] == "resumed"]
    return {
        "layout": str(layout),
        "mesh": {axis: degree for axis, degree in layout.degrees.items() if degree > 1},
        "steps": result["steps"],
        "losses": result["losses"],
        "step_s": sorted(steps)[len(steps) // 2] if steps else None,
        "saved": (run.path / "checkpoints").is_dir() and any((run.path / "checkpoints").iterdir()),
        "resumed": resumed[0]["step"] if resumed else None,
    }


def _told(found: dict[str, Any]) -> str:
    mesh = " x ".join(f"{axis} {degree}" for axis, degree in found["mesh"].items()) or "one rank"
    step = f", {found['step_s']:.2f} s a step here" if found["step_s"] is not None else ""
    if found["resumed"] is not None:
        chain = f"stopped in time after step {found['resumed']}, saved, and gone on with in a second link"
    elif found["saved"]:
        chain = "saved; it ended before it could be stopped, so going on was not played"
    else:
        chain = "not saved (--checkpoint none), so going on was not played"
    counted = f"{_counted(found['nodes'], 'node')}, {_counted(found['ranks'], 'rank')}"
    return (
        f"played here with gloo: {counted}, mesh {mesh} ({found['layout']})\n"
        f"{found['steps']} steps{step}; {chain}\n"
        f"the job's script ran to its end in {found['seconds']:.0f} s with exit status 0"
    )


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _silent(line: str) -> None:
    """With --json, what the job prints is of interest only if it fails."""

"""From the configuration of a run to what its parts take.

    here = start_rank(config)                              # this rank's place in the mesh
    experiment, lr_scale, note = override(experiment, config)
    how_of(config)                                         # how a step is computed

Every command that trains, or looks at a training, reads the options in this one way.
"""

from __future__ import annotations

import dataclasses

from torch.utils.data import Subset

from meshrun import mesh
from meshrun.config import RunConfig
from meshrun.experiment import Experiment
from meshrun.parallel.how import How


def start_rank(config: RunConfig) -> mesh.Here:
    """Meet the other ranks, as the options say."""
    mesh.use(meeting_of(config))
    return mesh.start()


def meeting_of(config: RunConfig) -> mesh.Meeting:
    """How ranks are to meet."""
    names = ("layout", "device", "backend", "timeout", "threads", "runs", "allow_tp_across_nodes", "site")
    return mesh.Meeting(**{name: getattr(config, name) for name in names})


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
    changed.refuse_impossible_length()
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


def how_of(config: RunConfig) -> How:
    """What the options say on how a step is computed."""
    names = {each.name for each in dataclasses.fields(How)} & {each.name for each in dataclasses.fields(config)}
    return How(**{name: getattr(config, name) for name in names})

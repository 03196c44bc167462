"""How a step is computed, as far as the user has a say in it, and which layouts can do so.

    how = How(recompute="auto", compile=None)     # None, auto: left to us (`decide.py`)
    refuse_how(experiment, layout, how)           # one sentence for what this layout cannot do

What a layout cannot do because of the model is for `demands.py` to say.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshrun.errors import SharedError, UserError
from meshrun.experiment import Experiment
from meshrun.layout import Layout
from meshrun.parallel import recompute


@dataclass(frozen=True)
class How:
    """What changes how a step is computed, never what."""

    recompute: str = "none"
    compile: bool | None = False
    """None leaves it to what the model and the device are."""
    graphs: bool | None = False
    states: str = "fp32"
    update_in_backward: bool = False
    offload: bool = False
    sync_batchnorm: bool = False
    compress: str = "none"
    torchao: bool = True
    """Whether float8 may be left to it, where it is installed and the layout is one that it can do; no option of a run,
    but who compares layouts wants one arithmetic."""


def refuse_how(experiment: Experiment, layout: Layout, how: How) -> None:
    """Say which ways of computing a step this layout does not have."""
    try:
        recompute.every(how.recompute)
    except UserError as error:
        raise SharedError(str(error)) from error
    if how.compress != "none" and layout.dp < layout.size:
        raise SharedError(
            f"compress is {how.compress!r}, which is for gradients of whole models, but the layout is '{layout}'; "
            f"use dp={layout.size} (--layout), or leave --compress away"
        )
    if how.offload and layout.fsdp == 1:
        raise SharedError(f"offload keeps fsdp's shards on the host, but layout '{layout}' has no fsdp (--layout)")
    replicas = layout.dp * layout.fsdp
    pieces = experiment.micro is not None and experiment.micro < -(-experiment.batch // replicas)
    if how.sync_batchnorm and (layout.pp > 1 or pieces):
        raise SharedError(
            f"sync_batchnorm needs the global batch at once, but each of the {replicas} replicas computes its part in "
            f"several micro-batches; leave --micro and pp away, or --sync-batchnorm"
        )

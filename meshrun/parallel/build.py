"""From what the user wrote to a model on this rank's device, part of the mesh.

    placed = build(experiment.model, here, seed=0)
    outputs = placed.forward(inputs)

The order of application, which every axis keeps to: draw the weights, move them to the device, make them the same on
all ranks, then let the axes wrap the model.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from meshrun.errors import UserError
from meshrun.mesh import Here
from meshrun.parallel import dp


def build(model: Callable[[], nn.Module], here: Here, seed: int) -> dp.Replicated:
    """Build the model from the same random numbers on every rank, and replicate it over the mesh."""
    torch.manual_seed(seed)
    built = model()
    if not isinstance(built, nn.Module):
        raise UserError(f"Experiment(model=…) returned {type(built).__name__}; it must return a torch nn.Module")
    built.to(here.device)
    # From here on ranks draw their own numbers: what the model draws while training must differ between replicas.
    torch.manual_seed(seed * 1_000_003 + 1 + here.replica)
    return dp.apply(built, here)

"""How a rank reads its batches: in which pieces, and by how many processes beside the one that computes.

    reading = reading_for(experiment, here, placed.cutting, workers=None, prefetch=2, skip_bad=False)
    readers_for(dataset, world, device)         # what `workers=None` comes to

Data in memory need nobody to read them, and readers get only cores that computing leaves to them.
"""

from __future__ import annotations

import math
from dataclasses import asdict

import torch

from meshrun.data.loader import Reading, is_light, readers_of_a_rank
from meshrun.data.order import Cut
from meshrun.experiment import Experiment, MapDataset
from meshrun.mesh import Here
from meshrun.parallel.placed import Cutting
from meshrun.world import World
from meshrun.world.cores import granted, quota


def reading_for(
    experiment: Experiment, here: Here, cutting: Cutting, workers: int | None, prefetch: int, skip_bad: bool
) -> Reading:
    """As the model on the mesh needs its batches; `workers` None leaves their number to us."""
    return Reading(
        cut=Cut(experiment.micro, **asdict(cutting)),
        workers=readers_for(experiment.train, here.world, here.device) if workers is None else workers,
        prefetch=prefetch,
        pin=here.device.type == "cuda",
        collate=experiment.collate,
        seed=experiment.seed,
        skip_bad=skip_bad,
    )


def readers_for(data: MapDataset, world: World, device: torch.device) -> int:
    """Processes that read beside the computing, from the cores that this rank really has."""
    local = world.local_size
    # Ranks are bound to cores of their own, but by nobody to their share of what a container may use.
    bound = len(granted()) / (local if world.source == "none" else 1)
    cores = int(min(bound, (quota() or math.inf) / local))
    return readers_of_a_rank(cores, torch.get_num_threads(), device.type == "cuda", is_light(data))

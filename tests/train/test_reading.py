"""How many processes read for a rank: from the cores that it really has."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from meshrun.data.loader import readers_of_a_rank
from meshrun.parallel.placed import Cutting
from meshrun.train import reading
from meshrun.world import World

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
WORLD = World(0, 4, 0, 4, 0, 1, "node7", "slurm")


class Slow:
    """A dataset that is worth readers."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, number: int) -> int:
        return number


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    found = SimpleNamespace(cores=6, quota=None)
    monkeypatch.setattr(reading, "granted", lambda: frozenset(range(found.cores)))
    monkeypatch.setattr(reading, "quota", lambda: found.quota)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    return found


@pytest.mark.usefixtures("machine")
def test_a_rank_that_is_bound_to_its_cores_leaves_one_to_itself_beside_a_gpu():
    assert reading.readers_for(Slow(), WORLD, GPU) == 5
    assert reading.readers_for(Slow(), WORLD, CPU) == 4, "what its threads leave"
    assert reading.readers_for([0], WORLD, GPU) == 0, "data in memory"


def test_ranks_that_nobody_has_bound_share_the_cores(machine: Any):
    machine.cores = 12
    assert reading.readers_for(Slow(), replace(WORLD, source="none"), GPU) == 2
    assert reading.readers_for(Slow(), WORLD, GPU) == 8, "never more"


def test_ranks_of_a_container_share_what_it_lets_run(machine: Any):
    machine.quota = 12.0
    assert reading.readers_for(Slow(), WORLD, GPU) == 2


@pytest.mark.parametrize(
    ("cores", "threads", "on_gpu", "light", "readers"),
    [
        (6, 2, True, False, 5),
        (6, 2, False, False, 4),
        (64, 1, True, False, 8),
        (1, 4, False, False, 0),
        (6, 2, True, True, 0),
    ],
)
def test_readers_get_the_cores_that_computing_leaves(cores: int, threads: int, on_gpu: bool, light: bool, readers: int):
    assert readers_of_a_rank(cores, threads, on_gpu, light) == readers


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(("workers", "found"), [(None, 4), (0, 0), (3, 3)])
def test_a_number_of_readers_that_is_given_is_heeded(workers: int | None, found: int):
    experiment: Any = SimpleNamespace(train=Slow(), micro=3, collate=None, seed=7)
    here: Any = SimpleNamespace(world=WORLD, device=CPU)
    made = reading.reading_for(experiment, here, Cutting(in_step=True, pieces=2), workers, 5, True)
    assert (made.workers, made.prefetch, made.pin, made.seed, made.skip_bad) == (found, 5, False, 7, True)
    assert (made.cut.micro, made.cut.in_step, made.cut.pieces) == (3, True, 2)
    here.device = GPU
    assert reading.reading_for(experiment, here, Cutting(), workers, 5, True).pin

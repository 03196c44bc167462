"""What ranks leave in the memory of their nodes when others are lost, and what becomes of it."""

from __future__ import annotations

import json
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from meshrun import mesh
from meshrun.mesh import Here
from meshrun.state.memory import memory_files
from meshrun.train.interval import Every
from meshrun.train.loop import Trainer
from meshrun.train.recovery import Keeping
from tests.ranks import run_on_ranks
from tests.train.small import start_on_cpu
from tests.train.test_resume import assert_equal, llama, noisy, result_of, seeded
from tests.train.whole import assert_same


def on_nodes(here: Here, nodes: int) -> Here:
    """The same ranks, as if they were on several nodes."""
    local = here.size // nodes
    world = replace(
        here.world, node=here.rank // local, nodes=nodes, local_rank=here.rank % local, local_size=local, host="node"
    )
    return replace(here, world=world)


def trainer_in(folder: Path, here: Here, experiment: Any, generation: int, **options: Any) -> Trainer:
    memory = folder / f"node-{here.world.node}"
    memory.mkdir(exist_ok=True)
    keeping = Keeping(folder / "checkpoints", memory, Every(never=True), generation=generation)
    return Trainer(experiment, here, keeping=keeping, **options)


def lose(trainer: Trainer, after: int, dead: set[int]) -> None:
    """Train as far as `after`; then some ranks are gone, and the others say their last words."""
    for update in trainer.steps():
        if update.step == after:
            break
    here, keeper = trainer.here, trainer.keeper
    assert keeper is not None and keeper.keeping.memory is not None
    first = here.rank - here.world.local_rank
    local = sorted(rank for rank in dead if first <= rank < first + here.world.local_size)
    if here.world.local_rank == 0:
        path = keeper.keeping.memory / f"dead-{keeper.keeping.generation}.json"
        path.write_text(json.dumps({"ranks": local, "final": False}))
    dist.barrier()
    if here.rank not in dead:
        keeper.leave(graceful=False)
    dist.barrier()


def started(layout: str) -> Here:
    mesh.use(mesh.Meeting(layout=layout, device="cpu"))
    return mesh.start()


def goes_on(layout: str, nodes: int, dead: set[int], folder: Path, step: int, experiment: Any = llama) -> None:
    here = on_nodes(started(layout), nodes)
    seeded()
    wanted = result_of(Trainer(experiment(), here))
    seeded()
    lose(trainer_in(folder, here, experiment(), 0), 4, dead)
    next_one = trainer_in(folder, here, experiment(), 1)
    found = next_one.resume()
    assert found is not None and found["source"] == "memory" and found["step"] == step
    assert_equal(result_of(next_one), wanted)


@pytest.mark.parametrize("dead", [0, 1])
@pytest.mark.ranks(2)
def test_a_lost_copy_costs_no_step(dead: int, tmp_path: Path):
    goes_on("dp=2", 1, {dead}, tmp_path, 5)


@pytest.mark.parametrize("dead", [0, 2])
@pytest.mark.ranks(3)
def test_running_statistics_and_drawn_numbers_of_a_lost_rank_are_still_there(dead: int, tmp_path: Path):
    goes_on("dp=3", 1, {dead}, tmp_path, 5, noisy)


@pytest.mark.parametrize("layout", ["fsdp=2", "tp=2", "pp=2"])
@pytest.mark.ranks(2)
def test_a_lost_part_is_found_in_its_nodes_memory(layout: str, tmp_path: Path):
    """A copy is made every step where that is quick, but not before the third, and not of the one it died in."""
    here = started(layout)
    wanted = result_of(Trainer(llama(), here))
    first = trainer_in(tmp_path, here, llama(), 0)
    first.keeper._spare_at = 4  # type: ignore[union-attr]
    lose(first, 4, {1})
    next_one = trainer_in(tmp_path, here, llama(), 1)
    found = next_one.resume()
    assert found is not None and found["source"] == "memory" and found["step"] == 4
    assert_equal(result_of(next_one), wanted)


@pytest.mark.ranks(4)
def test_a_lost_node_is_made_up_for_by_the_copies_on_others(tmp_path: Path):
    """Of two nodes with two ranks each, one is lost: its ranks, and all that was in its memory."""
    here = on_nodes(started("dp=2,fsdp=2"), 2)
    wanted = result_of(Trainer(llama(), here))
    lose(trainer_in(tmp_path, here, llama(), 0), 4, {2, 3})
    if here.rank == 2:
        for path in (tmp_path / "node-1").iterdir():
            path.unlink()
    dist.barrier()
    next_one = trainer_in(tmp_path, here, llama(), 1)
    found = next_one.resume()
    assert found is not None and found["source"] == "memory" and found["step"] == 5
    assert_equal(result_of(next_one), wanted)


@pytest.mark.ranks(4)
def test_a_lost_node_that_held_parts_alone_is_made_up_for_by_its_neighbours_copy(tmp_path: Path):
    here = on_nodes(started("fsdp=4"), 2)
    wanted = result_of(Trainer(llama(), here))
    first = trainer_in(tmp_path, here, llama(), 0)
    assert first.keeper is not None
    first.keeper._spare_at = 4
    for update in first.steps():
        if update.step == 4:
            break
    assert first.keeper._neighbour is not None
    first.keeper._neighbour.wait()
    dist.barrier()
    if here.rank == 0:
        for path in (tmp_path / "node-0").iterdir():
            path.unlink()
    dist.barrier()
    next_one = trainer_in(tmp_path, here, llama(), 1)
    found = next_one.resume()
    assert found is not None and found["source"] == "memory" and found["step"] == 4
    assert_equal(result_of(next_one), wanted)


@pytest.mark.ranks(2)
def test_a_copy_that_nobody_takes_is_told_with_the_reason(tmp_path: Path):
    here = on_nodes(started("fsdp=2"), 2)
    trainer = trainer_in(tmp_path, here, llama(), 0)
    assert trainer.keeper is not None and trainer.keeper._neighbour is not None
    neighbour = trainer.keeper._neighbour
    with socket.create_server((here.address, 0)) as gone:
        neighbour._to = gone.getsockname()[:2]
    trainer.keeper._spare_at = 1
    steps = trainer.steps()
    next(steps)
    next(steps)  # before it the copy is sent
    neighbour.wait()
    (told,) = neighbour.notes
    assert "could not leave a copy of its state" in told and "Connection refused" in told


def lose_one_of_three(folder: Path) -> None:
    lose(trainer_in(folder, started("dp=3"), llama(), 0), 4, {0})


def test_a_run_goes_on_from_memory_with_fewer_ranks(tmp_path: Path):
    run_on_ranks(__file__, "lose_one_of_three", 3, {"folder": tmp_path}, 60)
    try:
        here = start_on_cpu(1)
        wanted = result_of(Trainer(llama(), here))
        alone = trainer_in(tmp_path, here, llama(), 1)
        found = alone.resume()
        assert found is not None and found["source"] == "memory" and found["step"] == 5
        assert_same(result_of(alone), wanted)
    finally:
        mesh.finish()
        mesh.use(mesh.Meeting())


@pytest.mark.ranks(2)
def test_weights_that_were_being_changed_are_not_left_to_anyone(tmp_path: Path):
    here = started("dp=2")
    trainer = trainer_in(tmp_path, here, llama(), 0)
    keeper = trainer.keeper
    assert keeper is not None

    def fail() -> None:
        raise RuntimeError("the update broke off")

    next(trainer.steps())
    with pytest.raises(RuntimeError), keeper.updating():
        fail()
    keeper.leave(graceful=True)
    assert not [file for file in memory_files(tmp_path / "node-0") if file.path.name.startswith("words")]

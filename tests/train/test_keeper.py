"""When a training's state is saved, what of it is saved, and what is left to those who come next."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from meshrun import Here, RunFailed, UserError, mesh
from meshrun.config import write_json
from meshrun.data.order import Order
from meshrun.state.memory import memory_files
from meshrun.train.interval import Every, parse
from meshrun.train.keeper import AGAIN_AFTER, LAST_SAVE, Keeper, _weight_of
from meshrun.train.loop import Trainer
from meshrun.train.recovery import Keeping
from meshrun.train.state import _of_optimizer, moment, passing, plain, regions, values
from tests.train.small import points, small, start_on_cpu

STEPS = 6


def trainer_in(folder: Path, here: Here, every: Every | None = None, **changes: Any) -> Trainer:
    keeping = {name: changes.pop(name) for name in ("memory", "generation", "keep") if name in changes}
    options = {name: changes.pop(name) for name in ("record", "record_ids") if name in changes}
    experiment = small(24, changes.pop("batch", 8), steps=STEPS, **changes)
    kept = Keeping(folder, every=every or Every(steps=2), **{"keep": 100, **keeping})
    return Trainer(experiment, here, eval_every=2, keeping=kept, **options)


def keeper_of(trainer: Trainer) -> Keeper:
    assert trainer.keeper is not None
    return trainer.keeper


def saved_in(folder: Path) -> list[int]:
    return sorted(int(path.name[5:13]) for path in folder.glob("step-*"))


def train(trainer: Trainer, steps: int) -> None:
    """So many steps; what is due after the last of them is done."""
    for update in trainer.steps():
        if update.step == steps:  # the one after: its own saving has not come yet
            break


def test_state_is_saved_every_so_many_steps_and_at_the_end_once(alone: Here, tmp_path: Path):
    trainer_in(tmp_path, alone, Every(steps=4)).train()
    assert saved_in(tmp_path) == [4, STEPS]
    trainer_in(tmp_path / "even", alone, Every(steps=3)).train()
    assert saved_in(tmp_path / "even") == [3, STEPS]
    trainer_in(tmp_path / "never", alone, Every(never=True)).train()
    assert saved_in(tmp_path / "never") == []


def test_a_training_that_is_resumed_at_its_end_saves_nothing_again(alone: Here, tmp_path: Path):
    trainer_in(tmp_path, alone).train()
    again = trainer_in(tmp_path, alone)
    assert again.resume() == {"step": STEPS, "source": "a checkpoint", "seconds": pytest.approx(0, abs=60)}
    again.train()
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step-{step:08d}" for step in (2, 4, 6)]


def test_a_step_is_due_once(alone: Here, tmp_path: Path):
    keeper = keeper_of(trainer_in(tmp_path, alone, Every(steps=2)))
    assert [step for step in range(1, 7) if keeper._due(step)] == [2, 4, 6]
    keeper._saved = 4
    assert [step for step in range(1, 7) if keeper._due(step)] == [2, 6]
    keeper._saved = STEPS
    assert not keeper._due(STEPS), "nor the last one"


@pytest.mark.parametrize("generation", [0, 1])
def test_memory_in_which_others_still_read_is_not_made_ready_by_ranks_that_were_started_anew(
    alone: Here, tmp_path: Path, generation: int
):
    memory = tmp_path / "memory"
    before = trainer_in(tmp_path, alone, Every(steps=100), memory=memory)
    train(before, 2)
    keeper_of(before)._snapshot()
    assert len(memory_files(memory)) == 1
    anew = trainer_in(tmp_path / "anew", alone, Every(steps=100), memory=memory, generation=generation)
    train(anew, 2)
    assert len(memory_files(memory)) == generation


def test_by_the_clock_it_is_saved_when_the_time_has_come_and_no_write_is_under_way(
    alone: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    trainer = trainer_in(tmp_path, alone, Every(given=10.0))
    keeper = keeper_of(trainer)
    now = keeper._saved_at
    monkeypatch.setattr(time, "monotonic", lambda: now)
    keeper._look = 0
    assert not keeper._due(1) and keeper._look > 1
    keeper._look, now = 0, now + 10.1
    assert keeper._due(1)
    monkeypatch.setattr(Keeper, "_busy", True)
    keeper._look = 0
    assert not keeper._due(1), "the last one is still being written"


def test_another_rank_that_still_writes_is_waited_for(alone: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    keeper = keeper_of(trainer_in(tmp_path, alone, Every(given=10.0)))
    now = keeper._saved_at + 10.1
    monkeypatch.setattr(time, "monotonic", lambda: now)
    for busy in (True, False):
        monkeypatch.setattr(Here, "gathered", lambda _, own, busy=busy: [own, (*own[:3], busy, *own[4:])])
        assert keeper._time_has_come(1) is not busy


def test_a_checkpoint_that_could_not_be_written_is_tried_again_before_the_next_is_due(
    alone: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    keeper = keeper_of(trainer_in(tmp_path, alone, Every(given=1000.0)))
    now = keeper._saved_at + AGAIN_AFTER + 1
    monkeypatch.setattr(time, "monotonic", lambda: now)
    assert not keeper._time_has_come(1)
    keeper.unsaved = "the disk is full"
    assert keeper._time_has_come(2)


@pytest.mark.parametrize(("holders", "copies"), [((0, 1), True), ((0, 2), False)])
def test_what_one_node_alone_holds_goes_to_another_from_two_images(
    alone: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, holders: tuple[int, ...], copies: bool
):
    """Ranks 0 and 1 are on the first of two nodes. While an image is on its way, the next is made in another one."""
    trainer = trainer_in(tmp_path, alone)
    trainer.placed.shards = [replace(each, holders=holders) for each in trainer.placed.shards]
    trainer.here = replace(alone, world=replace(alone.world, size=4, local_size=2, nodes=2))
    monkeypatch.setattr(Here, "gathered", lambda _, value: [value] * 4 if isinstance(value, bool) else [0, 0, 1, 1])
    monkeypatch.setattr("meshrun.train.keeper.Neighbour", lambda *_: SimpleNamespace())
    keeper = Keeper(trainer, Keeping(tmp_path, memory=tmp_path / "memory"))
    assert (keeper._copies, keeper._neighbour is not None, len(keeper.saver._stagings)) == (copies, copies, 1 + copies)


def test_a_look_at_the_clock_comes_half_way_at_the_pace_of_the_steps(
    alone: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    trainer = trainer_in(tmp_path, alone, Every(given=100.0))
    keeper = keeper_of(trainer)
    now = keeper._saved_at + 10.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    keeper._looked = (0, now - 10.0)
    assert not keeper._time_has_come(20)  # 2 steps a second, 90 s left
    assert keeper._look == 20 + 90


@pytest.mark.ranks(2)
def test_the_slowest_rank_s_clock_decides_for_all(tmp_path: Path):
    here = start_on_cpu(2)
    trainer = trainer_in(tmp_path, here, Every(given=1000.0))
    keeper = keeper_of(trainer)
    keeper._saved_at -= 2000.0 if here.rank == 1 else 0.0
    assert keeper._time_has_come(3), "rank 1 has not saved for 2,000 s"
    keeper._saved_at = time.monotonic()
    assert not keeper._time_has_come(4)


def test_how_long_a_checkpoint_took_is_known_from_its_beginning_to_its_end(alone: Here, tmp_path: Path):
    told: list[dict[str, Any]] = []
    trainer = trainer_in(tmp_path, alone, record=lambda kind, **f: told.append(f) if kind == "checkpoint" else None)
    assert keeper_of(trainer).took is None
    trainer.train()
    assert [each["step"] for each in told] == [2, 4, 6]
    took = keeper_of(trainer).took
    assert took == pytest.approx(told[-1]["seconds"] + told[-1]["stall"], abs=2e-4) and took >= told[-1]["seconds"] > 0


def test_the_last_checkpoint_is_of_this_very_step_and_its_failure_is_one_of_the_run(alone: Here, tmp_path: Path):
    trainer = trainer_in(tmp_path / "ok", alone, Every(steps=100))
    train(trainer, 3)
    assert keeper_of(trainer).save_last() and saved_in(tmp_path / "ok") == [4]
    never = trainer_in(tmp_path / "never", alone, Every(never=True))
    train(never, 1)
    assert not keeper_of(never).save_last() and saved_in(tmp_path / "never") == []
    bad = trainer_in(tmp_path / "bad", alone, Every(steps=100))
    train(bad, 1)
    (tmp_path / "bad").write_text("a file where a folder must be")
    with pytest.raises(RunFailed, match="stopped after step 2, but its checkpoint was not kept: "):
        keeper_of(bad).save_last()


def test_a_state_that_was_given_is_not_saved_again_unless_it_was_in_memory_only(alone: Here, tmp_path: Path):
    trainer_in(tmp_path, alone, Every(steps=4)).train()
    again = trainer_in(tmp_path, alone, Every(steps=100))
    again.resume()
    assert keeper_of(again).save_last() and saved_in(tmp_path) == [4, STEPS]
    begun = trainer_in(tmp_path / "new", alone)
    assert begun.resume() is None
    assert keeper_of(begun).save_last() and saved_in(tmp_path / "new") == [], "step 0 is in the program itself"
    keeper = keeper_of(again)
    keeper.recovery.find = lambda: "memory"  # type: ignore[method-assign]
    again.resume()
    assert keeper._given == 0 and keeper._saved is None


def test_ids_that_were_used_before_a_resume_count(alone: Here, tmp_path: Path):
    whole = trainer_in(tmp_path, alone).train()
    cut = trainer_in(tmp_path, alone)
    cut.resume()
    assert cut.train()["sample_ids_sha256"] == whole["sample_ids_sha256"]


@pytest.mark.parametrize("torn", [False, True])
def test_weights_that_are_between_two_steps_are_not_left_to_anyone(alone: Here, tmp_path: Path, torn: bool):
    trainer = trainer_in(tmp_path, alone, Every(steps=100))
    train(trainer, 2)
    keeper = keeper_of(trainer)
    if torn:
        with keeper.updating():
            pass
    keeper.leave(graceful=True)
    assert saved_in(tmp_path) == ([] if torn else [3])
    if torn:
        keeper.remember()
        keeper.leave(graceful=True)
    assert saved_in(tmp_path) == [3]


@pytest.mark.ranks(2)
def test_a_rank_that_is_left_alone_puts_its_state_into_its_node_s_memory(tmp_path: Path):
    here = start_on_cpu(2)
    trainer = trainer_in(tmp_path, here, Every(steps=100), memory=tmp_path / "memory", generation=0)
    train(trainer, 3)
    if here.rank == 1:
        keeper_of(trainer)._last_words(frozenset({0}))
        (found,) = [file for file in memory_files(tmp_path / "memory") if file.path.name.startswith("words")]
        names = {entry.name for entry in found.pieces}
        weights = {f"model/{shard.name}" for shard in trainer.placed.shards}
        momenta = {f"optimizer/{shard.name}/momentum_buffer" for shard in trainer.placed.shards}
        assert weights | momenta <= names and found.step == 4
    here.gathered(None)


@pytest.mark.parametrize("final", [True, False])
def test_state_is_left_in_memory_for_ranks_that_come_and_on_the_disk_where_none_will(
    alone: Here, tmp_path: Path, final: bool
):
    memory = tmp_path / "memory"
    trainer = trainer_in(tmp_path, alone, Every(steps=100), memory=memory)
    train(trainer, 3)
    memory.mkdir(mode=0o700, exist_ok=True)
    write_json(memory / "dead-0.json", {"ranks": [1], "final": final})
    keeper_of(trainer).leave(graceful=False)
    left = [file.path.name for file in memory_files(memory) if file.path.name.startswith("words")]
    assert (saved_in(tmp_path), left) == (([4], []) if final else ([], ["words-00000.safetensors"]))


def test_what_the_dead_would_have_written_is_left_by_others(
    alone: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    memory, dead = tmp_path / "memory", list[Any]()
    trainer = trainer_in(tmp_path, alone, Every(steps=100), memory=memory)
    memory.mkdir(mode=0o700)
    write_json(memory / "dead-0.json", {"ranks": [1, 3], "final": False})
    monkeypatch.setattr(Keeper, "_last_words", lambda _, ranks: dead.append(ranks))
    keeper_of(trainer).leave(graceful=True)
    assert dead == [{1, 3}]


def test_a_training_goes_back_once_what_is_being_written_is_there(
    alone: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    keeper, done = keeper_of(trainer_in(tmp_path, alone)), list[str]()
    monkeypatch.setattr(keeper.saver, "wait", lambda: done.append("written"))
    monkeypatch.setattr(keeper.recovery, "go_back", lambda before: done.append("read") or before - 1)
    assert keeper.go_back(4) == 3 and done == ["written", "read"]


def test_what_other_nodes_hold_is_left_on_each(alone: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """By the first rank of the node that is not dead, here one of ranks 4 to 7."""
    trainer, writers = trainer_in(tmp_path, alone, memory=tmp_path / "memory"), list[int]()
    trainer.here = replace(alone, world=replace(alone.world, rank=6, local_rank=2, size=12, local_size=4))

    def found(_trainer: Any, _moment: Any, writer: Any) -> list[Any]:
        writers.extend(writer(holders) for holders in ((0, 5, 7, 8), (0, 4, 7), (0, 1)))
        return []

    monkeypatch.setattr("meshrun.train.keeper.regions", found)
    keeper_of(trainer)._last_words(frozenset({4}))
    assert writers == [5, 7, 6]


@pytest.mark.parametrize("mine", [1.0, 9.0])
def test_the_rank_whose_checkpoint_costs_most_decides_how_often_there_is_one(
    alone: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mine: float
):
    keeper, costs = keeper_of(trainer_in(tmp_path, alone, parse("auto"))), list[Any]()
    keeper._cost = mine
    monkeypatch.setattr(Every, "seconds", lambda _, cost, __: costs.append(cost) or 100.0)
    monkeypatch.setattr(Here, "gathered", lambda _, own: [own, (*own[:2], 5.0, *own[3:])])
    keeper._time_has_come(1)
    assert costs == [max(mine, 5.0)]


def test_copies_in_memory_take_a_small_share_of_the_time(alone: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    trainer = trainer_in(tmp_path, alone)
    keeper, trainer.step = keeper_of(trainer), 10
    monkeypatch.setattr(time, "monotonic", lambda: 50.0)
    monkeypatch.setattr(Keeper, "_busy", True)
    for cost, steps in ((0.0, 1), (0.1, 5), (1.0, 50)):
        keeper._copied, keeper._copy_cost = (0, 40.0), cost  # a second a step
        keeper._copy_to_memory()
        assert keeper._spare_at == 10 + steps


def test_what_belongs_to_a_weight_is_known_by_its_name():
    assert _weight_of("model/block.0.w") == "model/block.0.w"
    assert _weight_of("optimizer/block.0.w/exp_avg") == "model/block.0.w"
    assert _weight_of("optimizer/of/w/exp_avg") == "model/of/w"


def test_a_state_speaks_of_its_own_moment(alone: Here, tmp_path: Path):
    trainer = trainer_in(tmp_path, alone, evals={"val": points(9)})
    before = moment(trainer)
    trainer.train()
    state = values(trainer, before)
    assert (state["step"], state["evaluated"]) == (0, 0), "and not where the training stands now"
    losses = {each.name: each.tensor for each in regions(trainer, before)}["totals/losses"]
    assert len(losses) == 0
    now = values(trainer, moment(trainer))
    assert (now["step"], now["evaluated"], now["world"], now["layout"]) == (STEPS, STEPS, 1, "dp=1")
    assert now["data"] == {"batch": 8, "seed": 4, "train_samples": 24, "shuffle": "full", "fingerprint": None}
    assert now["kept"]["keys"] == ["momentum_buffer"] and now["kept"]["without"] == []


def test_an_entry_of_the_optimizer_that_is_none_is_left_out(alone: Here, tmp_path: Path):
    trainer = trainer_in(tmp_path, alone, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    for shard in trainer.placed.shards:
        trainer.optimizer.state[shard.parameter]["momentum_buffer"] = None
    assert not [each for each in regions(trainer, moment(trainer)) if each.name.startswith("optimizer/")]
    assert values(trainer, moment(trainer))["kept"]["keys"] == []


def test_draws_of_the_program_are_noticed(alone: Here, tmp_path: Path):
    trainer = trainer_in(tmp_path, alone)
    keeper = keeper_of(trainer)
    assert not keeper._values()["draws"]
    random.random()
    keeper.remember()
    assert keeper._values()["draws"]
    assert {"rng/0/torch", "rng/0/python", "rng/0/numpy"} <= {each.name for each in passing(trainer, moment(trainer))}


def test_groups_are_written_down_as_plain_numbers():
    group = {"lr": torch.tensor(0.5), "betas": (0.9, 0.99), "fused": None, "params": [nn.Parameter(torch.ones(1))]}
    assert plain({**group, "eps": float("nan")}) == {"lr": 0.5, "betas": [0.9, 0.99], "fused": None}


@pytest.mark.ranks(3)
def test_samples_that_only_fill_up_a_piece_are_not_recorded_as_used(tmp_path: Path):
    mesh.use(mesh.Meeting(layout="fsdp=3", device="cpu"))
    here, told = mesh.start(), list[int]()

    def record(kind: str, **fields: Any) -> None:
        if kind == "ids":
            told.extend(fields["ids"])

    # Of two samples on three ranks, one has none and computes a sample of another.
    trainer = trainer_in(tmp_path, here, Every(never=True), record=record, record_ids=True, batch=2)
    train(trainer, 1)
    everyone = sorted(number for ids in here.gathered(told) for number in ids)
    order = Order(24, 2, 4)
    assert everyone == sorted(int(number) for step in (0, 1) for number in order.batch_ids(step))


def test_the_last_evaluated_step_is_kept_beside_the_step(alone: Here, tmp_path: Path):
    trainer = trainer_in(tmp_path, alone)
    trainer.step, trainer.evaluated = 3, 2
    state = values(trainer, moment(trainer))
    assert (state["step"], state["evaluated"]) == (3, 2)


def test_an_evaluation_is_part_of_the_state_that_is_left_to_others(alone: Here, tmp_path: Path):
    trainer = trainer_in(tmp_path, alone, Every(never=True), evals={"val": points(8, seed=3)})
    for _ in trainer.steps():
        trainer._evaluate_and_keep()
        assert keeper_of(trainer)._moment.evaluated == trainer.step


@pytest.mark.parametrize(("tp", "cp", "writes"), [(0, 0, True), (1, 0, False), (0, 1, False)])
def test_buffers_of_a_replica_are_written_by_one_of_its_ranks(tp: int, cp: int, writes: bool):
    here = SimpleNamespace(rank=3, replica=1, place={"tp": tp, "cp": cp, "pp": 0}.__getitem__)
    now = SimpleNamespace(random=SimpleNamespace(tensors=dict), buffers={"mean": torch.ones(2)})
    placed = SimpleNamespace(stages_with=lambda _: (0,))
    found = passing(SimpleNamespace(here=here, placed=placed), now)  # type: ignore[arg-type]
    assert [each.name for each in found] == (["buffer/mean@1"] if writes else [])


def test_a_buffer_on_several_stages_is_shared_out_over_them():
    now: Any = SimpleNamespace(random=SimpleNamespace(tensors=dict), buffers={"mean": torch.ones(2)})
    placed = SimpleNamespace(stages_with=lambda _: (0, 2))
    found = []
    for stage in (0, 2):
        here = SimpleNamespace(rank=stage, replica=1, place={"tp": 0, "cp": 0, "pp": stage}.__getitem__)
        trainer: Any = SimpleNamespace(here=here, placed=placed)
        found += [(each.name, each.copy, each.copies) for each in passing(trainer, now)]
    assert found == [("buffer/mean@1", 0, 2), ("buffer/mean@1", 1, 2)]


def test_who_writes_what_all_ranks_know_is_asked(alone: Here, tmp_path: Path):
    trainer = trainer_in(tmp_path, alone)
    for writer, writes in ((min, True), (lambda _: 5, False)):
        names = {each.name for each in regions(trainer, moment(trainer), writer)}
        assert ({"totals/losses", "totals/grad_norms"} <= names) == writes


def part(start: tuple[int, int], holders: tuple[int, ...] = (0, 1)) -> Any:
    return SimpleNamespace(name="w", parameter=torch.ones(2, 3), shape=(4, 3), start=start, holders=holders)


def test_a_number_of_the_optimizer_is_written_by_one_holder_of_the_first_part(alone: Here, tmp_path: Path):
    trainer = trainer_in(tmp_path, alone)

    def names(shard: Any) -> list[str]:
        return [each.name for each in _of_optimizer(trainer, shard, "step", 3, min)]

    assert names(part((0, 0))) == ["optimizer/w/step#int"]
    assert names(part((2, 0))) == names(part((0, 0), (1, 2))) == []


def test_a_state_that_no_other_layout_could_use_is_refused(alone: Here, tmp_path: Path):
    trainer = trainer_in(tmp_path, alone)
    with pytest.raises(UserError, match=r"keeps 'rows' of shape \(2,\) for a part of w"):
        list(_of_optimizer(trainer, part((0, 0)), "rows", torch.ones(2), min))
    whole = part((0, 0))
    whole.shape = (2, 3)
    assert [each.shape for each in _of_optimizer(trainer, whole, "rows", torch.ones(2), min)] == [(2,)]


def test_a_state_says_all_of_the_order_and_how_groups_were_made(alone: Here, tmp_path: Path):
    trainer = trainer_in(tmp_path, alone, shuffle="window:8")
    (group,) = trainer.optimizer.param_groups
    made = group["lr"]
    group["lr"] = made / 2
    state = values(trainer, moment(trainer))
    assert state["data"]["shuffle"] == str(trainer.order.shuffle) != "window"
    assert [(each["made"]["lr"], each["now"]["lr"]) for each in state["groups"]] == [(made, made / 2)]


def test_weights_are_of_no_step_while_an_update_changes_them(alone: Here, tmp_path: Path):
    trainer = trainer_in(tmp_path, alone, Every(never=True))
    seen: list[bool] = []
    trainer.optimizer.register_step_pre_hook(lambda *_: seen.append(keeper_of(trainer)._torn))
    for _ in trainer.steps():
        seen.append(keeper_of(trainer)._torn)  # noqa: PERF401 - the hook adds to it meanwhile
    assert seen == [True, False] * STEPS


def test_used_samples_are_recorded_with_the_step_that_they_are_used_in(alone: Here, tmp_path: Path):
    told: list[dict[str, Any]] = []

    def record(kind: str, **fields: Any) -> None:
        told.extend([fields] if kind == "ids" else [])

    trainer_in(tmp_path, alone, Every(never=True), record=record, record_ids=True).train()
    order = Order(24, 8, 4)
    assert told == [{"step": step + 1, "ids": order.batch_ids(step).tolist()} for step in range(STEPS)]


class WithStatistics(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(5, 3), nn.BatchNorm1d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.inner(x))


@pytest.mark.parametrize(("model", "draws"), [(WithStatistics, False), (None, True), (None, False)])
def test_what_is_lost_with_a_rank_is_left_of_two_steps_where_there_is_any(
    alone: Here, tmp_path: Path, model: Any, draws: bool
):
    trainer = trainer_in(tmp_path / "c", alone, **({"model": model} if model else {}))
    keeper = keeper_of(trainer)
    left: list[tuple[str, int]] = []
    keeper.keeping = replace(keeper.keeping, memory=tmp_path)
    keeper.saver.put = lambda stem, _found, step, _state: left.append((stem, step)) is None  # type: ignore[method-assign]
    trainer.here = replace(alone, world=replace(alone.world, size=2, local_size=2))
    if draws:
        random.random()
    for trainer.step in (3, 4):
        keeper.remember()
    assert left == ([("passing-1", 3), ("passing-0", 4)] if model or draws else [])


def test_draws_before_a_resume_are_not_forgotten(alone: Here, tmp_path: Path):
    keeper = keeper_of(trainer_in(tmp_path, alone))
    assert not keeper._values()["draws"]
    keeper._drew = True
    assert keeper._values()["draws"]


def test_a_checkpoint_that_failed_is_known_until_one_is_kept(alone: Here, tmp_path: Path):
    (tmp_path / "file").write_text("no folder")
    trainer = trainer_in(tmp_path / "file", alone, Every(steps=4))
    train(trainer, 4)
    keeper = keeper_of(trainer)
    keeper.saver.wait()
    keeper._report()
    assert keeper.unsaved is not None and "cannot write" in keeper.unsaved
    (tmp_path / "file").unlink()
    assert keeper.save_now() is None and keeper.unsaved is None


def test_best_weights_that_are_late_are_written_before_a_checkpoint_says_that_they_are_there(
    alone: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    trainer = trainer_in(tmp_path, alone, Every(steps=4))
    seen: list[list[int]] = []
    monkeypatch.setattr(trainer, "write_late_weights", lambda: seen.append(saved_in(tmp_path)))
    trainer.train()
    assert saved_in(tmp_path) == [4, STEPS] and seen == [[], [4]]


def test_a_rank_that_is_left_alone_saves_within_its_time_and_nothing_of_step_0(alone: Here, tmp_path: Path):
    trainer = trainer_in(tmp_path, alone, Every(steps=100))
    keeper = keeper_of(trainer)
    keeper.leave(graceful=True)
    assert saved_in(tmp_path) == []
    train(trainer, 3)
    since = keeper._saved_at
    keeper.leave(graceful=True)
    assert saved_in(tmp_path) == [trainer.step] and keeper.saver.timeout == LAST_SAVE
    keeper._save()
    assert keeper._saved_at > since


def test_a_rank_that_is_left_alone_keeps_nothing_where_no_checkpoints_are_wanted(alone: Here, tmp_path: Path):
    trainer = trainer_in(tmp_path, alone, Every(never=True))
    train(trainer, 3)
    keeper_of(trainer).leave(graceful=True)
    assert saved_in(tmp_path) == []


def test_how_often_ranks_fail_goes_by_how_many_there_are(alone: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    trainer = trainer_in(tmp_path, alone, parse("auto"), generation=3)
    keeper = keeper_of(trainer)
    given: list[tuple[float, ...]] = []
    monkeypatch.setattr("meshrun.train.keeper.failures_apart", lambda *said: given.append(said) or 100.0)
    trainer.here = replace(alone, world=replace(alone.world, size=8))
    monkeypatch.setattr(type(trainer.here), "gathered", lambda _, value: [value])
    trainer.totals.seconds = 50.0
    keeper._time_has_come(5)
    assert given == [(keeper.keeping.mtbf, 8, 3, 50.0)]

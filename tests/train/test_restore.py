"""What a checkpoint puts back into a trainer, entry by entry, and which checkpoints are refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from meshrun import Here
from meshrun.errors import SharedError
from meshrun.state.checkpoint import BadCheckpoint, Checkpoint
from meshrun.train.interval import Every
from meshrun.train.loop import Trainer
from meshrun.train.recovery import Keeping
from meshrun.train.restore import (
    _kept,
    _like,
    _restore_buffers,
    _restore_optimizer,
    check,
    refuse_other,
    restore,
    same_mesh,
    wanted,
)
from tests.train.small import points, small

STEPS = 4


def trainer_in(folder: Path, here: Here, **changes: Any) -> Trainer:
    experiment = small(24, 8, steps=STEPS, **{"evals": {"val": points(9)}, **changes})
    return Trainer(experiment, here, eval_every=2, keeping=Keeping(folder, every=Every(steps=2)))


@pytest.fixture
def kept(alone: Here, tmp_path: Path) -> tuple[Trainer, Checkpoint]:
    """A training at its end, and the checkpoint of that step."""
    trainer = trainer_in(tmp_path, alone)
    trainer.train()
    return trainer, Checkpoint.open(tmp_path / f"step-{STEPS:08d}")


def test_a_training_that_was_restored_stands_where_the_other_one_stood(
    alone: Here, tmp_path: Path, kept: tuple[Trainer, Checkpoint]
):
    trainer, checkpoint = kept
    again = trainer_in(tmp_path / "new", alone)
    restore(again, checkpoint)
    assert (again.step, again.evaluated, again.drew) == (STEPS, STEPS, trainer.drew)
    one, other = vars(again.totals), vars(trainer.totals)
    names = ("losses", "grad_norms", "scores", "best", "skipped", "seconds", "samples", "timed_samples", "data_wait")
    assert {name: one[name] for name in names} == {name: other[name] for name in names}
    assert len(one["losses"]) == STEPS and one["best"]["step"] in (2, STEPS)
    for mine, theirs in zip(again.placed.shards, trainer.placed.shards, strict=True):
        assert torch.equal(mine.parameter, theirs.parameter), mine.name
        momentum = [each.optimizer.state[shard.parameter] for each, shard in ((again, mine), (trainer, theirs))]
        assert torch.equal(momentum[0]["momentum_buffer"], momentum[1]["momentum_buffer"]), mine.name


def test_an_evaluation_that_was_made_is_not_made_again(alone: Here, tmp_path: Path):
    first = trainer_in(tmp_path, alone)
    first.train()
    again = trainer_in(tmp_path, alone)
    assert again.resume() is not None
    again.evaluate = pytest.fail  # type: ignore[method-assign]
    again.train()


def test_what_restore_reads_is_what_it_says_beforehand(kept: tuple[Trainer, Checkpoint], tmp_path: Path):
    trainer, checkpoint = kept
    names = {name for name, _, _ in wanted(trainer, checkpoint)}
    read: set[str] = set()
    seen = SimpleNamespace(
        state=checkpoint.state,
        tensors=checkpoint.tensors,
        path=checkpoint.path,
        whole=lambda name: (read.add(name), checkpoint.whole(name))[1],
        read=lambda region: (read.add(region.name), checkpoint.read(region))[1],
    )
    restore(trainer_in(tmp_path / "new", trainer.here), seen)  # type: ignore[arg-type]
    assert names == read


def test_moments_of_another_shape_than_their_weight_are_wanted_whole(alone: Here, tmp_path: Path):
    """As those of Adafactor, which keeps a number for each row and each column of a matrix."""
    trainer = trainer_in(tmp_path, alone, optimizer=lambda parameters: torch.optim.Adafactor(parameters, lr=0.01))
    trainer.train()
    checkpoint = Checkpoint.open(tmp_path / f"step-{STEPS:08d}")
    boxes = {name: (start, size) for name, start, size in wanted(trainer, checkpoint)}
    shapes = {name: checkpoint.tensors[name].shape for name in boxes if name in checkpoint.tensors}
    assert any(name.endswith("/row_var") for name in shapes)
    assert {name: ((0,) * len(shape), shape) for name, shape in shapes.items()} == {
        name: boxes[name] for name in shapes
    }


def changed(checkpoint: Checkpoint, change: Callable[[dict[str, Any]], None]) -> Any:
    state = {**checkpoint.state, "data": dict(checkpoint.state["data"])}
    change(state)
    return SimpleNamespace(path=checkpoint.path, tensors=checkpoint.tensors, state=state)


REFUSED: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "more samples": (lambda s: s["data"].update(train_samples=25), "was trained on 25 samples but .* has 24 now"),
    "batch": (lambda s: s["data"].update(batch=4), r"with batch 4 but batch is 8 now.*\(--batch\)"),
    "seed": (lambda s: s["data"].update(seed=5), r"with seed 5 but seed is 4 now.*\(--seed\)"),
    "shuffle": (lambda s: s["data"].update(shuffle="window"), r"with shuffle window but shuffle is full now"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_checkpoint_of_other_data_is_refused(kept: tuple[Trainer, Checkpoint], case: str):
    trainer, checkpoint = kept
    change, sentence = REFUSED[case]
    refuse_other(trainer, checkpoint)
    with pytest.raises(SharedError, match=sentence):
        refuse_other(trainer, changed(checkpoint, change))


def test_a_checkpoint_from_before_there_were_other_orders_was_shuffled_fully(kept: tuple[Trainer, Checkpoint]):
    refuse_other(kept[0], changed(kept[1], lambda state: state["data"].pop("shuffle")))


@pytest.mark.parametrize("entry", ["step", "evaluated", "world", "scores", "totals", "data", "kept", "groups", "draws"])
def test_a_checkpoint_that_holds_no_training_is_refused_by_the_entry_it_lacks(
    kept: tuple[Trainer, Checkpoint], entry: str
):
    check(kept[1])
    with pytest.raises(BadCheckpoint, match=f"its state has no '{entry}' as a training has"):
        check(changed(kept[1], lambda state: state.pop(entry)))


@pytest.mark.parametrize("entry", ["samples", "timed_samples", "seconds", "data_wait"])
def test_a_checkpoint_that_lacks_one_of_its_sums_is_refused(kept: tuple[Trainer, Checkpoint], entry: str):
    sums = {name: value for name, value in kept[1].state["totals"].items() if name != entry}
    with pytest.raises(BadCheckpoint, match=f"its state has no '{entry}' as a training has"):
        check(changed(kept[1], lambda state: state.update(totals=sums)))


def test_the_same_mesh_is_the_same_layout_on_as_many_ranks(kept: tuple[Trainer, Checkpoint]):
    trainer, checkpoint = kept
    assert same_mesh(trainer.here, checkpoint)
    assert not same_mesh(trainer.here, changed(checkpoint, lambda state: state.update(layout="tp=1")))
    assert not same_mesh(trainer.here, changed(checkpoint, lambda state: state.update(world=2)))


def test_another_optimizer_is_refused_and_another_rate_is_the_users(
    alone: Here, tmp_path: Path, kept: tuple[Trainer, Checkpoint]
):
    del kept
    adam = trainer_in(tmp_path, alone, optimizer=lambda p: torch.optim.Adam(p, lr=0.1))
    with pytest.raises(SharedError, match="the state of the optimizer SGD but this training uses Adam"):
        adam.resume()
    faster = trainer_in(tmp_path, alone, optimizer=lambda p: torch.optim.SGD(p, lr=0.7, momentum=0.9))
    faster.resume()
    assert faster.optimizer.param_groups[0]["lr"] == 0.7
    other = trainer_in(tmp_path, alone)
    other.optimizer.param_groups[0]["lr"] = 0.123  # as a schedule has left it
    other.resume()
    assert other.optimizer.param_groups[0]["lr"] == 0.3


def test_what_a_training_has_changed_in_a_group_goes_on_as_it_was(kept: tuple[Trainer, Checkpoint]):
    trainer, checkpoint = kept
    checkpoint.state["groups"][0]["now"]["momentum"] = 0.5
    restore(trainer, checkpoint)
    assert trainer.optimizer.param_groups[0]["momentum"] == 0.5


def test_moments_that_a_checkpoint_has_not_are_gone_after_it(kept: tuple[Trainer, Checkpoint]):
    trainer, checkpoint = kept
    tensors = {name: info for name, info in checkpoint.tensors.items() if not name.startswith("optimizer/")}
    before: Any = SimpleNamespace(path="x", tensors=tensors, state=checkpoint.state)
    assert trainer.optimizer.state
    _restore_optimizer(trainer, before)
    assert not trainer.optimizer.state


@pytest.mark.parametrize("value", [3, 0.5, True])
def test_plain_numbers_of_an_optimizer_come_back_as_such(alone: Here, value: Any):
    name = f"optimizer/w/step#{type(value).__name__}"
    saved: Any = SimpleNamespace(tensors={name: SimpleNamespace(shape=())}, whole=lambda _: torch.tensor(value))
    shard: Any = SimpleNamespace(parameter=torch.ones(2), shape=(2,))
    key, found = _kept(alone, saved, name, shard, {})
    assert key == "step" and found == value and type(found) is type(value)


def test_saved_values_take_the_form_that_the_group_has():
    assert _like((0.9, 0.99), [0.8, 0.9]) == (0.8, 0.9)
    assert _like(None, [1, 2]) == [1, 2]
    assert torch.equal(_like(torch.tensor(1.0), 0.5), torch.tensor(0.5))


def test_on_another_mesh_noise_goes_on_by_seed_replica_and_step(
    alone: Here, tmp_path: Path, kept: tuple[Trainer, Checkpoint]
):
    checkpoint = kept[1]
    drawn = {}
    for name, layout, seed in (("one", "tp=1", 4), ("again", "tp=1", 4), ("other seed", "tp=1", 5)):
        trainer = trainer_in(tmp_path / name, alone)
        trainer.experiment = replace(trainer.experiment, seed=seed)
        other = changed(checkpoint, lambda state, layout=layout: state.update(layout=layout))
        other.whole, other.read = checkpoint.whole, checkpoint.read
        restore(trainer, other)
        drawn[name] = torch.rand(3).tolist()
    assert drawn["one"] == drawn["again"] != drawn["other seed"]
    later = changed(checkpoint, lambda state: state.update(layout="tp=1", step=STEPS + 1))
    later.whole, later.read = checkpoint.whole, checkpoint.read
    restore(trainer_in(tmp_path / "later", alone), later)
    assert torch.rand(3).tolist() != drawn["one"], "else the same noise would come again after each change of the mesh"


def test_steps_that_were_left_out_stay_so(alone: Here, tmp_path: Path, kept: tuple[Trainer, Checkpoint]):
    other = changed(kept[1], lambda state: state.update(skipped=[2, 3]))
    other.whole, other.read = kept[1].whole, kept[1].read
    again = trainer_in(tmp_path / "new", alone)
    restore(again, other)
    assert again.totals.skipped == [2, 3]


def test_on_another_mesh_running_statistics_are_the_mean_of_all_replicas(alone: Here):
    saved = {
        "buffer/mean@0": torch.tensor([1.0, 2.0]),
        "buffer/mean@1": torch.tensor([3.0, 6.0]),
        "buffer/count@0": torch.tensor(5),
        "buffer/count@1": torch.tensor(7),
    }
    own = {"mean": torch.zeros(2), "count": torch.tensor(0)}
    trainer: Any = SimpleNamespace(here=alone, placed=SimpleNamespace(own_buffers=lambda: own))
    checkpoint: Any = SimpleNamespace(tensors=saved, whole=saved.__getitem__, path="x")
    _restore_buffers(trainer, checkpoint, same=False)
    assert own["mean"].tolist() == [2.0, 4.0] and own["count"] == 5
    _restore_buffers(trainer, checkpoint, same=True)
    assert own["mean"].tolist() == [1.0, 2.0]


def test_whether_the_program_has_drawn_before_is_known_after_a_resume(kept: tuple[Trainer, Checkpoint], tmp_path: Path):
    trainer, checkpoint = kept
    for drew in (True, False):
        again = trainer_in(tmp_path / str(drew), trainer.here)
        state = {**checkpoint.state, "draws": drew}
        saved: Any = SimpleNamespace(
            state=state, tensors=checkpoint.tensors, path="x", whole=checkpoint.whole, read=checkpoint.read
        )
        restore(again, saved)
        assert again.drew is drew


def test_nothing_is_wanted_of_a_weight_of_which_the_optimizer_keeps_nothing(kept: tuple[Trainer, Checkpoint]):
    trainer, checkpoint = kept
    first, *rest = [shard.name for shard in trainer.placed.shards]
    state = changed(checkpoint, lambda state: state.update(kept={**state["kept"], "without": [first]}))
    found = {name.split("/")[1] for name, _, _ in wanted(trainer, state) if name.startswith("optimizer/")}
    assert found == set(rest)


def test_on_another_mesh_the_statistics_of_all_replicas_are_wanted(kept: tuple[Trainer, Checkpoint]):
    trainer, checkpoint = kept
    buffers = {f"buffer/mean@{replica}": SimpleNamespace(shape=(2,)) for replica in range(3)}
    tensors = {**checkpoint.tensors, **buffers}
    placed = SimpleNamespace(shards=[], frozen=[], own_buffers=lambda: {"mean": torch.zeros(2)})
    here: Any = SimpleNamespace(trainer=trainer, here=trainer.here, placed=placed)

    def names(layout: str) -> set[str]:
        saved: Any = SimpleNamespace(tensors=tensors, state={**checkpoint.state, "layout": layout})
        return {name for name, _, _ in wanted(here, saved) if name.startswith("buffer/")}

    assert names("dp=3") == set(buffers) and names(str(trainer.here.layout)) == {"buffer/mean@0"}


def test_on_another_mesh_each_replica_draws_its_own_noise(
    alone: Here, tmp_path: Path, kept: tuple[Trainer, Checkpoint], monkeypatch: pytest.MonkeyPatch
):
    other = changed(kept[1], lambda state: state.update(layout="tp=1"))
    other.whole, other.read = kept[1].whole, kept[1].read
    trainer, drawn = trainer_in(tmp_path / "new", alone), []
    for replica in (0, 1):
        monkeypatch.setattr(Here, "replica", property(lambda _, replica=replica: replica))
        restore(trainer, other)
        drawn.append(torch.rand(3).tolist())
    assert drawn[0] != drawn[1]

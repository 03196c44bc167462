"""Steps that are recorded and replayed train as steps that are not; on the CPU, a recording is a closure."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import TensorDataset

from meshrun import Here, Schedule, accuracy
from meshrun.parallel.how import How
from meshrun.parallel.placed import Piece
from meshrun.train import graphs
from meshrun.train.bad_steps import Policy
from meshrun.train.graphs import alike, objection
from meshrun.train.interval import parse as parse_interval
from meshrun.train.loop import Stopped, Trainer
from meshrun.train.recording import Recording, form_of
from meshrun.train.recovery import Keeping
from tests.train.small import difference, noting, points, small, trained

CPU = torch.device("cpu")


class Closure:
    """Does again what was recorded by calling it, and writes what comes out to where it was at first."""

    def __init__(self) -> None:
        self.replays = 0
        self.parameters: Callable[[], list[nn.Parameter]] = list
        self.wrong_from = math.inf
        """Replays from which on the numbers are others."""
        self.error: Exception | None = None
        self.only_branches = False
        self.recorded: list[bool] = []

    @contextmanager
    def aside(self) -> Iterator[None]:
        yield

    def record(self, body: Callable[[], Any], branches: bool) -> tuple[Any, Callable[[], None]]:
        self.recorded.append(branches)
        if self.error is not None and (branches or not self.only_branches):
            raise self.error
        found = body()
        gradients = [(each, each.grad) for each in self.parameters() if each.grad is not None]

        def replay() -> None:
            self.replays += 1
            for each in self.parameters():
                each.grad = None
            for old, new in zip(tree_leaves(found), tree_leaves(body()), strict=True):
                if isinstance(old, Tensor):
                    old.copy_(new)
            for parameter, static in gradients:
                assert parameter.grad is not None
                static.copy_(parameter.grad)
                parameter.grad = static
                if self.replays >= self.wrong_from:
                    static *= 1.5

        return found, replay

    def wait(self) -> None:
        """Nothing is ever under way."""

    def has_room(self) -> bool:
        return True


@pytest.fixture
def closure(monkeypatch: pytest.MonkeyPatch) -> Closure:
    made = Closure()
    monkeypatch.setattr(graphs, "recorder_on", lambda _: made)
    return made


def replaying(closure: Closure, experiment: Any, here: Here, **options: Any) -> tuple[Trainer, list[str]]:
    record, notes = noting()
    options = {"workers": 0, "how": How(graphs=True), "record": record, **options}
    trainer = Trainer(experiment, here, **options)
    if trainer._update.recorder is not None:
        closure.parameters = trainer._update.graphed._parameters
    return trainer, notes


def eager(experiment: Any, here: Here, **options: Any) -> Trainer:
    return Trainer(experiment, here, workers=0, **options)


def with_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3))


@pytest.mark.parametrize("micro", [None, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_replayed_steps_train_as_steps_that_are_computed_each_time(
    alone: Here, closure: Closure, micro: int | None, precision: str
):
    """With a clipped norm, momentum, a schedule and running statistics; every third batch is short."""
    experiment = small(
        20, 7, steps=24, micro=micro, model=with_norm, precision=precision, schedule=Schedule("cosine", warmup=4)
    )
    trainer, notes = replaying(closure, experiment, alone)
    assert difference(trained(trainer), trained(eager(experiment, alone))) < (1e-6 if precision == "fp32" else 2e-2)
    assert notes == [] and closure.replays == 16 - graphs.FIRST


def test_evaluation_is_in_nobodys_way(alone: Here, closure: Closure):
    experiment = small(
        40, 8, steps=30, model=with_norm, evals={"val": points(11, seed=9)}, metrics={"accuracy": accuracy}
    )
    uneven = small(39, 8, steps=30, model=with_norm, evals={"val": points(11, seed=9)})
    for each, replays in ((experiment, 27), (uneven, 21)):
        closure.replays = 0
        trainer, notes = replaying(closure, each, alone, eval_every=3)
        reached, expected = trainer.train(), eager(each, alone, eval_every=3).train()
        assert reached["losses"] == pytest.approx(expected["losses"], rel=1e-6)
        assert reached["grad_norms"] == pytest.approx(expected["grad_norms"], rel=1e-6)
        assert reached["eval"]["val"]["loss"] == pytest.approx(expected["eval"]["val"]["loss"], rel=1e-6)
        assert notes == [] and closure.replays == replays


def test_updates_kept_until_the_end_have_their_own_numbers(alone: Here, closure: Closure):
    trainer, _ = replaying(closure, small(21, 7, steps=12), alone)
    updates = list(trainer.steps())
    assert [update.loss for update in updates] == trainer.totals.losses
    assert len(set(trainer.totals.losses)) == 12 and closure.replays == 9


def test_a_training_that_goes_on_from_a_checkpoint_is_the_training_without_it(
    alone: Here, closure: Closure, tmp_path: Path
):
    experiment = small(21, 7, steps=20, model=with_norm)
    keeping = Keeping(tmp_path, None, parse_interval("8"))
    first, _ = replaying(closure, experiment, alone, keeping=keeping)
    for update in first.steps():
        if update.step == 12:
            break
    assert first.keeper is not None
    first.keeper.finish()
    second, _ = replaying(closure, experiment, alone, keeping=keeping)
    resumed = second.resume()
    assert resumed is not None and resumed["step"] == 8
    closure.replays = 0
    assert difference(trained(second), trained(eager(experiment, alone))) < 1e-6
    assert closure.replays == 12 - graphs.FIRST


def test_going_back_after_a_bad_step_leaves_the_recording_right(alone: Here, closure: Closure, tmp_path: Path):
    inputs, targets = points(120).tensors
    bad = int(Trainer(small(120, 6), alone).order.batch_ids(9)[3])
    inputs[bad] = math.nan
    experiment = small(120, 6, steps=16, train=TensorDataset(inputs, targets))

    def run(make: Callable[..., Any], folder: str, policy: Policy) -> Trainer:
        keeping = Keeping(tmp_path / folder, None, parse_interval("4"))
        return make(experiment, alone, policy=policy, keeping=keeping)

    for action in ("skip", "rollback"):
        closure.replays = 0
        policy = Policy(on_nan=action)
        found = run(lambda *a, **b: replaying(closure, *a, **b)[0], f"{action}-graphs", policy)
        expected = run(eager, f"{action}-eager", policy)
        found.train()
        expected.train()
        assert found.totals.skipped == expected.totals.skipped and found.totals.skipped
        for name, value in expected.model.state_dict().items():
            torch.testing.assert_close(found.model.state_dict()[name], value)
        assert closure.replays == 16 - graphs.FIRST


def test_who_is_asked_to_stop_stops_after_the_same_step(alone: Here, closure: Closure):
    class Clock:
        steps = 0

        def asked(self, _: bool) -> float:
            return float(self.steps >= 9)

        def stepped(self, _: float) -> None:
            self.steps += 1

        def evaluated(self, _: float) -> None:
            pass

    trainer, _ = replaying(closure, small(21, 7, steps=20), alone)
    trainer.ending = Clock()
    with pytest.raises(Stopped, match="after step 10"):
        list(trainer.steps())
    assert closure.replays == 7


def test_a_recording_with_other_numbers_is_not_used(alone: Here, closure: Closure):
    experiment = small(21, 7, steps=12, model=with_norm)
    closure.wrong_from = 1
    trainer, notes = replaying(closure, experiment, alone)
    assert difference(trained(trainer), trained(eager(experiment, alone))) < 1e-6
    assert closure.replays == 1
    assert notes == [graphs.refused("a recorded step gives other numbers than the step itself")]
    assert (trainer.placed.chosen["graphs"], trainer.placed.chosen["graphs_why"]) == (False, notes[0])


def test_a_recording_that_goes_wrong_later_is_found_out(alone: Here, closure: Closure, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(graphs, "CHECK_EVERY", 4)
    closure.wrong_from = 8
    trainer, notes = replaying(closure, small(21, 7, steps=20), alone)
    trained(trainer)
    assert closure.replays == 9 and len(notes) == 1  # the first one, and every fourth is compared


def test_what_cannot_be_recorded_is_computed_as_always(alone: Here, closure: Closure):
    experiment = small(21, 7, steps=12, model=with_norm)
    closure.error = RuntimeError("operation not permitted when stream is capturing\nand more")
    trainer, notes = replaying(closure, experiment, alone)
    assert difference(trained(trainer), trained(eager(experiment, alone))) < 1e-6
    assert notes == [graphs.refused("it cannot be recorded (operation not permitted when stream is capturing)")]


class Odd(nn.Module):
    """A model that does something in each step which a recording would freeze."""

    def __init__(self, odd: str) -> None:
        super().__init__()
        self.net, self.odd, self.calls = nn.Linear(5, 3), odd, 0
        self.register_buffer("mean", torch.zeros(5))
        self.drop = nn.Dropout(0.3 if odd == "dropout" else 0.0)

    def forward(self, x: Tensor) -> Tensor:
        if self.odd == "replaces":
            self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        if self.odd == "counts":
            self.calls += 1
        scale = random.random() if self.odd == "draws" else 1.0
        return self.net(self.drop(x) - self.mean) * scale


@pytest.mark.parametrize(
    ("odd", "why"),
    [
        ("replaces", "the model replaces its buffer mean in a step instead of writing to it"),
        ("counts", "the model changes the number calls in a step"),
        ("draws", "random numbers are drawn on the host in a step"),
        ("dropout", "the model has dropout"),
    ],
)
def test_a_model_that_a_recording_would_freeze_is_noticed(alone: Here, closure: Closure, odd: str, why: str):
    experiment = small(21, 7, steps=12, model=lambda: Odd(odd))
    random.seed(3)
    trainer, notes = replaying(closure, experiment, alone)
    found = trained(trainer)
    random.seed(3)
    assert difference(found, trained(eager(experiment, alone))) < 1e-6
    assert closure.replays == 0 and notes == [graphs.refused(why)]


def test_a_model_whose_dropout_drops_nothing_is_recorded(alone: Here, closure: Closure):
    trained(replaying(closure, small(21, 7, steps=12, model=lambda: Odd("")), alone)[0])
    assert closure.replays == 12 - graphs.FIRST


def test_long_steps_are_not_recorded_unless_that_is_asked_for(
    alone: Here, closure: Closure, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(graphs, "SHORT", 0.0)
    monkeypatch.setattr(graphs, "LONG", 0.0)
    for wanted, replays in ((None, 0), (True, 57)):
        trainer, notes = replaying(closure, small(21, 7, steps=60), alone, how=How(graphs=wanted))
        assert trainer.placed.chosen["graphs"] == "auto"  # nobody knows how long a step takes
        trainer.train()
        assert closure.replays == replays and notes == []
        assert trainer.placed.chosen["graphs"] is (replays > 0)


def test_short_steps_are_not_recorded_where_there_is_no_memory_for_two_of_them(
    alone: Here, closure: Closure, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(closure, "has_room", lambda: False)
    for wanted, replays in ((None, 0), (True, 57)):
        trainer, notes = replaying(closure, small(21, 7, steps=60), alone, how=How(graphs=wanted))
        trainer.train()
        assert closure.replays == replays and notes == []


def test_batches_that_are_all_different_are_not_recorded(alone: Here, closure: Closure):
    def widened(samples: list[Any]) -> tuple[dict[str, Any], Tensor]:
        """Each batch with another number beside its tensors."""
        inputs, targets = zip(*samples, strict=True)
        return {"input": torch.stack(inputs), "power": float(torch.stack(inputs).sum())}, torch.stack(targets)

    class Powered(nn.Linear):
        def forward(self, input: Tensor, power: float) -> Tensor:
            return super().forward(input) * (1 + power)

    experiment = small(400, 4, steps=60, collate=widened, model=lambda: Powered(5, 3))
    trainer, notes = replaying(closure, experiment, alone)
    assert difference(trained(trainer), trained(eager(experiment, alone))) < 1e-6
    assert closure.replays == 0 and notes == [graphs.refused("hardly any batch has the form of another")]


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


def held(pieces: list[Piece], samples: int) -> Recording:
    form, tensors = form_of(pieces, samples)
    return Recording(form, pieces, tensors, None, [], lambda: None)


def test_tensors_of_a_batch_of_a_known_form_are_found_in_the_order_of_the_recording():
    inputs = {"z": torch.ones(2, 3), "a": [torch.ones(2), (torch.ones(1), 4, "x", None)], "m": 0.5}
    pieces = [Piece(inputs, torch.ones(2), [1, 2], 2), Piece(inputs, torch.ones(2), [3, 4], 1)]
    found = held(pieces, 3).tensors_of(pieces, 3)
    assert found is not None and len(found) == 8
    assert all(one is two for one, two in zip(found, form_of(pieces, 3)[1], strict=True))


@pytest.mark.parametrize(
    ("inputs", "targets", "ids", "real", "samples"),
    [
        ({"x": torch.ones(2, 4), "n": 1}, torch.ones(2), [0, 1], 2, 2),
        ({"x": torch.ones(2, 3).double(), "n": 1}, torch.ones(2), [0, 1], 2, 2),
        ({"x": torch.ones(2, 3), "n": 2}, torch.ones(2), [0, 1], 2, 2),
        ({"n": 1, "x": torch.ones(2, 3)}, torch.ones(2), [0, 1], 2, 2),
        ({"x": torch.ones(2, 3)}, torch.ones(2), [0, 1], 2, 2),
        ([torch.ones(2, 3), 1], torch.ones(2), [0, 1], 2, 2),
        ({"x": 3.0, "n": 1}, torch.ones(2), [0, 1], 2, 2),
        ({"x": torch.ones(2, 3), "n": 1}, (torch.ones(2),), [0, 1], 2, 2),
        ({"x": torch.ones(2, 3), "n": 1}, torch.ones(2), [0, 1, 2], 2, 2),
        ({"x": torch.ones(2, 3), "n": 1}, torch.ones(2), [0, 1], 1, 2),
        ({"x": torch.ones(2, 3), "n": 1}, torch.ones(2), [0, 1], 2, 7),
    ],
)
def test_a_batch_of_another_form_is_looked_at_closely(
    inputs: Any, targets: Any, ids: list[int], real: int, samples: int
):
    recording = held([Piece({"x": torch.ones(2, 3), "n": 1}, torch.ones(2), [0, 1], 2)], 2)
    assert recording.tensors_of([Piece(inputs, targets, ids, real)], samples) is None
    assert recording.tensors_of([], 2) is None


def test_structures_that_only_a_closer_look_knows_are_replayed_too(alone: Here, closure: Closure):
    class Adds(nn.Linear):
        def forward(self, first: Tensor, second: Tensor) -> Tensor:
            return super().forward(first + second)

    def collated(samples: list[Any]) -> tuple[Pair, Tensor]:
        inputs, targets = (torch.stack(each) for each in zip(*samples, strict=True))
        return Pair(inputs, inputs * 2), targets

    experiment = small(21, 7, steps=12, collate=collated, model=lambda: Adds(5, 3))
    trainer, notes = replaying(closure, experiment, alone)
    assert difference(trained(trainer), trained(eager(experiment, alone))) < 1e-6
    assert closure.replays == 12 - graphs.FIRST and notes == []


def test_replaying_pays_where_steps_are_short_or_have_many_kernels_or_are_many():
    assert graphs.pays(0.001, 0.019, left=50) and graphs.pays(0.05, 0.1, left=50)
    assert not graphs.pays(0.03, 0.1, left=50) and not graphs.pays(0.9, 1.0, left=1000)
    assert graphs.pays(0.1, 0.4, left=10_000) and not graphs.pays(0.1, 1.1, left=10_000)


def test_where_branches_cannot_be_recorded_a_step_is_recorded_without(alone: Here, closure: Closure):
    def net() -> nn.Module:
        return nn.Sequential(nn.Unflatten(1, (1, 5)), nn.Conv1d(1, 4, 3), nn.Flatten(), nn.Linear(12, 3))

    closure.error, closure.only_branches = RuntimeError("unjoined work"), True
    experiment = small(21, 7, steps=9, model=net)
    trainer, notes = replaying(closure, experiment, alone)
    assert difference(trained(trainer), trained(eager(experiment, alone))) < 1e-6
    assert closure.recorded == [True, False] and closure.replays == 6 and notes == []


def test_who_looks_at_gradients_gets_steps_that_are_not_recorded(alone: Here, closure: Closure):
    seen: list[int] = []
    trainer, _ = replaying(closure, small(21, 7), alone, inspect=lambda step, _: seen.append(step))
    trained(trainer)
    assert seen == [0, 1, 2, 3, 4, 5] and closure.replays == 0
    assert graphs.refused("somebody is shown the gradients of every step") in trainer.placed.notes


def test_where_nothing_can_be_recorded_only_who_asks_for_it_is_told(alone: Here):
    assert Trainer(small(21, 7), alone, how=How(graphs=None)).placed.notes == []
    asked = Trainer(small(21, 7), alone, how=How(graphs=True))
    assert asked.placed.notes == [graphs.refused("the device is cpu")] and asked._update.recorder is None


@pytest.mark.usefixtures("closure")
def test_reasons_not_to_record():
    usual: dict[str, Any] = {"device": CPU, "ranks": 1, "steps": 1000, "shown": False, "in_backward": False}
    assert objection(None, **usual) is None and objection(True, **usual) is None
    assert objection(False, **usual) == "nobody wants it"
    assert "4 ranks" in str(objection(True, **{**usual, "ranks": 4}))
    assert "only 10 steps" in str(objection(None, **{**usual, "steps": 10}))
    assert objection(True, **{**usual, "steps": 10}) is None
    assert "--update-in-backward" in str(objection(True, **{**usual, "in_backward": True}))


def test_numbers_are_alike_but_for_rounding():
    assert alike([1.0, 2.0, 1e-9], [1.0001, 2.0, 3e-9]) and alike([math.nan, math.inf], [math.nan, math.inf])
    assert not alike([1.0, 2.0], [1.0, 2.1]) and not alike([1.0], [math.nan]) and not alike([1.0], [1.0, 2.0])

"""A recorded step with dropout drops in every replay what the step itself would drop.

On the CPU a recording is a tape of operations: as a GPU does, it does them again on the same memory, and no line of
Python runs again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshrun import Here
from meshrun.experiment import Loss
from meshrun.parallel import dp
from meshrun.parallel import moment as moments
from meshrun.parallel.how import How
from meshrun.train import graphs
from meshrun.train.loop import Trainer
from tests.train.small import noting, small
from tests.train.test_graphs import Closure


class Tape(TorchDispatchMode):
    """Writes down operations."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, found))
        return found

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, written in self.calls:
            for old, new in zip(tree_leaves(written), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class Recorder(Closure):
    """Does again what was recorded by its tape."""

    def __init__(self) -> None:
        super().__init__()
        self.around: Callable[[], AbstractContextManager[None]] = nullcontext
        """Each replay."""

    def record(self, body: Callable[[], Any], branches: bool) -> tuple[Any, Callable[[], None]]:
        del branches
        with Tape() as tape:
            found = body()

        def replay() -> None:
            self.replays += 1
            with self.around():
                tape.replay()

        return found, replay


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    def on_device(loss: Loss) -> Tensor:
        """As on a GPU: nobody looks at a number."""
        return torch.stack([loss.total.detach().double(), torch.full((), float(loss.count), dtype=torch.float64)])

    made = Recorder()
    monkeypatch.setattr(graphs, "recorder_on", lambda _: made)
    monkeypatch.setattr(dp, "as_sums", on_device)
    return made


class Drops(nn.Module):
    """Drops twice with the same module, and shows what the second call has left."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(5, 16), nn.Dropout(0.4), nn.Linear(16, 3)
        self.register_buffer("kept", torch.zeros(3, 16), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(torch.tanh(self.first(self.drop(x))))
        with torch.no_grad():
            self.kept[: len(h)].copy_(h[:3] != 0)
        return self.last(h)


STEPS = 12


def trainer_of(here: Here, micro: int | None) -> tuple[Trainer, list[str]]:
    record, notes = noting()
    experiment = small(21, 7, steps=STEPS, model=Drops, micro=micro)
    trainer = Trainer(experiment, here, workers=0, how=How(graphs=True), record=record)
    trainer.placed.moment.in_place = True  # as on a GPU
    return trainer, notes


def masks_of(trainer: Trainer) -> list[Tensor]:
    """What was left in each step."""
    return [trainer.model.kept.clone() for _ in trainer.steps()]


def as_always(monkeypatch: pytest.MonkeyPatch, here: Here, micro: int | None) -> tuple[Trainer, list[Tensor]]:
    with monkeypatch.context() as changed:
        changed.setattr(graphs, "FIRST", STEPS + 1)
        trainer, _ = trainer_of(here, micro)
        return trainer, masks_of(trainer)


def same(one: Trainer, other: Trainer) -> bool:
    weights = zip(one.model.parameters(), other.model.parameters(), strict=True)
    return one.totals.losses == other.totals.losses and all(torch.equal(a, b) for a, b in weights)


@pytest.mark.parametrize("micro", [None, 3])
def test_replays_drop_what_the_steps_themselves_drop(
    alone: Here, recorder: Recorder, monkeypatch: pytest.MonkeyPatch, micro: int | None
):
    expected, wanted = as_always(monkeypatch, alone, micro)
    assert recorder.replays == 0
    trainer, notes = trainer_of(alone, micro)
    found = masks_of(trainer)
    assert notes == [] and recorder.replays == STEPS - graphs.FIRST and trainer.placed.chosen["graphs"] is True
    assert all(map(torch.equal, found, wanted)) and same(trainer, expected)
    assert all(not torch.equal(one, two) for one, two in pairwise(found))


@pytest.mark.parametrize(("first", "then"), [(0.4, 0.0), (0.4, 0.2), (0.0, 0.4)])
def test_a_rate_that_is_changed_between_two_steps_is_that_of_the_steps_after_it(
    alone: Here, recorder: Recorder, monkeypatch: pytest.MonkeyPatch, first: float, then: float
):
    compared: list[graphs.Before] = []

    class Before(graphs.Before):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            compared.append(self)

    def changed(trainer: Trainer) -> list[Tensor]:
        masks = []
        trainer.model.drop.p = first
        for progress in trainer.steps():
            masks.append(trainer.model.kept.clone())
            if progress.step == 6:
                trainer.model.drop.p = then
        return masks

    monkeypatch.setattr(graphs, "Before", Before)
    trainer, notes = trainer_of(alone, None)
    found = changed(trainer)
    assert recorder.replays > 0 and notes == [] and bool(found[-1].all()) == (then == 0.0)
    # Each of two recordings when it is made, and where it drops something at the next step.
    assert len(compared) == sum(2 if rate else 1 for rate in (first, then))
    monkeypatch.setattr(graphs, "FIRST", STEPS + 1)
    expected, _ = trainer_of(alone, None)
    assert all(map(torch.equal, found, changed(expected))) and same(trainer, expected)


@pytest.mark.parametrize("frozen", ["key", "ids"])
def test_a_recording_that_drops_the_same_for_ever_is_found_out_at_the_next_step(
    alone: Here, recorder: Recorder, monkeypatch: pytest.MonkeyPatch, frozen: str
):
    expected, wanted = as_always(monkeypatch, alone, None)
    trainer, notes = trainer_of(alone, None)
    recorded: list[tuple[Tensor, Tensor]] = []

    @contextmanager
    def freezing() -> Iterator[None]:
        """As if the values that were there when it was recorded had become part of it."""
        if not recorded:
            memory = getattr(trainer.placed.moment, frozen)
            recorded.append((memory, memory.clone()))
        memory, values = recorded[0]
        now = memory.clone()
        memory.copy_(values)
        yield
        memory.copy_(now)

    recorder.around = freezing
    found = masks_of(trainer)
    assert notes == [graphs.refused(graphs.OTHER_NUMBERS)] and recorder.replays == 2
    assert all(map(torch.equal, found, wanted)) and same(trainer, expected)


def test_a_step_that_another_one_begins_in_is_not_recorded(
    alone: Here, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
):
    expected, _ = as_always(monkeypatch, alone, None)
    trainer, notes = trainer_of(alone, None)
    record, step = recorder.record, trainer.placed.step

    def recording(body: Callable[[], Any], branches: bool) -> Any:
        with monkeypatch.context() as changed:
            changed.setattr(moments, "is_recorded", lambda _: True)
            changed.setattr(trainer.placed, "step", lambda number, *rest: step(number + 1, *rest))
            return record(body, branches)

    monkeypatch.setattr(recorder, "record", recording)
    masks_of(trainer)
    assert recorder.replays == 0 and len(notes) == 1 and "begins within a recorded one" in notes[0]
    assert same(trainer, expected)

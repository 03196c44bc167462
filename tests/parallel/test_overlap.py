"""Messages travel while ranks compute: the order in which things happen in one step, by trace.

On the CPU a message may take longer than what it travels beside, so nothing here is about durations: what counts is
that it is asked for before the computation that can hide it has ended.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from meshrun import Experiment, RunFailed, cross_entropy, mesh
from meshrun.parallel import pipeline, reduced
from meshrun.parallel.meshed import Meshed
from meshrun.train.loop import Trainer
from tests.train.small import plainly
from tests.train.whole import Result, assert_same, by_one_process, program, trained

BACKWARD = "autograd::engine::evaluate_function: "


@dataclass(frozen=True)
class Span:
    name: str
    begin: float
    end: float


def steps_of(experiment: Experiment, layout: str) -> tuple[Trainer, Iterator[Any]]:
    """A training that has done two updates: in the first ones, ranks find out how they go on."""
    mesh.use(mesh.Meeting(layout=layout, device="cpu"))
    trainer = Trainer(experiment, mesh.start())
    steps = iter(trainer.steps())
    next(steps)
    next(steps)
    return trainer, steps


def traced(steps: Iterator[Any]) -> list[Span]:
    """What happened in the next update, in the order in which it began."""
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        next(steps)
    spans = [Span(each.name, each.time_range.start, each.time_range.end) for each in trace.events()]
    return sorted(spans, key=lambda each: each.begin)


def named(spans: list[Span], pattern: str) -> list[Span]:
    found = [each for each in spans if re.search(pattern, each.name)]
    assert found, f"nothing is called {pattern} in {sorted({each.name for each in spans})}"
    return found


@contextmanager
def told_of_buckets(size: int) -> Iterator[None]:
    """Small buckets, each of which can be seen in a trace."""
    begun, kept = reduced._begun, reduced.BUCKET

    def seen(*arguments: Any) -> dist.Work:
        with record_function("bucket"):
            return begun(*arguments)

    reduced._begun, reduced.BUCKET = seen, size
    yield
    reduced._begun, reduced.BUCKET = begun, kept


def wide() -> Experiment:
    """Layers of a mebibyte: more than one bucket of torch's."""
    inputs = torch.randn(8, 512, generator=torch.Generator().manual_seed(0))
    return Experiment(
        model=lambda: nn.Sequential(*(nn.Linear(512, 512) for _ in range(4))),
        train=TensorDataset(inputs, torch.arange(8)),
        loss=cross_entropy,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        batch=4,
        steps=4,
    )


@pytest.mark.ranks(2)
def test_dp_sends_gradients_of_the_last_layers_while_the_first_ones_are_computed():
    _, steps = steps_of(wide(), "dp=2")
    spans = traced(steps)
    last = named(spans, BACKWARD + "AddmmBackward0")[-1]
    assert named(spans, "c10d::allreduce_")[0].begin < last.begin


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param("dp=2,tp=2", marks=pytest.mark.ranks(4)),
        pytest.param("cp=2", marks=pytest.mark.ranks(2)),
    ],
)
def test_so_does_dp_beside_other_axes(layout: str):
    with told_of_buckets(2048):
        _, steps = steps_of(program("small_llama"), layout)
        spans = traced(steps)
    buckets = named(spans, "^bucket$")
    last = named(spans, BACKWARD + ".*Embedding.*Backward0")[-1]
    early = [each for each in buckets if each.begin < last.begin]
    assert len(early) > len(buckets) / 2, f"{len(early)} of {len(buckets)} before the last gradient"


@pytest.mark.ranks(2)
def test_fsdp_asks_for_the_next_unit_while_one_computes_and_sends_gradients_while_the_next_are_computed():
    _, steps = steps_of(program("small_llama"), "fsdp=2")
    spans = traced(steps)
    blocks = [rf"\(.*blocks\.{number}[,)]" for number in range(4)]
    for block, after in itertools.pairwise(blocks):
        asked = named(spans, "FSDP::all_gather " + after)[0]
        assert asked.begin < named(spans, "FSDP::post_forward " + block)[0].begin, f"{after} in the forward pass"
        sent = named(spans, "FSDP::post_backward_reduce " + after)[0]
        assert sent.begin < named(spans, "FSDP::post_backward_accumulate " + block)[0].begin, f"{after} backward"
    for block, before in zip(blocks[1:-1], blocks, strict=False):
        asked = named(spans, "FSDP::all_gather " + before)[-1]
        assert asked.begin < named(spans, "FSDP::post_backward_accumulate " + block)[0].begin, f"{before} backward"


class Told(list[Any]):
    """Tells of what is appended."""

    def __init__(self, told: Callable[[Any], None]) -> None:
        super().__init__()
        self.told = told

    def append(self, value: Any) -> None:
        self.told(value)


class Sending:
    """A message on its way, which tells that somebody waits for it."""

    def __init__(self, work: dist.Work, told: Callable[[], None]) -> None:
        self.work, self.told, self.is_completed = work, told, work.is_completed

    def wait(self) -> None:
        self.told()
        self.work.wait()


@pytest.mark.ranks(2)
def test_a_pipeline_waits_for_no_send_and_asks_for_messages_before_it_needs_them():
    trainer, steps = steps_of(program("small_llama"), "pp=2")
    assert isinstance(trainer.placed, Meshed)
    happened: list[tuple[str, Any]] = []
    isend, post, take = dist.isend, pipeline.Incoming._post, pipeline.Incoming.take

    def sent(*arguments: Any) -> Any:
        happened.append(("sent", None))
        return Sending(isend(*arguments), lambda: happened.append(("waits for a send", None)))

    def asked(incoming: pipeline.Incoming) -> None:
        happened.append(("asked", (incoming.kind, *incoming.coming[0])))
        post(incoming)

    def taken(incoming: pipeline.Incoming, stage: int, piece: int) -> tuple[Tensor, ...]:
        happened.append(("taken", (incoming.kind, stage, piece)))
        return take(incoming, stage, piece)

    dist.isend, pipeline.Incoming._post, pipeline.Incoming.take = sent, asked, taken
    trainer.placed.pipeline.events = Told(lambda event: happened.append(("computed", event.action)))
    next(steps)
    kinds = [kind for kind, _ in happened]
    last = max(place for place, kind in enumerate(kinds) if kind == "computed")
    assert kinds.count("sent") > 2 and kinds.count("taken") > 2
    assert "waits for a send" not in kinds[:last]
    ahead = []
    for place, (kind, message) in enumerate(happened):
        if kind == "taken":
            ahead.append("computed" in kinds[happened.index(("asked", message)) : place])
    # The first message is needed when there is nothing to compute before it.
    assert all(ahead[1:]), happened


@pytest.fixture
def wanted() -> Result:
    return by_one_process("small_llama")


@pytest.mark.parametrize("layout", ["dp=2,tp=2", "pp=2:interleaved,dp=2"])
@pytest.mark.ranks(4)
def test_sums_in_many_buckets_are_those_of_one_process(layout: str, wanted: Result):
    reduced.BUCKET = 2048
    mesh.use(mesh.Meeting(layout=layout, device="cpu"))
    assert_same(trained(program("small_llama")), wanted, tolerance=1e-6)


@pytest.mark.ranks(4)
def test_in_bf16_sums_of_masters_gradients_are_those_that_are_made_at_the_end():
    reduced.BUCKET = 2048
    mesh.use(mesh.Meeting(layout="dp=2,tp=2", device="cpu"))
    found = []
    for early in (True, False):
        trainer = Trainer(program("small_llama", 4, precision="bf16"), mesh.start())
        assert isinstance(trainer.placed, Meshed) and any(each.copy is not None for each in trainer.placed.shards)
        if not early:
            trainer.placed._sums = None
            trainer.placed.pipeline.settings.before_backward = lambda *_: None
        trainer.train()
        found.append((trainer.totals.losses, trainer.totals.grad_norms))
    assert found[0] == (pytest.approx(found[1][0], rel=1e-6), pytest.approx(found[1][1], rel=1e-6))


class Choosy(nn.Module):
    """Rows with a positive first number go through a layer of their own, the others do not; a layer is never used."""

    def __init__(self, twice: bool = False) -> None:
        super().__init__()
        self.first, self.some, self.never, self.last = (nn.Linear(4, 4) for _ in range(4))
        self.twice = twice

    def forward(self, rows: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(rows))
        positive = rows[:, 0] > 0
        if bool(positive.any()):
            hidden = torch.where(positive[:, None], self.some(hidden), hidden)
        if self.twice:
            # Recomputed in a backward pass of its own, which adds its part of the gradient first.
            hidden = checkpoint(self.last, hidden, use_reentrant=True)
        return self.last(hidden)


def choosy(steps: int, twice: bool = False) -> Experiment:
    """Every second row is positive, so that a replica with two rows sometimes has none."""
    inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    inputs[:, 0] = torch.tensor([1.0, -1.0]).repeat(4) * inputs[:, 0].abs()
    return Experiment(
        model=lambda: Choosy(twice),
        train=TensorDataset(inputs, torch.arange(8) % 4),
        loss=cross_entropy,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.3, momentum=0.9),
        batch=4,
        micro=1,
        steps=steps,
        clip=0.1,
        seed=2,
    )


@pytest.mark.parametrize("twice", [False, True], ids=["once", "twice"])
@pytest.mark.ranks(4)
def test_parameters_that_some_samples_do_not_need_or_that_get_gradients_in_parts_are_summed_too(twice: bool):
    reduced.BUCKET = 16
    mesh.use(mesh.Meeting(layout="dp=2,tp=2", device="cpu"))
    trainer = Trainer(choosy(8, twice), mesh.start())
    trainer.train()
    plain = plainly(choosy(8, twice))
    assert trainer.totals.losses == pytest.approx(plain.losses, rel=1e-6)
    assert trainer.totals.grad_norms == pytest.approx(plain.grad_norms, rel=1e-5)
    assert trainer.placed.habits()["again"] == (["last.bias", "last.weight"] if twice else [])
    grads = {each.name: each.parameter.grad for each in trainer.placed.shards}
    assert grads["never.weight"] is None


@pytest.mark.ranks(4)
def test_a_gradient_that_grows_after_it_was_sent_is_no_silent_mistake():
    reduced.BUCKET = 16
    trainer, steps = steps_of(choosy(4), "dp=2,tp=2")
    trainer.model.twice = True
    with pytest.raises(RunFailed, match=r"'last\..*' came in several parts in one backward pass"):
        next(steps)


def test_gradients_of_two_types_travel_in_buckets_of_their_own_and_large_ones_in_several(
    monkeypatch: pytest.MonkeyPatch,
):
    tensors = [torch.zeros(2), torch.zeros(2), torch.zeros(2, dtype=torch.bfloat16), torch.zeros(3), torch.zeros(3)]
    assert reduced._bucketed(tensors) == [[0, 1], [2], [3, 4]]
    monkeypatch.setattr(reduced, "BUCKET", 8)
    assert reduced._bucketed(tensors) == [[0], [1], [2], [3], [4]]

"""What is left to us of how a step is computed: what is compiled, and what is computed twice, by what memory allows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from meshrun import Experiment, mesh
from meshrun.errors import RunFailed
from meshrun.kernels import products
from meshrun.layout import parse
from meshrun.parallel import decide
from meshrun.parallel.build import build
from meshrun.parallel.choose import Choosing, fitting, ways
from meshrun.parallel.compiled import Choice, chosen, if_much
from meshrun.parallel.how import How
from meshrun.parallel.moment import Moment
from meshrun.parallel.placed import Piece, nobody
from meshrun.parallel.recompute import Measured, Recomputing, apply
from meshrun.train.losses import cross_entropy

GPU, CPU = torch.device("cuda"), torch.device("cpu")
MANY = {"parameters": 10**9, "steps": 600}


@pytest.mark.parametrize(
    "asked, layout, device, size, compiles, why",
    [
        (None, "dp=1", CPU, MANY, False, "the device is cpu"),
        (True, "dp=1", CPU, MANY, True, "asked for"),
        (False, "dp=1", GPU, MANY, False, "asked for"),
        (True, "pp=2:zb", GPU, MANY, False, "puts gradients of weights off"),
        (None, "cp=2", GPU, MANY, False, "compute attention together"),
    ],
)
def test_what_is_asked_for_is_compiled_where_it_can_be(asked, layout, device, size, compiles, why):
    found = chosen(asked, parse(layout), device, **size)
    assert (found.compile, why in found.why) == (compiles, True), found


@pytest.mark.parametrize(
    "parameters, steps, compiles",
    [(10**9, 600, True), (5_000_000, 100, True), (4_999_999, 600, False), (10**9, 99, False)],
)
def test_a_gpu_compiles_what_pays(monkeypatch: pytest.MonkeyPatch, parameters: int, steps: int, compiles: bool):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    assert chosen(None, parse("fsdp=2"), GPU, parameters, steps).compile is compiles


def test_without_triton_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert chosen(None, parse("dp=1"), GPU, 10**9, 600).why == "triton is not installed"


@pytest.mark.parametrize(
    "budget, level",
    [(100, "none"), (99, "every-4"), (80, "every-4"), (79, "every-2"), (60, "every-2"), (59, "full"), (0, "full")],
)
def test_no_more_is_computed_twice_than_has_to_be(budget: int, level: str):
    """Eight segments of ten each, and twenty for all else."""
    assert fitting(dict.fromkeys(range(8), 10), 20, budget) == level


class Played:
    """A device's memory, and a model on it, as a test plays them: segments of ten, and twenty for all else.

    With the first update an optimizer takes thirty for its state.
    """

    def __init__(self, room: int, segments: int = 8, buffers: bool = False) -> None:
        self.shards: list[Any] = []
        self.room, self.segments, self.held, self.most = room, segments, 0, 0
        self.steps: list[str] = []
        self.notes: list[str] = []
        self.chosen: dict[str, Any] = {}
        self.model = nn.Linear(1, 1)
        self.twice = Recomputing("auto")
        self.has_buffers = buffers
        self.records = False
        self.each = 10
        """What a segment keeps."""

    @property
    def keeps_more(self) -> bool:
        return self.each > 10

    def keep_more(self) -> None:
        self.each = 15

    def keep_less(self) -> None:
        self.each = 10

    def own_buffers(self) -> dict[str, Tensor]:
        return {"mean": torch.zeros(1)} if self.has_buffers else {}

    def allocated(self) -> int:
        return self.held

    def peak(self) -> int:
        return self.most

    def begin(self) -> None:
        self.most = self.held

    def budget(self) -> int:
        return self.room

    def let_go(self) -> None:
        assert self.model.weight.grad is None
        self.held = self.held_before

    def is_recording(self) -> bool:
        return self.records

    def step(self, step: int, *_: Any) -> str:
        self.held_before = self.held
        self.steps.append(self.twice.level)
        self.model.weight.grad = torch.ones(1, 1)
        self._take(20 + sum(self.each for each in range(self.segments) if not self.twice.covers(each)))
        for each in range(self.segments):
            if self.twice.measured is not None:
                self.twice.measured.forward(each)
                self.twice.measured.again(each, self.each)
        self.held = self.held_before + (30 if step == 0 else 0)
        return f"step {step}"

    def _take(self, size: int) -> None:
        self.held += size
        self.most = max(self.most, self.held)
        if self.held > self.room:
            raise torch.OutOfMemoryError(f"{self.held} of {self.room}")


def choosing(played: Played, size: int = 1, others: str = "none") -> Choosing:
    here: Any = SimpleNamespace(size=size, gathered=lambda level: [level, others])
    found = Choosing(played, played.twice, played, here, may_repeat=True)  # type: ignore[arg-type]
    played.steps.clear()
    return found


def run(step: Choosing, number: int) -> Any:
    return step(number, [], 1, cross_entropy, nobody)


@pytest.mark.parametrize("room, level", [(130, "none"), (129, "every-4"), (109, "every-2"), (89, "full")])
def test_the_second_step_computes_twice_what_the_first_one_has_shown_to_be_needed(room: int, level: str):
    played = Played(room)
    step = choosing(played)
    assert [run(step, number) for number in range(3)] == ["step 0", "step 1", "step 2"]
    assert played.steps == ["full", level, level] and played.chosen["recompute"] == level
    assert len(played.notes) == (level != "none")


@pytest.mark.parametrize(
    "room, levels, each",
    [
        (1000, ["full", "none", "none"], 15),
        (213, ["full", "none", "none"], 15),
        (212, ["full", "full", "none"], 10),
        (130, ["full", "full", "none"], 10),
        (129, ["full", "full", "every-4"], 10),
    ],
)
def test_code_that_keeps_less_is_compiled_before_anything_is_computed_twice(room: int, levels: list[str], each: int):
    """With all that is quicker kept a step takes 170, which is to be no more than four fifths of the room."""
    played = Played(room)
    played.twice.code.append(played)
    step = choosing(played)
    assert [run(step, number) for number in range(3)] == ["step 0", "step 1", "step 2"]
    assert (played.steps, played.each) == (levels, each)
    assert played.chosen == {"recompute": levels[-1], "ample": each == 15}
    assert len(played.notes) == (levels[-1] != "none")


@pytest.mark.parametrize("about", [{"size": 2}, {"buffers": True}])
def test_where_a_step_cannot_be_repeated_code_keeps_what_it_must(about: dict[str, Any]):
    """The first step has the least memory that a step can have, and one that has failed there could not go on."""
    played = Played(1000, buffers=about.get("buffers", False))
    played.twice.code.append(played)
    step = choosing(played, size=about.get("size", 1))
    run(step, 0), run(step, 1)
    assert played.steps == ["full", "none"] and played.each == 10 and "ample" not in played.chosen


def test_code_that_keeps_less_is_tried_first_where_a_step_does_not_fit():
    played = Played(213)
    played.twice.code.append(played)
    step = choosing(played)
    run(step, 0), run(step, 1)
    played.segments = 11  # 50 + 165 with what is quicker kept
    run(step, 2)
    assert played.steps == ["full", "none", "none", "none"] and played.each == 10
    assert played.chosen == {"recompute": "none", "ample": False}
    assert played.notes == ["gated activations are not kept from step 3 on, which did not fit into memory"]


def test_the_first_step_too_may_need_code_that_keeps_less():
    """It is seen anew what segments keep: what was begun and did not fit is not counted."""
    played = Played(29)
    played.twice.code.append(played)
    full = played.step

    def first(step: int, *about: Any) -> str:
        assert played.twice.measured is not None
        if played.each > 10:
            played.held_before, played.most = played.held, 29
            played.model.weight.grad = None
            played.twice.measured.forward(0)
            raise torch.OutOfMemoryError("one segment alone")
        return full(step, *about)

    played.step = first  # type: ignore[method-assign]
    step = choosing(played)
    run(step, 0)
    assert played.each == 10 and played.twice.measured is not None
    assert played.twice.measured.kept() == dict.fromkeys(range(8), 10) and step._least == 20


def test_ranks_take_the_highest_level_that_one_of_them_needs():
    played = Played(1000)
    step = choosing(played, size=2, others="every-2")
    run(step, 0), run(step, 1)
    assert played.steps == ["full", "every-2"]


def test_a_step_that_does_not_fit_is_computed_once_more_without_its_gradients():
    """Batches may differ: here segments become twice as many after the choice."""
    played = Played(130)
    step = choosing(played)
    run(step, 0), run(step, 1)
    played.segments = 16
    run(step, 2)
    assert played.steps == ["full", "none", "none", "every-4", "every-2", "full"][: len(played.steps)]
    assert played.chosen["recompute"] == "every-2"
    assert "from step 3 on, which did not fit into memory" in played.notes[-1]


@pytest.mark.parametrize("about", [{"size": 2}, {"buffers": True}])
def test_where_a_step_cannot_be_repeated_a_sentence_says_what_would_help(about: dict[str, Any]):
    """Other ranks wait in its collectives; running statistics have seen a part of it."""
    played = Played(130, buffers=about.get("buffers", False))
    step = choosing(played, size=about.get("size", 1))
    run(step, 0), run(step, 1)
    played.segments = 16
    with pytest.raises(RunFailed, match=r"a step needs more than .* GiB: use a smaller --micro, fsdp \(--layout\)"):
        run(step, 2)


def test_a_recording_that_does_not_fit_changes_nothing():
    played = Played(130)
    step = choosing(played)
    run(step, 0), run(step, 1)
    played.segments, played.records = 16, True
    with pytest.raises(torch.OutOfMemoryError):
        run(step, 2)
    assert played.twice.level == "none" and played.steps == ["full", "none", "none"]


def test_what_fits_at_no_level_is_refused_in_a_sentence():
    with pytest.raises(RunFailed, match=r"--states 8bit or --update-in-backward"):
        run(choosing(Played(19)), 0)


def test_what_a_segment_would_keep_is_seen_when_it_is_computed_again():
    """Two micro-batches wait at once, as in a pipeline."""
    held = [0]

    class Keeping(nn.Module):
        def __init__(self, size: int) -> None:
            super().__init__()
            self.layer, self.size = nn.Linear(3, 3), size

        def forward(self, x: Tensor) -> Tensor:
            held[0] += self.size
            return torch.tanh(self.layer(x)).cos()

    segments = [Keeping(7), Keeping(11), nn.Linear(3, 3)]
    twice = Recomputing("full", measured=Measured(lambda: held[0]))
    apply(list(enumerate(segments)), twice, Moment())
    model = nn.Sequential(*segments)
    totals = [model(torch.ones(2, 3)).sum() for _ in range(2)]
    for total in totals:
        total.backward()
    assert twice.measured is not None and twice.measured.kept() == {0: 14, 1: 22}


def test_many_small_steps_are_not_worth_half_a_minute_of_compiling():
    pays = Choice(True, "")
    assert not if_much(pays, 11_200_000, 12_200).compile, "a ResNet-18 that sees each of 244 pictures fifty times"
    assert if_much(pays, 25_600_000, 256 * 100) is pays and if_much(pays, 1_100_000_000, 16 * 100) is pays


@pytest.mark.parametrize(("ranks", "wanted", "told"), [(1, True, [True]), (2, True, [False]), (1, False, [])])
def test_kernels_are_timed_where_compiled_code_keeps_a_rank_busy_for_long(
    ranks: int, wanted: bool, told: list[bool], monkeypatch: pytest.MonkeyPatch
):
    found: list[bool] = []
    monkeypatch.setattr(products, "time_them", found.append)
    model = nn.Linear(1000, 1000)
    data = [(torch.zeros(1), torch.zeros(1))] * 128
    experiment = Experiment(lambda: model, data, cross_entropy, torch.optim.SGD, batch=128, steps=1_000_000)
    here = SimpleNamespace(layout=parse(f"dp={ranks}"), device=torch.device("cpu"), size=ranks)
    decide.ways(experiment, here, How(compile=wanted), model)
    assert found == told


@pytest.mark.parametrize(("ranks", "whole"), [(1, True), (2, False)])
def test_a_convolutional_network_is_compiled_at_once_where_no_gradients_have_to_travel(ranks: int, whole: bool):
    """What the user asks for is compiled, however little work it is."""
    model = nn.Conv2d(1, 1, 1)
    experiment = Experiment(lambda: model, [0], cross_entropy, torch.optim.SGD, batch=1, steps=1)
    here: Any = SimpleNamespace(layout=parse(f"dp={ranks}"), device=CPU, size=ranks)
    found = decide.ways(experiment, here, How(compile=True), model)
    assert (found.compile.compile, found.whole) == (True, whole)
    assert not decide.ways(experiment, here, How(compile=False), model).whole


def test_running_statistics_do_not_count_twice_what_is_computed_twice():
    torch.manual_seed(0)
    made = [nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh()) for _ in range(2)]
    made[1].load_state_dict(made[0].state_dict())
    twice = Recomputing("full")
    apply([(0, made[1])], twice, Moment())
    x = torch.randn(6, 3)
    for model in made:
        model(x).square().sum().backward()
    for name, buffer in made[0].named_buffers():
        assert torch.equal(buffer, made[1].get_buffer(name)), name
    assert torch.equal(made[0][0].weight.grad, made[1][0].weight.grad)


def test_on_a_cpu_nothing_is_computed_twice_and_nothing_is_around_it():
    found = ways(Choice(False, ""), "auto", CPU, nn.Conv2d(1, 1, 1))
    assert (found.twice, found.by_segment, found.channels_last) == (None, False, False)


def test_on_a_gpu_the_first_step_computes_all_twice_unless_the_model_is_one_piece():
    found = ways(Choice(True, ""), "auto", GPU, nn.Conv2d(1, 1, 1))
    assert found.twice is not None and found.auto and found.channels_last
    assert found.without_segments().twice is None
    asked = ways(Choice(False, ""), "full", GPU, nn.Linear(1, 1))
    assert asked.without_segments() == asked and not asked.channels_last


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(torch.sin(self.layer(x)))


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rise, self.fall = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.rise(x).split(WIDTH, -1)
        return x + self.fall(torch.tanh(gate) * up)


WIDTH, ROWS = 4096, 1 << 14


def chosen_on_a_gpu(block: type[nn.Module], how: How, granted: float | None) -> dict[str, Any]:
    """What is chosen for eight blocks and 16,384 rows, of which a tensor is 256 MiB, in so many bytes of memory."""
    device = torch.device("cuda", 0)
    mesh.use(mesh.Meeting(device="cuda"))
    experiment = Experiment(
        model=lambda: nn.Sequential(*(block() for _ in range(8)), nn.Linear(WIDTH, 3)),
        train=TensorDataset(torch.randn(8, WIDTH), torch.zeros(8, dtype=torch.long)),
        loss=cross_entropy,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
        batch=8,
        steps=1,
    )
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.empty_cache()
    try:
        placed = build(experiment, mesh.start(), how)
        inputs, targets = torch.randn(ROWS, WIDTH, device=device), torch.zeros(ROWS, dtype=torch.long, device=device)
        piece = Piece(inputs, targets, list(range(ROWS)), ROWS)
        for number in range(4):
            if granted is not None:
                torch.cuda.set_per_process_memory_fraction(granted / total, device)
            placed.step(number, [piece], ROWS, cross_entropy, nobody)
            for each in placed.model.parameters():
                each.grad = None
        return placed.chosen
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
        mesh.finish()
        mesh.use(mesh.Meeting())


@pytest.mark.gpu
@pytest.mark.parametrize("granted, levels", [(None, {"none"}), (8e9, {"every-4", "every-2", "full"})])
def test_memory_decides_how_much_is_computed_twice_on_a_gpu(granted: float | None, levels: set[str]):
    """Blocks that keep 4 GiB or more beside 4.5 that a step needs in any case."""
    assert chosen_on_a_gpu(Wide, How(recompute="auto"), granted)["recompute"] in levels


@pytest.mark.gpu
@pytest.mark.parametrize("granted, ample", [(None, True), (15e9, False)])
def test_memory_decides_whether_gated_activations_are_kept_on_a_gpu(granted: float | None, ample: bool):
    """A block keeps its inputs, what it makes of them, which is twice as large, and where memory is ample one more."""
    found = chosen_on_a_gpu(Gated, How(recompute="auto", compile=True), granted)
    assert found["ample"] is ample

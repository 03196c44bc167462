"""Compiled segments: like blocks share a graph, nothing is compiled twice, and what is computed stays the same."""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.utils import counters
from torch._functorch._aot_autograd.autograd_cache import check_cacheable
from torch.nn.attention import SDPBackend, sdpa_kernel

from meshrun import Here, mesh
from meshrun.parallel import choose, compiled, functional, inductor
from meshrun.parallel.choose import Ways
from meshrun.parallel.how import How
from meshrun.parallel.recompute import Recomputing
from meshrun.train.loop import Trainer
from tests.ranks import run_on_ranks
from tests.train.small import small
from tests.train.whole import Result, assert_same, by_one_process, program, trained

STEPS = 2


def before_ranks() -> None:
    """Whatever the backend, torch.compile imports this one, which takes each rank longer than all else."""
    importlib.import_module("torch._inductor.compile_fx")


@pytest.fixture(autouse=True)
def traced_in_one_piece(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A break is an error; graphs are those of any compiler, but on a CPU no code is made of them."""
    torch._dynamo.reset()
    counters.clear()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, fullgraph=True))
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setattr(inductor, "backend", lookup_backend("aot_eager"))
    yield
    torch._dynamo.reset()


def trace_in_one_piece() -> None:
    """The same in a rank, which ends with its test."""
    torch.compile = functools.partial(torch.compile, fullgraph=True)  # type: ignore[assignment]
    inductor.backend = lookup_backend("aot_eager")


@pytest.fixture
def wanted() -> Result:
    return by_one_process("small_llama", STEPS)


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("level", ["none", "full"])
def test_like_blocks_share_a_graph_whose_dropout_is_that_of_each(wanted: Result, level: str):
    """Of a graph that saw dropout's counter change, the backward pass would drop other elements than the forward."""
    assert_same(trained(program("small_llama", STEPS), How(compile=True, recompute=level)), wanted)
    assert graphs() == 2, "one for training and one for evaluation, of all blocks"


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param("fsdp=2", marks=pytest.mark.ranks(2, timeout=180)),
        pytest.param("tp=2", marks=[pytest.mark.ranks(2, timeout=180), pytest.mark.every]),
    ],
)
def test_compiled_segments_go_with_other_axes(layout: str, wanted: Result):
    """What is on its way when it enters a compiled block would give a wrong gradient of the embedding."""
    trace_in_one_piece()
    mesh.use(mesh.Meeting(layout=layout, device="cpu"))
    trainer = Trainer(program("small_llama", STEPS), mesh.start(), how=How(compile=True, recompute="every-2"))
    list(trainer.steps())
    assert trainer.totals.losses == pytest.approx(wanted.losses, rel=1e-5)
    assert trainer.totals.grad_norms == pytest.approx(wanted.grad_norms, rel=1e-5)
    assert graphs() == 1, "of all blocks"


def test_a_batch_of_another_size_is_compiled_once_more_and_then_never_again(alone: Here):
    experiment = small(30, 8, steps=8, model=blocks)
    plain = Trainer(experiment, alone)
    list(plain.steps())
    trainer = Trainer(experiment, alone, how=How(compile=True))
    made = [graphs() for _ in trainer.steps()]
    assert trainer.totals.losses == pytest.approx(plain.totals.losses, rel=1e-6)
    # The first block's inputs have no gradient, those of the others have.
    assert made == [2, 2, 2, 4, 4, 4, 4, 4], "batches of eight, eight, eight, six, and the same again"


@pytest.mark.gpu
@pytest.mark.parametrize("precision, tolerance", [("fp32", 1e-4), ("bf16", 3e-2)])
def test_on_a_gpu_compiled_segments_train_as_plain_ones(precision: str, tolerance: float):
    """With dropout, and with activations that the first step computes twice to see what they take."""
    mesh.use(mesh.Meeting(device="cuda"))
    try:
        found = []
        for how in (How(), How(compile=True, recompute="auto")):
            trainer = Trainer(program("small_llama", STEPS + 1, precision=precision), mesh.start(), how=how)
            list(trainer.steps())
            trainer.evaluate()
            found.append(trainer)
    finally:
        mesh.finish()
        mesh.use(mesh.Meeting())
    plain, fast = found
    assert fast.totals.losses == pytest.approx(plain.totals.losses, rel=tolerance)
    assert fast.totals.grad_norms == pytest.approx(plain.totals.grad_norms, rel=tolerance)
    assert fast.placed.chosen["recompute"] == "none" and graphs() == 2


def test_what_was_chosen_is_known(alone: Here):
    trainer = Trainer(small(20, 6, model=blocks), alone, how=How(compile=None, recompute="auto"))
    assert trainer.placed.chosen == {
        "compile": False,
        "compile_why": "the device is cpu",
        "recompute": "none",
        "channels_last": False,
        "attention": "torch",
        "update": "fused",
        "states": "fp32",
        "update_in_backward": False,
        "graphs": False,
        "graphs_why": "nobody wants it",
    }
    assert trainer.placed.notes == []


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x))


def blocks() -> nn.Module:
    return nn.Sequential(Block(), Block(), Block(), nn.Linear(5, 3))


def test_norms_and_attention_in_bf16_are_kept_for_the_next_start():
    """What switches something around its arithmetic is nothing that torch would not keep."""
    graphs: list[torch.fx.GraphModule] = []

    def forward(x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False), sdpa_kernel([SDPBackend.MATH]):
            return nn.functional.scaled_dot_product_attention(x, x, x)

    compiled._prepare(asked=True)
    torch.compile(forward, backend=lambda graph, _: graphs.append(graph) or graph)(torch.ones(1, 1, 4, 4))
    check_cacheable(graphs[0])


class Wide(nn.Module):
    """Code that segments of any width share."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x))


def test_segments_are_compiled_for_their_shapes_until_these_are_many(monkeypatch: pytest.MonkeyPatch):
    shapes: list[bool] = []

    def noted(graph: torch.fx.GraphModule, inputs: list[object]) -> object:
        shapes.append(any(isinstance(each, torch.SymInt) for each in inputs))
        return lookup_backend("eager")(graph, inputs)

    monkeypatch.setattr(inductor, "backend", noted)
    segments = [Wide(3), Wide(4), Wide(5)]
    compiled.apply(segments, asked=True)
    for segment in segments:
        for rows in (2, 6, 2):
            width = segment.inner.in_features
            assert segment(torch.ones(rows, width)).shape == (rows, width)
    assert shapes == [False] * 6, "each width and each number of rows has code of its own"
    for rows in range(2, 20):
        segments[0](torch.ones(rows, 3))
    assert shapes[6:] == [True], "further ones share theirs"
    with torch.no_grad():
        for rows in (2, 3, 4, 5):
            segments[1](torch.ones(rows, 4))
    assert shapes[7:] == [False, True], "so do those of evaluation, but for the first"


class Convolved(nn.Module):
    """Blocks of different widths, on pictures of one line."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Narrow(1, 2), Narrow(2, 3)])
        self.head = nn.Linear(15, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, None, None]
        for block in self.blocks:
            x = block(x)
        return self.head(x.flatten(1))


class Narrow(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.inner = nn.Conv2d(inputs, outputs, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x))


@pytest.mark.parametrize(
    ("room", "level", "count"), [(None, "none", 1), (1 << 40, "none", 1), (0, "full", 2)], ids=["asked", "room", "none"]
)
def test_a_convolutional_network_is_compiled_at_once_unless_parts_are_computed_twice(
    room: int | None, level: str, count: int, alone: Here, monkeypatch: pytest.MonkeyPatch
):
    segments = {"segments": lambda model: [*model.blocks, model.head]}
    experiment = small(24, 6, model=Convolved, **segments)
    plain = Trainer(experiment, alone)
    if room is not None:  # as with `--recompute auto` on a GPU
        twice = Recomputing("full")
        monkeypatch.setattr(choose, "ways", lambda choice, *_: Ways(choice, twice, auto=True, channels_last=False))
        monkeypatch.setattr(choose, "OnDevice", lambda _: Roomy(room))
    trainer = Trainer(experiment, alone, how=How(compile=True, recompute="none"))
    list(plain.steps()), list(trainer.steps())
    assert trainer.totals.losses == pytest.approx(plain.totals.losses, rel=1e-6)
    assert (trainer.placed.chosen["recompute"], graphs()) == (level, count)


class Roomy:
    """Memory in which a step of a byte takes place, or not."""

    def __init__(self, room: int) -> None:
        self.begin = self.let_go = lambda: None
        self.allocated, self.peak = (lambda: 0), (lambda: 1)
        self.budget = lambda: room
        self.is_recording = lambda: False


class Compiling(nn.Module):
    """A model that asks torch by itself to compile what it does."""

    def __init__(self, compiles: bool) -> None:
        super().__init__()
        self.linear, self.compute = nn.Linear(5, 3), self.dropped
        if compiles:
            self.compute = torch.compile.func(self.dropped, backend=without_words)  # type: ignore[attr-defined]

    def dropped(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(self.linear(x).relu(), 0.5, self.training) + 1

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(x)


def without_words(graph: torch.fx.GraphModule, _: object) -> object:
    """A compiler that cannot make the words of 64 bits by which samples draw, as Inductor cannot on a CPU."""
    assert not any(node.target is torch.full for node in graph.graph.nodes)
    return graph.forward


def test_draws_in_what_a_model_compiles_by_itself_are_left_to_samples(alone: Here, monkeypatch: pytest.MonkeyPatch):
    for name in ("drop", "drop_weights"):
        monkeypatch.setattr(functional.Site, name, inspect.unwrap(getattr(functional.Site, name)))
    plain, found = (Trainer(small(20, 6, model=functools.partial(Compiling, each)), alone) for each in (False, True))
    list(plain.steps()), list(found.steps())
    assert found.totals.losses == plain.totals.losses


def no_compiler(*_: object) -> None:
    raise RuntimeError("there is no compiler here")


def test_what_cannot_be_compiled_ends_a_training_only_where_it_was_asked_for(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch, "compile", torch.compile.func)
    monkeypatch.setattr(inductor, "backend", no_compiler)
    block, x = Block(), torch.ones(2, 5)
    wanted = block(x)
    compiled.apply([block], asked=False)
    assert torch.equal(block(x), wanted)
    torch._dynamo.reset()
    compiled.apply([block], asked=True)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed):
        block(x)


def test_what_could_not_be_compiled_is_told_once(alone: Here, monkeypatch: pytest.MonkeyPatch):
    """As on a GPU, where nobody has asked for it."""
    plain = Trainer(experiment := small(20, 6, model=blocks), alone)
    monkeypatch.setattr(torch, "compile", torch.compile.func)
    monkeypatch.setattr(inductor, "backend", no_compiler)
    monkeypatch.setattr(compiled, "chosen", lambda *_: compiled.Choice(True, "it pays", asked=False))
    trainer = Trainer(experiment, alone)
    assert trainer.placed.chosen["compile"] is True
    list(plain.steps()), list(trainer.steps())
    assert trainer.totals.losses == plain.totals.losses
    why = "could not be compiled: RuntimeError: there is no compiler here"
    assert (trainer.placed.chosen["compile"], trainer.placed.chosen["compile_why"]) == ("tried", why)
    assert [each for each in trainer.placed.notes if why in each] == trainer.placed.notes[-1:]


def start(folder: Path, number: int) -> None:
    """A process that compiles a block; what it did of that, and its losses, are written down."""
    # Headers that are compiled beforehand pay off with more kernels than the two of a block.
    torch._inductor.config.cpp_cache_precompile_headers = False
    torch._inductor.config.cpp.vec_isa_ok = True  # else that is found out by compiling too
    torch._inductor.config.compile_threads = 1
    mesh.use(mesh.Meeting(device="cpu"))
    experiment = small(16, 8, steps=2, model=lambda: nn.Sequential(Block(), nn.Linear(5, 3)))
    trainer = Trainer(experiment, how=How(compile=True))
    list(trainer.steps())
    found = {**counters["inductor"], **counters["aot_autograd"], "losses": trainer.totals.losses}
    (folder / f"{number}.json").write_text(json.dumps(found))


def test_a_second_start_compiles_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in os.environ:
        if name.startswith(("TORCHINDUCTOR", "TRITON")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for number in (1, 2):
        run_on_ranks(__file__, "start", 1, {"folder": tmp_path, "number": number}, 110)
    first, second = (json.loads((tmp_path / f"{number}.json").read_text()) for number in (1, 2))
    assert first["autograd_cache_miss"] > 0 and "autograd_cache_hit" not in first
    assert second["autograd_cache_hit"] == first["autograd_cache_miss"] and "autograd_cache_miss" not in second
    assert second["fxgraph_cache_hit"] > 0 and "fxgraph_cache_miss" not in second
    assert second["losses"] == first["losses"]
    assert any((tmp_path / "meshrun" / "compile").iterdir())

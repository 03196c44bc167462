"""Compiled segments: like blocks share a graph, nothing is compiled twice, and what is computed stays the same."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch._dynamo.utils import counters

from meshrun import Here, mesh
from meshrun.parallel import compiled
from meshrun.parallel.how import How
from meshrun.train.loop import Trainer
from tests.train.small import small
from tests.train.whole import Result, assert_same, by_one_process, program, trained

STEPS = 2


@pytest.fixture(autouse=True)
def traced_in_one_piece(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A break is an error; graphs are those of any compiler, but on a CPU no code is made of them."""
    torch._dynamo.reset()
    counters.clear()
    backend = "aot_eager" if request.node.get_closest_marker("gpu") is None else "inductor"
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend, fullgraph=True))
    yield
    torch._dynamo.reset()


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
    "layout", [pytest.param(each, marks=pytest.mark.ranks(2, timeout=180), id=each) for each in ("fsdp=2", "tp=2")]
)
def test_compiled_segments_go_with_other_axes(layout: str, wanted: Result):
    """What is on its way when it enters a compiled block would give a wrong gradient of the embedding."""
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


def no_compiler(*_: object) -> None:
    raise RuntimeError("there is no compiler here")


def test_what_cannot_be_compiled_ends_a_training_only_where_it_was_asked_for(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile.func, backend=no_compiler))
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
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile.func, backend=no_compiler))
    monkeypatch.setattr(compiled, "chosen", lambda *_: compiled.Choice(True, "it pays", asked=False))
    trainer = Trainer(experiment, alone)
    assert trainer.placed.chosen["compile"] is True
    list(plain.steps()), list(trainer.steps())
    assert trainer.totals.losses == plain.totals.losses
    why = "could not be compiled: RuntimeError: there is no compiler here"
    assert (trainer.placed.chosen["compile"], trainer.placed.chosen["compile_why"]) == ("tried", why)
    assert [each for each in trainer.placed.notes if why in each] == trainer.placed.notes[-1:]


STARTED = """
import json
from torch._dynamo.utils import counters
from meshrun import mesh
from meshrun.parallel.how import How
from meshrun.train.loop import Trainer
from tests.train.small import small
from tests.train.test_compiled import blocks
mesh.use(mesh.Meeting(device="cpu"))
trainer = Trainer(small(16, 8, steps=2, model=blocks), how=How(compile=True))
list(trainer.steps())
print(json.dumps({**counters["inductor"], **counters["aot_autograd"], "losses": trainer.totals.losses}))
"""


def test_a_second_start_compiles_nothing(tmp_path: Path):
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TORCHINDUCTOR", "TRITON"))}
    env = {**kept, "XDG_CACHE_HOME": str(tmp_path), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    found = [
        json.loads(subprocess.run([sys.executable, "-c", STARTED], env=env, check=True, stdout=subprocess.PIPE).stdout)
        for _ in range(2)
    ]
    first, second = found
    assert first["autograd_cache_miss"] > 0 and "autograd_cache_hit" not in first
    assert second["autograd_cache_hit"] == first["autograd_cache_miss"] and "autograd_cache_miss" not in second
    assert second["fxgraph_cache_hit"] > 0 and "fxgraph_cache_miss" not in second
    assert second["losses"] == first["losses"]
    assert any((tmp_path / "meshrun" / "compile").iterdir())

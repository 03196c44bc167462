"""Where a model is cut, and its stages: one after the other they compute what the whole model does, each with its part.

The stages run here in one process, without messages; `tests/train/test_axes.py` runs them on ranks.
"""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from meshrun import Experiment, Loss, UserError
from meshrun.layout import parse
from meshrun.parallel import pp
from meshrun.parallel.demands import Demands, demands_of
from meshrun.parallel.placed import call
from tests.programs import bert, encoder, gpt2, hf_llama, small_llama, t5

CPU = torch.device("cpu")


class Block(nn.Module):
    """A feed-forward network that is added to what comes in."""

    def __init__(self, width: int = 4, hidden: int = 8) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).tanh())


def of(model: Callable[[], nn.Module], inputs: Any = None, **changes: Any) -> Experiment:
    """An experiment that is never run."""
    sample = (torch.randn(4, generator=torch.Generator().manual_seed(1)) if inputs is None else inputs, torch.ones(1))
    fields = {"loss": total, "optimizer": torch.optim.SGD, "batch": 1, "steps": 1, **changes}
    return Experiment(model=model, train=[sample], **fields)


def total(outputs: Any, _: Any) -> Loss:
    values = outputs.logits if hasattr(outputs, "logits") else outputs
    return Loss((values * torch.linspace(-1, 1, values.numel()).reshape(values.shape)).sum(), 1)


@given(costs=st.lists(st.integers(1, 50), min_size=1, max_size=8), stages=st.integers(1, 5))
@settings(max_examples=150)
def test_no_other_cut_has_a_cheaper_dearest_stage(costs: list[int], stages: int):
    def dearest(cuts: tuple[int, ...]) -> float:
        return max(sum(costs[a:b]) for a, b in itertools.pairwise([*cuts, len(costs)]))

    if stages > len(costs):
        return
    found = tuple(pp.Trace([], [float(each) for each in costs], [], {}).cuts(stages))
    others = [(0, *each) for each in itertools.combinations(range(1, len(costs)), stages - 1)]
    assert found in others
    assert dearest(found) == min(map(dearest, others))


def test_a_heavy_block_gets_a_stage_for_itself():
    def uneven() -> nn.Module:
        return nn.Sequential(Block(), Block(hidden=400), Block(), Block(), Block())

    assert demands_of(of(uneven)).trace().cuts(2) == [0, 2], "two blocks against three"
    assert demands_of(of(uneven)).trace().cuts(3) == [0, 1, 2], "by number it would be [0, 2, 4]"
    assert demands_of(of(lambda: nn.Sequential(*(Block() for _ in range(6))))).trace().cuts(3) == [0, 2, 4]


def test_what_is_around_segments_costs_too():
    """The head, or the entry, of a small model with many words is dearer than all of its blocks."""

    class Wordy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(4))
            self.head = nn.Linear(4, 1000)

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    class Entered(Wordy):
        def __init__(self) -> None:
            super().__init__()
            self.entry = nn.Linear(4, 1000)

        def forward(self, x: Tensor) -> Tensor:
            x = self.entry(x)[..., :4]
            for block in self.blocks:
                x = block(x)
            return x

    assert demands_of(of(Wordy)).trace().cuts(2) == [0, 3]
    assert demands_of(of(Entered)).trace().cuts(2) == [0, 1]


class Masked(nn.Module):
    """Blocks that get a mask and a scale by name, computed between segments from inputs, a buffer and a parameter."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()

        def forward(self, x: Tensor, *, mask: Tensor, scale: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
            return self.block(x) * mask + scale["by"], x.mean(-1, keepdim=True)

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(4.0), persistent=False)
        self.shift = nn.Parameter(torch.full((4,), 0.5))
        self.blocks = nn.ModuleList(Masked.Layer() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        mask = (x > 0).float() + self.table
        x = x + self.shift
        for block in self.blocks:
            x, mean = block(x, mask=mask, scale={"by": self.table * 0.1})
            x = x - 0.1 * mean
        return x


class Remembering(nn.Module):
    """Like a decoder: all later blocks also get what the first ones made."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.look = Block(), nn.Linear(4, 4)

        def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
            return self.block(x) + (self.look(memory) if memory is not None else 0)

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ModuleList(Remembering.Layer() for _ in range(2))
        self.second = nn.ModuleList(Remembering.Layer() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        memory = x
        for block in self.first:
            memory = block(memory)
        for block in self.second:
            x = block(x, memory=memory)
        return x


class Tied(nn.Module):
    """The embedding is the head too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(4, 9, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class TiedByFunction(nn.Module):
    """The model's own code computes with the embedding's weights, and with those of a norm that it never calls."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(9, 4), nn.LayerNorm(4)
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return nn.functional.linear(x * self.norm.weight, self.embed.weight)


class InPlace(nn.Module):
    """As torchvision's ResNets: in-place ReLU and BatchNorm around segments, and in-place ReLU first in a segment."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.relu, self.norm = nn.ReLU(inplace=True), nn.BatchNorm1d(4)
            self.block = Block()

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.block(self.relu(x)))

    def __init__(self) -> None:
        super().__init__()
        self.into, self.norm, self.relu = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(inplace=True)
        self.register_buffer("table", torch.arange(4.0))
        self.blocks = nn.ModuleList(InPlace.Layer() for _ in range(4))
        self.last = nn.BatchNorm1d(4, affine=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.norm(self.into(x))) + self.table
        for block in self.blocks:
            x = block(x).mul_(0.5)
        return self.last(x).add_(self.table)


MODELS: dict[str, Callable[[], Experiment]] = {
    "in-place ReLU and BatchNorm": lambda: of(InPlace),
    "Sequential": lambda: of(lambda: nn.Sequential(*(Block() for _ in range(5)))),
    "masks by name, a buffer, a parameter of the model's own": lambda: of(Masked),
    "what the first blocks made for all later ones": lambda: of(Remembering),
    "tied": lambda: of(Tied, torch.arange(3)),
    "tied by function": lambda: of(TiedByFunction, torch.arange(3)),
    **{
        each.__name__.rpartition(".")[2]: lambda each=each: replace(each.experiment(), loss=total)
        for each in (small_llama, encoder, gpt2, hf_llama, t5, bert)
    },
}


def staged(demands: Demands, whole: nn.Module, stages: int) -> list[pp.Part]:
    """The stages with the values that the whole model has, as they would be on as many ranks."""
    trace = demands.trace()
    parts = []
    tensors = dict((*whole.named_parameters(remove_duplicate=False), *whole.named_buffers(remove_duplicate=False)))
    for stage in range(stages):
        part = pp.Part(demands.model, trace, trace.cuts(stages), stage, CPU)
        part.to_empty(device="cpu")
        with torch.no_grad():
            for name, tensor in (*part.model.named_parameters(), *part.model.named_buffers()):
                tensor.copy_(tensors[name])
        parts.append(part.eval())
    return parts


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_stages_one_after_the_other_compute_what_the_model_does(name: str, stages: int):
    """Outputs, and gradients: those of what several stages hold are to be added."""
    experiment = MODELS[name]()
    torch.manual_seed(5)
    whole = experiment.model().eval()
    demands = demands_of(experiment)
    demands.refuse(parse(f"pp={stages}"))
    inputs, targets = demands.sample()
    wanted = total(call(whole, inputs), targets).total
    wanted.backward()

    parts = staged(demands, whole, stages)
    received: tuple[Tensor, ...] = ()
    passed: list[tuple[tuple[Tensor, ...], tuple[Tensor, ...]]] = []
    for part in parts[:-1]:
        sent = part(received, inputs)
        passed.append((received, sent))
        received = tuple(each.detach().requires_grad_(each.is_floating_point()) for each in sent)
    found = total(parts[-1](received, inputs), targets).total
    torch.testing.assert_close(found, wanted)
    found.backward()
    for arrived, sent in reversed(passed):
        pairs = [(a, b.grad) for a, b in zip(sent, received, strict=True) if b.grad is not None and a.requires_grad]
        torch.autograd.backward([a for a, _ in pairs], [b for _, b in pairs])
        received = arrived

    first = {id(each): name for name, each in reversed(list(whole.named_parameters(remove_duplicate=False)))}
    own = {name: first[id(each)] for name, each in whole.named_parameters(remove_duplicate=False)}
    gradients: dict[str, Tensor] = {}
    for part in parts:
        for each, parameter in part.model.named_parameters():
            if parameter.grad is not None:
                gradients[own[each]] = gradients.get(own[each], 0) + parameter.grad
    for each, parameter in whole.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(gradients[each], parameter.grad, rtol=1e-4, atol=1e-5, msg=each)
        else:
            assert each not in gradients


def test_a_stage_does_not_hold_on_to_what_it_has_received():
    experiment = MODELS[next(iter(MODELS))]()
    whole = experiment.model().eval()
    demands = demands_of(experiment)
    first, second = staged(demands, whole, 2)
    with torch.no_grad():
        received = first((), inputs := demands.sample()[0])
        there = [weakref.ref(each) for each in received]
        second(received, inputs)
    del received
    gc.collect()
    assert [each() for each in there] == [None] * len(there)


@pytest.mark.parametrize("stages", [2, 4])
def test_a_stage_holds_its_own_parameters_and_no_others(stages: int):
    experiment = small_llama.experiment()
    whole = experiment.model()
    held = [
        {name for name, _ in part.model.named_parameters()} for part in staged(demands_of(experiment), whole, stages)
    ]
    assert sorted(name for names in held for name in names) == sorted(name for name, _ in whole.named_parameters())
    assert "embed.weight" in held[0] and "head.weight" in held[-1]


def test_tied_weights_are_on_the_stages_that_use_them():
    experiment = of(Tied, torch.arange(3))
    parts = staged(demands_of(experiment), Tied(), 4)
    held = [{name for name, _ in part.model.named_parameters()} for part in parts]
    assert "embed.weight" in held[0] and "head.weight" in held[3]
    for names in held[1:3]:
        assert not {"embed.weight", "head.weight"} & names


class Skips(nn.Module):
    """Adds what came in before the cut to what goes out after it, past all segments."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        early = x = self.into(x)
        for block in self.blocks:
            x = block(x)
        return x + early


class Plain(nn.Module):
    """Blocks in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Twice(Plain):
    def forward(self, x: Tensor) -> Tensor:
        for block in (*self.blocks, self.blocks[0]):
            x = block(x)
        return x


class Forgets(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[0](self.blocks[1](x))


class Shifting(Plain):
    """Changes a buffer of its own by what a segment has computed."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        with torch.no_grad():
            self.mean.lerp_(x.mean(0), 0.1)
        for block in self.blocks[1:]:
            x = block(x - self.mean)
        return x


class OneNorm(Plain):
    """Calls one batch norm after every block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4, affine=False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.norm(block(x))
        return x


class Lends(Plain):
    """Computes with the weights of its first segment after the last one."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(super().forward(x), self.blocks[0].up.weight)


class ByValue(Plain):
    """Looks at the values of activations between segments."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            assert x.std() > 0
        return x


REFUSED = {
    "a buffer that a stage would change alone": (
        Shifting,
        "the model changes its buffer 'mean' outside of segments by values that only one stage of the pipeline has; "
        "change it in a module of its own, or inside a segment",
    ),
    "running statistics of several stages": (
        OneNorm,
        r"module 'norm' changes its buffer 'norm.\w+' in the forward pass, and several stages of the pipeline call it",
    ),
    "values of activations": (
        ByValue,
        r"pp cannot follow the model's forward pass without its weights \(.*test_pp.py:\d+: AssertionError",
    ),
    "weights of a segment on another stage": (
        Lends,
        r"its code uses weights of segment 'blocks.0' outside of it, on another stage of the pipeline; leave "
        r"'blocks.0' out of Experiment\(segments=…\)",
    ),
    "a path past the segments": (Skips, r"cannot be cut before segment 'blocks.\d': .*pass them through the segments"),
    "a segment that is called twice": (Twice, "segment 'blocks.0' is called twice in one forward pass"),
    "a segment that is not called": (Forgets, "segment 'blocks.2' was not called in the model's forward pass"),
    "no segments": (lambda: nn.Linear(4, 4), r"the model has no segments: .*segments=lambda model"),
    "fewer segments than stages": (lambda: nn.Sequential(Block()), "needs 2 stages, but the model has only 1 segments"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_model_that_cannot_be_cut_is_refused_in_a_sentence_with_layouts_that_work(case: str):
    model, sentence = REFUSED[case]
    with pytest.raises(UserError, match=rf"(?s){sentence}.*layouts of 2 ranks that work: dp=2; fsdp=2 \(--layout\)$"):
        demands_of(of(model)).refuse(parse("pp=2"))


def test_a_model_with_a_tensor_plan_that_cannot_be_cut_may_have_tp():
    perceptron = of(lambda: nn.Sequential(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))))
    with pytest.raises(UserError, match=r"layouts of 2 ranks that work: dp=2; fsdp=2; tp=2 \(--layout\)$"):
        demands_of(perceptron).refuse(parse("pp=2"))


def test_a_stage_owns_the_running_statistics_around_segments_that_it_computes():
    parts = staged(demands_of(of(InPlace)), InPlace(), 2)
    held = [{name for name, _ in part.model.named_buffers() if "blocks" not in name} for part in parts]
    statistics = ("running_mean", "running_var", "num_batches_tracked")
    assert held[0] == {"table", *(f"norm.{each}" for each in statistics)}
    assert held[1] == {"table", *(f"last.{each}" for each in statistics)}


def test_more_chunks_than_segments_are_refused_for_interleaving_only():
    demands = demands_of(of(lambda: nn.Sequential(Block(), Block(), Block())))
    demands.refuse(parse("pp=2"))
    with pytest.raises(UserError, match="'pp=2:interleaved' needs 4 stages, but the model has only 3 segments"):
        demands.refuse(parse("pp=2:interleaved"))


def test_a_segment_that_only_moves_numbers_has_its_cost():
    _, moved = pp._shaped(lambda x: x.clone(), (torch.zeros(4, 5),), {})
    _, multiplied = pp._shaped(nn.Linear(5, 5, device="meta"), (torch.zeros(4, 5),), {})
    assert 0 < moved < multiplied


class Auxiliary(nn.Module):
    """Has one more channel in training, and normalises over samples, which training refuses for one sample."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.into(x))
        return torch.cat([x, x], 1) if self.training else x


def test_what_other_stages_would_give_is_as_in_training_or_as_in_evaluation():
    experiment = of(lambda: nn.Sequential(Auxiliary(), Block(8), Block(8)))
    demands = demands_of(experiment)
    model = demands.model
    trace = pp.Trace(["0", "1", "2"], [1.0] * 3, [[], [0], [0]], {})
    part = pp.Part(model, trace, [0, 1, 2], 2, CPU)
    first = part.model.get_submodule("0")
    assert first(torch.zeros(2, 4)).shape == (2, 8)
    part.eval()
    assert first(torch.zeros(2, 4)).shape == (2, 4)
    assert first(torch.zeros(1, 4)).shape == (1, 4), "one sample is enough in evaluation"
    part.train()
    assert first(torch.zeros(2, 4)).shape == (2, 8)

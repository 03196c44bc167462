"""What modules draw by lies on the model's device: nobody waits for it, counts it there, or changes it too early."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from meshrun import RunFailed
from meshrun.parallel import moment as moments
from meshrun.parallel.dropout import key_dropouts
from meshrun.parallel.moment import Moment, frozen

B, T, D = 4, 3, 10
IDS = torch.tensor([5, 3, 999_999_999_999, 0])


class Often(nn.Module):
    """A block that calls its dropout several times."""

    def __init__(self, calls: int) -> None:
        super().__init__()
        self.linear, self.drop, self.calls = nn.Linear(D, D), nn.Dropout(0.4), calls

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.calls):
            x = self.drop(self.linear(x))
        return x


def dropping(moment: Moment) -> nn.Module:
    model = nn.ModuleDict({"drop": nn.Dropout(0.4)})
    key_dropouts(model, moment)
    return model["drop"]


def in_place(**fields: Any) -> Moment:
    moment = Moment(ids=IDS, **fields)
    moment.in_place = True  # as on a GPU
    return moment


def test_masks_stay_what_they_always_were():
    moment = Moment(seed=3)
    drop, found = dropping(moment), hashlib.sha256()
    for step in (0, 77):
        moment.step, moment.ids = step, IDS + step
        for _ in range(moments.AHEAD + 3):
            found.update((drop(torch.ones(B, T, D)) != 0).numpy().tobytes())
    assert found.hexdigest() == "c7c0e84cf54e96079020e14558674151c62c2022cc3da9c24a2b996d15374534"


def test_a_key_in_place_is_one_tensor_that_is_written_only_for_another_step():
    moment, fresh = in_place(), Moment(ids=IDS)
    drop, other = dropping(moment), dropping(fresh)
    memory = None
    for step in range(4):
        moment.step = fresh.step = step
        assert moment.key is not None and memory in (None, moment.key)
        memory, version = moment.key, moment.key._version
        moment.step = None
        assert moment.key is None
        moment.step = step
        with frozen(moment, moment.copy()):
            assert moment.key is memory
        assert moment.key is memory and memory._version == version
        assert torch.equal(drop(torch.ones(B, T, D)), other(torch.ones(B, T, D)))


def test_going_back_to_another_step_leaves_what_is_in_memory():
    moment = in_place()
    drop, x = dropping(moment), torch.ones(B, T, D)
    moment.step = 3
    first, earlier = drop(x), moment.copy()
    second = drop(x)
    moment.step = 4
    wanted, memory = drop(x), moment.key
    assert memory is not None
    version = memory._version
    with frozen(moment, earlier):
        assert moment.step == 3 and torch.equal(drop(x), second)
    assert moment.key is memory and memory._version == version
    moment.step = 4
    assert torch.equal(drop(x), wanted)
    moment.step = 3
    assert moment.key is memory and torch.equal(drop(x), first)


def test_going_back_returns_to_the_tokens_of_then():
    moment = Moment()
    moment.positions, moment.length = torch.arange(3), 6
    earlier = moment.copy()
    moment.positions, moment.length = torch.arange(3, 6), 8
    with frozen(moment, earlier):
        assert moment.positions.tolist() == [0, 1, 2] and moment.length == 6
    assert moment.positions.tolist() == [3, 4, 5] and moment.length == 8


def test_a_step_that_begins_within_a_recorded_one_is_refused(monkeypatch: pytest.MonkeyPatch):
    moment = in_place(step=3)
    drop, earlier = dropping(moment), moment.copy()
    moment.step = 4
    wanted = drop(torch.ones(B, T, D))
    monkeypatch.setattr(moments, "is_recorded", lambda _: True)
    moment.step = 4
    assert torch.equal(drop(torch.ones(B, T, D)), wanted)
    with pytest.raises(RunFailed, match="step 3 begins within a recorded one"), frozen(moment, earlier):
        pass
    with pytest.raises(RunFailed, match="step 5 begins within a recorded one"):
        moment.step = 5


def test_turns_are_counted_without_a_look_at_the_device():
    moment = Moment(step=0, ids=IDS)
    drop = dropping(moment)
    for calls in range(moments.AHEAD + 3):
        assert int(moment.turns["drop"]) == calls
        drop(torch.ones(B, D))
    moment.ids = IDS
    assert int(moment.turns["drop"]) == 0


def single_numbers(graph: fx.GraphModule) -> list[fx.Node]:
    """What a graph computes of 0-dim integers, which on a host would be kernels of their own."""
    values = [(each, each.meta.get("example_value")) for each in graph.graph.nodes if each.op.startswith("call")]
    return [each for each, value in values if isinstance(value, Tensor) and value.dim() == 0]


@pytest.mark.parametrize("calls", [1, 2, 5])
def test_compiled_code_counts_no_turns_and_is_the_same_for_all_blocks_and_steps(calls: int):
    torch._dynamo.reset()
    moment, graphs = Moment(), []

    def backend(graph: fx.GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    blocks = nn.ModuleList(Often(calls) for _ in range(4))
    key_dropouts(blocks, moment)
    compiled = [torch.compile(block, backend=backend, fullgraph=True) for block in blocks]
    for step in range(4):
        x, found = torch.randn(B, T, D), []
        for computed in (compiled, blocks):
            moment.step, moment.ids = step, IDS + step
            found.append([each(x) for each in computed])
            assert {int(each) for each in moment.turns.values()} == {calls}
        assert all(map(torch.equal, *found))
    (graph,) = graphs
    sums = single_numbers(graph)
    assert len(sums) == calls, "the key and the word of a call are added, and nothing else"
    assert all(source.op == "placeholder" for each in sums for source in each.all_input_nodes)
    (outputs,) = next(each for each in graph.graph.nodes if each.op == "output").args
    assert len(outputs) == 1, "no turn comes out of a graph"


@pytest.mark.gpu
def test_on_a_gpu_the_host_does_not_wait_for_keys():
    wanted = dropping(Moment(seed=1, step=2, ids=IDS))(torch.ones(B, T, D))
    moment = Moment(seed=1, ids=IDS.cuda(), device=torch.device("cuda"))
    drop, x = dropping(moment), torch.ones(B, T, D, device="cuda")
    moment.step = 0
    drop(x)
    assert moment.in_place and moment.key is not None and moment.key.is_cuda
    memory = moment.key
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        moment.step = 2
        found = drop(x)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert moment.key is memory and torch.equal(found.cpu(), wanted)
    moment.ids = IDS
    assert torch.equal(drop(torch.ones(B, T, D)), wanted), "what is computed on the host is dropped there"

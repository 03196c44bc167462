"""What a model on a mesh keeps between steps, without ranks; `tests/train/test_axes.py` trains on them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from meshrun.layout import parse
from meshrun.parallel import meshed
from meshrun.parallel.meshed import Meshed


@pytest.fixture
def placed() -> Any:
    """A model of which two stages of this rank hold one weight, which an update has changed on the first."""
    found: Any = Meshed.__new__(Meshed)
    found.first, found.copy = (SimpleNamespace(local=torch.full((2,), value)) for value in (5.0, 1.0))
    found._copied, found._counts_here = [(found.copy, found.first)], True
    found._unused, found._again = None, set()
    found.here = SimpleNamespace(layout=SimpleNamespace(cp=1))
    return found


def test_an_evaluation_sees_the_last_update_on_all_stages_of_a_rank(placed: Any):
    placed.pipeline = SimpleNamespace(score=lambda *_: placed.copy.local.clone())
    assert placed.scores([], {}).tolist() == [5.0, 5.0]
    placed._counts_here = False
    assert placed.scores([], {}).tolist() == [0.0, 0.0], "ranks that have the same outputs count once"


def test_what_steps_have_settled_is_taken_up_by_a_run_that_goes_on(placed: Any):
    assert placed.habits() == {} and not placed.take_up({}) and placed.habits() == {}
    settled = {"unused": ["b", "c"], "again": ["a"]}
    assert not placed.take_up(settled) and placed.habits() == settled


def test_a_weight_that_only_other_ranks_use_has_a_gradient_of_zeros_here(placed: Any):
    weights = {name: nn.Parameter(torch.ones(2)) for name in ("used", "elsewhere", "nowhere")}
    weights["used"].grad = torch.ones(2)
    placed.trained = [SimpleNamespace(parameter=each, master=None) for each in weights.values()]
    placed.shards = [SimpleNamespace(name=name, parameter=each) for name, each in weights.items()]
    placed._copied, placed._unused, placed._partial, placed._ties = [], {"nowhere"}, set(), {}
    placed._sharded, placed._sums, placed._reduced, placed._kept_whole = False, None, None, []
    placed._finish_gradients()
    found = [None if each.grad is None else each.grad.tolist() for each in weights.values()]
    assert found == [[1.0, 1.0], [0.0, 0.0], None]


def test_running_statistics_are_those_of_all_replicas(placed: Any):
    asked: list[tuple[str, ...]] = []
    placed.here = SimpleNamespace(submesh=lambda *axes: asked.append(axes))
    placed.agree_on_buffers()
    assert asked == [("dp", "fsdp")]


@pytest.mark.parametrize(
    ("rank", "split_dim", "ties", "holders"),
    [
        (0, None, {}, (0, 1, 2, 3)),
        (6, None, {}, (4, 5, 6, 7)),
        (0, 1, {}, (0, 2)),
        (7, 0, {}, (5, 7)),
        (1, 1, {"w": ((0, 1), None)}, (1, 3, 5, 7)),
        (6, None, {"w": ((0, 1), None)}, (0, 1, 2, 3, 4, 5, 6, 7)),
    ],
)
def test_who_holds_the_same_elements_differs_only_along_axes_that_do_not_cut_them(
    placed: Any, rank: int, split_dim: int | None, ties: dict[str, Any], holders: tuple[int, ...]
):
    layout = parse("pp=2,dp=2,tp=2").resolve(8)
    placed.here = SimpleNamespace(rank=rank, size=8, layout=layout, place=layout.coordinates(rank).__getitem__)
    placed._sharded, placed._ties, placed._holders_of = False, ties, {}
    assert placed._holders(SimpleNamespace(name="w", split_dim=split_dim)) == holders


def test_collected_gradients_of_which_each_rank_of_tp_has_a_part_are_summed(
    placed: Any, monkeypatch: pytest.MonkeyPatch
):
    """Those of a matrix in bf16 that all of them hold, where each has computed with tokens of its own."""
    whole, part, unused = (nn.Parameter(torch.zeros(2)) for _ in range(3))
    whole.grad, part.grad = torch.full((2,), 2.0), torch.full((2,), 3.0)
    summed: list[float] = []

    def add_up(gradients: list[torch.Tensor], _group: object) -> None:
        summed.extend(each[0].item() for each in gradients)
        raise ZeroDivisionError  # what comes after it is not looked at

    placed._sharded, placed._copied, placed._partial = False, [], {part, unused}
    placed.trained = [SimpleNamespace(master=each) for each in (whole, part, unused)]
    placed.shards = [SimpleNamespace(parameter=each) for each in (whole, part, unused)]
    placed.here.submesh = lambda _: SimpleNamespace(get_group=lambda: None)
    monkeypatch.setattr(meshed, "summed", add_up)
    with pytest.raises(ZeroDivisionError):
        placed._finish_gradients()
    assert summed == [3.0]

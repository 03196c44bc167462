"""What is counted of a micro-batch, norms, and the buffers that are state."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshrun import Loss
from meshrun.errors import RunFailed, WrongTarget
from meshrun.parallel.moment import Place
from meshrun.parallel.placed import (
    PersistentBuffers,
    Piece,
    Shard,
    call,
    counted,
    norms,
    persistent_buffers,
    refuse_unclear,
)

ALL = Place(0, (1,))


def piece(targets: Any, rows: int, real: int) -> Piece:
    return Piece(inputs=None, targets=targets, ids=list(range(40, 40 + rows)), real=real)


def all_of_it(outputs: Any, targets: Any) -> Loss:
    values, weights = (outputs[0], targets[1]) if isinstance(outputs, tuple) else (outputs, targets)
    return Loss(values.sum() + weights.sum(), len(values))


@pytest.mark.parametrize("inputs", [(1, 2), [1, 2], {"b": 2, "a": 1}])
def test_a_model_is_called_as_its_inputs_ask_for(inputs: Any):
    class Two(nn.Module):
        def forward(self, a: int, b: int) -> tuple[int, int]:
            return a, b

    assert call(Two(), inputs) == (1, 2)
    assert call(nn.Identity(), 3) == 3


def test_what_has_no_row_for_each_sample_is_left_whole_with_the_rows_that_count():
    outputs = (torch.ones(3, 2), torch.ones(5))
    targets = (torch.ones(3), torch.arange(4.0))
    found = counted(outputs, piece(targets, rows=3, real=2), all_of_it)
    assert (found.total.item(), found.count) == (2 * 2 + 6, 2)


def test_dimensions_of_another_number_of_outputs_are_not_used():
    found = counted(torch.ones(3, 2), piece(torch.zeros(3), rows=3, real=1), all_of_it, [Place(1, (3, 1)), ALL])
    assert (found.total.item(), found.count) == (2.0, 1)


def test_of_entries_in_any_order_those_of_the_samples_that_count_are_left():
    shown: list[tuple[Tensor, Tensor]] = []

    def loss(outputs: Tensor, targets: Tensor) -> Loss:
        shown.append((outputs, targets))
        return Loss(outputs.sum(), 1)

    names = torch.tensor([[0, 10, 20], [1, 11, 21]])  # (time, batch)
    by_time, by_sample = names.flatten(), names.t().flatten()
    several = Place(0, (2,))
    for outputs, place, targets, of_targets in (
        (names, Place(1, (2, 1)), by_time, Place(0, (2,), together=1)),
        (by_sample, several, names[0], Place(0, (1,))),
        (by_sample, several, by_sample.repeat(2), Place(0, (4,), together=2)),
        (names[:, 0], Place(None, (2,)), names, None),
    ):
        counted(outputs, piece(targets, rows=3, real=2), loss, [place], [of_targets] if of_targets else None)
    assert [each.tolist() for pair in shown for each in pair] == [
        *([[0, 10], [1, 11]], [0, 10, 1, 11]),
        *([0, 1, 10, 11], [0, 10]),
        *([0, 1, 10, 11], [0, 1, 10, 11] * 2),
        *([0, 1], names.tolist()),
    ]


def test_entries_in_no_order_are_refused_where_not_all_samples_count():
    for place in (Place(0, (2,), together=0), Place(0, (2,), together=4), Place(1, (6, 1))):
        with pytest.raises(RunFailed, match=r"of 3 samples 2 count, and a tensor of shape \(6,\) .*--batch"):
            counted(torch.ones(6), piece(torch.ones(3), rows=3, real=2), all_of_it, [place])


def test_sizes_that_fit_dim_1_are_refused_where_not_all_samples_count():
    with pytest.raises(RunFailed, match=r"3 samples 2 count, .* shape \(4, 3\) .* because it looks at values: choose"):
        refuse_unclear((torch.ones(3, 2), torch.ones(3)), piece(torch.ones(4, 3), rows=3, real=2), "it looks at values")
    for real in (0, 3):
        refuse_unclear(torch.ones(3, 3), piece(torch.ones(3), rows=3, real=real), "it looks at values")
    refuse_unclear(torch.ones(3, 2), piece(torch.ones(3, 4), rows=3, real=2), "it looks at values")


def test_rows_that_only_fill_up_count_nothing_and_have_no_gradient_but_are_reached_by_the_backward_pass():
    weight = torch.ones(2, requires_grad=True)
    outputs = {"logits": weight * torch.ones(3, 2), "number": torch.arange(3)}
    found = counted(outputs, piece(torch.zeros(3), rows=3, real=0), lambda *_: pytest.fail("nothing is to be counted"))
    assert found.count == 0 and found.total.item() == 0
    found.total.backward()
    assert weight.grad is not None and weight.grad.tolist() == [0.0, 0.0]


def test_a_wrong_target_names_its_sample_where_it_has_one():
    def wrong(row: int) -> Any:
        def loss(*_: Any) -> Loss:
            raise WrongTarget("target 9", row)

        return loss

    with pytest.raises(WrongTarget, match="sample 41"):
        counted(torch.ones(2), piece(torch.ones(2), rows=2, real=2), wrong(1))
    with pytest.raises(WrongTarget) as raised:
        counted(torch.ones(2), piece(torch.ones(2), rows=2, real=2), wrong(2))
    assert raised.value.row == 2


def test_norms_of_halves_are_summed_in_fp32():
    halves = torch.ones(1001, dtype=torch.bfloat16)
    found = norms([halves, torch.tensor([3.0, 4.0], dtype=torch.float64)])
    assert found.dtype == torch.float64
    assert found.tolist() == pytest.approx([math.sqrt(1001), 5.0], rel=1e-6)


class Stateful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.zeros(1))
        self.register_buffer("table", torch.zeros(2), persistent=False)
        self.register_buffer("nothing", None)


def test_buffers_of_the_state_are_found_also_those_that_a_model_makes_later():
    model = nn.Sequential(Stateful())
    buffers = PersistentBuffers(model)
    assert list(dict(persistent_buffers(model))) == ["0.kept"] == list(buffers.now())
    replaced = torch.ones(1)
    model[0].kept = replaced
    assert buffers.now()["0.kept"] is replaced
    model[0].register_buffer("later", torch.ones(3))
    model.register_buffer("own", torch.ones(3))
    assert set(buffers.now()) == set(model.state_dict()) == {"0.kept", "0.later", "own"}


def test_a_gradient_is_that_of_the_copy_until_it_was_collected():
    master, copy = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    shard = Shard("weight", master, (0, 1), (2,), (0,), copy=copy)
    assert shard.gradient is None and shard.copies == 2 and shard.computed is copy
    copy.grad = torch.ones(2, dtype=torch.bfloat16)
    assert shard.gradient is copy.grad
    master.grad = torch.ones(2)
    assert shard.gradient is master.grad


def test_ids_that_were_sent_are_not_sent_again():
    sent = torch.tensor([7, 8])
    numbers = Piece(None, None, [7, 8], 2)
    assert torch.equal(numbers.ids_on(torch.device("cpu")), sent)
    known: Tensor = Piece(None, None, [7, 8], 2, sent=sent).ids_on(torch.device("cpu"))
    assert known is sent

"""What stages say to each other, without ranks; `tests/train/test_axes.py` has them train together."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from meshrun import Loss
from meshrun.errors import RunFailed
from meshrun.parallel.moment import Place
from meshrun.parallel.pipeline import Lane, Passed, _from_header, _header, _rounds, _Run
from meshrun.parallel.placed import Piece
from meshrun.parallel.schedule import Action


def test_rounds_have_all_pieces_once_and_in_order():
    pieces: Any = range(7)
    assert list(_rounds(pieces, 3)) == [[0, 1, 2], [3, 4, 5], [6]]
    assert list(_rounds(pieces, 7)) == [list(range(7))]
    assert list(_rounds([], 3)) == []


def test_a_header_says_how_many_tensors_come_and_of_which_shape_and_type():
    tensors = [torch.zeros(2, 3), torch.zeros((), dtype=torch.bfloat16), torch.zeros(0, 1, 2, 3, 4, 5)]
    found = _from_header(_header(tensors, torch.device("cpu")))
    assert found == [(each.shape, each.dtype) for each in tensors]


def test_messages_of_a_lane_are_told_apart_by_their_number_and_direction():
    group: Any = None
    first, second = (Lane(group, number, False, False) for number in (0, 1))
    tags = [first._tag("to", 1), first._tag("to", 1), second._tag("to", 1)]
    assert len(set(tags)) == 3
    assert first._tag("from", 1) == tags[0] and first._tag("to", 2) == tags[0]


def test_what_is_sent_has_no_gaps_and_is_described_once_for_training_and_once_for_evaluation():
    sent: list[Tensor] = []

    def send(tensor: Tensor, peer: int) -> Any:
        assert peer == 5
        sent.append(tensor)
        return SimpleNamespace(is_completed=lambda: True), tensor

    run: Any = _Run.__new__(_Run)
    here, lanes = SimpleNamespace(device=torch.device("cpu")), {("F", False): SimpleNamespace(send=send)}
    run.pipeline = SimpleNamespace(here=here, _lanes=lanes, _peers=(4, 5), ranks=2, _shapes={})
    run.pieces, run._sending = [Piece(torch.zeros(3, 2), None, ids=[0, 1, 2], real=3)], []
    for scale, messages in ((1.0, 2), (1.0, 1), (None, 2), (None, 1)):
        run.scale = scale
        sent.clear()
        run._send("F", Action("F", 0, 0), 1, [torch.arange(6).view(2, 3).t()])
        assert len(sent) == messages
        assert sent[-1].is_contiguous() and sent[-1].tolist() == [[0, 3], [1, 4], [2, 5]]


def run_of(stages: int) -> tuple[Any, list[tuple[str, int, list[Tensor]]]]:
    """A pass that computes stage 1, with what it sends."""
    sent: list[tuple[str, int, list[Tensor]]] = []
    run: Any = _Run.__new__(_Run)
    settings = SimpleNamespace(before_backward=lambda *_: None, attention=nullcontext)
    run.pipeline = SimpleNamespace(settings=settings, parts={1: None}, stages=stages)
    run._waiting, run._totals = {}, {}
    run._send = lambda kind, _, stage, tensors: sent.append((kind, stage, tensors))
    return run, sent


def test_a_stage_sends_zeros_back_for_what_it_did_not_use():
    run, sent = run_of(stages=2)
    used, unused = torch.ones(2, requires_grad=True), torch.ones(3, requires_grad=True)
    run._waiting[1, 0], run._totals[0] = Passed((used, unused), ()), (3 * used).sum()
    run.backward(Action("B", 1, 0), last=True)
    ((kind, stage, (first, second)),) = sent
    assert (kind, stage, first.tolist(), second.tolist()) == ("B", 0, [3.0, 3.0], [0.0, 0.0, 0.0])
    assert not run._waiting and not run._totals, "activations are let go of"


def test_gradients_from_the_next_stage_go_through_what_depends_on_parameters():
    run, sent = run_of(stages=3)
    received = torch.ones(2, requires_grad=True)
    run._waiting[1, 0] = Passed((received,), (2 * received, torch.ones(1)))
    run._incoming = {"B": SimpleNamespace(take=lambda *_: (torch.tensor([1.0, 5.0]), torch.zeros(1)))}
    run.backward(Action("B", 1, 0), last=False)
    assert sent[0][2][0].tolist() == [2.0, 10.0]


def test_the_last_stage_counts_no_samples_of_which_it_does_not_know_where_they_are():
    run, _ = run_of(stages=2)
    run.functions, run.scale, run.sums = {"loss": lambda out, _: Loss(out.sum(), 2)}, None, torch.zeros(1, 2).double()
    outputs, piece = torch.ones(4, 3, 2), Piece(None, torch.ones(4, 3), ids=[0, 1, 2], real=2)  # (time, batch, …)
    places = [Place(1, (4, 1, 2))], [Place(1, (4, 1))]
    run.pipeline.moment = SimpleNamespace(unplaced="it looks at values", batch_dim=None, outputs=None, targets=None)
    with pytest.raises(RunFailed, match="dim 1 may be the batch; the model does not tell, because it looks at values"):
        run._score(outputs, piece, Action("F", 1, 0))
    run.pipeline.moment = SimpleNamespace(unplaced=None, batch_dim=None, outputs=places[0], targets=places[1])
    run._score(outputs, piece, Action("F", 1, 0))
    assert run.sums.tolist() == [[16, 2]], "two samples of four steps and two features"

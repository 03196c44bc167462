"""Ranks that hold the others up are named while the run goes on, and not for nothing."""

from __future__ import annotations

import pytest

from meshrun.observe.pulse import Reading
from meshrun.observe.stragglers import Sample, Straggling, sniff_on, stragglers


def sample(rank: int, data_wait: float = 0.001, cpu: float = 0.08, sniff: float = 0.001) -> Sample:
    return Sample(rank, step=0.1, data_wait=data_wait, cpu=cpu, sniff=sniff)


def reading(rank: int, steps: int, data_wait: float, sniff: float = 0.001, cpu: float = 0.08) -> Reading:
    return Reading(
        rank=rank, pid=1, generation=0, thread=1, beats=1, beat_age=0.0, marks=1, silent=0.0, step=steps,
        phase="reading", what="", finished=steps, last=steps, longest=0.1, seconds=0.1 * steps,
        data_wait=data_wait * steps, cpu=cpu * steps, sniff=sniff, evaluations=0, longest_evaluating=0.0,
    )  # fmt: skip


def test_equal_ranks_have_no_straggler():
    assert stragglers([sample(rank) for rank in range(4)]) == []


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("kind", ["data", "compute", "device"])
def test_rank_that_stands_out_is_named_in_what(ranks: int, kind: str):
    field, value = {"data": ("data_wait", 0.05), "compute": ("cpu", 0.2), "device": ("sniff", 0.003)}[kind]
    samples = [sample(rank, **({field: value} if rank == 1 else {})) for rank in range(ranks)]
    (slow,) = stragglers(samples)
    assert (slow.rank, slow.kind) == (1, kind)


def test_what_is_too_short_to_matter_is_not_told():
    assert stragglers([sample(0, data_wait=0.0001), sample(1, data_wait=0.004)]) == []
    assert stragglers([sample(0, sniff=0.0001), sample(1, sniff=0.00025)]) == []


def test_who_takes_less_than_half_as_long_again_does_not_stand_out():
    assert stragglers([sample(0, cpu=0.08), sample(1, cpu=0.11)]) == []
    assert [each.rank for each in stragglers([sample(0, cpu=0.08), sample(1, cpu=0.13)])] == [1]


def test_sniff_test_that_not_every_rank_has_done_says_nothing():
    assert stragglers([sample(0, sniff=0.0), sample(1, sniff=0.003)]) == []


def test_one_rank_has_nobody_to_be_held_against():
    assert stragglers([sample(0, data_wait=9.0)]) == []


def looks(straggling: Straggling, waits: list[float]) -> list[list[str]]:
    """Rank 1 waits so long in the steps before each look."""
    total, steps, told = 0.0, 0, []
    straggling.look([reading(0, 0, 0.0), reading(1, 0, 0.0)])
    for wait in waits:
        steps, total = steps + 10, total + 10 * wait
        told.append(straggling.look([reading(0, steps, 0.001), reading(1, steps, total / steps)]))
    return told


def test_nothing_is_said_while_a_rank_has_finished_no_step_since_the_last_look():
    straggling, told = Straggling("node7"), list[str]()
    for steps in (10, 20, 30, 40, 50):
        told += straggling.look([reading(0, steps, 0.001), reading(1, steps, 0.05), reading(2, 3, 0.001)])
    assert told == []


def test_sentence_comes_after_three_looks_in_a_row_and_only_once():
    told = looks(Straggling("node7"), [0.05] * 6)
    sentence = "rank 1 on node7 is slow: it waits 50.0 ms a step for its data, the others 1.0 ms"
    assert told == [[], [], [sentence], [], [], []]


def test_slowness_that_passes_is_not_told():
    assert looks(Straggling("node7"), [0.05, 0.05, 0.001, 0.05, 0.05, 0.001]) == [[]] * 6


def test_slowness_that_changes_is_told_again():
    told = looks(Straggling("node7"), [0.05] * 3 + [0.5] * 2)
    assert [len(sentences) for sentences in told] == [0, 0, 1, 1, 0]


def test_slowness_that_gets_less_than_half_of_it_is_told_again():
    told = looks(Straggling("node7"), [0.05] * 3 + [0.015] * 2)
    assert [len(sentences) for sentences in told] == [0, 0, 1, 1, 0]


def test_what_a_rank_computes_is_told_for_a_step():
    straggling = Straggling("node7")
    told = [straggling.look([reading(0, steps, 0.0), reading(1, steps, 0.0, cpu=0.3)]) for steps in range(0, 40, 10)]
    assert told[-1] == ["rank 1 on node7 is slow: it computes 300.0 ms a step, the others 80.0 ms"]


def test_stages_of_a_pipeline_may_compute_for_different_times():
    for by_stage, sentences in ((False, 1), (True, 0)):
        straggling = Straggling("node7", by_stage)
        told = [
            straggling.look([reading(0, steps, 0.001), reading(1, steps, 0.001, cpu=0.3)]) for steps in range(0, 50, 10)
        ]
        assert sum(map(len, told)) == sentences


def test_sniff_test_takes_about_a_millisecond():
    import torch

    sniff = sniff_on(torch.device("cpu"))
    sniff()
    assert 0 < min(sniff() for _ in range(5)) < 0.01

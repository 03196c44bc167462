"""From the traces that a mistake leaves to the sentence that names it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from meshrun.check.causes import likely_cause, why_unjudged
from meshrun.check.probe import Found, Tried
from meshrun.check.verify import Measured, Verdict, _not_numbers, allow

SAME = Found(
    layout="dp=1",
    world=1,
    replicas=1,
    losses=[1.0, 0.9],
    grad_norms=[5.0, 5.0],
    gradients=[{"w": 3.0, "b": 4.0}] * 2,
    evals={},
    length=20,
    ids="i",
    samples={"3": "x", "11": "y"},
    unstable=[],
    pieces=[12],
    factors=[[1.0, 1.0]],
    torn=[],
)
ON_TWO = replace(SAME, layout="dp=2", world=2, replicas=2, pieces=[6], factors=[[1.0, 1.0]] * 2)


def cause(reference: Found, other: Found, losses: tuple[float, float] = (0.0, 0.1), **changes: Any) -> str:
    """The sentence for losses that part by so much; unless told, at the second step."""
    steps = {"losses": list(losses), "grad_norms": [0.0, 0.1], "parameters": [{"w": 0.0, "b": 0.0}] * 2}
    end = {"weights": {"w": 0.1}, "evals": 0.1, "counts_equal": True, "ids_equal": True}
    measured = Measured(**{**steps, **end, **changes})
    first = next((step for step, loss in enumerate(measured.losses, 1) if loss > 1e-5), None)
    return likely_cause(reference, other, measured, allow(1e-5, None, 2), Verdict(False, first, "w"))


def gradients(w: float, b: float) -> list[dict[str, float]]:
    return [{"w": w, "b": b}, {"w": 1.0, "b": 1.0}]


EVERYTHING = Tried(
    draws=["drawn at net.py:3 (aten.rand in block)", "drawn by aten.rand in head"],
    batchnorms=["bn"],
    loss="mean",
)

CASES = {
    "another length": (
        replace(SAME, tried=EVERYTHING),
        replace(ON_TWO, length=10),
        "the training set has 10 samples here and 20 in one process: its length must not depend on the process",
    ),
    "other samples": (SAME, replace(ON_TWO, ids="j"), "the ranks together did not train on the samples that"),
    "data that change": (
        replace(SAME, unstable=[7, 9], tried=EVERYTHING),
        replace(ON_TWO, samples={"3": "z"}),
        "the dataset is not deterministic: sample 7 was not the same when it was read again",
    ),
    "data of another rank": (
        replace(SAME, tried=EVERYTHING),
        replace(ON_TWO, samples={"3": "x", "11": "x", "12": "q"}),
        "the dataset gives other data on these ranks: sample 11 is not what one process reads (1 of 2 samples differ)",
    ),
    "random numbers": (
        replace(SAME, tried=EVERYTHING),
        ON_TWO,
        "random numbers drawn at net.py:3 (aten.rand in block), and 1 more, differ from mesh to mesh; dropout, and",
    ),
    "a collate function that draws": (
        replace(SAME, tried=Tried(collate_draws=True, batchnorms=["bn"])),
        ON_TWO,
        "the collate function draws random numbers, for the samples of a micro-batch together",
    ),
    "augmentation that draws": (
        replace(SAME, tried=Tried(augment_draws=True, mixes=True)),
        ON_TWO,
        "Experiment(augment=…) draws random numbers of its own, which are others on another mesh; take them from",
    ),
    "samples that mix": (
        replace(SAME, tried=Tried(mixes=True, batchnorms=["bn"], loss="other")),
        ON_TWO,
        "the inputs of a sample depend on the other samples of its micro-batch, which are others on another mesh",
    ),
    "an evaluation that changes is no cause of other losses": (
        replace(SAME, tried=Tried(changing_eval="val")),
        ON_TWO,
        "the losses part at step 2",
    ),
    "BatchNorm": (
        replace(SAME, tried=Tried(batchnorms=["a", "b", "c"], loss="mean")),
        ON_TWO,
        "BatchNorm (a, b and 1 more) takes its statistics from a micro-batch, which has 6 samples here and 12 in one "
        "process; --sync-batchnorm takes them over all ranks",
    ),
    "BatchNorm in a pipeline": (
        replace(SAME, tried=Tried(batchnorms=["a"])),
        replace(ON_TWO, replicas=1),
        "BatchNorm (a) takes its statistics from a micro-batch, which has 6 samples here and 12 in one process; "
        "with --micro 6 one process does so too",
    ),
    "gradient times the ranks": (
        SAME,
        replace(ON_TWO, gradients=gradients(6.0, 8.0)),
        "the gradient is 2 times that of one process, and there are 2 ranks",
    ),
    "gradient divided by the ranks": (
        SAME,
        replace(ON_TWO, world=4, gradients=gradients(0.75, 1.0)),
        "the gradient is 1/4 of that of one process, and there are 4 ranks",
    ),
    "gradient of one parameter times the ranks": (
        SAME,
        replace(ON_TWO, gradients=gradients(3.0, 8.0)),
        "the gradient of b is 2 times that of one process",
    ),
    "clipping by part": (
        replace(SAME, factors=[[1.0, 0.5]]),
        replace(ON_TWO, factors=[[1.0, 0.5], [1.0, 0.7]]),
        "the optimizer scales gradients by the norm of the part that its rank holds: by 0.7 on rank 1 and by 0.5 in "
        "one process, at step 2",
    ),
    "replicas that part": (SAME, replace(ON_TWO, torn=["w"]), "ranks that should hold the same values of w do not"),
    "nothing to go by": (
        SAME,
        ON_TWO,
        "the losses part at step 2 (first gradient to differ: w), after equal gradients",
    ),
}


def test_an_evaluation_that_changes_is_no_cause_of_other_weights():
    told = cause(replace(SAME, tried=Tried(changing_eval="val")), ON_TWO, losses=(0.0, 0.0))
    assert told == "all steps agree, but the final values of w do not"


@pytest.mark.parametrize("case", CASES)
def test_a_trace_is_taken_for_its_mistake(case: str):
    reference, other, sentence = CASES[case]
    assert cause(reference, other).startswith(sentence)


def test_a_loss_that_does_not_add_up_is_the_cause_only_if_the_first_loss_differs():
    mean, other = (replace(SAME, tried=Tried(loss=kind)) for kind in ("mean", "other"))
    assert cause(mean, ON_TWO, (0.1, 0.1)).startswith("the loss returns a mean where it must return a sum")
    assert cause(other, ON_TWO, (0.1, 0.1)).startswith("the loss of a batch is not the sum of the losses of its parts")
    assert cause(mean, ON_TWO).startswith("the losses part at step 2")


def test_batchnorm_is_no_cause_where_micro_batches_are_the_same():
    reference = replace(SAME, tried=Tried(batchnorms=["bn"]))
    on_tensor_parallel_ranks = replace(ON_TWO, layout="tp=2", replicas=1, pieces=[12])
    assert cause(reference, on_tensor_parallel_ranks).startswith("the losses part")


def test_batchnorm_over_all_ranks_is_no_cause():
    reference = replace(SAME, tried=Tried(batchnorms=["bn"]), sync_batchnorm=True)
    assert cause(reference, replace(ON_TWO, sync_batchnorm=True)).startswith("the losses part")


def test_a_factor_that_is_no_number_of_ranks_is_no_scaling():
    assert "times that of one process" not in cause(SAME, replace(ON_TWO, gradients=gradients(6.0, 4.4)))


def test_gradients_that_are_scaled_by_the_replicas_among_more_ranks_are_named():
    on_four = replace(ON_TWO, layout="dp=2,tp=2", world=4, replicas=2)
    assert "the gradient is 1/2 of that of one process, and there are 2 ranks" in cause(
        SAME, replace(on_four, gradients=gradients(1.5, 2.0))
    )
    assert "4 times that of one process" in cause(SAME, replace(on_four, gradients=gradients(12.0, 16.0)))
    assert "times" not in cause(SAME, replace(on_four, gradients=gradients(12.0, 8.0))), "each has a factor of its own"


def test_an_optimizer_that_scales_gradients_later_than_they_part_is_no_cause():
    later = replace(ON_TWO, factors=[[1.0, 1.0], [1.0, 0.5]])
    assert "the optimizer scales gradients" in cause(SAME, later)
    assert "the optimizer scales gradients" not in cause(SAME, later, (0.1, 0.1))
    both = replace(SAME, factors=[[1.0, 0.5]])
    assert "the optimizer scales gradients" not in cause(both, replace(ON_TWO, factors=[[1.0, 0.5]] * 2))


def test_batchnorm_of_replicas_is_a_cause_also_where_micro_batches_are_of_one_size():
    reference = replace(SAME, pieces=[6, 6], tried=Tried(batchnorms=["bn"]))
    assert cause(reference, replace(ON_TWO, pieces=[6, 6])).startswith("BatchNorm (bn)")
    assert not cause(reference, replace(ON_TWO, sync_batchnorm=True, pieces=[12])).startswith("BatchNorm")


def test_a_sample_that_changes_on_the_layout_alone_is_named():
    assert "the dataset is not deterministic: sample 5" in cause(SAME, replace(ON_TWO, unstable=[5]))


def test_without_a_trace_the_sentence_says_which_part_of_a_step_differs():
    assert cause(SAME, ON_TWO, (0.1, 0.1)) == "the forward pass computes something else from step 1 on, parameter w"
    agreed = (0.0, 0.0)
    assert cause(SAME, ON_TWO, agreed) == "all steps agree, but the final values of w do not"
    assert cause(SAME, ON_TWO, agreed, weights={"w": 0.0}).startswith(
        "the training agrees, but the evaluation does not"
    )


def test_of_samples_that_differ_the_one_with_the_lowest_number_is_named():
    other = replace(ON_TWO, samples={"3": "other", "11": "other"})
    assert "sample 3 is not what one process reads (2 of 2 samples differ)" in cause(SAME, other)
    drawn = {"11 drawn with 5": "x", "3 drawn with 7": "x"}
    others = replace(ON_TWO, samples=dict.fromkeys(drawn, "other"))
    assert "sample 3 is not what one process reads" in cause(replace(SAME, samples=drawn), others)


def twin(**changes: Any) -> Measured:
    """A twin whose first step agrees and whose weights end far away, unless told."""
    fields = {"losses": [1e-7, 5e-5], "grad_norms": [1e-7, 1e-3], "parameters": [{"w": 1e-7}, {"w": 1e-3}]}
    end = {"weights": {"w": 0.59}, "evals": 0.0, "counts_equal": True, "ids_equal": True}
    return Measured(**{**fields, **end, **changes})


def test_a_twin_that_ends_far_away_proves_nothing_and_its_cause_is_searched_for():
    noise = twin()
    allowed = allow(1e-5, noise, 2)
    assert allowed.blown and not allowed.depends_on_micro
    drawn = why_unjudged(replace(SAME, tried=EVERYTHING), noise, allowed)
    assert drawn is not None and drawn.startswith("random numbers drawn at net.py:3")
    unknown = why_unjudged(SAME, noise, allowed)
    assert unknown is not None and "alone move w by 5.9e-01" in unknown and "--steps" in unknown


def test_a_model_that_draws_is_never_the_same_where_its_draws_change_the_first_step():
    noise = twin(losses=[1e-3, 1e-3])
    allowed = allow(1e-5, noise, 2)
    assert allowed.depends_on_micro
    assert str(why_unjudged(replace(SAME, tried=EVERYTHING), noise, allowed)).startswith("random numbers drawn at")
    assert why_unjudged(replace(SAME, tried=Tried(batchnorms=["bn"])), noise, allowed) is None


def test_a_twin_within_rounding_sets_the_bar_also_where_a_model_draws_what_it_does_not_use():
    noise = twin(weights={"w": 1e-4})
    assert why_unjudged(replace(SAME, tried=EVERYTHING), noise, allow(1e-5, noise, 2)) is None
    assert why_unjudged(replace(SAME, tried=EVERYTHING), None, allow(1e-5, None, 2)) is None


def test_a_result_that_is_no_number_in_one_process_either_is_said_to_be_beyond_comparison():
    scores = replace(SAME, evals={"val": {"loss": math.nan}})
    (said,) = _not_numbers(scores, scores, {})
    assert said == (
        "the loss of the evaluation 'val' is nan here and nan in one process, where it must be a number to be compared"
    )

"""Why a layout trains to something else: the likely cause, in a sentence, from what the trainings left behind.

    likely_cause(reference, other, measured, allowed, verdict)

Each check below looks for the trace of one mistake, the surest traces first; the first that finds one speaks. Where
none does, the sentence says which part of a step went another way: forward, backward, or the update.
"""

from __future__ import annotations

import math

from meshrun.check.nan_safe import exceeds
from meshrun.check.probe import Found
from meshrun.check.verify import Allowed, Measured, Verdict

CLOSE = 0.01
"""How near a ratio must be to a number of ranks to be taken for it."""


def likely_cause(reference: Found, other: Found, measured: Measured, allowed: Allowed, verdict: Verdict) -> str:
    """The sentence for a layout that differs."""
    first_loss_agrees = measured.losses[0] <= allowed.losses[0]
    return (
        _other_samples(reference, other)
        or measured.not_number
        or _changing_data(reference, other)
        or _other_data(reference, other)
        or _own_draws(reference)
        or _collate_draws(reference)
        or _mixed_samples(reference)
        or _batchnorm(reference, other)
        or (None if first_loss_agrees else _no_sum(reference))
        or (_scaled(reference, other, allowed) if first_loss_agrees else None)
        or _clipped_by_part(reference, other, verdict)
        or _torn(other)
        or _changing_eval(reference, measured, allowed, verdict)
        or _where(measured, allowed, verdict)
    )


def why_unjudged(reference: Found, noise: Measured | None, allowed: Allowed) -> str | None:
    """Why a layout that stays within what is allowed has not been shown to train the same; None if it has been."""
    if noise is None or not (allowed.depends_on_micro or allowed.blown):
        return None
    found = (
        _changing_data(reference, reference)
        or _own_draws(reference)
        or _collate_draws(reference)
        or _mixed_samples(reference)
    )
    if found is not None or not allowed.blown:
        return found
    most = max(noise.weights, key=lambda name: noise.weights[name])
    return (
        f"in one process other micro-batches alone move {most} by {noise.weight:.1e}, so that equal results would "
        f"prove nothing: the model makes much of rounding (often ReLU or max-pooling at equal values, or a bias before "
        f"a BatchNorm), or each forward pass changes a buffer; compare fewer steps (--steps), or allow more "
        f"(--tolerance)"
    )


def _other_samples(reference: Found, other: Found) -> str | None:
    if reference.length != other.length:
        return (
            f"the training set has {other.length} samples here and {reference.length} in one process: "
            f"its length must not depend on the process"
        )
    if reference.ids != other.ids:
        return "the ranks together did not train on the samples that one process trains on, in its order"
    return None


def _changing_data(reference: Found, other: Found) -> str | None:
    unstable = reference.unstable or other.unstable
    if not unstable:
        return None
    return (
        f"the dataset is not deterministic: sample {unstable[0]} was not the same when it was read again, with the "
        f"generators of Python, NumPy and torch seeded alike; take its random numbers from these, and not from a "
        f"generator of its own"
    )


def _other_data(reference: Found, other: Found) -> str | None:
    shared = [number for number in reference.samples if number in other.samples]
    wrong = [number for number in shared if reference.samples[number] != other.samples[number]]
    if not wrong:
        return None
    first = min(int(number.split()[0]) for number in wrong)  # the seed of what it has drawn may follow the number
    return (
        f"the dataset gives other data on these ranks: sample {first} is not what one process reads "
        f"({len(wrong)} of {len(shared)} samples differ); what it returns must depend on the index, not on the rank "
        f"or the number of ranks"
    )


def _own_draws(reference: Found) -> str | None:
    draws = reference.tried.draws
    if not draws:
        return None
    more = f", and {len(draws) - 1} more," if len(draws) > 1 else ""
    return (
        f"random numbers {draws[0]}{more} differ from mesh to mesh; dropout, and what Experiment(augment=…) draws, "
        f"are drawn by sample and do not"
    )


def _collate_draws(reference: Found) -> str | None:
    if reference.tried.augment_draws:
        return (
            "Experiment(augment=…) draws random numbers of its own, which are others on another mesh; take them from "
            "its second argument, such as draws.uniform(2), which draws by sample"
        )
    if not reference.tried.collate_draws:
        return None
    return (
        "the collate function draws random numbers, for the samples of a micro-batch together, which are others on "
        "another mesh; draw them in the dataset, where they are drawn by sample, or in Experiment(augment=…)"
    )


def _mixed_samples(reference: Found) -> str | None:
    if not reference.tried.mixes:
        return None
    return (
        "the inputs of a sample depend on the other samples of its micro-batch, which are others on another mesh: "
        "Experiment(collate=…) and Experiment(augment=…) must give each sample the same values in any batch"
    )


def _changing_eval(reference: Found, measured: Measured, allowed: Allowed, verdict: Verdict) -> str | None:
    name = reference.tried.changing_eval
    if name is None or verdict.first_step is not None or measured.weight > allowed.weight:
        return None
    return (
        f"the evaluation set {name!r} is not deterministic: a sample was not the same when it was read again, with the "
        f"generators of Python, NumPy and torch seeded alike; take its random numbers from these"
    )


def _batchnorm(reference: Found, other: Found) -> str | None:
    names = reference.tried.batchnorms
    if not names or other.sync_batchnorm or (reference.pieces == other.pieces and other.replicas == 1):
        return None
    here = max(other.pieces)
    if other.replicas > 1:
        remedy = "--sync-batchnorm takes them over all ranks"
    else:  # pp cuts the batch by itself, and no rank has the samples of the others
        remedy = f"with --micro {here} one process does so too"
    return (
        f"BatchNorm ({_some(names)}) takes its statistics from a micro-batch, which has {here} samples "
        f"here and {max(reference.pieces)} in one process; {remedy}"
    )


def _no_sum(reference: Found) -> str | None:
    match reference.tried.loss:
        case "mean":
            return (
                "the loss returns a mean where it must return a sum: Loss(total, count) of a batch must be the sum of "
                "those of its parts (reduction='sum')"
            )
        case "other":
            return (
                "the loss of a batch is not the sum of the losses of its parts, so it depends on how the batch is cut "
                "into micro-batches"
            )
    return None


def _scaled(reference: Found, other: Found, allowed: Allowed) -> str | None:
    """Gradients of the first step that are wrong by a factor which is a number of ranks."""
    norm, mine, theirs = reference.grad_norms[0], reference.gradients[0], other.gradients[0]
    wrong = [name for name in mine if abs(theirs.get(name, 0.0) - mine[name]) > allowed.parameters[0] * norm]
    ratios = [theirs.get(name, 0.0) / mine[name] for name in wrong if mine[name]]
    if not ratios:
        return None
    for ranks in dict.fromkeys((other.world, other.replicas)):
        for factor, text in ((ranks, f"{ranks} times"), (1 / ranks, f"1/{ranks} of")):
            if ranks > 1 and all(math.isclose(ratio, factor, rel_tol=CLOSE) for ratio in ratios):
                what = "the gradient is" if len(wrong) == len(mine) else f"the gradient of {_some(wrong)} is"
                return (
                    f"{what} {text} that of one process, and there are {ranks} ranks: the program scales gradients by "
                    f"the number of ranks, which meshrun has accounted for"
                )
    return None


def _clipped_by_part(reference: Found, other: Found, verdict: Verdict) -> str | None:
    """An optimizer that scales gradients by a norm can only know the norm of what its rank holds."""
    steps = verdict.first_step or len(reference.losses)
    for step in range(steps):
        usual = reference.factors[0][step]
        for rank, factors in enumerate(other.factors):
            if not math.isclose(factors[step], usual, rel_tol=1e-3):
                return (
                    f"the optimizer scales gradients by the norm of the part that its rank holds: by "
                    f"{factors[step]:.3g} on rank {rank} and by {usual:.3g} in one process, at step {step + 1}; "
                    f"clip the whole gradient with Experiment(clip=…) instead"
                )
    return None


def _torn(other: Found) -> str | None:
    if not other.torn:
        return None
    return f"ranks that should hold the same values of {_some(other.torn)} do not: something updates them apart"


def _where(measured: Measured, allowed: Allowed, verdict: Verdict) -> str:
    step, parameter = verdict.first_step, verdict.first_parameter
    if step is None:
        if exceeds(measured.weight, allowed.weight) or allowed.counts(measured.integers):
            return f"all steps agree, but the final values of {parameter} do not"
        return (
            "the training agrees, but the evaluation does not: the model or a metric depends on how samples are batched"
        )
    named = f", parameter {parameter}" if parameter else ""
    if exceeds(measured.losses[step - 1], allowed.losses[step - 1]):
        if step > 1:
            return (
                f"the losses part at step {step} (first gradient to differ: {parameter or 'none'}), after equal "
                f"gradients at step {step - 1}: the optimizer's update may depend on more than each element"
            )
        return f"the forward pass computes something else from step 1 on{named}"
    return (
        f"the losses of step {step} agree but gradients do not{named}: something changes them in the backward pass, "
        f"often ReLU or max-pooling at equal values (compare with GELU and average pooling)"
    )


def _some(names: list[str]) -> str:
    shown = [name or "the model" for name in names[:2]]
    return ", ".join(shown) + (f" and {len(names) - 2} more" if len(names) > 2 else "")

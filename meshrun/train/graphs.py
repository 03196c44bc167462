"""Steps as CUDA graphs: the device repeats a step that was recorded, and the host only hands it the next batch.

    compute = Graphed(gradients, placed, device, CudaRecorder(device), wanted=None, steps=1000, note=print)
    compute(step, pieces, samples)       # what gradients(step, pieces, samples) returns, and leaves in `.grad`

A step of a small model is hundreds of kernels of a few microseconds, and the host cannot start them as fast as the
device does them. What is recorded is forward, backward, sums, norm and scaling of one step with all its micro-batches.
Reading, changing pictures at random and the optimizer stay outside, so that learning rates and draws are never frozen.
Dropout by key (`parallel/moment.py`) reads the step and the samples from memory that is written before each replay.

    some steps as always       what libraries choose by trying is settled after them, and how long a step takes known
    record one                 it was computed as always just before, on the same batch
    replay and compare         other numbers: as always for ever, and a note says so
    replay from then on        now and then compared again, and where there is dropout at the next step, whose masks are
                               others; a batch of another form is computed as always

What a recording would freeze or lose is noticed by what the step before it has done to the model and to the host's
generators of random numbers: see `before`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from meshrun.parallel.dropout import Keyed
from meshrun.parallel.moment import Moment
from meshrun.parallel.placed import Piece, Placed, norms
from meshrun.train.before import Before, drawing
from meshrun.train.recording import CudaRecorder, Form, Recorder, Recording, Unfit, form_of

Compute = Callable[[int, list[Piece], int], Any]
"""(step, pieces, samples) -> numbers, as tensors in any structure; gradients are left in `.grad`."""
Note = Callable[[str], None]
Looks = tuple[list[float], list[float]]
"""The numbers of a step, and the norm of each gradient."""

FIRST = 3
"""Steps of one form that are computed as always before one is recorded."""
FORMS = 32
"""Of batches that may come before one of them has come that often."""
SHORT, LONG = 0.020, 0.200
"""Seconds: of a longer step, starting its kernels is no part worth a word, unless there are many of them."""
BUSY = 0.4
"""Of a step, from which on the host that starts its kernels says that they are many: between two of them the device
waits a microsecond or more, and where the host is slower than it, for the host."""
LASTING, LONGEST = 1800.0, 1.0
"""Seconds of what is left of a training from which on that microsecond is worth it in any step, up to so long a one: of
that of a Llama of a billion parameters all of them are three thousandths. In a longer one kernels may be too many."""
ENOUGH = 50
"""Steps that a training must have: recording one costs as much as some."""
CHECK_EVERY = 2000
"""Replayed steps between two comparisons."""
OTHER_NUMBERS = "a recorded step gives other numbers than the step itself"
LIKE = 2e-3
"""Relative difference of numbers that count as the same: some kernels add up in an order of their own each time."""


def objection(
    wanted: bool | None, device: torch.device, ranks: int, steps: int, shown: bool, in_backward: bool
) -> str | None:
    """Why steps are not recorded, or None if they may be; `wanted` None leaves it to how long a step takes.

    `shown` says that somebody looks at the gradients of every step, `in_backward` that weights change in it.
    """
    if wanted is False:
        return "nobody wants it"
    if recorder_on(device) is None:
        return f"the device is {device.type}"
    if ranks > 1:
        return f"there are {ranks} ranks, and what they send each other is not recorded"
    if shown:
        return "somebody is shown the gradients of every step"
    if in_backward:
        return "weights are updated while gradients are computed (--update-in-backward)"
    if wanted is None and steps < ENOUGH:
        return f"the training has only {steps} steps"
    return None


def recorder_on(device: torch.device) -> Recorder | None:
    """What records there; None where nothing can."""
    return CudaRecorder(device) if device.type == "cuda" else None


def refused(why: str) -> str:
    """What the user is told."""
    return f"steps are not replayed as CUDA graphs: {why} (--graphs)"


def pays(begun: float, done: float, left: int) -> bool:
    """Whether replaying the steps that are left pays: of one, all is begun and then done after so many seconds."""
    lasts = left * done >= LASTING and done <= LONGEST
    return done <= SHORT or (done <= LONG and begun > BUSY * done) or lasts


def has_branches(placed: Placed) -> bool:
    """Whether a step has what can be done at the same time: see `branches`. Compiled code goes its own way."""
    compiled = getattr(placed, "chosen", {}).get("compile", False)
    return not compiled and any(isinstance(each, nn.Conv1d | nn.Conv2d | nn.Conv3d) for each in placed.model.modules())


class Graphed:
    """Computes steps, as always or from a recording."""

    def __init__(
        self,
        compute: Compute,
        placed: Placed,
        device: torch.device,
        recorder: Recorder,
        wanted: bool | None,
        steps: int,
        note: Note,
    ) -> None:
        self._compute, self._placed, self._device, self._recorder = compute, placed, device, recorder
        self._wanted, self._steps, self._note = wanted, steps, note
        self._recording: Recording | None = None
        self._over = False
        self._seen: dict[Form, int] = {}
        self._replayed = 0

    @property
    def keeps_gradients(self) -> bool:
        """Whether gradients lie in a recording's memory and are written anew by the next step: nobody clears them."""
        if self._recording is None:
            return False
        parameter, gradient = self._recording.gradients[0]
        return parameter.grad is gradient

    def __call__(self, step: int, pieces: list[Piece], samples: int) -> Any:
        if self._over:
            return self._compute(step, pieces, samples)
        if self._recording is not None and not self._recording.holds:
            self._clear()
            self._drop()
        recording = self._recording
        tensors = recording.tensors_of(pieces, samples) if recording is not None else None
        if recording is None or tensors is None:
            try:
                form, tensors = form_of(pieces, samples)
            except Unfit as why:
                self._leave_it(str(why))
                return self._compute(step, pieces, samples)
            if recording is None:
                return self._before_it(form, tensors, step, pieces, samples)
            if form != recording.form:
                return self._as_always(step, pieces, samples)
        self._replayed += 1
        if self._replayed % CHECK_EVERY and (self._replayed > 1 or recording.moment is None):
            return recording(step, pieces, tensors)
        before = Before(self._placed, self._device)
        expected = self._looked_at(self._as_always(step, pieces, samples))
        found = self._compared(recording, before, expected, step, pieces, tensors)
        if found is not None:
            return found
        before.restore()
        return self._give_up(OTHER_NUMBERS, step, pieces, samples)

    def _before_it(self, form: Form, tensors: list[Tensor], step: int, pieces: list[Piece], samples: int) -> Any:
        """One of the first steps, or the one that is recorded."""
        count = self._seen[form] = self._seen.get(form, 0) + 1
        if len(self._seen) > FORMS:
            self._leave_it("hardly any batch has the form of another")
            return self._compute(step, pieces, samples)
        if count < FIRST:
            return self._as_always(step, pieces, samples)
        if count == FIRST:
            self._recorder.wait()
            began = time.perf_counter()
            found = self._as_always(step, pieces, samples)
            begun = time.perf_counter() - began
            self._recorder.wait()
            done = time.perf_counter() - began
            worth = pays(begun, done, self._steps - step) and self._recorder.has_room()
            self._over = self._wanted is None and not worth
            return found
        return self._recorded(form, tensors, step, pieces, samples)

    def _recorded(self, form: Form, tensors: list[Tensor], step: int, pieces: list[Piece], samples: int) -> Any:
        before = Before(self._placed, self._device)
        with self._recorder.aside():
            found = self._as_always(step, pieces, samples)
        why = before.objection()
        if why is not None:
            self._leave_it(why)
            return found
        expected, moment = self._looked_at(found), drawing(self._placed)
        del found
        for branches in (True, False) if has_branches(self._placed) else (False,):
            self._clear()
            try:
                recording = self._record(form, tensors, step, pieces, samples, moment, branches)
            except Exception as error:
                why = f"it cannot be recorded ({_first_of(error)})"
                continue
            why = OTHER_NUMBERS
            found = self._compared(recording, before, expected, step, pieces, tensors)
            if found is not None:
                self._recording = recording
                return found
        assert why is not None
        before.restore()
        return self._give_up(why, step, pieces, samples)

    def _record(
        self,
        form: Form,
        tensors: list[Tensor],
        step: int,
        pieces: list[Piece],
        samples: int,
        moment: Moment | None,
        branches: bool,
    ) -> Recording:
        inputs = [each.clone() for each in tensors]
        own = iter(inputs)
        leaves, structure = tree_flatten([(each.inputs, each.targets) for each in pieces])
        static = tree_unflatten([next(own) if isinstance(each, Tensor) else each for each in leaves], structure)
        held = [replace(each, inputs=pair[0], targets=pair[1]) for each, pair in zip(pieces, static, strict=True)]
        if moment is not None:
            moment.step = step
            held = [replace(each, sent=each.id_tensor().to(self._device)) for each in held]
        found, replay = self._recorder.record(lambda: self._compute(step, held, samples), branches)
        gradients = [(each, each.grad) for each in self._parameters() if each.grad is not None]
        if not gradients:
            raise Unfit("it leaves no gradients")
        keyed = (each for each in self._placed.model.modules() if isinstance(each, Keyed))
        rates = tuple((each, each.rate, each.training) for each in keyed)
        return Recording(form, held, inputs, found, gradients, replay, moment, rates)

    def _compared(
        self,
        recording: Recording,
        before: Before,
        expected: Looks,
        step: int,
        pieces: list[Piece],
        tensors: list[Tensor],
    ) -> Any:
        """What a recording computes if that is what was `expected`, else None."""
        before.restore()
        found = recording(step, pieces, tensors)
        replayed = self._looked_at(found)
        return found if alike(expected[0], replayed[0]) and alike(expected[1], replayed[1]) else None

    def _looked_at(self, found: Any) -> Looks:
        """The numbers of a step, and the norm of each gradient; the host waits for them."""
        numbers = [each.detach().double().flatten() for each in tree_leaves(found) if isinstance(each, Tensor)]
        gradients = [each.grad for each in self._parameters() if each.grad is not None]
        return torch.cat(numbers).tolist(), norms(gradients).tolist() if gradients else []

    def _parameters(self) -> list[nn.Parameter]:
        """All that may have a gradient: what the model computes with, and what the optimizer changes."""
        return list(
            dict.fromkeys([*self._placed.model.parameters(), *(each.parameter for each in self._placed.shards)])
        )

    def _as_always(self, step: int, pieces: list[Piece], samples: int) -> Any:
        if self._recording is not None:
            self._clear()
        return self._compute(step, pieces, samples)

    def _clear(self) -> None:
        """Gradients are made anew: into those that are there, they would be added."""
        for each in self._parameters():
            each.grad = None

    def _give_up(self, why: str, step: int, pieces: list[Piece], samples: int) -> Any:
        """After a recording that has failed."""
        self._stop()
        self._note(refused(why))
        self._clear()
        return self._compute(step, pieces, samples)

    def _leave_it(self, why: str) -> None:
        """Where recording is not for this training: only who has asked for it is told."""
        self._stop()
        if self._wanted:
            self._note(refused(why))

    def _stop(self) -> None:
        self._over = True
        self._drop()

    def _drop(self) -> None:
        """Begin anew, as if no step had been seen."""
        self._recording, self._replayed = None, 0
        self._seen.clear()


def _first_of(error: BaseException) -> str:
    """The first line of what went wrong first: ending a recording after that goes wrong too."""
    while error.__context__ is not None:
        error = error.__context__
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def alike(expected: list[float], found: list[float]) -> bool:
    """Whether numbers are the same but for rounding; what is next to nothing beside the largest may be anything."""
    finite = [abs(each) for each in expected if math.isfinite(each)]
    little = LIKE * LIKE * max(finite, default=0.0)
    return len(expected) == len(found) and all(
        math.isclose(a, b, rel_tol=LIKE, abs_tol=little) or a == b or (math.isnan(a) and math.isnan(b))
        for a, b in zip(expected, found, strict=True)
    )

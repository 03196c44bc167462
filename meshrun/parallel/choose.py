"""What is left to us of how a step is computed; above all `--recompute auto`: no more twice than memory asks for.

    found = ways(choice, "auto", here.device, model)    # on a GPU the first step computes every segment twice
    watch(placed, found.twice, here, may_repeat=True)   # and the second one as few as fit

The first step is an ordinary one with the least memory that a step can have, and it shows what each segment would keep:
that is how much memory is in use when the segment has been computed again. Before the second step, when the optimizer
has its state too, the sum says which level fits. No step is tried in vain, and ranks of a mesh, which could not give a
step up without all others, take the highest level that any of them needs.

Where a step can be repeated, compiled code keeps more than it must at first (`ample`). If that does not fit with room
to spare, code that keeps less is compiled before anything is computed twice, and the second step shows what the first
one has shown.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import nn

from meshrun.errors import RunFailed
from meshrun.mesh import Here
from meshrun.parallel.compiled import Choice, convolves
from meshrun.parallel.placed import Asked, Outcome, Piece, Placed, Score
from meshrun.parallel.recompute import Measured, Recomputing, covers

LEVELS = ("none", "every-4", "every-2", "full")
"""Each computes more twice than the one before it."""
AMPLE = 0.8
"""The share of its memory that a step may take which keeps more than it must: another batch may be longer."""
ROOM = 0.06
"""The share of a device's memory that is left to what no step allocates: libraries, and gaps between tensors."""


@dataclass(frozen=True)
class Ways:
    """How segments compute."""

    compile: Choice
    twice: Recomputing | None
    """What is computed twice; None where nothing ever is."""
    auto: bool
    """Whether that is left to us."""
    channels_last: bool
    """Whether images come with their channels last."""
    whole: bool = False
    """Whether code is compiled for all segments at once, should none be computed twice."""

    @property
    def by_segment(self) -> bool:
        """Whether it matters what the segments are."""
        return self.compile.compile or self.twice is not None

    def without_segments(self) -> Ways:
        """For a model that is one piece: to compute all of it twice takes as much memory as to compute it once."""
        return replace(self, twice=None) if self.auto else self


def ways(choice: Choice, recompute: str, device: torch.device, model: nn.Module) -> Ways:
    """What is asked for, with what is left to us decided as far as it can be before the first step."""
    if recompute == "auto" and device.type != "cuda":
        recompute = "none"
    auto, images = recompute == "auto", device.type == "cuda" and convolves(model)
    if recompute == "none":
        return Ways(choice, None, False, images)
    return Ways(choice, Recomputing(LEVELS[-1] if auto else recompute, choice.compile), auto, images)


class Memory(Protocol):
    """The memory of a device, in bytes."""

    def allocated(self) -> int:
        """In use now."""

    def peak(self) -> int:
        """The most that was in use since `begin`."""

    def begin(self) -> None:
        """Look for the most from now on."""

    def budget(self) -> int:
        """What this process may use."""

    def let_go(self) -> None:
        """Give back what is not in use."""

    def is_recording(self) -> bool:
        """Whether steps are being written down, and nothing can be given back."""


class OnDevice:
    """A GPU's memory."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def allocated(self) -> int:
        return torch.cuda.memory_allocated(self.device)

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self.device)

    def begin(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)

    def budget(self) -> int:
        free, total = torch.cuda.mem_get_info(self.device)
        granted = total * torch.cuda.get_per_process_memory_fraction(self.device)
        return int(min(granted, free + torch.cuda.memory_reserved(self.device)) - ROOM * min(granted, total))

    def let_go(self) -> None:
        gc.collect()  # what a step has left in cycles
        torch.cuda.empty_cache()

    def is_recording(self) -> bool:
        return torch.cuda.is_current_stream_capturing()


def fitting(kept: Mapping[int, int], least: int, budget: int) -> str:
    """The level that computes the least twice and fits.

    `kept` says what each segment, by its number, keeps where it is computed once; `least` is what a step needs that
    computes all of them twice.
    """
    for level in LEVELS[:-1]:
        if least + sum(size for number, size in kept.items() if not covers(level, number)) <= budget:
            return level
    return LEVELS[-1]


def watch(placed: Placed, twice: Recomputing, here: Here, may_repeat: bool) -> None:
    """Let a model's first steps find out what is computed twice."""
    placed.step = Choosing(placed, twice, OnDevice(here.device), here, may_repeat)  # type: ignore[method-assign]


class Choosing:
    """A model's `step`, which finds out what is computed twice, and computes more so should it not have been enough."""

    def __init__(self, placed: Placed, twice: Recomputing, memory: Memory, here: Here, may_repeat: bool) -> None:
        """`may_repeat`: a step that did not fit leaves nothing behind, so it can be computed once more."""
        self.twice, self.memory, self.here = twice, memory, here
        self.tell: Callable[[str | None], None] = self._note
        """Told when something was chosen: a sentence, where it is worth one."""
        # Running statistics have seen the part of a batch that was computed before memory was out.
        self.may_repeat = may_repeat and here.size == 1 and not placed.own_buffers()
        self.computes = placed.step
        """What computes a step; another may take its place."""
        self._placed = placed
        for code in twice.code if self.may_repeat else ():
            code.keep_more()
        twice.level, twice.measured = "full", Measured(memory.allocated)
        self._least: int | None = None
        """What the first step needed beside what was there before it."""

    def __call__(self, step: int, pieces: list[Piece], samples: int, loss: Score, asked: Asked) -> Outcome:
        if self.twice.measured is not None and self._least is not None:
            self._choose(self.twice.measured, self._least)
        if self.twice.measured is None:
            return self._fitted(step, pieces, samples, loss, asked)
        before = self.memory.allocated()
        self.memory.begin()
        outcome = self._fitted(step, pieces, samples, loss, asked)
        self._least = self.memory.peak() - before
        return outcome

    def _choose(self, measured: Measured, least: int) -> None:
        needed, budget = self.memory.allocated() + least, self.memory.budget()
        share = AMPLE if self.twice.keeps_more else 1.0
        level = max(self.here.gathered(fitting(measured.kept(), needed, int(share * budget))), key=LEVELS.index)
        if level != LEVELS[0] and self.twice.keeps_more:
            self._keep_less()
            self._least = None
            return
        self.twice.level, self.twice.measured = level, None
        self._placed.chosen["recompute"] = self.twice.level
        if self.twice.keeps_more:
            self._placed.chosen["ample"] = True
        self.twice.settled(self.twice.level)
        text = None
        if self.twice.level != "none":
            whole = _gib(needed + sum(measured.kept().values()))
            text = f"recompute is {self.twice.level}: to keep all activations would take {whole} of {_gib(budget)}"
        self.tell(text)

    def _fitted(self, step: int, *about: Any) -> Outcome:
        while True:
            try:
                return self.computes(step, *about)
            except torch.OutOfMemoryError as error:
                if self.memory.is_recording():
                    raise  # for who records: without that it may well fit
                higher = LEVELS[LEVELS.index(self.twice.level) + 1 :]
                if not self.may_repeat or not (higher or self.twice.keeps_more):
                    raise RunFailed(_too_large(self.memory.budget())) from error
            # Here, where the error no longer holds on to what the step has computed.
            self._forget()
            if self.twice.keeps_more:
                self._keep_less()
                if self.twice.measured is None:
                    self.tell(f"gated activations are not kept from step {step + 1} on, which did not fit into memory")
                continue
            self.twice.level = self._placed.chosen["recompute"] = higher[0]
            self.twice.settled(higher[0])
            self.tell(f"recompute is {higher[0]} from step {step + 1} on, which did not fit into memory")

    def _keep_less(self) -> None:
        for code in self.twice.code:
            code.keep_less()
        self._placed.chosen["ample"] = False
        if self.twice.measured is not None:
            self.twice.measured = Measured(self.memory.allocated)
            self.memory.begin()

    def _note(self, text: str | None) -> None:
        self._placed.notes += [text] if text is not None else []

    def _forget(self) -> None:
        for parameter in (*self._placed.model.parameters(), *(each.parameter for each in self._placed.shards)):
            parameter.grad = None
        self.memory.let_go()


def _too_large(budget: int) -> str:
    return (
        f"a step needs more than {_gib(budget)}: use a smaller --micro, fsdp (--layout), --states 8bit or "
        f"--update-in-backward"
    )


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"

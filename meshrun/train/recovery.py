"""Where a training goes on from: the nodes' memory, else the newest checkpoint that is whole.

    recovery = Recovery(trainer, keeping)
    recovery.find()                  # "memory", "a checkpoint", or None for a run that begins
    recovery.go_back(before=120)     # the weights of a checkpoint up to that step, into the running training

All ranks take the same state or none does: what is wrong with one is told to all before the next is tried.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from meshrun.errors import RunFailed, SharedError
from meshrun.state import catalog, exchange
from meshrun.state.checkpoint import BadCheckpoint, Checkpoint
from meshrun.state.manifest import Index
from meshrun.train.interval import Every
from meshrun.train.restore import check, refuse_other, restore, restore_model, wanted

if TYPE_CHECKING:
    from meshrun.train.loop import Trainer

Value = TypeVar("Value")


@dataclass(frozen=True)
class Keeping:
    """Where state goes and how often."""

    folder: Path
    memory: Path | None = None
    """In this node's memory: what is in there survives this process."""
    every: Every = field(default_factory=Every)
    keep: int = 2
    mtbf: float = 50_000.0
    """Hours between two failures of a rank."""
    generation: int = 0
    """How often the ranks of this run were started anew."""
    timeout: float = 600.0


class Recovery:
    """Finds and loads the state of one trainer."""

    def __init__(self, trainer: Trainer, keeping: Keeping) -> None:
        self.trainer, self.keeping = trainer, keeping
        self._half = ""
        """Why a state was given up of which some rank may have taken a part already."""

    def find(self) -> str | None:
        """Load the newest state that is whole; returns where it was."""
        if self._from_memory():
            return "memory"
        if self._from_disk():
            return "a checkpoint"
        if self._half:
            raise RunFailed(f"the state of this run could not be put together again: {self._half}")
        return None

    def _from_memory(self) -> bool:
        here, memory = self.trainer.here, self.keeping.memory
        if memory is None or self.keeping.generation == 0:
            return False
        offers = exchange.gather(here, memory)
        for indices in exchange.moments(offers, here):
            names = self._files_for(memory, indices)
            needed = here.gathered(names)
            if any(each is None for each in needed):
                continue
            exchange.bring(here, memory, offers, indices, needed)
            assert names is not None
            missing = exchange.missing(memory, [index for index in indices if index.name in names])
            if not self._first_wrong(missing) and self._restored(Checkpoint.of_indices(memory, indices)) is None:
                return True
        return False

    def _files_for(self, memory: Path, indices: Sequence[Index]) -> set[str] | None:
        """The files that have this rank's state; None if some of it is in none."""
        try:
            candidate = Checkpoint.of_indices(memory, indices)
            check(candidate)
        except BadCheckpoint:
            return None
        boxes = [box for box in wanted(self.trainer, candidate) if math.prod(box[2])]
        if not all(candidate.covers(*box) for box in boxes):
            return None
        return set().union(*(candidate.files_for(*box) for box in boxes))

    def _from_disk(self) -> bool:
        failures: list[tuple[Path, str]] = []
        for path in self._named():
            failure = self._load(path)
            if failure is None:
                # Only now: what kept the newer ones from being read may have been a disk that was away for a moment.
                if self.trainer.here.rank == 0:
                    for damaged, _ in failures:
                        catalog.set_aside(damaged)
                return True
            failures.append((path, failure))
            self.trainer.tell("note", text=f"{failure}; the one before it is tried")
        if failures:
            raise SharedError(
                f"no checkpoint in {self.keeping.folder} can be used: {failures[0][1]}; begin a new run, or move them "
                f"away to begin this one anew"
            )
        return False

    def _named(self) -> list[Path]:
        """All that is called a checkpoint, the newest first, as rank 0 sees it."""
        here, folder = self.trainer.here, self.keeping.folder
        found: list[Path] | str = []
        if here.rank == 0:
            try:
                found = list(reversed(catalog.named(folder)))
            except OSError as error:
                found = f"cannot read {folder}: {error.strerror}"
        found = here.from_rank_0(found)
        if isinstance(found, str):
            raise SharedError(found)
        return found

    def _load(self, path: Path) -> str | None:
        """Load a checkpoint on all ranks; what is wrong with it, if anything is."""
        checkpoint, wrong = self._tried(lambda: _opened(path))
        if checkpoint is None:
            return wrong
        refuse_other(self.trainer, checkpoint)
        return self._restored(checkpoint)

    def _restored(self, checkpoint: Checkpoint) -> str | None:
        _, wrong = self._tried(lambda: restore(self.trainer, checkpoint))
        checkpoint.close()
        self._half = wrong or ""
        return wrong

    def _tried(self, action: Callable[[], Value]) -> tuple[Value | None, str | None]:
        """What an action gives, if it goes well on all ranks; else what the first rank says on which it does not."""
        value, wrong = None, ""
        try:
            value = action()
        except BadCheckpoint as error:
            wrong = str(error)
        wrong = self._first_wrong(wrong)
        return (None, wrong) if wrong else (value, None)

    def _first_wrong(self, wrong: str) -> str:
        return next((each for each in self.trainer.here.gathered(wrong) if each), "")

    def go_back(self, before: int) -> int:
        """Load the newest checkpoint of a step up to `before` into the running training; returns its step."""
        for path in self._named():
            checkpoint, _ = self._tried(lambda path=path: _opened(path))  # type: ignore[misc]
            if checkpoint is not None and checkpoint.step <= before:
                _, wrong = self._tried(lambda found=checkpoint: restore_model(self.trainer, found))  # type: ignore[misc]
                if wrong is None:
                    return checkpoint.step
        raise RunFailed(f"there is no checkpoint of step {before} or before to go back to (--checkpoint)")


def _opened(path: Path) -> Checkpoint:
    checkpoint = Checkpoint.open(path)
    check(checkpoint)
    return checkpoint

"""Whole batches by sample numbers: what a reader does for each micro-batch.

    samples = Samples(dataset, collate=None, skip_bad=True)
    samples[Wanted([4, 7, 9], real=3, epoch=2)]     # Read(batch, ids=[4, 9], real=2, bad=((7, "…"),))

A dataset that has `batch_of` makes the batch itself, where no collate is given. Whatever goes wrong in a dataset gets
the sample's number. With `skip_bad`, samples that cannot be read are left out and told; the batch of a micro-batch
that has no other samples is filled with one that can be read and does not count, as ranks must stay in step.

A dataset may draw from Python's, NumPy's or torch's global generator. The first batch that does is read again, sample
by sample, and so are all batches after it: the generators are seeded by (seed, epoch, sample) before each `data[i]`,
and put back after the batch. A collate function that draws gets a seed of its batch, which depends on the mesh. The
generators are the whole process's: whoever reads this way must not do so in a thread beside a model that draws too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import Dataset, TensorDataset, default_collate
from torch.utils.data._utils.pin_memory import pin_memory

from meshrun.data import seeding
from meshrun.data.sending import unpacked
from meshrun.errors import BadSample, RunFailed, UserError, is_of_machine
from meshrun.experiment import MapDataset, sample_of

Collate = Callable[[list[Any]], Any]

TRIES = 1000
"""Samples that are tried to find one that can be read."""


@dataclass(frozen=True)
class Wanted:
    """A micro-batch: sample numbers, of which the first `real` count."""

    ids: list[int]
    real: int
    equal: bool = False
    """Whether it must have that many rows, also without bad samples."""
    epoch: int | None = None
    """The epoch of the training; None in evaluation."""


@dataclass(frozen=True)
class Effort:
    """What reading took: the time, and how much of it was computing."""

    seconds: float = 0.0
    busy: float = 0.0

    def __add__(self, other: Effort) -> Effort:
        return Effort(self.seconds + other.seconds, self.busy + other.busy)


NO_EFFORT = Effort()


@dataclass(frozen=True)
class Read:
    """What was read of a micro-batch."""

    batch: Any
    ids: list[int] | None = None
    """The samples in it where these are not the ones that were wanted."""
    real: int = 0
    bad: tuple[tuple[int, str], ...] = ()
    """Samples that were left out, and why."""
    error: tuple[BaseException, str] | None = None
    """Instead of a batch: what another process has met, and how it came to it."""
    effort: Effort = NO_EFFORT

    def pin_memory(self) -> Read:
        """torch calls this of what other processes have read."""
        return replace(self, batch=pin_memory(unpacked(self.batch)))

    def of(self, wanted: Wanted) -> Wanted:
        """The micro-batch that it has become."""
        return wanted if self.ids is None else replace(wanted, ids=self.ids, real=self.real)


class Samples(Dataset[Read]):
    """The user's dataset, a batch at a time."""

    def __init__(
        self, dataset: MapDataset, collate: Collate | None = None, skip_bad: bool = False, seed: int = 0
    ) -> None:
        self.dataset, self.skip_bad, self.seed = dataset, skip_bad, seed
        self._may_draw = may_draw(dataset, collate)
        self.draws = False
        """Whether a batch was seen to draw from a global generator."""
        self._collate = collate or default_collate
        self._whole: Callable[[list[int]], Any] | None = getattr(dataset, "batch_of", None) if collate is None else None
        self._many: Callable[[list[int]], list[Any]] | None = getattr(dataset, "__getitems__", None)

    def __getitem__(self, wanted: Wanted) -> Read:
        if not self._may_draw:  # a thread may read it, beside a model that draws
            return self._read(wanted)
        if not self.draws:
            before = seeding.snapshot()
            try:
                read = self._read(wanted)
            except Exception:
                if before.same(seeding.snapshot()):
                    raise
            else:
                if before.same(seeding.snapshot()):
                    return read
            before.restore()
            self.draws = True
        with seeding.put_back():
            return self._read(wanted)

    def _read(self, wanted: Wanted) -> Read:
        try:
            return Read(self._batch(wanted.ids, wanted.epoch))
        except Exception as error:
            if not (self.skip_bad and _can_be_skipped(error)):
                raise
            return self._without_bad(wanted, error)

    def _batch(self, ids: list[int], epoch: int | None) -> Any:
        if self.draws:
            return self._collated([self._one(number, epoch) for number in ids], ids, epoch)
        if self._whole is not None:
            batch = self._noted(self._whole, ids, epoch)
            refuse_lost_rows(batch, len(ids), f"batch_of of {type(self.dataset).__name__}")
            return batch
        if self._many is not None:
            samples = self._noted(self._many, ids, epoch)
            if not hasattr(samples, "__len__") or len(samples) != len(ids):
                found = len(samples) if hasattr(samples, "__len__") else type(samples).__name__
                raise UserError(
                    f"__getitems__ of {type(self.dataset).__name__} returned {found} for {len(ids)} samples; it must "
                    f"return a list with one for each"
                )
            return self._collated(samples, ids, epoch)
        return self._collated([self._one(number, epoch) for number in ids], ids, epoch)

    def _collated(self, samples: list[Any], ids: list[int], epoch: int | None) -> Any:
        if self.draws:
            seeding.seed_for(self.seed, epoch, ids)
        batch = self._collate(samples)
        if self._collate is not default_collate:
            refuse_lost_rows(batch, len(ids), "Experiment(collate=…)")
        return batch

    def _noted(self, read: Callable[[list[int]], Any], ids: list[int], epoch: int | None) -> Any:
        try:
            return read(ids)
        except BaseException as error:
            if not self.skip_bad and _can_be_skipped(error) and not isinstance(error, BadSample):
                for number in ids:  # one of them, which the user wants to know
                    self._one(number, epoch)
            error.add_note(f"while reading samples {', '.join(map(str, ids))}")
            raise

    def _one(self, number: int, epoch: int | None) -> Any:
        if self.draws:
            seeding.seed_for(self.seed, epoch, number)
        try:
            return sample_of(self.dataset, number)
        except BaseException as error:
            hint = "" if self.skip_bad or not _can_be_skipped(error) else " (--skip-bad-samples goes on without such)"
            error.add_note(f"while reading sample {number}{hint}")
            raise

    def _without_bad(self, wanted: Wanted, error: Exception) -> Read:
        """The micro-batch of what can be read, sample by sample."""
        found: dict[int, Any] = {}
        bad: dict[int, str] = {}
        for number in wanted.ids[: wanted.real]:
            sample, why = self._tried(number, wanted.epoch)
            if why is None:
                found[number] = sample
            else:
                bad[number] = why
        good = [number for number in wanted.ids[: wanted.real] if number in found]
        short = len(wanted.ids) - len(good) if wanted.equal else int(not good)
        if short and not good:
            filler, found[filler] = self._some(wanted.ids[-1], wanted.epoch)
        elif short:
            filler = good[-1]
        ids = good + [filler] * short if short else good
        if ids == wanted.ids:
            raise error  # each can be read, but not all of them together
        if self._whole is not None:
            batch = self._batch(ids, wanted.epoch)
        else:
            batch = self._collated([found[number] for number in ids], ids, wanted.epoch)
        return Read(batch, ids, len(good), tuple(bad.items()))

    def _tried(self, number: int, epoch: int | None) -> tuple[Any, str | None]:
        """A sample, or why there is none."""
        try:
            return self._one(number, epoch), None
        except Exception as error:
            if not _can_be_skipped(error):
                raise
            return None, _why(error)

    def _some(self, near: int, epoch: int | None) -> tuple[int, Any]:
        """The next sample that can be read."""
        why: str | None = None
        for number in range(near + 1, near + 1 + min(TRIES, len(self.dataset))):
            sample, why = self._tried(number % len(self.dataset), epoch)
            if why is None:
                return number % len(self.dataset), sample
        raise UserError(
            f"neither sample {near} nor any of the {min(TRIES, len(self.dataset))} after it can be read, the last one "
            f"because of: {why}; what --skip-bad-samples goes on without are single samples"
        )


def may_draw(dataset: MapDataset, collate: Collate | None) -> bool:
    """Whether reading runs code that may draw from a global generator; a class says that of itself alone."""
    kind = type(dataset)
    if collate is not None:
        return True
    if "draws" in vars(kind):
        return bool(getattr(dataset, "draws", True))
    return kind not in (TensorDataset, Tensor, list, tuple)


def refuse_lost_rows(batch: Any, samples: int, maker: str) -> None:
    """Refuse a batch that says by all its shapes that it has fewer samples than were read.

    Tensors of a batch may have other first dimensions than the samples: tokens that are packed, steps of time. But
    where all have the same number of rows, one of them a single value in each, and these are fewer than the samples,
    while no dimension of any is the number of samples, then some are lost.
    """
    shapes = [each.shape for each in tree_leaves(batch) if isinstance(each, Tensor)]
    rows = {shape[0] if shape else samples for shape in shapes}
    if len(shapes) < 2 or len(rows) != 1 or rows.pop() >= samples:
        return
    if min(map(len, shapes)) > 1 or any(samples in shape for shape in shapes):
        return
    raise UserError(
        f"{maker} made a batch of {shapes[0][0]} rows of {samples} samples; it must keep every sample, since each is "
        f"counted (raise an error where one cannot be read: --skip-bad-samples goes on without such)"
    )


def _can_be_skipped(error: BaseException) -> bool:
    """Whether an error is the sample's own: not the machine's, and none that every other sample would meet too."""
    if is_of_machine(error):  # other ranks of the mesh may have read it
        return False
    if isinstance(error, UserError):
        return isinstance(error, BadSample)
    return isinstance(error, Exception) and not isinstance(error, MemoryError | RunFailed)


def _why(error: Exception) -> str:
    """In one line."""
    text = str(error).strip()
    if isinstance(error, BadSample):
        return text
    return f"{type(error).__name__}: {(text.splitlines() or ['no message'])[0]}"

"""Why a training has waited for its data, and what would help: a sentence for its end.

    waited_for_data(trainer, cached=False)     # on all ranks: each one's share of the time; a note where it is large

    41 % of the time waited for data, on rank 3 of n7: it has 1 core, of 48 granted to the job on this node; …

While one rank waits for its data, all others wait for that rank: the share of the worst one is that of the training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshrun.data.samples import NO_EFFORT, Effort
from meshrun.world import cores, disks
from meshrun.world.disks import file_system_of, is_shared
from meshrun.world.environment import inherited

if TYPE_CHECKING:
    from meshrun.train.loop import Trainer
    from meshrun.train.totals import Update

WORTH_A_WORD = 0.10
"""Share of the time from which on waiting is spoken of."""
LEAST_WAITED = 0.2
"""And so many seconds: of less, nobody has felt anything."""
LEAST_SECONDS, LEAST_STEPS = 5.0, 50
"""Of a training that is shorter than both, nothing is known."""
IDLE = 0.5
"""Who computes less than that share of the time of reading waits for what it reads from."""
MANY_FILES = 1_000
MOST_READERS = 8
"""More than so many readers a rank are not advised: they would seldom find more to do."""
MOST_WAITING = 16
"""Nor more than so many that mostly wait."""
HDF5 = (".h5", ".hdf5", ".hdf", ".he5")


@dataclass
class Tally:
    """The steps of this process that tell whether data was waited for."""

    left_out: int
    """How many first ones do not: at those, readers are just beginning."""
    steps: int = 0
    seconds: float = 0.0
    waited: float = 0.0
    effort: Effort = NO_EFFORT

    def add(self, update: Update) -> None:
        if self.left_out:
            self.left_out -= 1
            return
        self.steps += 1
        self.seconds += update.seconds
        self.waited += update.data_wait
        self.effort += update.effort

    def wait(self, rank: int, host: str, workers: int, cores: frozenset[int]) -> Wait:
        busy = self.effort.busy / self.effort.seconds if self.effort.seconds else 1.0
        return Wait(rank, host, self.seconds, self.waited, workers, cores, self.steps, busy)


@dataclass(frozen=True)
class Wait:
    """How long one rank waited for data, and what it has to read with."""

    rank: int
    host: str
    seconds: float
    """Of all steps that were timed."""
    waited: float
    workers: int
    cores: frozenset[int]
    steps: int = LEAST_STEPS
    busy: float = 1.0
    """Share of the time of reading that was computing."""

    @property
    def share(self) -> float:
        return self.waited / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class Facts:
    """What is known of the data and of the node beside that."""

    granted: int | None = None
    """Cores of the node that the job was granted, where somebody says so."""
    mended: str = ""
    """How this launcher is told to hand on all of them."""
    path: str = ""
    """The file or folder that is read; nothing where that is not known."""
    files: int = 0
    """How many files a folder has; 0 for a single file."""
    file_system: str = ""
    cached: bool = False
    shuffle: str = "full"


def waited_for_data(trainer: Trainer, cached: bool) -> dict[str, Any]:
    """The share of the time that data was waited for, by rank and by the worst of them, and a word to the user."""
    here, totals = trainer.here, trainer.totals
    own = trainer.tally.wait(here.rank, here.world.host, trainer.reading.workers, cores.granted())
    words = here.gathered((asdict(own), cores.granted_to_job(inherited(), here.world), cores.mended(here.world)))
    waits = [(Wait(**wait), *rest) for wait, *rest in words]
    shares = here.gathered(totals.data_wait / totals.seconds if totals.seconds else 0.0)
    worst, granted, mended = waits[shares.index(max(shares))]
    if here.rank == 0:
        facts = facts_of(trainer.experiment.train, trainer.experiment.shuffle, cached, granted, mended, disks.mounts())
        said = sentence(worst, [each for each, *_ in waits], facts, max(shares))
        if said is not None:
            trainer.tell("note", text=said)
    return {"data_wait": max(shares) if totals.seconds else None, "data_waits": shares}


def read_from(data: Any) -> tuple[Any, str | Path | None]:
    """The dataset that is inside of others, and the file or folder that it reads, where it shows one."""
    while not (hasattr(data, "path") or hasattr(data, "folder")) and hasattr(data, "dataset"):
        data = data.dataset
    found = getattr(data, "path", None) or getattr(data, "folder", None)
    return data, found if isinstance(found, str | Path) else None


def facts_of(data: Any, shuffle: str, cached: bool, granted: int | None, mended: str, mounts: str) -> Facts:
    """What a dataset shows of where its samples lie; what wraps another one shows that one's."""
    data, found = read_from(data)
    if found is None:
        return Facts(granted, mended, shuffle=shuffle, cached=cached)
    path = Path(found).absolute()
    files = getattr(data, "files", ()) if path.is_dir() else ()
    count = len(files) if hasattr(files, "__len__") else 0
    return Facts(granted, mended, str(found), count, file_system_of(str(path.resolve()), mounts), cached, shuffle)


def sentence(worst: Wait, waits: Sequence[Wait], facts: Facts, share: float) -> str | None:
    """What to tell the user, or None where waiting is not worth a word; `share` is that of the whole run."""
    if worst.share <= WORTH_A_WORD or worst.waited < LEAST_WAITED:
        return None
    if worst.seconds < LEAST_SECONDS and worst.steps < LEAST_STEPS:
        return None
    here = [each for each in waits if each.host == worst.host]
    on_node = len(frozenset[int]().union(*(each.cores for each in here)))
    # Some cores are left to the system at many sites; a rank without half of what is its due was bound by mistake.
    lost = facts.granted is not None and on_node < facts.granted and 2 * len(worst.cores) * len(here) <= facts.granted
    where = f", on rank {worst.rank} of {worst.host}" if len(waits) > 1 else ""
    cores = _cores(worst, facts.granted if lost else None)
    idle = worst.busy < IDLE
    advice = [*(_on_waiting(worst) if idle else _on_cores(worst, lost, facts.mended)), *_on_data(facts)]
    return (
        f"{100 * share:.3g} % of the time waited for data{where}: reading has {cores} and "
        f"{_readers(worst.workers)}{_at_what(worst) if idle else ''}; {', or '.join(advice)}"
    )


def _cores(worst: Wait, granted: int | None) -> str:
    count = f"{len(worst.cores)} core{'s' * (len(worst.cores) > 1)}"
    return count if granted is None else f"{count} ({granted} granted to the job on this node)"


def _readers(workers: int) -> str:
    if not workers:
        return "no process of its own"
    return f"{workers} reader process{'es' * (workers > 1)}"


def _at_what(worst: Wait) -> str:
    return f", and computes {100 * worst.busy:.0f} % of its time but waits for the rest"


def _on_waiting(worst: Wait) -> list[str]:
    more = min(MOST_WAITING, max(2, 2 * worst.workers))
    if worst.workers < more:
        return [f"let more processes wait at once (--workers {more})"]
    return ["what it reads from gives no more"]


def _on_cores(worst: Wait, lost: bool, mended: str) -> list[str]:
    readers = min(MOST_READERS, len(worst.cores) - 1)
    if lost and mended:
        return [mended]
    if worst.workers < readers:
        return [f"read beside the computing (--workers {readers})"]
    return ["give each rank more cores"]


def _on_data(facts: Facts) -> list[str]:
    found = []
    if facts.files >= MANY_FILES:
        found.append(f"make one file of its {facts.files:,} (meshrun convert-data {facts.path} FILE.h5)")
    elif facts.path and not facts.files and is_shared(facts.file_system) and not facts.cached:
        found.append(f"copy {facts.path}, which is on {facts.file_system}, to each node first (--cache auto)")
    if facts.path.endswith(HDF5) and facts.shuffle == "full":
        found.append("read it nearly from front to back (--shuffle window)")
    return found

"""The checkpoints of a run: which are complete, which is the newest, which may go.

    complete(run.checkpoints)             # [step-00000100, step-00000120], oldest first
    newest(run.checkpoints)
    set_aside(path)                       # a damaged one, out of the way and still there to look at
    prune(run.checkpoints, keep=2, best_step=100)

A folder called step-… was complete when it got that name. `step-00000120.1` is the same step, saved again later.
"""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from meshrun.errors import RunFailed, UserError
from meshrun.state.checkpoint import MANIFEST, BadCheckpoint, Checkpoint

PARTIAL = ".partial-"
_NAME = re.compile(r"step-(\d{8,})(?:\.(\d+))?")


def number(path: Path) -> tuple[int, int] | None:
    """Step of a checkpoint and how often that step had been saved before; None for any other folder."""
    match = _NAME.fullmatch(path.name)
    return (int(match[1]), int(match[2] or 0)) if match else None


def named(folder: Path) -> list[Path]:
    """All that is called a checkpoint, oldest first; an OSError for a folder that is there and cannot be read."""
    try:
        found = [(each, path) for path in folder.iterdir() if (each := number(path)) is not None]
    except FileNotFoundError:
        return []
    return [path for _, path in sorted(found)]


def complete(folder: Path) -> list[Path]:
    """Checkpoints whose manifest can be read, oldest first."""
    try:
        return [path for path in named(folder) if _opens(path)]
    except OSError:
        return []


def newest(folder: Path) -> Path | None:
    """The last complete checkpoint."""
    return next(reversed(complete(folder)), None)


def find(path: Path, step: int | None = None) -> Path:
    """The checkpoint that a user names: itself, or a run with several, of which the last is meant or that of a step."""
    if (number(path) is not None and path.exists()) or (path / MANIFEST).exists():
        return path
    if not path.is_dir():
        raise UserError(f"{path} does not exist; give a run directory or a checkpoint in one")
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    try:
        there = named(folder)
    except OSError as error:
        raise UserError(f"cannot read {folder}: {error.strerror}") from None
    found = [each for each in there if step is None or (number(each) or (None,))[0] == step]
    if not found:
        steps = ", ".join(str(each[0]) for each in map(number, there) if each)
        of = f" of step {step}" if step is not None else ""
        raise UserError(
            f"{path} has no checkpoint{of}; it has steps {steps} (--step)" if steps else f"{path} has no checkpoint yet"
        )
    return found[-1]


def best(path: Path) -> Path:
    """The checkpoint of the step that scored best, as the run's newest one has it."""
    last = find(path)
    score = Checkpoint.open(last).state.get("best")
    step = score.get("step") if isinstance(score, dict) else None
    if not isinstance(step, int):
        raise UserError(f"{path} has not been evaluated, so none of its checkpoints is the best; leave out --best")
    return find(last.parent, step)


def set_aside(path: Path) -> Path:
    """Rename a damaged checkpoint, so that nobody finds it again."""
    aside, copy = path.with_name(f".damaged-{path.name}"), 0
    while aside.exists():
        copy += 1
        aside = path.with_name(f".damaged-{path.name}.{copy}")
    return path.rename(aside)


def prune(folder: Path, keep: int, best_step: int | None) -> list[Path]:
    """Delete old checkpoints: all but the newest complete ones, of which one stays in any case, and the best one."""
    found = complete(folder)
    spared = set(found[-max(1, keep) :])
    best = [path for path in found if best_step is not None and (number(path) or (None,))[0] == best_step]
    spared.update(best[-1:])
    gone = [path for path in found if path not in spared]
    for path in gone:
        discard(path)
    return gone


@contextlib.contextmanager
def refusing_deleted(path: Path) -> Iterator[None]:
    """Says of a checkpoint that could not be read that its run has deleted it meanwhile, if that is so."""
    try:
        yield
    except BadCheckpoint:
        refuse_deleted(path)
        raise


def refuse_deleted(path: Path) -> None:
    """Refuse a checkpoint that was there, and is no more."""
    if not path.exists():
        raise RunFailed(
            f"{path} was deleted while it was read: its run goes on, and keeps the newest ones only (--keep); give the "
            f"command again"
        )


def discard(path: Path) -> None:
    """Delete a checkpoint, which from the first moment on is none: a half-deleted one must not look complete."""
    hidden = path.with_name(f"{PARTIAL}gone-{path.name}")
    shutil.rmtree(hidden, ignore_errors=True)
    path.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def remove_partial(folder: Path) -> None:
    """Delete all that never became a checkpoint, as far as the disk lets it be deleted."""
    for path in folder.glob(f"{PARTIAL}*"):
        shutil.rmtree(path, ignore_errors=True)


def free_name(folder: Path, step: int) -> Path:
    """Where the next checkpoint of a step goes."""
    path, copy = folder / f"step-{step:08d}", 0
    while path.exists():
        copy += 1
        path = folder / f"step-{step:08d}.{copy}"
    return path


def _opens(path: Path) -> bool:
    try:
        Checkpoint.open(path)
    except BadCheckpoint:
        return False
    return True

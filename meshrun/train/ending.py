"""When a training has to stop, and how it stops in time: by the clock, a signal or a file, under every launcher alike.

    with Signals() as signals:                           # SIGUSR2 from now on, SIGTERM once `heed` is called
        trainer.ending = ending = Ending(trainer, run, signals, deadline_of(config, os.environ, began))
        try:
            ending.begin(restarted=False)                # refuses to begin what has no time for a step
            trainer.train()
        except Stopped as stopped:
            ending.conclude(stopped)                     # a checkpoint of this step; {"step": 812, "why": …}

A rank that has a reason to stop adds 1 to a number which is summed with the step's loss, so all ranks know after the
same step that they are to stop; nobody polls. Rank 0 alone looks at the clock and for the file `RUN/stop`.

"In time" is what was measured here: the longest of the last steps, an evaluation if one comes next, twice the time of a
checkpoint, and some slack.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections import deque
from contextlib import nullcontext, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from meshrun.config import RunDirectory, remove
from meshrun.errors import RunFailed, SharedError
from meshrun.launch.words import word_of_the_launcher, writing
from meshrun.observe.failures import directory_gone
from meshrun.train.deadline import Deadline
from meshrun.train.loop import Stopped, Trainer

LOOK_EVERY = 1.0
"""Seconds between two looks for the stop file: it may lie on a disk that a thousand runs share."""
LOOKS_FOR_DELETED = 2
"""Looks in a row that find no run directory before the run ends: a file server may lose sight of one for a moment."""
ASK_AHEAD = 5.0
"""Seconds before the time to stop at which Slurm is asked whether that still holds: limits get extended."""
ANSWER_WITHIN = 2.0
"""Seconds that the beginning of a run waits for Slurm to say when its job ends; ranks started anew do not, unless it
seems to be over."""
RECENT = 16
"""Steps that are looked back at."""
TRIED_BYTES = 4 << 20


class Signals:
    """Notes who asks this rank to stop, instead of being ended by it."""

    def __init__(self) -> None:
        self.by: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        self._install(signal.SIGUSR2)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def heed(self) -> None:
        """SIGTERM too: before there is a state to keep, who sends it wants this process gone."""
        self._install(signal.SIGTERM)

    def _install(self, number: int) -> None:
        if threading.current_thread() is threading.main_thread():  # Python lets no other thread do this
            self._before[number] = signal.signal(number, self._note)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.by = self.by or number


class Ending:
    """One rank's part in the end of its training."""

    def __init__(
        self,
        trainer: Trainer,
        run: RunDirectory,
        signals: Signals,
        deadline: Deadline | None,
        memory: Path | None = None,
        in_slurm: bool = False,
    ) -> None:
        """Of the `deadline` and the stop file rank 0 takes care; in `memory` a launcher of ours leaves its word."""
        self._trainer, self._run, self._signals = trainer, run, signals
        self._memory, self._in_slurm = memory, in_slurm
        self._looks = trainer.here.rank == 0
        keeper = trainer.keeper
        keeps = keeper is not None and not keeper.keeping.every.never
        # To stop early would gain nothing where nothing can be kept: it may still reach its end.
        self._deadline = deadline if self._looks and keeps else None
        self._why: str | None = None
        self._by = "clock"
        """Who wants that: clock, signal, slurm or user."""
        self._look_at = 0.0
        self._missing = 0
        """Looks in a row at which the run directory was not there."""
        self._asked_about = math.inf
        """The end that was asked about last, whether it still holds."""
        self._steps: deque[float] = deque([0.0], RECENT)
        self._evaluation: float | None = None
        self._guess = self._guessed_checkpoint() if self._deadline is not None else 0.0

    def begin(self, restarted: bool) -> None:
        """From now on this rank can be asked; refuses to begin where there is no time for a step.

        Ranks that were started anew have the steps of those before them, so they stop at once, to keep them.
        """
        self._signals.heed()
        deadline, needed = self._deadline, 0.0
        if deadline is not None:
            deadline.wait(0.0 if restarted else ANSWER_WITHIN)
            needed = self._needed(evaluates=False)
            if self._is_time(needed):
                deadline.ask()  # the job was told its end when it began
                deadline.wait(ANSWER_WITHIN)
                self._why = deadline.why if self._is_time(needed) else None
        here = self._trainer.here
        why, needed = here.from_rank_0((self._why, needed))
        if why is None:
            return
        if restarted:
            raise Stopped(f"rank {here.rank} on {here.world.host} stopped after step {self._trainer.step}")
        # Else every link of a chain would begin, get nowhere, and hand over to the next.
        raise SharedError(
            f"{why}, which is too short for a step and a checkpoint ({needed:.0f} s as far as is known); give it more "
            f"time (--deadline, or the job's time limit)"
        )

    def asked(self, evaluates: bool) -> float:
        """1 if this rank has a reason to stop, else 0; once a step, of which nothing is noticed."""
        if self._why is None:
            if self._signals.by is not None:
                self._why, self._by = f"it got {signal.Signals(self._signals.by).name}", "signal"
            elif self._looks:
                self._look(evaluates)
        return 0.0 if self._why is None else 1.0

    def stepped(self, seconds: float) -> None:
        self._steps.append(seconds)

    def evaluated(self, seconds: float) -> None:
        self._evaluation = seconds

    def _look(self, evaluates: bool) -> None:
        """On rank 0: is the file there, or the time come?"""
        now = time.monotonic()
        if now >= self._look_at:
            self._look_at = now + LOOK_EVERY
            self._refuse_deleted()
            if (by := self._run.asked_to_stop_by()) is not None:
                told = "Slurm has told the job that it is to end"
                self._why, self._by = told if by == "slurm" else f"{self._run.stop_file} was made", by
                return
            if self._deadline is not None:
                self._deadline.ask_while_unknown()
        deadline = self._deadline
        if deadline is None:
            return
        needed = self._needed(evaluates)
        if self._is_time(needed + ASK_AHEAD):
            if self._asked_about != deadline.end:
                self._asked_about = deadline.end
                deadline.ask()
            if self._is_time(needed):
                deadline.wait(ASK_AHEAD)  # where steps are long, it was asked just now
                self._why = deadline.why if self._is_time(needed) else None

    def _refuse_deleted(self) -> None:
        """End a run whose directory is gone: nothing of it could be kept."""
        try:
            (self._run.path / "config.json").stat()
            self._missing = 0
        # Of the folder it would say nothing: whoever writes a checkpoint makes it again.
        except (FileNotFoundError, NotADirectoryError):
            self._missing += 1
        except OSError:
            return
        if self._missing >= LOOKS_FOR_DELETED:
            raise RunFailed(directory_gone(self._run, f" (step {self._trainer.step})"))

    def _is_time(self, needed: float) -> bool:
        assert self._deadline is not None
        return time.time() + needed > self._deadline.end

    def _needed(self, evaluates: bool) -> float:
        """Seconds to the very end, if all ranks stop one step later than they could now."""
        assert self._deadline is not None and self._trainer.keeper is not None
        step, took = max(self._steps), self._trainer.keeper.took
        # The step that is being computed and the next one; on a GPU its numbers are seen another one later.
        steps = 3 if self._trainer.here.device.type == "cuda" else 2
        evaluation = self._time_of_evaluation(step) if evaluates else 0.0
        saving = max(self._guess, self._deadline.unknown_checkpoint) if took is None else 2 * took
        return steps * step + evaluation + saving + self._deadline.slack

    def _time_of_evaluation(self, step: float) -> float:
        if self._evaluation is not None:
            return self._evaluation
        experiment = self._trainer.experiment
        # Until one was made: forward alone is quicker than a step, but who knows by how much.
        return step * sum(math.ceil(len(each) / experiment.batch) for each in experiment.evals.values())

    def _guessed_checkpoint(self) -> float:
        """Twice the time for this rank's weights and two moments, by the time that some bytes take."""
        assert self._trainer.keeper is not None
        shards = self._trainer.placed.shards
        size = 3 * sum(each.parameter.numel() * each.parameter.element_size() / each.copies for each in shards)
        rate = _bytes_a_second(self._trainer.keeper.keeping.folder)
        return 2 * size / rate

    def conclude(self, stopped: Stopped) -> dict[str, Any]:
        """All ranks have stopped after this step: keep it, and say why.

        Raises `stopped` again where a launcher of ours will start ranks anew, which is the reason or the consequence.
        """
        here = self._trainer.here
        memory, word = self._memory, None
        if memory is not None:
            word = word_of_the_launcher(memory, here.world.attempt)
        if word is not None and word.dead:
            raise stopped  # who is gone cannot be asked
        said = here.gathered((self._why, self._by, self._signals.by, word.final if word is not None else None))
        finals = [final for *_, final in said if final is not None]
        strangers = [number for why, _, number, _ in said if why is not None]
        restarts = memory is not None and not self._in_slurm and set(strangers) == {signal.SIGTERM}
        if not any(finals) if finals else restarts:
            raise stopped
        assert self._trainer.keeper is not None
        with writing(memory, here.rank) if memory is not None else nullcontext():
            saved = self._trainer.keeper.save_last()
        if here.rank == 0:
            remove(self._run.stop_file)
        why, by = next((why, by) for why, by, *_ in said if why is not None)
        return {
            "step": self._trainer.step,
            "of": self._trainer.total_steps,
            "why": why,
            "by": by,
            "time": time.time(),
            "saved": saved,
        }


def begin_anew(run: RunDirectory, again: bool) -> None:
    """On rank 0, as early as can be: what was asked of the run before is no part of this start of it.

    `again` says that its launcher has only started ranks anew.
    """
    remove(run.stopped_file)
    if not again:
        remove(run.stop_file)


def _bytes_a_second(folder: Path) -> float:
    """How fast a little is written there, which is slower than much would be."""
    path = folder / f".tried-{os.getpid()}"
    began = time.perf_counter()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            file.write(bytes(TRIED_BYTES))
            file.flush()
            os.fsync(file.fileno())
        return TRIED_BYTES / (time.perf_counter() - began)
    except OSError:
        return math.inf  # the checkpoint itself will say what is wrong
    finally:
        with suppress(OSError):
            path.unlink(missing_ok=True)

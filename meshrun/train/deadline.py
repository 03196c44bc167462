"""When a run must be over: as the user says, or as Slurm says of its job, which may change its mind.

    began = start_of_run(world, ours=True)               # when the launcher was started, not this rank
    deadline = deadline_of(config, os.environ, began)    # None where nobody says so
    deadline.end, deadline.slack                         # in seconds since 1970, and how many to leave over
    deadline.ask(); deadline.wait(5.0)                   # limits get extended

Slurm is asked in a thread: where it is away, its commands wait for it for long, and the training does not.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from meshrun.config import RunConfig, seconds_in
from meshrun.world import World, slurm

Ask = Callable[[], float | None]

FIRST_PAUSE = 10.0
"""Seconds before an end that nobody knew is asked for again, and twice as many each time after that."""
UNKNOWN_CHECKPOINT = 10.0
"""Seconds that the last checkpoint is given at least as long as none was made."""
SLACK, SLACK_SHARE, MOST_SLACK = 5.0, 0.01, 60.0
"""Seconds, and the share of the whole time, that are left over."""
SHORT = 4, 10
"""Of a short time the unknown checkpoint gets at most a 4th and the slack a 10th: trying out takes seconds."""


class Deadline:
    """When all must be over, in seconds since 1970; never, as long as nobody says so."""

    def __init__(
        self, began: float, end: float = math.inf, what: str = "the deadline is", ask: Ask | None = None
    ) -> None:
        """`ask` says when the end is, or None; it may take long, so it is asked beside the training."""
        self.began, self.end, self._what, self._ask = began, end, what, ask
        self._asking: threading.Thread | None = None
        self._pause, self._again_at = FIRST_PAUSE, 0.0

    @property
    def limit(self) -> float:
        """How long all of it is, in seconds."""
        return max(0.0, self.end - self.began)

    @property
    def slack(self) -> float:
        return min(SLACK + SLACK_SHARE * self.limit, MOST_SLACK, self.limit / SHORT[1])

    @property
    def unknown_checkpoint(self) -> float:
        return min(UNKNOWN_CHECKPOINT, self.limit / SHORT[0])

    @property
    def why(self) -> str:
        return f"{self._what} in {max(0.0, self.end - time.time()):.0f} s"

    def ask(self) -> None:
        """Ask whether the end is still the same; `wait` for the answer, or see it later."""
        if self._ask is not None and (self._asking is None or not self._asking.is_alive()):
            self._asking = threading.Thread(target=self._learn, args=(self._ask,), name="deadline", daemon=True)
            self._asking.start()

    def ask_while_unknown(self) -> None:
        """Ask now and then: Slurm may have been away, or there is no end."""
        if math.isinf(self.end) and time.monotonic() >= self._again_at:
            self._again_at, self._pause = time.monotonic() + self._pause, 2 * self._pause
            self.ask()

    def wait(self, seconds: float) -> None:
        if self._asking is not None:
            self._asking.join(seconds)

    def _learn(self, ask: Ask) -> None:
        if (end := ask()) is not None:
            self.end = end


def deadline_of(config: RunConfig, env: Mapping[str, str], began: float) -> Deadline | None:
    """When a run that began then must be over, if anybody says so."""
    if config.deadline == "auto":
        if not slurm.in_job(env):
            return None
        end = slurm.told_end_of_job(env)
        made = Deadline(began, math.inf if end is None else end, "the job ends", lambda: slurm.end_of_job(env))
        made.ask_while_unknown()
        return made
    limit = seconds_in(config.deadline)
    return Deadline(began, began + limit) if limit is not None else None


def start_of_run(world: World, ours: bool) -> float:
    """When this start of the run began, in seconds since 1970, which is when who has started this rank was started."""
    # Where torchrun's variables were exported by hand, that is a shell, which may be old.
    launched = world.agent_store or world.source not in ("torchrun", "none")
    try:
        found = _stat(os.getppid() if launched else os.getpid())
        if ours:  # through a process that it replaces when that is lost
            found = _stat(int(found[1]))
    except OSError:  # in a container of its own it does not see who has started it
        return time.time()
    ticks = int(found[19])
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")


def _stat(pid: int) -> list[str]:
    """What Linux says of a process, from its state on; its name, which comes before that, may have spaces."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()

"""The words that launchers, ranks and whoever starts them share: what to start, where, and how it ended.

job = Job(["-m", "meshrun", "rank", "runs/digits-1", PARENT], ranks=2, restarts=3)
Failure(rank=1, code=-9, time=0.0).how          # "was killed by SIGKILL"
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from meshrun.errors import UserError

WORTH_A_RESTART = 75
"""Exit status of a rank that lost another one, its device, or its connections, and of a run that was cut off: it would
go well another time."""

PARENT = "{parent}"
"""Stands in a job's words for the number of the process that starts the rank."""


@dataclass(frozen=True)
class Job:
    """A Python command line to be started on several ranks; `port` 0 takes a free one."""

    argv: Sequence[str]
    ranks: int
    port: int = 0
    target: str | None = None
    """The training whose imports are made once for all ranks."""
    memory: Path | None = None
    """The folder in this node's memory in which ranks leave what has to survive them."""
    restarts: int = 0
    """How often in a row, without progress between, lost ranks are replaced."""
    saving: float = 30.0
    """Seconds that ranks which end with nobody lost may take to finish what they are at and to keep their state."""


@dataclass(frozen=True)
class Failure:
    """A rank that did not end well; `code` is its exit status, or minus the signal that killed it."""

    rank: int
    code: int
    time: float

    @property
    def is_lost(self) -> bool:
        """Whether it was lost, and not ended by an error of the program or of the user."""
        return self.code < 0 or self.code == WORTH_A_RESTART

    @property
    def how(self) -> str:
        if self.code < 0:
            with contextlib.suppress(ValueError):
                return f"was killed by {signal.Signals(-self.code).name}"
        return f"ended with exit status {self.code}"


class Interrupted(Exception):
    """The launcher was told to stop, and has ended all ranks."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


@dataclass(frozen=True)
class Verdict:
    """What somebody who watches the ranks has found, and what is to be done about it."""

    rank: int
    sentence: str
    action: Literal["restart", "end", "report"]


class Watch(Protocol):
    """Whoever watches the ranks of this node while they run."""

    def started(self, pids: dict[int, int], generation: int) -> None:
        """The processes of this node's ranks, by rank; the first generation is 0."""

    def look(self) -> Verdict | None:
        """Called every tenth of a second."""

    def progress(self) -> int:
        """The highest step that was finished."""

    def patience(self) -> float:
        """Seconds that a step takes, at most, as far as is known."""

    def takes_long(self) -> bool:
        """Whether a rank is well, and at something that may take much longer than a step."""


class Unwatched:
    """Nobody looks at the ranks, and none of them tells of progress."""

    def started(self, pids: dict[int, int], generation: int) -> None:
        pass

    def look(self) -> Verdict | None:
        return None

    def progress(self) -> int:
        return 0

    def patience(self) -> float:
        return 0.0

    def takes_long(self) -> bool:
        return False


Tell = Callable[..., Any]
"""`tell(kind, **fields)`: what the launcher has to say, as an event."""


@dataclass(frozen=True)
class Seat:
    """Where the ranks of one node sit among all, and where all of them meet."""

    job: str
    """What tells this launch from all others."""
    generation: int
    node: int
    nodes: int
    first: int
    size: int
    address: str
    port: int


def port_refused(port: int, error: OSError) -> UserError:
    """A sentence for a port that somebody else has."""
    why = os.strerror(error.errno or 0)  # strerror of the error itself may name the address as well
    return UserError(f"port {port} cannot be used on this machine: {why}; leave --port away to get a free one")


def silent(kind: str, **fields: Any) -> None:
    """A `Tell` for whoever does not want to know."""

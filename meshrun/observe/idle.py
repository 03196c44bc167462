"""Whether a process is idle, seen from outside: it uses no processor, and reads and writes nothing.

    activity = Activity()
    activity.seen(pid)       # asked now and then: whether the process, or one that it has started, did something since
    activity.forget(pid)     # what it has done since then does not count

For programs of which nobody knows what a step is. A process that waits for others in a collective is idle; one that
computes, reads data, prints, or is ready to run on a busy machine is not.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path

from meshrun.observe import stacks

SHARE = 0.02
"""Of a processor: threads that only wake up to look, such as gloo's and the heartbeat's, use a tenth of it."""
_TICK = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Effort:
    """What a process has done so far."""

    cpu: float
    bytes: int

    @classmethod
    def of(cls, pid: int) -> Effort:
        cpu, moved = 0.0, 0
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            cpu = sum(map(int, fields[11:15])) / _TICK  # user and system time, also of children that have ended
        with contextlib.suppress(OSError, ValueError, IndexError):
            lines = Path(f"/proc/{pid}/io").read_text().splitlines()
            moved = sum(int(line.split()[1]) for line in lines if line.startswith(("rchar", "wchar")))
        return cls(cpu, moved)

    def __add__(self, other: Effort) -> Effort:
        return Effort(self.cpu + other.cpu, self.bytes + other.bytes)

    def differs(self, before: Effort, seconds: float) -> bool:
        """Whether this is more than an idle process does in so many seconds."""
        return self.bytes != before.bytes or abs(self.cpu - before.cpu) > SHARE * seconds + 1 / _TICK


NOTHING = Effort(0.0, 0)


class Activity:
    """Looks at processes now and then, and compares what they have done by then."""

    def __init__(self) -> None:
        self._before: dict[int, tuple[float, Effort, Effort]] = {}
        """When a process was last looked at, and what it and what its children had done by then."""
        self._ready: set[int] = set()
        """Processes that were ready to run when they were last looked at."""

    def seen(self, pid: int) -> bool:
        """Whether a process has done anything since it was last asked about; one that is new has."""
        now, own = time.monotonic(), Effort.of(pid)
        at, before, of_children = self._before.get(pid, (now, None, NOTHING))
        # A thread that only wakes up to look is ready for a moment; a computation that gets no core is at every look.
        ready, was_ready = _is_ready(pid), pid in self._ready
        self._ready = self._ready | {pid} if ready else self._ready - {pid}
        if before is None or own.differs(before, now - at) or (ready and was_ready):
            # Children are looked for among all processes of the machine, which is left out for those that are busy.
            self._before[pid] = now, own, of_children
            return True
        self.forget(pid)
        return self._before[pid][2].differs(of_children, now - at)

    def forget(self, pid: int) -> None:
        """Compare with what it has done by now from now on."""
        children = sum(map(Effort.of, stacks.children_of(pid)), NOTHING)
        self._before[pid] = time.monotonic(), Effort.of(pid), children


def _is_ready(pid: int) -> bool:
    """Whether a thread runs, or would if there were a core for it."""
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            if (task / "stat").read_text().rpartition(")")[2].split()[0] == "R":
                return True
    return False

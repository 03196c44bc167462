"""The ranks of this node, seen from its launcher: started through the nursery, told to stop, and ended if they do not.

    with Nursery("digits") as nursery:
        ranks = Ranks(job, nursery)
        ranks.begin(seat)
        for what in ranks.poll(): …          # Ended, and Gone once none of them is left
        ranks.stop(Stop(dead=(1,)))

No call waits: `poll` does what is due, and `fds` are what to wait on in between.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass

from meshrun.config import use_reserve, write_json
from meshrun.launch.job import Job, Seat
from meshrun.launch.nursery import FORKABLE
from meshrun.launch.parting import dead_file
from meshrun.launch.wire import Document, Wire, readable
from meshrun.world.environment import inherited, of_nursery, of_rank, python_for

GRACE = 2.0
"""The least seconds from the signal that should end a rank to the one that does."""
STEPS = 3
"""The same in steps, where these are long: ranks finish theirs, and one more to agree on where to stop."""
STEP = 120.0
"""The most, and what all ranks get where they are well and end at the next step."""
WORDS = 30.0
"""Further seconds for ranks that are still writing down their state; a job says how many where nobody is lost."""


@dataclass(frozen=True)
class Ended:
    """A rank is gone. `own` is false where it was this launcher's signal that ended it."""

    rank: int
    code: int
    own: bool


@dataclass(frozen=True)
class Gone:
    """No rank of this generation is left on the node."""

    generation: int


@dataclass(frozen=True)
class Stop:
    """All ranks are to end."""

    dead: tuple[int, ...] = ()
    """Ranks that are gone, or are to be killed at once since they hang."""
    patient: bool = False
    """Whether they may finish their step: nobody is lost."""
    final: bool = False
    """Whether nothing is started after them."""
    hurried: bool = False
    """Whether nobody needs what they hold, since the program itself has failed."""

    @property
    def unhurried(self) -> bool:
        """Whether all are well and are to end in good order, which may take its time."""
        return (self.patient or self.final) and not self.dead and not self.hurried

    def after(self, before: Stop) -> Stop:
        """Both: what is said later only adds to what was said before, and may make it more urgent."""
        return Stop(
            (*before.dead, *self.dead),
            before.patient and self.patient,
            before.final or self.final,
            before.hurried or self.hurried,
        )


class Nursery:
    """The launcher's handle on the process that ranks are forked from; one that has died is replaced when needed."""

    def __init__(self, target: str | None, warm: bool = True) -> None:
        self._words = [target] if warm and target else []
        self._warm = warm
        _allow_many_files()
        self._start()

    def __enter__(self) -> Nursery:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        fd = str(theirs.fileno())
        words = ["nursery" if self._warm else "cold-nursery", fd, str(os.getpid()), *self._words]
        # A session of its own: CTRL-C is for the launcher, which then decides. Standard output is for the result.
        self.process = subprocess.Popen(
            python_for([*FORKABLE, *words]),
            env=of_nursery(),
            stdin=subprocess.DEVNULL,
            stdout=2,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()
        self.wire = Wire(ours)

    def start(self, request: Document) -> None:
        if self.wire.closed or self.process.poll() is not None:
            self.close()
            self._start()
        self.wire.send(request)

    def ended(self) -> int:
        """How it ended: its exit status, or minus a signal."""
        self.wire.close()
        try:
            return self.process.wait(GRACE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()

    def close(self) -> None:
        """End it, and with it every rank that it has started."""
        self.wire.close()
        self.process.kill()
        self.process.wait()


@dataclass
class _Process:
    pid: int
    pidfd: int
    signalled: int = 0
    """The last signal that this launcher sent to end it."""


class Ranks:
    """Ranks of one generation after the other."""

    def __init__(self, job: Job, nursery: Nursery, takes_long: Callable[[], bool] = lambda: False) -> None:
        """`takes_long`: whether ranks are at something that may take much longer than a step, such as an evaluation."""
        self._job, self._nursery, self._takes_long = job, nursery, takes_long
        self._seat: Seat | None = None
        self._alive: dict[int, _Process] = {}
        self._expected: set[int] = set()
        """Ranks that the nursery was asked for and has not started yet."""
        self._stop: Stop | None = None
        self._stopped_at = self._well_at = self.grace = 0.0
        self._dead: set[int] = set()

    @property
    def fds(self) -> list[int]:
        if self._seat is None or self._nursery.wire.closed:
            return []
        return [self._nursery.wire.fileno()]

    @property
    def count(self) -> int:
        """How many ranks of a generation are on this node."""
        return self._job.ranks

    @property
    def pids(self) -> dict[int, int]:
        return {rank: each.pid for rank, each in self._alive.items()}

    @property
    def running(self) -> bool:
        """Whether all have been started and none was told to stop."""
        return self._seat is not None and not self._expected and self._stop is None

    @property
    def busy(self) -> bool:
        """Whether there are any, or will be."""
        return self._seat is not None

    def begin(self, seat: Seat) -> None:
        """Start the ranks of a new generation; those before are gone."""
        self._seat, self._stop, self._dead = seat, None, set()
        count = self._job.ranks
        places = {
            seat.first + local: of_rank(
                seat.first + local,
                seat.size,
                (local, count),
                (seat.node, seat.nodes),
                (seat.address, seat.port),
                seat.generation,
                seat.job,
            )
            for local in range(count)
        }
        self._expected = set(places)
        self._nursery.start({"argv": list(self._job.argv), "environment": inherited(), "ranks": places})

    def stop(self, stop: Stop, step: float = 0.0) -> None:
        """Begin to end all ranks; what they hold is whole only between two steps, of which one takes `step` seconds."""
        if self._seat is None:  # the last of them went while it was being decided
            return
        before = self._stop
        self._stop = both = stop.after(before) if before is not None else stop
        self.grace = STEP if both.patient else GRACE if both.hurried else min(max(GRACE, STEPS * step), STEP)
        self._dead |= set(stop.dead)
        self._write_dead(both.final)
        if before is None:
            self._stopped_at = self._well_at = time.monotonic()
            for process in self._alive.values():
                self._signal(process, signal.SIGTERM)
        for rank in stop.dead:
            if rank in self._alive:
                self._signal(self._alive[rank], signal.SIGKILL)

    def poll(self) -> list[Ended | Gone]:
        """What has happened since the last call."""
        if self._seat is None:
            return []
        found: list[Ended | Gone] = []
        wire = self._nursery.wire
        while not wire.closed and readable([wire.fileno()], 0):
            for said in wire.receive():
                if "started" in said:
                    self._started({int(rank): pid for rank, pid in said["started"].items()})
                else:
                    found += self._ended(said["ended"], said["code"])
        if wire.closed:
            found += self._orphaned()
        if self._stop is not None:
            self._kill_the_late()
        if self._dead and any(isinstance(each, Ended) for each in found):
            self._write_dead(self._stop is not None and self._stop.final)
        if not self._alive and not self._expected:
            found.append(Gone(self._seat.generation))
            self._seat = None
        return found

    def close(self) -> None:
        """End at once what is left."""
        for process in self._alive.values():
            _kill_group(process.pid)
        if self._alive or self._expected:
            self._nursery.close()

    def _started(self, pids: dict[int, int]) -> None:
        for rank, pid in pids.items():
            try:
                process = _Process(pid, os.pidfd_open(pid))
            except ProcessLookupError:  # it has gone already, which is told next
                process = _Process(pid, -1)
            self._alive[rank] = process
            self._expected.discard(rank)
            if self._stop is not None:
                self._signal(process, signal.SIGTERM)

    def _ended(self, pid: int, code: int) -> list[Ended | Gone]:
        """A process that no rank is known for belongs to an earlier job of the same nursery."""
        for rank, process in self._alive.items():
            if process.pid == pid:
                return [self._lost(rank, code)]
        return []

    def _lost(self, rank: int, code: int) -> Ended:
        process = self._alive.pop(rank)
        if process.pidfd >= 0:
            os.close(process.pidfd)
        own = code >= 0 or -code != process.signalled
        if own and code < 0:
            self._dead.add(rank)
        return Ended(rank, code, own)

    def _orphaned(self) -> list[Ended | Gone]:
        """The nursery has died: the kernel ends its ranks, and how they ended is known without being told."""
        for process in self._alive.values():
            _kill_group(process.pid)
            if process.pidfd >= 0:
                readable([process.pidfd], GRACE)
        # One that could not even start will not do so another time.
        never = [Ended(rank, self._nursery.ended() or -signal.SIGKILL, own=True) for rank in self._expected]
        self._expected.clear()
        return [*never, *(self._lost(rank, -signal.SIGKILL) for rank in list(self._alive))]

    def _kill_the_late(self) -> None:
        assert self._stop is not None
        now = time.monotonic()
        unhurried = self._stop.unhurried and not self._dead
        if unhurried and self._takes_long():
            self._well_at = now  # the steps that are waited for come after it
        words = max(WORDS, self._job.saving) if unhurried else WORDS
        is_late = now - self._well_at > self.grace and not self._are_writing()
        if is_late or now - self._stopped_at > self.grace + words:
            for process in self._alive.values():
                if process.signalled != signal.SIGKILL:
                    self._signal(process, signal.SIGKILL)
            if self._expected:
                self._nursery.close()

    def _are_writing(self) -> bool:
        """Whether a rank still writes down its state, which the next one will need."""
        memory = self._job.memory
        return memory is not None and any((memory / f"words-{rank}.busy").exists() for rank in self._alive)

    def _write_dead(self, final: bool) -> None:
        """Tell the ranks that are left who is gone, and whether anybody will come after them."""
        if self._job.memory is not None and self._seat is not None:
            path = dead_file(self._job.memory, self._seat.generation)
            use_reserve(self._job.memory)
            with contextlib.suppress(OSError):
                write_json(path, {"ranks": sorted(self._dead), "final": final})

    @staticmethod
    def _signal(process: _Process, number: int) -> None:
        process.signalled = number
        with contextlib.suppress(ProcessLookupError, OSError):
            signal.pidfd_send_signal(process.pidfd, number)


def _allow_many_files() -> None:
    """Raise the limit of open files of this launcher as far as it may: each rank of a run is a connection to it.

    Ranks inherit the limit and need it too, since gloo connects each of them to all others.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # in a sandbox that forbids it the limit stays as it is
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _kill_group(pid: int) -> None:
    """Kill a rank and what it has started."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)

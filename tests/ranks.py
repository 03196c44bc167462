"""Runs a test body on N local gloo ranks and says what went wrong on which of them.

    run_on_ranks(__file__, "body", n=3, kwargs={"folder": tmp_path}, timeout=20)

The ranks are forks of one warm process (`tests/nursery.py`), started at the first call and kept for the next. This
side imports no torch: it asks, waits, and turns the answer into nothing, a skip, or `RanksFailed`.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
NURSERY_START_S = 60.0
LATE_S = 45.0  # what the nursery needs beyond the time limit: the import of a test file, stacks, ends of processes


class RanksFailed(Exception):
    """The body failed on some rank; the text names the rank and shows its traceback, or the stacks of a hang."""


class NotConnected(Exception):
    """Ranks did not find together, before any of them has begun with the body."""


@dataclass(frozen=True)
class Request:
    """What the nursery needs to run one body; the arguments stay pickled until they are on their rank."""

    path: str
    qualname: str
    n: int
    kwargs: bytes
    timeout: float
    environ: dict[str, str]
    cwd: str


@dataclass(frozen=True)
class Outcome:
    """How one rank ended. `at` is the monotonic clock, which all processes of a machine share."""

    rank: int
    status: str  # ok, skipped, xfailed, error, died, running (it had to be killed)
    summary: str = ""
    traceback: str = ""
    at: float = 0.0
    output: str = ""
    stacks: str = ""


@dataclass(frozen=True)
class Reply:
    """All ranks' ends; `refused` is the traceback if the test file could not even be imported."""

    outcomes: tuple[Outcome, ...] = ()
    timed_out: bool = False
    refused: str = ""


class Nursery:
    """The parent's handle on the warm process: one request at a time, one reply each."""

    def __init__(self) -> None:
        self.pipe, theirs = multiprocessing.Pipe()
        fd = theirs.fileno()
        # A session of its own: Ctrl-C reaches pytest alone, which then closes the pipe, which ends the nursery.
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-m", "tests.nursery", str(fd), str(os.getpid())],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[fd],
            start_new_session=True,
        )
        theirs.close()
        self._receive(NURSERY_START_S)

    def ask(self, request: Request) -> Reply:
        self.pipe.send_bytes(pickle.dumps(request))
        return self._receive(request.timeout + LATE_S)

    def _receive(self, seconds: float) -> Any:
        """Anything but an answer, be it Ctrl-C or pytest-timeout, leaves ranks at work: the nursery ends with them."""
        try:
            if not self.pipe.poll(seconds):
                raise RanksFailed(f"the nursery (process {self.process.pid}) gave no answer for {seconds:.0f} s")
            return pickle.loads(self.pipe.recv_bytes())
        except (EOFError, ConnectionError):
            self.close()
            raise RanksFailed(f"the nursery ended by itself with status {self.process.returncode}") from None
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self.pipe.close()
        try:
            self.process.wait(timeout=3)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


_nursery: Nursery | None = None


def run_on_ranks(path: str, qualname: str, n: int, kwargs: Mapping[str, Any], timeout: float) -> None:
    """Calls `qualname` of the file `path` with `kwargs` on every rank of a fresh gloo group of `n` ranks."""
    global _nursery
    arguments = _pickled(kwargs)
    if _nursery is None or _nursery.pipe.closed or _nursery.process.poll() is not None:
        stop()
        _nursery = Nursery()
    request = Request(str(path), qualname, n, arguments, timeout, dict(os.environ), str(Path.cwd()))
    reply = _nursery.ask(request)
    if any(each.summary.startswith(NotConnected.__name__) for each in reply.outcomes):
        # gloo takes whoever knocks at its port for a rank, and many tests beside this one open and close ports.
        reply = _nursery.ask(request)
    for outcome in reply.outcomes:
        if outcome.output:
            print(f"[output of rank {outcome.rank}]\n{outcome.output}")
    judge(reply, timeout)


def stop() -> None:
    """Ends the nursery, if there is one, and every rank with it."""
    global _nursery
    if _nursery is not None:
        _nursery.close()
    _nursery = None


def judge(reply: Reply, timeout: float) -> None:
    """Returns if all ranks are ok. Else the earliest bad end decides: the others follow from it."""
    if reply.refused:
        raise RanksFailed(f"the test file does not import in the nursery\n{reply.refused}")
    if reply.timed_out:
        raise RanksFailed(describe_hang(reply.outcomes, timeout))
    ended = [o for o in reply.outcomes if o.status not in ("ok", "running")]
    if not ended:
        return
    first = min(ended, key=lambda o: (lost_a_peer(o), o.at))
    if first.status == "skipped":
        pytest.skip(f"rank {first.rank}: {first.summary}")
    if first.status == "xfailed":
        pytest.xfail(f"rank {first.rank}: {first.summary}")
    raise RanksFailed(describe_failure(first, reply.outcomes))


def lost_a_peer(outcome: Outcome) -> bool:
    """Whether an error only says that another rank went away; it can be seen before that rank counts as dead."""
    return any(
        sign in outcome.traceback for sign in ("by peer", "Broken pipe", "connectFullMesh", "Connection refused")
    )


def describe_failure(first: Outcome, outcomes: Sequence[Outcome]) -> str:
    verb = "died" if first.status == "died" else "failed first"
    lines = [f"rank {first.rank} of {len(outcomes)} {verb}: {first.summary}", first.traceback.rstrip()]
    if first.output:
        lines += [f"--- last output of rank {first.rank}", first.output]
    lines += ["--- other ranks", *(_line(o, first) for o in outcomes if o is not first)]
    return "\n".join(line for line in lines if line)


def describe_hang(outcomes: Sequence[Outcome], timeout: float) -> str:
    running = [o for o in outcomes if o.status == "running"]
    names = ", ".join(str(o.rank) for o in running)
    lines = [f"the time limit of {timeout:g} s struck; still running: {names} of {len(outcomes)} ranks"]
    for o in running:
        lines += [
            f"--- stacks of rank {o.rank}",
            o.stacks.rstrip() or "none: it is stopped, or handles SIGUSR1 itself",
        ]
        if o.output:
            lines += [f"--- last output of rank {o.rank}", o.output]
    return "\n".join([*lines, *(f"rank {o.rank}: had finished" for o in outcomes if o.status != "running")])


def _line(outcome: Outcome, first: Outcome) -> str:
    if outcome.status == "ok":
        return f"rank {outcome.rank}: ok"
    if outcome.status == "running":
        return f"rank {outcome.rank}: still running, killed"
    later = max(0.0, outcome.at - first.at)
    return f"rank {outcome.rank}: {outcome.status} {later:.2f} s later, {outcome.summary[:160]}"


def _pickled(kwargs: Mapping[str, Any]) -> bytes:
    with contextlib.suppress(Exception):
        return pickle.dumps(dict(kwargs))
    for name, value in kwargs.items():
        try:
            pickle.dumps(value)
        except Exception as error:
            raise RanksFailed(f"the argument {name!r} cannot travel to the ranks: {error}") from None
    raise RanksFailed("the arguments cannot travel to the ranks together")

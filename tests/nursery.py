"""The warm process whose forks are the ranks of a test: torch is imported once a session, not once a rank.

    python -m tests.nursery FD PARENT     # started by tests/ranks.py; FD is its end of a socket pair

For each request it forks n ranks, watches them, and answers how each of them ended. It does no autograd and touches
no CUDA itself, since forks of a process that did are broken. A rank that is done waits until all are, so that nobody
tears down connections which others still use. If a test file has a function `before_ranks`, it is called before they
are forked: for imports that only ranks need.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import pickle
import pkgutil
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch._dynamo  # the first optimizer of a process imports it, which takes 1.4 s: too much for every rank
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.tensor.parallel

import meshrun
from tests.rank_body import be_rank, load
from tests.ranks import Outcome, Reply, Request

GRACE_S = 1.5  # for the other ranks after one has failed
EXIT_S = 10.0  # for leaving the group after all bodies are done
STACKS_S = 1.0
PR_SET_PDEATHSIG = 1
LATER = ("meshrun.parallel.inductor",)
"""What takes seconds to import, and few tests need."""


@dataclass(frozen=True)
class Client:
    """Who asks. The nursery lives as long as this process and its end of the pipe."""

    pipe: Connection
    pidfd: int


@dataclass
class Rank:
    """A fork at work, seen from the nursery."""

    number: int
    pid: int
    pidfd: int
    pipe: Connection
    folder: Path
    outcome: Outcome | None = None
    gone: bool = False

    def receive(self) -> None:
        if self.outcome is None:
            with contextlib.suppress(EOFError, ConnectionError):
                self.outcome = pickle.loads(self.pipe.recv_bytes())

    def bury(self) -> None:
        """Called once the process has ended: an end without a word, or after an ok but before its time, is a death."""
        self.gone = True
        if self.pipe.poll():
            self.receive()
        end = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        assert end is not None
        if end.si_code == os.CLD_EXITED:
            how = f"exited with status {end.si_status}"
        else:
            how = f"killed by {signal.Signals(end.si_status).name}"
        clean = end.si_code == os.CLD_EXITED and end.si_status == 0
        if self.outcome is None:
            self.outcome = Outcome(self.number, "died", f"{how} inside the test", at=time.monotonic())
        elif self.outcome.status == "ok" and not clean:
            self.outcome = Outcome(self.number, "died", f"{how} after its part of the test", at=time.monotonic())

    def kill(self) -> None:
        """Ends the rank and what it started; its number is free for others only after this."""
        for kill in (os.kill, os.killpg):
            with contextlib.suppress(ProcessLookupError):
                kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self.pidfd)
        self.pipe.close()

    def final(self) -> Outcome:
        outcome = self.outcome or Outcome(self.number, "running", at=time.monotonic())
        text = (self.folder / "output").read_text(errors="replace")
        lines = [line for line in text.splitlines() if not line.startswith("[Gloo] Rank ")]
        return replace(outcome, output="\n".join(lines[-40:]), stacks=self.stacks())

    def stacks(self) -> str:
        return (self.folder / "stacks").read_text(errors="replace")


def serve(client: Client) -> None:
    """Answers requests until the client is gone."""
    warm_up()
    with contextlib.suppress(EOFError, ConnectionError):
        client.pipe.send_bytes(pickle.dumps("ready"))
        while client.pidfd not in wait([client.pipe, client.pidfd]):
            client.pipe.send_bytes(pickle.dumps(answer(pickle.loads(client.pipe.recv_bytes()), client)))


def warm_up() -> None:
    """Imports what tests use. A module that does not import is left to the test that needs it."""
    for module in pkgutil.walk_packages(meshrun.__path__, "meshrun.", onerror=lambda _: None):
        if not module.name.endswith("__main__") and module.name not in LATER:
            with contextlib.suppress(Exception, SystemExit):
                importlib.import_module(module.name)
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()


def answer(request: Request, client: Client) -> Reply:
    try:
        module = load(request.path)
        getattr(module, "before_ranks", lambda: None)()
    except (Exception, pytest.skip.Exception):
        return Reply(refused=traceback.format_exc())
    with tempfile.TemporaryDirectory(prefix="ranks-", ignore_cleanup_errors=True) as folder:
        ranks: list[Rank] = []
        try:
            for number in range(request.n):
                ranks.append(start(number, module, request, Path(folder), [client.pipe, *(r.pipe for r in ranks)]))
            timed_out = watch(ranks, client, request.timeout)
            return Reply(tuple(rank.final() for rank in ranks), timed_out)
        finally:
            for rank in ranks:
                rank.kill()


def watch(ranks: list[Rank], client: Client, timeout: float) -> bool:
    """Returns when every rank has ended or need not be waited for any longer: True if the time limit struck."""
    deadline = time.monotonic() + timeout
    failed = False
    while any(rank.outcome is None for rank in ranks) and (left := deadline - time.monotonic()) > 0:
        listen(ranks, client, left)
        ends = {rank.outcome.status for rank in ranks if rank.outcome}
        if ends & {"skipped", "xfailed"}:
            return False
        if ends - {"ok"} and not failed:
            failed, deadline = True, min(deadline, time.monotonic() + GRACE_S)
    if failed:
        return False
    if any(rank.outcome is None for rank in ranks):
        dump_stacks([rank for rank in ranks if rank.outcome is None])
        return True
    release(ranks, client)
    return False


def release(ranks: list[Rank], client: Client) -> None:
    """All bodies are done: lets the ranks leave their group, which can hang or crash as well."""
    for rank in ranks:
        with contextlib.suppress(ConnectionError):
            rank.pipe.send_bytes(b"leave")
    deadline = time.monotonic() + EXIT_S
    while (stuck := [rank for rank in ranks if not rank.gone]) and (left := deadline - time.monotonic()) > 0:
        listen(ranks, client, left)
    dump_stacks(stuck)
    for rank in stuck:
        why = f"did not leave the process group within {EXIT_S:g} s of the end of all bodies"
        rank.outcome = Outcome(rank.number, "error", why, rank.stacks(), time.monotonic())


def listen(ranks: list[Rank], client: Client, seconds: float) -> None:
    """Waits for a word or an end of any rank. Meanwhile the client has nothing to say but its end."""
    silent = [rank.pipe for rank in ranks if rank.outcome is None and not rank.gone]
    alive = [rank.pidfd for rank in ranks if not rank.gone]
    ready = wait([client.pipe, client.pidfd, *silent, *alive], seconds)
    if client.pipe in ready or client.pidfd in ready:
        raise EOFError
    for rank in ranks:
        if rank.pipe in ready:
            rank.receive()
        if rank.pidfd in ready:
            rank.bury()


def dump_stacks(ranks: list[Rank]) -> None:
    """Has every thread's stack written to the ranks' files, even where they hang inside of C."""
    if not ranks:
        return
    for rank in ranks:
        os.kill(rank.pid, signal.SIGUSR1)
    end = time.monotonic() + STACKS_S
    while time.monotonic() < end and not all((rank.folder / "stacks").stat().st_size for rank in ranks):
        time.sleep(0.02)
    time.sleep(0.1)


def start(number: int, module: ModuleType, request: Request, folder: Path, inherited: list[Connection]) -> Rank:
    ours, theirs = Pipe()
    home = folder / str(number)
    home.mkdir()
    for name in ("output", "stacks"):
        (home / name).touch()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            die_with(parent)
            for pipe in [ours, *inherited]:
                pipe.close()
            be_rank(number, module, request, home, theirs)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    theirs.close()
    return Rank(number, pid, os.pidfd_open(pid), ours, home)


def die_with(parent: int) -> None:
    """Asks the kernel to kill this process when its parent ends; that may have happened already."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


if __name__ == "__main__":
    with contextlib.suppress(ProcessLookupError):
        serve(Client(Connection(int(sys.argv[1])), os.pidfd_open(int(sys.argv[2]))))

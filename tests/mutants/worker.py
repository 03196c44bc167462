"""The warm process of a worker, whose forks run tests: it has imported torch and pytest, but nothing of meshrun.

process = spawn.Process(target=serve, args=(root, tree, log, pipe))
pipe.recv()                              # "ready"
pipe.send((tests, True, 180.0))          # up to the first that fails, within so many seconds
Ended(*pipe.recv())
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import multiprocessing
import multiprocessing.connection
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

WARM = (
    "numpy",
    "hypothesis",
    "rich.console",
    "typer",
    "safetensors.torch",
    "h5py",
    "PIL.Image",
    "torch",
    "torch._dynamo",
    "torch.utils.data",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
)


class Ended(NamedTuple):
    """How the tests of one fork ended: the ones that failed, how many passed; neither for a hang."""

    failed: tuple[str, ...] = ()
    passed: int = 0
    hung: bool = False


class Noting:
    """A plugin of pytest that notes what failed and counts what passed."""

    def __init__(self) -> None:
        self.failed: list[str] = []
        self.passed = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid)
        elif report.when == "call" and report.passed:
            self.passed += 1

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid)


def serve(root: Path, tree: Path, log: Path, pipe: Any) -> None:
    """A worker's warm process: for each list of tests, a fork that runs them and answers with an `Ended`."""
    os.chdir(tree)
    os.environ |= {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    sys.dont_write_bytecode = True
    sys.path = [str(tree), *(each for each in sys.path if each not in ("", str(root)))]
    for name in WARM:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    for name in [name for name in sys.modules if name.partition(".")[0] in ("meshrun", "tests")]:
        del sys.modules[name]
    gc.collect()
    gc.freeze()
    pipe.send("ready")
    while (asked := pipe.recv()) is not None:
        tests, first_only, limit = asked
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.setsid()
            os.close(reading)
            with log.open("w") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            ended = run_tests(tests, first_only)
            os.write(writing, json.dumps([ended.failed, ended.passed]).encode())
            os._exit(0)
        os.close(writing)
        pipe.send(tuple(heard(pid, reading, limit)))


def run_tests(tests: Sequence[str], first_only: bool) -> Ended:
    """In a fork: pytest in this process, and the nursery of its ranks as a fork that was made before anything ran."""
    started = NurseryAhead()
    noting = Noting()
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--no-header", "--hypothesis-profile=planted"]
    options += ["-x"] if first_only else []
    try:
        status = int(pytest.main([*options, *tests], plugins=[noting, started]))
    except BaseException as error:
        return Ended((f"pytest ended with {type(error).__name__}",))
    if status in (2, 3, 4, 5) and not noting.failed:
        noting.failed.append(f"pytest ended with status {status}")
    return Ended(tuple(noting.failed), noting.passed)


class NurseryAhead:
    """The process that forks ranks, itself a fork: what the suite else starts anew, which takes seconds of imports."""

    def __init__(self) -> None:
        ours, theirs = multiprocessing.Pipe()
        parent = os.getpid()
        self.pid, self.pipe = os.fork(), ours
        if self.pid == 0:
            os.setsid()
            ours.close()
            self._wait_and_serve(theirs, parent)
        theirs.close()

    def _wait_and_serve(self, pipe: Any, parent: int) -> None:
        try:
            watched = os.pidfd_open(parent)
            if pipe in multiprocessing.connection.wait([pipe, watched]):
                pipe.recv_bytes()
                nursery = importlib.import_module("tests.nursery")
                nursery.serve(nursery.Client(pipe, watched))
        finally:
            os._exit(0)

    def pytest_configure(self) -> None:
        """tests/ranks.py finds this process at its first request; one that ended is replaced as ever."""
        ranks = importlib.import_module("tests.ranks")
        start = ranks.Nursery.__init__

        def attach(nursery: Any) -> None:
            if self.pipe.closed:
                start(nursery)
                return
            nursery.pipe, nursery.process = self.pipe, Forked(self.pid)
            self.pipe.send_bytes(b"begin")
            nursery._receive(ranks.NURSERY_START_S)

        ranks.Nursery.__init__ = attach

    def pytest_unconfigure(self) -> None:
        self.pipe.close()


class Forked:
    """What tests/ranks.py asks of a process."""

    def __init__(self, pid: int) -> None:
        self.pid, self.returncode = pid, None

    def poll(self) -> int | None:
        with contextlib.suppress(ChildProcessError):
            if os.waitpid(self.pid, os.WNOHANG)[0]:
                self.returncode = 0
        return self.returncode

    def wait(self, timeout: float = 3.0) -> None:
        end = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("nursery", timeout)
            time.sleep(0.01)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


def heard(pid: int, reading: int, limit: float) -> Ended:
    """What a fork says; it is ended if it says nothing in time."""
    with open(reading, "rb") as answer:
        watch = threading.Timer(limit, lambda: os.killpg(pid, signal.SIGKILL))
        watch.start()
        text = answer.read()
        watch.cancel()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    if not text:
        return Ended(hung=True) if os.WIFSIGNALED(status) else Ended(("the tests' process ended without a word",))
    failed, passed = json.loads(text)
    return Ended(tuple(failed), passed)


if __name__ == "__main__":
    with contextlib.suppress(EOFError):
        root, tree, log = map(Path, sys.argv[2:])
        serve(root, tree, log, multiprocessing.connection.Connection(int(sys.argv[1])))

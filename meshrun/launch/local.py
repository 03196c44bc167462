"""Ranks on this machine, started by torch's own elastic agent as torchrun does.

    failures = launch(Job(argv=["-m", "meshrun", "rank", "runs/digits-1"], ranks=2))

The agent gives ranks their variables, ends all of them when one fails, and passes signals on. What is added here: no
rank outlives the grace time or the launcher, and nothing is printed. torch is imported only when a job is launched.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import socket
import sys
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from meshrun.errors import UserError

if TYPE_CHECKING:
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

GRACE = 2
"""Seconds from the signal that should end a rank to the one that does."""


@dataclass(frozen=True)
class Job:
    """A Python command line to be started on several ranks; `port` 0 takes a free one."""

    argv: Sequence[str]
    ranks: int
    port: int = 0


@dataclass(frozen=True)
class Failure:
    """A rank that did not end well; `code` is its exit status, or minus the signal that killed it."""

    rank: int
    code: int
    time: float

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


def launch(job: Job) -> list[Failure]:
    """Run the job to its end; returns the ranks that failed, first one first, and nothing if all went well."""
    if job.port:
        _refuse_used(job.port)
    from torch.distributed.elastic.multiprocessing import SignalException

    agent = _agent(job)
    # Its modules set their own levels when they are imported, so each has to be told.
    for name in logging.root.manager.loggerDict:
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        result = agent.run()
    except SignalException as stopped:
        raise Interrupted(stopped.sigval) from None
    finally:
        _end_groups(agent)
    failures = [Failure(rank, each.exitcode, each.timestamp) for rank, each in result.failures.items()]
    return sorted(failures, key=lambda failure: failure.time)


def die_with_launcher(launcher: int) -> None:
    """Called by a rank: have the kernel end it when the process that launched it is gone, however that went."""
    with contextlib.suppress(OSError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != launcher:  # it went while this process was still importing, and the kernel tells nobody
        os._exit(1)
    # A rank waits in collectives, where Python handles no signal: the default action ends it at once.
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _agent(job: Job) -> LocalElasticAgent:
    from torch.distributed.elastic.agent.server.api import WorkerGroup, WorkerSpec
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.rendezvous import RendezvousParameters, registry

    class Agent(LocalElasticAgent):
        """An agent that waits for GRACE, not for half a minute, before it kills."""

        def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
            started = super()._start_workers(worker_group)
            context = self._pcontext
            assert context is not None
            close = context.close
            context.close = lambda death_sig=None, timeout=0: close(death_sig, GRACE)  # type: ignore[method-assign]  # noqa: ARG005
            return started

    # Port 0: the agent's stores, this one and the one that ranks meet on, bind free ports before anybody is told of
    # them, so that none can be lost between the choosing and the binding.
    meeting = RendezvousParameters(
        backend="c10d",
        endpoint=f"127.0.0.1:{job.port}",
        run_id=uuid.uuid4().hex,
        min_nodes=1,
        max_nodes=1,
        local_addr="127.0.0.1",
        is_host=True,
    )
    spec = WorkerSpec(
        role="rank",
        local_world_size=job.ranks,
        entrypoint=sys.executable,
        args=tuple(job.argv),
        rdzv_handler=registry.get_rendezvous_handler(meeting),
        max_restarts=0,
        monitor_interval=0.1,
        local_addr="127.0.0.1",
    )
    return Agent(spec, DefaultLogsSpecs(os.devnull))


def _end_groups(agent: LocalElasticAgent) -> None:
    """Kill what is left of the ranks' process groups: readers of a rank that died without ending them."""
    context = agent._pcontext
    for pid in context.pids().values() if context is not None else ():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)


def _refuse_used(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise UserError(
                f"port {port} cannot be used on this machine: {error.strerror}; leave --port away to get a free one"
            ) from None

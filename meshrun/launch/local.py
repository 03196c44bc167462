"""Ranks started from here, watched, and started anew when some of them are lost.

    failures = launch(Job(argv=["-m", "meshrun", "rank", "runs/digits-1", PARENT], ranks=2, restarts=3))

Ranks are forks of a warm process (`nursery`), `ranks` starts and ends those of this node, `head` decides, and `nodes`
carries its orders to other machines. This process serves the store on which ranks meet (`store`), so that it outlives
them. No rank outlives the grace time or the launcher.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import replace

from meshrun.errors import CutOff, RunFailed, UserError
from meshrun.launch.head import Head, Member, Outcome, Wanted
from meshrun.launch.job import (
    PARENT,
    Failure,
    Interrupted,
    Job,
    Seat,
    Tell,
    Unwatched,
    Verdict,
    Watch,
    port_refused,
    silent,
)
from meshrun.launch.node import LOOK_EVERY, Node, Stopped
from meshrun.launch.nodes import Asked, Blind, Hub, Joined, Left, Said, Unfit
from meshrun.launch.nursery import FORKABLE
from meshrun.launch.ranks import Gone, Nursery
from meshrun.launch.wire import Beat, readable
from meshrun.store.server import LOOPBACK, Server

__all__ = ["PARENT", "Failure", "Interrupted", "Job", "Verdict", "Watch", "die_with_launcher", "launch"]

ME = "first"
"""This node among those of the run."""
ASK_EVERY = 1.0
"""Seconds between two questions whether it is still worth to wait for nodes."""

Lookout = Callable[[], str]
"""Says why a run that waits for nodes, without ranks who would see it, is to stop; nothing while it is not."""


def launch(
    job: Job,
    watch: Watch | None = None,
    tell: Tell = silent,
    nursery: Nursery | None = None,
    hub: Hub | None = None,
    wanted: Wanted | None = None,
    lookout: Lookout = lambda: "",
) -> list[Failure]:
    """Run the job to its end; returns the ranks that failed, first one first, and nothing if all went well.

    A nursery that is given stays; else one is started for this job. With a hub, other nodes take part, and `lookout` is
    asked while they are waited for.
    """
    with contextlib.ExitStack() as stack, Stopped() as stopped:
        store = stack.enter_context(_store(job.port if hub is None else 0))
        if nursery is None:
            nursery = stack.enter_context(Nursery(job.target, warm=list(job.argv[:2]) == FORKABLE))
        node = Node(job, nursery, watch or Unwatched())
        stack.callback(node.close)
        head = Head(job.restarts, wanted or Wanted(), tell)
        head.join(Member(ME, socket.gethostname(), job.ranks), time.monotonic())
        if hub is not None:
            stack.enter_context(Beat(hub.beat))
        outcome = _run(head, node, hub, store, stopped, tell, lookout)
    if stopped.by:
        raise Interrupted(stopped.by)
    if outcome.sentence:
        raise (UserError if outcome.by_user else CutOff if outcome.cut_off else RunFailed)(outcome.sentence)
    return list(outcome.failures)


def die_with_launcher(launcher: int) -> None:
    """Called by a rank: have the kernel end it when the process that started it is gone, however that went."""
    with contextlib.suppress(OSError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != launcher:  # it went while this process was still importing, and the kernel tells nobody
        os._exit(1)
    # A rank waits in collectives, where Python handles no signal: the default action ends it at once.
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _run(
    head: Head, node: Node, hub: Hub | None, store: Server, stopped: Stopped, tell: Tell, lookout: Lookout
) -> Outcome:
    """Carry facts to the head and its orders to the nodes, until the run is over."""
    ending = told = False
    asked = time.monotonic()
    while head.outcome is None and not stopped.at_once:
        readable([*node.fds, *(hub.fds if hub else ())], LOOK_EVERY)
        now = time.monotonic()
        for fact in node.news():
            if isinstance(fact, Gone):
                head.progress = max(head.progress, node.progress(), hub.progress if hub else 0)
            head.hear(ME, fact, now)
        for news in hub.news(now) if hub else ():
            match news:
                case Joined(member):
                    head.join(member, now)
                case Left(member_id):
                    head.leave(member_id, now)
                case Said(member_id, what):
                    head.hear(member_id, what, now)
                case Asked(number):
                    stopped.by = stopped.by or number  # one CTRL-C that reaches all nodes is no second one
                case Blind(host):
                    head.blind(host, now)
                case Unfit(host, why):
                    head.unfit(host, why)
        if stopped.by and not ending:
            ending = True
            head.end(Outcome(sentence=f"the run was stopped by {signal.Signals(stopped.by).name}"))
        if hub and head.is_waiting and now - asked > ASK_EVERY:
            asked = now
            if why := lookout():
                head.end(Outcome(sentence=f"the run stopped while it waited for nodes, since {why}", cut_off=True))
        head.tick(now)
        _pass_on(head, node, hub, store)
        if ending and not told:
            told = True
            if node.waits:
                tell("note", text=node.waits)
    outcome = head.outcome or Outcome()
    if hub:
        hub.finish(outcome)
    return outcome


def _pass_on(head: Head, node: Node, hub: Hub | None, store: Server) -> None:
    orders, head.orders = head.orders, []
    for member, order in orders:
        if member != ME:
            assert hub is not None
            hub.order(member, order, store)
        elif isinstance(order, Seat):
            node.begin(replace(order, address=LOOPBACK, port=store.port))
        else:
            node.stop(order)


def _store(port: int) -> Server:
    """The store that ranks meet on; a port that was not given is bound before anybody is told of it."""
    try:
        return Server(port)
    except OSError as error:
        raise port_refused(port, error) from None

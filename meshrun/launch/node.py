"""One node of a run: its ranks, whoever watches them, and the signals that ask its launcher to stop.

node = Node(job, nursery, watch)
node.begin(seat)
while …:
    readable(node.fds, LOOK_EVERY)
    for fact in node.news(): …           # Ended, Gone, Verdict
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import FrameType
from typing import Any

from meshrun.launch.job import Job, Seat, Verdict, Watch
from meshrun.launch.ranks import GRACE, Ended, Gone, Nursery, Ranks, Stop
from meshrun.store.relay import Relay
from meshrun.store.server import LOOPBACK

LOOK_EVERY = 0.1
"""Seconds between two looks at the ranks."""


class Stopped:
    """Notes the signals that ask for the end of a run, instead of being ended by them."""

    ASKING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR2)

    def __init__(self) -> None:
        self.by = 0
        self.at_once = False
        """CTRL-C was pressed again."""
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Stopped:
        if threading.current_thread() is threading.main_thread():  # Python lets no other thread do this
            # Who ignores a signal was told to: by nohup, or by a shell that started it in the background.
            heeded = [number for number in self.ASKING if signal.getsignal(number) is not signal.SIG_IGN]
            self._before = {number: signal.signal(number, self.note) for number in heeded}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def note(self, number: int, _frame: FrameType | None = None) -> None:
        self.at_once = bool(self.by) and number == signal.SIGINT
        self.by = self.by or number


class Node:
    """The ranks of this node and whoever watches them."""

    def __init__(self, job: Job, nursery: Nursery, watch: Watch, secret: Callable[[], bytes] | None = None) -> None:
        """`secret` reads what proves to the first node's store that this node takes part; None on the first node."""
        self._secret = secret
        self._relay: Relay | None = None
        self._ranks, self._watch = Ranks(job, nursery, watch.takes_long), watch
        self._told, self._looked = False, 0.0
        self._seat: Seat | None = None

    @property
    def fds(self) -> list[int]:
        return self._ranks.fds

    @property
    def busy(self) -> bool:
        """Whether ranks run, or are about to."""
        return self._ranks.busy

    def begin(self, seat: Seat) -> None:
        """Start the ranks of a generation."""
        self._told, self._seat = False, seat
        if self._secret is not None:
            self._end_relay()
            self._relay = Relay(seat.address, seat.port, self._secret())
            seat = replace(seat, address=LOOPBACK, port=self._relay.port)
        self._ranks.begin(seat)

    @property
    def elsewhere(self) -> list[int]:
        """The ranks of the same generation on other nodes."""
        if self._seat is None:
            return []
        first, size = self._seat.first, self._seat.size
        return [rank for rank in range(size) if not first <= rank < first + self._ranks.count]

    def stop(self, stop: Stop) -> None:
        """Begin to end them."""
        self._ranks.stop(stop, self._watch.patience())

    @property
    def waits(self) -> str:
        """What to tell whoever has asked for the end, where it will take its time."""
        if not self._ranks.busy:
            return ""
        if self._watch.takes_long():
            return "ranks get the time to finish what they are at; CTRL-C now ends them at once"
        if self._ranks.grace <= GRACE:
            return ""
        return f"ranks get {self._ranks.grace:.0f} s to finish their step; CTRL-C now ends them at once"

    def news(self) -> Iterator[Ended | Gone | Verdict]:
        """What has happened since the last call."""
        yield from self._ranks.poll()
        if not self._ranks.running:
            return
        if not self._told and self._seat is not None:
            self._told = True
            self._watch.started(self._ranks.pids, self._seat.generation)
        if time.monotonic() - self._looked >= LOOK_EVERY:
            self._looked = time.monotonic()
            if (found := self._watch.look()) is not None:
                yield found

    def progress(self) -> int:
        """The highest step that was finished here."""
        return self._watch.progress()

    def close(self) -> None:
        """End at once what is left."""
        self._ranks.close()
        self._end_relay()

    def _end_relay(self) -> None:
        if self._relay is not None:
            self._relay.close()

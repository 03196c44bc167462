"""Watches ranks that no launcher of ours has started: a thread in the first two ranks of each node does it.

    with Beside(watcher, memory, local_ranks=4, generation=0, found=tell, end=True):
        train()

Two of them, since a thread is stopped with its process: the watcher of the second is late by `LATE` seconds, and it
speaks only if the first could not. `found` is called in the thread, at most once a hang.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

from meshrun.observe.aside import Aside
from meshrun.observe.hang import Finding
from meshrun.observe.pulse import PulseView
from meshrun.observe.watch import Watcher

LATE = 4.0
"""Seconds by which the second watcher of a node lets the first go ahead."""
EVERY = 0.25


class Beside(Aside):
    """A watcher in a thread of this rank."""

    def __init__(
        self,
        watcher: Watcher,
        memory: Path,
        local_ranks: int,
        generation: int,
        found: Callable[[Finding], None],
        end: bool,
    ) -> None:
        """`end`: kill the rank that is found guilty, so that whoever started the ranks sees that one is lost."""
        super().__init__("watcher")
        self._watcher, self._memory, self._ranks, self._generation = watcher, memory, local_ranks, generation
        self._found, self._end = found, end

    def _run(self) -> None:
        while len(pids := self._pids()) < self._ranks:
            if self._over.wait(EVERY):
                return
        self._watcher.started(pids, self._generation)
        while not self._over.wait(EVERY):
            finding = self._watcher.look()
            if finding is not None and not _told_before(finding):
                self._found(finding)
                if self._end and finding.rank in pids:
                    os.kill(pids[finding.rank], signal.SIGKILL)

    def _pids(self) -> dict[int, int]:
        """The processes of this node's ranks, which they say themselves."""
        found = {}
        for path in self._memory.glob("pulse-*"):
            view = PulseView.open(self._memory, int(path.name.removeprefix("pulse-")))
            if view is not None and (pulse := view.read()).generation == self._generation:
                found[pulse.rank] = pulse.pid
        return found


def _told_before(finding: Finding) -> bool:
    """Whether the other watcher of this node has told of this hang; if not, it is this one that does."""
    if finding.stacks is None:
        return False
    try:
        finding.stacks.with_suffix(".told").touch(exist_ok=False)
    except FileExistsError:
        return True
    except OSError:
        return False
    return False


def told(run: Path) -> str:
    """The sentence on the last hang of a run; nothing where there was none."""
    marks = sorted((run / "hangs").glob("*.told"), key=lambda mark: mark.stat().st_mtime)
    if not marks:
        return ""
    return marks[-1].with_suffix(".txt").read_text().partition("\n")[0]

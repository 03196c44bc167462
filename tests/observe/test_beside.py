"""A watcher in a thread of a rank: whom it watches, when it speaks, and whether it ends the guilty rank."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from meshrun.observe import beside
from meshrun.observe.beside import Beside, told
from meshrun.observe.hang import Finding
from meshrun.observe.pulse import Pulse


class Watch:
    """A watcher that finds a rank guilty as soon as it knows the processes."""

    def __init__(self, *findings: Finding) -> None:
        self.findings, self.pids = list(findings), dict[int, int]()
        self.looked = threading.Event()

    def started(self, pids: dict[int, int], _generation: int) -> None:
        self.pids = pids

    def look(self) -> Finding | None:
        if self.findings:
            return self.findings.pop(0)
        self.looked.set()
        return None


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Signals that are sent meanwhile, which reach nobody."""
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(beside, "EVERY", 0.01)
    monkeypatch.setattr(beside, "os", SimpleNamespace(kill=lambda pid, number: sent.append((pid, number))))
    return sent


def watched(memory: Path, watch: Watch, end: bool) -> list[Finding]:
    """What a watcher tells of a node with one rank."""
    rank, found, watcher = Pulse.open(memory, 0, generation=1), list[Finding](), watch
    beside_rank: Any = Beside(watcher, memory, 1, 1, found.append, end)  # type: ignore[arg-type]
    with beside_rank:
        assert watch.looked.wait(20)
    rank.close()
    return found


@pytest.mark.parametrize("end", [True, False])
def test_a_guilty_rank_of_this_node_is_killed_where_that_was_asked_for(
    tmp_path: Path, killed: list[tuple[int, int]], end: bool
):
    findings = [Finding(0, "rank 0 hangs"), Finding(5, "a rank elsewhere hangs"), Finding(-1, "nobody gets on")]
    watch = Watch(*findings)
    assert watched(tmp_path, watch, end) == findings
    assert watch.pids == {0: os.getpid()}
    assert killed == ([(os.getpid(), signal.SIGKILL)] if end else [])


def test_a_hang_is_told_by_the_first_watcher_that_finds_it(tmp_path: Path, killed: list[tuple[int, int]]):
    stacks = tmp_path / "hangs" / "step-00000012-0-n1.txt"
    stacks.parent.mkdir()
    stacks.write_text("rank 0 hangs\nall stacks\n")
    hang = Finding(0, "rank 0 hangs", stacks)
    assert told(tmp_path) == ""
    assert watched(tmp_path, Watch(hang, hang), end=True) == [hang]
    assert len(killed) == 1 and told(tmp_path) == "rank 0 hangs"


def test_ranks_of_an_earlier_generation_are_not_watched(tmp_path: Path):
    for rank, generation in ((0, 0), (1, 1)):
        Pulse.open(tmp_path, rank, generation).close()
    never: Any = None
    assert Beside(never, tmp_path, 1, 1, never, end=True)._pids() == {1: os.getpid()}

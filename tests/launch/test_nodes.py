"""Several launchers in one run, as on several nodes: one is lost, one comes, and the first one is lost."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from meshrun.errors import UserError
from meshrun.launch.nodes import nodes_of
from tests.launch.command import MODULE, PROGRAMS, is_alive, meshrun, started, wait_until
from tests.launch.test_local import free_port
from tests.launch.test_restarts import Life, lives

LOSING = str(PROGRAMS / "losing.py")
CROWDED = """
import os, resource
resource.setrlimit(resource.RLIMIT_NOFILE, (1024, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
connections = [os.dup(2) for _ in range(1000)]
from meshrun.cli.main import main
main()
"""
"""`meshrun` in a process with the usual limit of 1,024 files that has opened 1,000, as the launcher of 1,000 ranks."""


class Nodes:
    """Launchers of one run with a rank each, joined over loopback."""

    def __init__(self, folder: Path, nodes: str) -> None:
        self.folder, self.port, self.nodes = folder, free_port(), nodes
        self.launchers: list[subprocess.Popen[str]] = []
        self.ranks: set[int] = set()

    def start(self, command: Sequence[str] = MODULE) -> subprocess.Popen[str]:
        """One more: the first leads, others join it."""
        where = ["--join", f"127.0.0.1:{self.port}"] if self.launchers else ["--port", self.port]
        words = ["--diary", self.folder / "diary", "--steps", 100_000, "--pause", 0.02, "--lives", 0, "--procs", 1]
        self.launchers.append(
            started(self.folder, "run", LOSING, *words, "--nodes", self.nodes, *where, command=command)
        )
        return self.launchers[-1]

    def reach(self, size: int, after: float = 0.0) -> list[Life]:
        """Wait until that many ranks compute together."""

        def now() -> list[Life]:
            found = [life for life in lives(self.folder / "diary") if life.world == size and life.began > after]
            last = max((life.generation for life in found), default=0)
            return [life for life in found if life.generation == last]

        wait_until(lambda: len(now()) == size, 60)
        self.ranks |= {life.pid for life in now()}
        return now()

    def clean_up(self) -> None:
        for launcher in self.launchers:
            if launcher.poll() is None:
                launcher.kill()
            launcher.communicate()
        for pid in self.ranks:
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    made = Nodes(tmp_path, "1:3")
    try:
        yield made
    finally:
        made.clean_up()


def test_a_run_shrinks_when_a_node_is_killed_and_grows_when_one_comes(nodes: Nodes):
    first, second = nodes.start(), nodes.start()
    before = nodes.reach(2)
    killed = time.time()
    second.kill()
    (alone,) = nodes.reach(1, after=killed)
    assert alone.began - killed < 20
    wait_until(lambda: not any(is_alive(life.pid) for life in before), 30)
    third = nodes.start()
    grown = nodes.reach(2, after=alone.began)
    assert {life.rank for life in grown} == {0, 1}
    assert {life.generation for life in grown} == {alone.generation + 1}
    parents = {psutil.Process(psutil.Process(life.pid).ppid()).ppid() for life in grown}
    assert parents == {first.pid, third.pid}
    first.terminate()
    _, err = third.communicate(timeout=60)
    assert third.returncode == 1
    assert err.splitlines()[-1] == "meshrun: the run was stopped by SIGTERM"
    _, err = first.communicate(timeout=60)
    host = socket.gethostname()
    assert f"node {host} with rank 1 was lost; all ranks are started again" in err
    assert f"now 2 nodes ({host}, {host}) with 2 ranks take part" in err


@pytest.mark.every
@pytest.mark.skipif(resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 2048, reason="the hard limit of open files")
def test_a_node_comes_back_to_a_launcher_with_more_than_1023_descriptors(nodes: Nodes):
    first, second = nodes.start((sys.executable, "-c", CROWDED)), nodes.start()
    nodes.reach(2)
    assert max(int(each.name) for each in Path(f"/proc/{first.pid}/fd").iterdir()) > 1023
    second.kill()
    (alone,) = nodes.reach(1, after=time.time())
    nodes.start()
    nodes.reach(2, after=alone.began)


def test_when_the_first_node_is_lost_the_others_end_and_say_how_to_go_on(nodes: Nodes):
    first, second = nodes.start(), nodes.start()
    nodes.reach(2)
    first.kill()
    _, err = second.communicate(timeout=60)
    assert second.returncode == 75
    run = nodes.folder / "runs/losing-1"
    assert err.splitlines()[-1] == (
        f"meshrun: the run's first node, 127.0.0.1:{nodes.port}, is lost, and all ranks here were ended; "
        f"what was reached is in {run}: meshrun resume {run} goes on"
    )
    wait_until(lambda: not any(is_alive(pid) for pid in nodes.ranks), 30)


@pytest.mark.parametrize(("text", "expected"), [("1", (1, 1)), ("4", (4, 4)), ("1:4", (1, 4))])
def test_numbers_of_nodes_are_read(text: str, expected: tuple[int, int]):
    assert nodes_of(text) == expected


@pytest.mark.parametrize("text", ["", "0", "3:2", "two", "1:2:3", "-1"])
def test_other_numbers_of_nodes_are_refused(text: str):
    with pytest.raises(UserError, match=r"it must be a number, or least:most such as 1:4 \(--nodes\)"):
        nodes_of(text)


@pytest.mark.parametrize("text", ["1:999999999", "200001"])
def test_more_nodes_than_any_machine_has_are_refused(text: str):
    """Each number between least and most is tried: a billion of them were gigabytes, and minutes."""
    with pytest.raises(UserError, match=r"it must be at most 200,000, more than any machine has \(--nodes\)"):
        nodes_of(text)


def test_a_first_node_that_does_not_answer_is_named(tmp_path: Path):
    where = f"127.0.0.1:{free_port()}"
    ended = meshrun(tmp_path, "run", LOSING, "--diary", "d", "--procs", 1, "--join", where, "--timeout", 1)
    assert ended.status == 1
    assert ended.sentences[0].startswith(f"the run's first node did not answer at {where} within 1 s")

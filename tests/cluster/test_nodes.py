"""One launcher a node on the real Slurm: nodes without power, cut from the network, or without the shared disk.

Each training must go on by itself, lose nothing of what it had finished, and end as if nothing had been.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from meshrun.check.cluster import Cluster
from tests.cluster.jobs import PYTHON, meshrun
from tests.launch.command import TINY, events, wait_until
from tests.launch.command import meshrun as locally

ONE_A_NODE = ("srun", "-N2", "--nodelist=n1,n2", "--ntasks-per-node=1", "--no-kill", "--kill-on-bad-exit=0")
BAR = 26.0
"""Seconds from a node's end to the next finished step: half of what plain torchrun needs on these nodes."""


class Training:
    """A run of two nodes with two ranks each, slow enough to be struck."""

    def __init__(self, cluster: Cluster, folder: Path, steps: int, *words: object) -> None:
        self.folder, self.run, self.steps = folder, folder / "runs/tiny-1", steps
        command = [*ONE_A_NODE, PYTHON, "-m", "meshrun", "run", TINY, "--procs", 2, "--steps", steps, "--pause", 0.1]
        self.task = cluster.start(
            "ctl",
            [*command, "--json", *words],
            cwd=folder,
            stdout=(folder / "out").open("w"),
            stderr=(folder / "err").open("w"),
        )
        try:
            wait_until(lambda: len(self.finished()) >= 5 or self.task.poll() is not None, 80)
        except AssertionError:
            self.task.kill()
            raise
        assert self.task.poll() is None, self.said

    @property
    def said(self) -> str:
        return (self.folder / "err").read_text()

    def finished(self, after: float = 0.0) -> list[dict[str, Any]]:
        return [event for event in events(self.run, 0, "step") if event["time"] > after]

    def goes_on(self, struck: float, silence: float = 2.0) -> float:
        """Seconds from a fault to the next finished step; steps that were under way end within the silence."""
        wait_until(lambda: self.finished(struck + silence) or self.task.poll() is not None, 60)
        assert self.finished(struck + silence), self.said
        return float(self.finished(struck + silence)[0]["time"]) - struck

    def comes_back(self, healed: float) -> None:
        wait_until(lambda: [event for event in events(self.run, 2, "start") if event["time"] > healed], 60)

    def ends(self) -> dict[str, Any]:
        """The result; srun itself would wait until Slurm is sure that a node is gone."""
        try:
            wait_until(lambda: (self.run / "result.json").exists() or self.task.poll() is not None, 60)
            assert self.task.poll() in (None, 0), self.said
        finally:
            self.task.kill()
        result: dict[str, Any] = json.loads((self.run / "result.json").read_text())
        return result

    def lost_no_step(self) -> None:
        """Every step is finished once on rank 0, and each start after the first goes on from the one before."""
        assert [event["step"] for event in self.finished()] == list(range(1, self.steps + 1))
        assert all(event["source"] == "memory" for event in events(self.run, 0, "resumed"))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The same in one process."""
    return locally(tmp_path_factory.mktemp("alone"), "run", TINY, "--steps", 150, "--json").document


def is_as(result: dict[str, Any], undisturbed: dict[str, Any], steps: int) -> None:
    assert result["steps"] == steps
    assert result["losses"] == pytest.approx(undisturbed["losses"][:steps], rel=1e-5)


def cut_until(cluster: Cluster, struck: float, seconds: float) -> float:
    """Heal a network that was cut after so many seconds; returns when."""
    time.sleep(max(0.0, struck + seconds - time.time()))
    cluster.heal("n2")
    return time.time()


def test_a_node_that_is_cut_off_comes_back_and_one_without_power_is_missed_and_no_step_is_lost(
    cluster: Cluster, tmp_path: Path, undisturbed: dict[str, Any]
):
    training = Training(cluster, tmp_path, 150)
    struck = time.time()
    cluster.cut("n2")
    assert training.goes_on(struck) < BAR
    training.comes_back(cut_until(cluster, struck, 10))
    struck = time.time()
    cluster.power_off("n2")
    assert training.goes_on(struck) < BAR
    result = training.ends()
    assert result["world"] == 2
    is_as(result, undisturbed, 150)
    training.lost_no_step()
    assert [event["world"] for event in events(training.run, 0, "start")] == [4, 2, 4, 2]
    assert training.said.count("node n2 with ranks 2 to 3 was lost; all ranks are started again") == 2
    assert "now 2 nodes (n1, n2) with 4 ranks take part" in training.said


@pytest.mark.every  # tests/launch/test_head.py has what the first node decides
def test_a_layout_that_holds_with_all_nodes_only_waits_for_the_one_that_is_cut_off(
    cluster: Cluster, tmp_path: Path, undisturbed: dict[str, Any]
):
    training = Training(cluster, tmp_path, 40, "--layout", "fsdp=4")
    struck = time.time()
    cluster.cut("n2")
    training.comes_back(cut_until(cluster, struck, 7))
    is_as(training.ends(), undisturbed, 40)
    training.lost_no_step()
    assert "the 1 node that is left cannot hold the layout fsdp=4: waiting for others" in training.said


def test_a_node_that_does_not_see_the_runs_is_named_and_all_nodes_end(cluster: Cluster, tmp_path: Path):
    runs = tmp_path / "runs"
    runs.mkdir()
    cluster.run("n2", ["mount", "-t", "tmpfs", "none", runs], check=True)
    try:
        ended = meshrun(cluster, "ctl", "run", TINY, "--procs", 2, "--json", cwd=tmp_path, launcher=ONE_A_NODE)
    finally:
        cluster.run("n2", ["umount", runs], check=True)
    sentence = "n2 cannot see runs/tiny-1; runs must be on a disk that all nodes share (--runs)"
    assert ended.status == 2
    assert ended.document == {"error": sentence, "status": 2}
    assert sentence in ended.sentences
    assert [each for each in ended.sentences if each.startswith(f"n2 cannot see {runs / 'tiny-1'} of the run")]

"""A run on the nodes of a virtual cluster, submitted as people submit it, for whoever breaks nodes, cables and Slurm.

    scene_on(cluster)                              # for `Place`: makes a scene as `Scene` does
    with scene_on(cluster)(folder, control, document, ranks=4) as scene:
        scene.begin(target)                        # meshrun submit TARGET --nodes 2 --gpus-per-node 2 …
        scene.nodes()                              # ["n1", "n2"], the first of which has the job's own shell

Nodes do not see each other's memory, and this machine does not see theirs: how far a run is stands in its events.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from meshrun.check.armed import Control
from meshrun.check.cluster import Cluster
from meshrun.check.cluster_conf import CONTROL
from meshrun.check.scene import NAME, Life, Missed, NotSurvived, Scene
from meshrun.errors import UserError
from meshrun.launch.chain import Record
from meshrun.observe.events import Follower
from meshrun.world.environment import python_for
from meshrun.world.hostlist import expand_hosts

NODES, PROCS = 2, 2
"""Nodes of a job, and ranks of a node."""
SPARE = 1
"""Nodes of the cluster that no job has at first: where the first node is lost, Slurm starts the job anew on others."""
OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY", "BOOT_FAIL")
ASK_EVERY = 0.5
"""Seconds between two questions to Slurm: each takes it and this machine a while."""


class ClusterScene(Scene):
    """One run as a Slurm job."""

    patience = 240.0
    """Slurm takes half a minute to notice a lost node, and as long to start a job anew, maybe on a busy machine."""

    def __init__(self, folder: Path, control: Control, document: dict[str, Any], ranks: int, cluster: Cluster) -> None:
        given = {name: value for name, value in document.items() if name != "procs"}  # ranks are GPUs here
        super().__init__(folder, control, given, ranks)
        self.cluster = cluster
        self._asked, self._state = 0.0, "PENDING"
        self._events = Follower(self.run.events_of(0))
        self._lives, self._last, self._world = 0, 0, 0

    def begin(self, target: Path | str) -> None:
        where = ("--name", NAME, "--runs", self.disk.folder, "--config", self._options)
        size = ("--nodes", NODES, "--gpus-per-node", PROCS, "--time", "2h", "--until-done")
        words = python_for(["-m", "meshrun", "submit", *map(str, (target, *where, *size)), "--json"])
        self.cluster.run(CONTROL, words, cwd=self.folder, timeout=self.patience, check=True)

    def end(self) -> None:
        """Cancel it, and mend what is broken around it."""
        self.cluster.mend()

    @property
    def job(self) -> str:
        """Slurm's number for it: of its last link."""
        return Record.load(self.run.path).jobs[-1]

    @property
    def status(self) -> int | None:
        """0 when the job is complete, 1 when it ended otherwise; None while it runs or waits to."""
        if time.monotonic() > self._asked + ASK_EVERY:
            with contextlib.suppress(UserError, OSError, IndexError):  # it is just being submitted
                # Nothing comes from a Slurm that is just being started anew: then what it said last holds.
                self._state = self.cluster.job(self.job).get("JobState", self._state)
            self._asked = time.monotonic()
        return None if self._state not in OVER else int(self._state != "COMPLETED")

    def nodes(self) -> list[str]:
        """The nodes of the job, the first one first."""
        about = self.cluster.job(self.job)
        found = expand_hosts(about.get("NodeList", "").replace("(null)", ""))
        if about.get("JobState") != "RUNNING" or len(found) < NODES:
            raise Missed("the job does not run on all its nodes")
        return found

    def life(self) -> Life | None:
        """As the first rank has written it down; it writes of a step when all ranks have finished it."""
        for event in self._events.new():
            if event["kind"] == "start":
                self._lives, self._last, self._world = self._lives + 1, 0, event["world"]
            elif event["kind"] == "step":
                self._last = event["step"]
        return Life(0, self._lives, self._last) if self._last else None

    def all_there(self) -> None:
        """Wait until all ranks train again; a run that ends before that has not missed them."""
        try:
            self.until(lambda: self.life() is not None and self._world == self.ranks)
        except Missed as error:
            if self.status != 0:
                raise NotSurvived(f"after a node was back, {error}: {self.where()}") from None

    def completes(self) -> None:
        give_up = time.monotonic() + self.patience
        while self.status is None:
            if time.monotonic() > give_up:
                raise NotSurvived(f"the run did not come to its end: {self.where()}")
            time.sleep(ASK_EVERY)
        if self.status != 0:
            raise NotSurvived(f"its job is {self._state}: {self.last_words()}")

    def where(self) -> str:
        self.life()
        return f"job {self.job} is {self._state}, step {self._last} of its life {self._lives} on {self._world} ranks"

    def last_words(self) -> str:
        logs = sorted(self.run.logs.glob("slurm-*.out"))
        lines = logs[-1].read_text(errors="replace").splitlines() if logs else []
        said = [line.removeprefix("meshrun: ") for line in lines if line.startswith("meshrun: ")]
        return said[-1] if said else (lines[-1] if lines else "it said nothing")


def scene_on(cluster: Cluster) -> Callable[[Path, Control, dict[str, Any], int], Scene]:
    """What makes scenes on a cluster."""

    def scene(folder: Path, control: Control, document: dict[str, Any], ranks: int) -> Scene:
        return ClusterScene(folder, control, document, ranks, cluster)

    return scene

"""Faults of nodes, of the network between them, and of Slurm, into which runs on a virtual cluster get.

    meshrun chaos digits --cluster
    meshrun chaos digits --cluster --kinds node-off,network-cut --faults 4

`plans` says how kinds are drawn; these are only drawn where there is a cluster.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

from meshrun.check.cluster_conf import CONTROL
from meshrun.check.cluster_scene import PROCS, ClusterScene
from meshrun.check.plans import Fault, Strike, Struck, kind
from meshrun.check.scene import Life, Missed, NotSurvived, Scene

CUT_S = 10.0
"""Seconds that a cable is out."""
SLOW_S, SLOW_RATE = 5.0, "2mbit"
IN_WORK_S = 0.5
"""Seconds after which no step can end any more that was in work when a cable was pulled."""


def _kind(name: str, does: str, **more: Any) -> Callable[[Callable[[ClusterScene, Fault], Iterator[Struck]]], Strike]:
    def add(strike: Callable[[ClusterScene, Fault], Iterator[Struck]]) -> Strike:
        return kind(name, does, needs="cluster", **more)(cast(Callable[[Scene, Fault], Iterator[Struck]], strike))

    return add


@_kind("network-cut", f"a node's cable is out for {CUT_S:.0f} s")
def network_cut(scene: ClusterScene, fault: Fault) -> Iterator[Struck]:
    node = scene.nodes()[fault.rank // PROCS]
    with _later(CUT_S, lambda: scene.cluster.heal(node)):
        scene.cluster.cut(node)
        when = time.monotonic()
        time.sleep(IN_WORK_S)
        yield Struck(when, new_life=False, before=_life(scene))
    scene.all_there()


@_kind("network-gone", "a node's cable is out for good", weight=1, last=True)
def network_gone(scene: ClusterScene, fault: Fault) -> Iterator[Struck]:
    scene.cluster.cut(_another(scene, fault))
    yield Struck(time.monotonic())


@_kind("network-slow", f"a node's network has {SLOW_RATE} for {SLOW_S:.0f} s", weight=1)
def network_slow(scene: ClusterScene, fault: Fault) -> Iterator[Struck]:
    node = scene.nodes()[fault.rank // PROCS]
    with _later(SLOW_S, lambda: scene.cluster.rate(node, None)):
        scene.cluster.rate(node, SLOW_RATE)
        yield Struck(time.monotonic(), new_life=False, before=_life(scene))
    scene.all_there()


@_kind("node-off", "a node loses its power, and is on again later", last=True)
def node_off(scene: ClusterScene, fault: Fault) -> Iterator[Struck]:
    node = _another(scene, fault)
    scene.cluster.power_off(node)
    yield Struck(time.monotonic())
    scene.cluster.power_on(node)


@_kind("first-node-off", "the node with the job's own shell loses its power: Slurm starts the job anew", weight=1)
def first_node_off(scene: ClusterScene, _fault: Fault) -> Iterator[Struck]:
    node = scene.nodes()[0]
    scene.cluster.power_off(node)
    yield Struck(time.monotonic())
    scene.cluster.power_on(node)


@_kind("requeue", "Slurm is told to start the job anew", weight=1)
def requeue(scene: ClusterScene, _fault: Fault) -> Iterator[Struck]:
    scene.nodes()
    when = time.monotonic()
    told = scene.cluster.run(CONTROL, ["scontrol", "requeue", scene.job])
    if told.returncode:
        raise Missed(told.stderr.strip())
    yield Struck(when)


@_kind("slurmd-restart", "the slurmd of a node is started anew", weight=1)
def slurmd_restart(scene: ClusterScene, fault: Fault) -> Iterator[Struck]:
    when = time.monotonic()
    scene.cluster.restart_slurmd(scene.nodes()[fault.rank // PROCS])
    yield Struck(when, new_life=False, before=_life(scene))


@_kind("slurmctld-restart", "slurmctld is started anew", weight=1)
def slurmctld_restart(scene: ClusterScene, _fault: Fault) -> Iterator[Struck]:
    when = time.monotonic()
    scene.cluster.restart_slurmctld()
    yield Struck(when, new_life=False, before=_life(scene))


def _another(scene: ClusterScene, fault: Fault) -> str:
    """A node of the job, but not the first one: its loss is for Slurm to heal, which takes that job for dead."""
    return fault.random.choice(scene.nodes()[1:])


def _life(scene: ClusterScene) -> Life:
    life = scene.life()
    if life is None:
        raise NotSurvived(f"no step was finished: {scene.where()}")
    return life


@contextmanager
def _later(seconds: float, heal: Callable[[], None]) -> Iterator[None]:
    """Heal after so many seconds, while the block goes on; it has been healed when the block is left."""
    healing = threading.Timer(seconds, heal)
    healing.start()
    try:
        yield
    finally:
        healing.join()

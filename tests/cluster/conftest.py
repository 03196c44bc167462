"""A virtual Slurm cluster of four nodes for the tests of this folder: one a test process, mended after each test.

def test_something(cluster, tmp_path):                  # nodes n1 … n4 with 4 GPUs each, clients run on "ctl"
    job = sbatch(cluster, SCRIPT, tmp_path, "-N2")      # see tests/cluster/jobs.py
    wait(cluster, job)

Where it cannot run (no root, no Slurm), all these tests are skipped and say why.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshrun.check.cluster import Cluster

HERE = Path(__file__).parent
CROWDED = "PartitionName=crowded Nodes=ALL OverSubscribe=FORCE:32"
"""One partition more, in which many jobs may have the same cores."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Called with the tests of all folders: these here need the cluster."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.cluster)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("cluster") and (why := Cluster.missing()):
        pytest.skip(f"needs a virtual Slurm cluster: {why}")


@pytest.fixture(scope="session")
def kept_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, range(os.cpu_count() or 1))  # its nodes have all cores, though the suite may not
    with Cluster(tmp_path_factory.mktemp("cluster"), config=[CROWDED]) as cluster:
        yield cluster
    os.sched_setaffinity(0, before)


@pytest.fixture
def cluster(kept_cluster: Cluster) -> Iterator[Cluster]:
    """All nodes on, healthy and idle, before a test and after it."""
    yield kept_cluster
    kept_cluster.mend()

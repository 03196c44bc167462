"""`meshrun doctor` on 2 nodes x 2 ranks: silent when they are healthy, and each fault that is injected is named.

The faults are real: mounts, variables, clocks and processes of one node are changed, nothing in the product is. Several
are put into one run, since each costs the start of four ranks.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from meshrun.check.cluster import Cluster
from tests.launch.command import Ended

PYTHON = sys.executable
SLOWED = Path(__file__).parent / "slowed.py"
DOCTOR = (PYTHON, "-m", "meshrun", "doctor", "--json")
TWO_BY_TWO = ("srun", "-N2", "--ntasks-per-node=2", "--gres=gpu:2")

SKEWED = """\
import time
real = time.time
time.time = lambda: real() + 3.0
"""
ON_N2 = """\
#!/bin/sh
if [ "$(hostname)" = n2 ]; then
  export PYTHONPATH={folder}/other CUDA_VISIBLE_DEVICES=0
  exec taskset -c {core} "$@"
fi
exec "$@"
"""


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two nodes that have a second, slow network."""
    with Cluster(tmp_path_factory.mktemp("two"), nodes=2, networks=2) as cluster:
        yield cluster


def examined(cluster: Cluster, folder: Path, *words: object, env: dict[str, str] | None = None) -> Ended:
    ended = cluster.run("ctl", words, cwd=folder, env=env, timeout=110)
    return Ended(ended.returncode, ended.stdout, ended.stderr)


def found(ended: Ended) -> dict[str, list[dict[str, Any]]]:
    """The findings of each check."""
    assert ended.out, ended.err
    checks: dict[str, list[dict[str, Any]]] = {}
    for finding in ended.document["findings"]:
        assert finding["where"] and finding["why"] and finding["fix"]
        checks.setdefault(finding["check"], []).append(finding)
    return checks


@contextlib.contextmanager
def mounted(cluster: Cluster, node: str, *options: object) -> Iterator[None]:
    """Something else in a place of that node's file system."""
    cluster.run(node, ["mount", *options], check=True)
    try:
        yield
    finally:
        cluster.run(node, ["umount", options[-1]], check=True)


def wrong_hosts(cluster: Cluster, folder: Path, name: str, address: str) -> Path:
    """/etc/hosts in which a name stands for an address that nobody has."""
    lines = cluster.run("n1", ["cat", "/etc/hosts"], check=True).stdout.splitlines()
    wrong = [f"{address} {name}" if line.split()[1] == name else line for line in lines]
    path = folder / f"hosts-{name}"
    path.write_text("\n".join(wrong) + "\n")
    return path


def test_a_healthy_allocation_is_left_in_peace(two: Cluster, tmp_path: Path):
    ended = examined(two, tmp_path, *TWO_BY_TWO, *DOCTOR)
    assert (ended.status, found(ended)) == (0, {}), ended.out + ended.err
    nodes = ended.document["nodes"]
    assert {name: node["ranks"] for name, node in nodes.items()} == {"n1": [0, 1], "n2": [2, 3]}
    for node in nodes.values():
        assert node["interface"] == "eth0" and node["bytes_per_s"]["eth0"] > 3 * node["bytes_per_s"]["eth1"]
        assert node["all_reduce"]["bytes_per_s"] > 0 and len(node["flops"]) == 2
        assert re.fullmatch(r"\d+\.\d+\.\d+\S*", node["slurm"]) and node["ends_in_s"] > 3600
        assert abs(node["clock_ahead_s"]) < 0.1 and node["gpus"] == {"granted": 2, "listed": 2, "seen": 0}
    assert not [each for each in (tmp_path / "runs").iterdir() if each.name == ".doctor"]


def test_eight_faults_of_a_node_are_named_at_once(two: Cluster, tmp_path: Path):
    runs = tmp_path / "runs"
    stale = runs / ".rendezvous" / "slurm-1.0.0-0.json"
    stale.parent.mkdir(parents=True)
    stale.write_text(json.dumps({"address": "10.77.0.1", "port": 9}))
    other = tmp_path / "other"
    (other / "torch-2.11.0.dist-info").mkdir(parents=True)
    (other / "torch-2.11.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.11.0\n")
    (other / "sitecustomize.py").write_text(SKEWED)
    wrapper = tmp_path / "on_n2.sh"
    core = two.run("n2", ["sh", "-c", "taskset -cp $$ | sed 's/.*: //; s/[,-].*//'"]).stdout.strip()
    wrapper.write_text(ON_N2.format(folder=tmp_path, core=core))
    wrapper.chmod(0o755)
    hosts = wrong_hosts(two, tmp_path, "n1", "10.77.0.250")
    with (
        mounted(two, "n2", "-t", "tmpfs", "-o", "size=1m", "tmpfs", "/dev/shm"),
        mounted(two, "n2", "--bind", hosts, "/etc/hosts"),
        mounted(two, "n2", "-o", "bind,ro", runs, runs),
    ):
        ended = examined(two, tmp_path, *TWO_BY_TWO, wrapper, *DOCTOR, "--quick")
    checks = found(ended)
    assert ended.status == 1
    expected = {
        "cores": f"ranks 2, 3 of n2 together may run on 1 core ({core}) but 2 were granted there",
        "GPUs": "2 GPUs of n2 were granted but ranks 2, 3 see 1: CUDA_VISIBLE_DEVICES=0",
        "address": "n2 takes 'n1' for 10.77.0.250, which no interface of n1 has",
        "clock": "the clock of n2 is 3.0 s ahead of that of n1",
        "memory": "/dev/shm of n2 has 1.0 MiB free of 1.0 MiB, and 2 ranks need at least 128.0 MiB",
        "folder": f"nothing can be written to {runs} on n2: Read-only file system",
        "versions": "torch is 2.11.0 on n2 and ",
        "ports": "runs/.rendezvous/slurm-1.0.0-0.json says that rank 0 of a launch listens at 10.77.0.1:9",
    }
    assert set(checks) == set(expected)
    for check, what in expected.items():
        assert len(checks[check]) == 1 and checks[check][0]["what"].startswith(what), checks[check]
        assert checks[check][0]["hosts"] == (["n1"] if check == "ports" else ["n2"])


def test_a_wrong_interface_and_a_slow_rank_are_measured(two: Cluster, tmp_path: Path):
    words = (*TWO_BY_TWO, PYTHON, SLOWED, tmp_path / "runs", *DOCTOR)
    ended = examined(two, tmp_path, *words, env={"GLOO_SOCKET_IFNAME": "eth1"})
    checks = found(ended)
    assert set(checks) == {"network", "speed"}, ended.out
    [network], [speed] = checks["network"], checks["speed"]
    assert "collectives of n1 go over eth1 (GLOO_SOCKET_IFNAME names it)" in network["what"]
    assert network["hosts"] == ["n1", "n2"] and "export GLOO_SOCKET_IFNAME=eth0" in network["fix"]
    assert speed["where"] == "rank 3 on n2" and "times as long for a matrix product" in speed["what"]


def test_a_port_that_is_taken_a_dead_address_and_loopback_are_named_before_anybody_waits(two: Cluster, tmp_path: Path):
    """As a script has it that exports torchrun's variables for each task; the port is still another program's."""
    exports = (
        "export RANK=$SLURM_PROCID WORLD_SIZE=2 LOCAL_RANK=$SLURM_LOCALID LOCAL_WORLD_SIZE=1 "
        'MASTER_ADDR=n1 MASTER_PORT=29555 GLOO_SOCKET_IFNAME=lo; exec "$@"'
    )
    server = two.start("n1", [PYTHON, "-m", "http.server", "29555"])
    try:
        with mounted(two, "n1", "--bind", wrong_hosts(two, tmp_path, "n1", "10.77.0.250"), "/etc/hosts"):
            words = ("srun", "-N2", "--ntasks-per-node=1", "sh", "-c", exports, "sh", *DOCTOR, "--quick")
            ended = examined(two, tmp_path, *words)
    finally:
        server.kill()
        server.communicate()
    checks = found(ended)
    assert set(checks) == {"address", "network", "ports"}, ended.out
    assert "port 29555 of n1, which MASTER_PORT names, is taken by process" in checks["ports"][0]["what"]
    assert "http.server 29555" in checks["ports"][0]["what"]
    assert "GLOO_SOCKET_IFNAME=lo names the loopback interface of n1" in checks["network"][0]["what"]
    assert "10.77.0.250, which no interface of it has" in checks["address"][0]["what"]


def test_one_task_a_node_with_folders_of_their_own_is_heard_over_the_network(two: Cluster, tmp_path: Path):
    runs = tmp_path / "runs"
    runs.mkdir()
    with mounted(two, "n2", "-t", "tmpfs", "tmpfs", runs):
        checks = found(examined(two, tmp_path, "srun", "-N2", "--ntasks-per-node=1", *DOCTOR, "--quick"))
    assert set(checks) == {"folder"}
    assert checks["folder"][0]["what"] == f"{runs} of n2 (tmpfs there) is not the one that n1 has"


def test_nodes_that_cannot_reach_each_other_are_heard_through_the_folder(two: Cluster, tmp_path: Path):
    lost = ["10.77.0.1", "10.78.0.1"]
    for address in lost:
        two.run("n2", ["ip", "route", "add", "blackhole", address], check=True)
    try:
        ended = examined(two, tmp_path, "srun", "-N2", "--ntasks-per-node=1", *DOCTOR, "--quick")
    finally:
        for address in lost:
            two.run("n2", ["ip", "route", "del", "blackhole", address], check=True)
    checks = found(ended)
    assert set(checks) == {"address"}, ended.out
    said = " ".join(finding["what"] for finding in checks["address"])
    assert "n1 does not reach n2 at 10.77.0.2" in said and "the same on 1 more node" in said

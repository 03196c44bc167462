"""The virtual cluster: several nodes that are really apart, real Slurm on them, and faults that strike."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from meshrun.check.cluster import Cluster
from meshrun.check.cluster_conf import Plan, files, slurm_conf
from meshrun.errors import RunFailed, UserError
from tests.cluster.jobs import sbatch, state, until, wait

GOLDEN = Path(__file__).parent / "golden"


def test_the_configuration_is_the_one_that_was_read_by_people():
    plan = Plan(Path("/shared/cluster"), nodes=4, gpus=4, networks=2, config=("JobRequeue=0",))
    for name in ("slurm.conf", "gres.conf", "hosts"):
        assert files(plan)[name] == (GOLDEN / name).read_text(), name


def test_a_cluster_without_gpus_names_none():
    plan = Plan(Path("/shared/cluster"), gpus=0)
    assert "gpu" not in slurm_conf(plan) and files(plan)["gres.conf"] == ""


def test_a_step_spans_nodes_that_are_apart(cluster: Cluster, tmp_path: Path):
    show = "echo $SLURM_PROCID $(hostname) $(hostname -I) $CUDA_VISIBLE_DEVICES $(readlink /proc/self/ns/pid) $TMPDIR"
    words = ["srun", "-N2", "--ntasks-per-node=2", "--gres=gpu:2", "--label", "sh", "-c", show]
    said = cluster.run("ctl", words, cwd=tmp_path, check=True).stdout
    tasks = sorted(line.partition(": ")[2].split() for line in said.splitlines())
    assert [task[:4] for task in tasks] == [
        ["0", "n1", "10.77.0.1", "0,1"],
        ["1", "n1", "10.77.0.1", "0,1"],
        ["2", "n2", "10.77.0.2", "0,1"],
        ["3", "n2", "10.77.0.2", "0,1"],
    ]
    spaces = [task[4] for task in tasks]
    assert spaces[0] == spaces[1] != spaces[2] == spaces[3], "each node counts its own processes"
    assert {task[5] for task in tasks} == {str(cluster.folder / "tmp" / node) for node in ("n1", "n2")}


def test_memory_is_of_a_node_and_the_disk_of_all(cluster: Cluster, tmp_path: Path):
    cluster.run("n1", ["sh", "-c", "echo one > /dev/shm/mine; echo one > ours"], cwd=tmp_path, check=True)
    assert cluster.run("n2", ["cat", "ours"], cwd=tmp_path).stdout == "one\n"
    assert cluster.run("n2", ["ls", "/dev/shm"]).stdout == ""
    assert cluster.run("n1", ["df", "--output=size", "-m", "/dev/shm"]).stdout.split()[-1] == "1024"
    assert not cluster.run("n1", ["ip", "route", "get", "1.1.1.1"]).stdout


def test_one_gpu_a_task_is_the_only_one_it_sees(cluster: Cluster):
    words = ["srun", "-N1", "-n4", "--gpus-per-task=1", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES"]
    assert sorted(cluster.run("ctl", words, check=True).stdout.split()) in (["0"] * 4, ["0", "1", "2", "3"])


def test_what_the_partitions_do_not_allow_is_refused(cluster: Cluster, tmp_path: Path):
    for options, sentence in (
        (["--partition=nowhere"], "invalid partition specified: nowhere"),
        (["--partition=short", "--time=10"], "Requested time limit is invalid"),
        (["--gres=gpu:5"], "Requested node configuration is not available"),
    ):
        with pytest.raises(RunFailed, match=sentence):
            sbatch(cluster, "true", tmp_path, *options)


def test_a_cut_node_hears_nothing_until_it_is_healed(cluster: Cluster):
    assert reaches(cluster, "n1", "n2")
    cluster.cut("n2")
    assert not reaches(cluster, "n1", "n2") and cluster.state()["n2"].cut
    cluster.heal("n2")
    assert reaches(cluster, "n1", "n2", seconds=30) and not cluster.state()["n2"].cut


SEND = """
import socket, sys, time
peer = socket.create_connection((sys.argv[1], 999))
begun = time.monotonic()
peer.sendall(bytes(1 << 20))
peer.shutdown(socket.SHUT_WR)
peer.recv(1)
print(time.monotonic() - begun)
"""
TAKE = """
import socket
peer = socket.create_server(("", 999)).accept()[0]
while peer.recv(1 << 16):
    pass
"""
LISTEN = """
import socket, time
peer = socket.create_server(("", 999)).accept()[0]
time.sleep(99)
"""
TALK = """
import socket
peer = socket.create_connection(("n2", 999))
print("there", flush=True)
peer.settimeout(0.5)
peer.recv(1)
"""
MAKE = """
import sys, time
from meshrun.check.cluster import Cluster
cluster = Cluster(sys.argv[1], nodes=1)
cluster.up()
print("up", flush=True)
time.sleep(99)
"""


def reaches(cluster: Cluster, node: str, other: str, seconds: int = 2) -> bool:
    """Whether a node can talk to the slurmd of another one."""
    return cluster.run(node, ["timeout", str(seconds), "bash", "-c", f": </dev/tcp/{other}/6818"]).returncode == 0


def listening(cluster: Cluster, node: str, program: str) -> subprocess.Popen[str]:
    started = cluster.start(node, [sys.executable, "-c", program])
    while ":999 " not in cluster.run(node, ["ss", "-ltn"]).stdout:
        assert started.poll() is None, started.stderr.read()
        time.sleep(0.02)
    return started


def test_a_slow_cable_is_slow_both_ways_and_fast_again(cluster: Cluster):
    def seconds(sender: str, taker: str) -> float:
        there = listening(cluster, taker, TAKE)
        said = cluster.run(sender, [sys.executable, "-c", SEND, taker], check=True).stdout
        there.wait()
        return float(said)

    cluster.rate("n1", "10mbit")
    assert seconds("n1", "n2") > 0.6 and seconds("n2", "n1") > 0.6
    cluster.rate("n1", None)
    assert seconds("n1", "n2") < 0.5


def test_a_node_that_lost_its_power_says_no_last_word_and_comes_back_empty(cluster: Cluster):
    there = listening(cluster, "n2", LISTEN)
    other = cluster.start("n1", [sys.executable, "-c", TALK])
    assert other.stdout.readline() == "there\n"
    cluster.power_off("n2")
    assert there.wait() != 0 and not cluster.state()["n2"].on
    assert "timed out" in other.communicate()[1], "a node without power closes no connection"
    with pytest.raises(RunFailed, match="node n2 is off: on are ctl, n1, n3, n4"):
        cluster.run("n2", ["true"])
    cluster.power_on("n2")
    assert cluster.run("n2", ["hostname"]).stdout == "n2\n"


def test_a_job_lives_on_while_daemons_are_started_anew(cluster: Cluster, tmp_path: Path):
    job = sbatch(cluster, "until [ -e go ]; do sleep 0.05; done; echo $SLURM_RESTART_COUNT done", tmp_path, "-w", "n1")
    until(cluster, job, "RUNNING")
    cluster.restart_slurmctld()
    cluster.restart_slurmd("n1")
    cluster.kill_slurmd("n1")
    assert state(cluster, job) == "RUNNING"
    cluster.start_slurmd("n1")
    (tmp_path / "go").touch()
    ended = wait(cluster, job)
    assert (ended.state, ended.restarts, ended.log) == ("COMPLETED", 0, "done\n")


def test_two_clusters_know_nothing_of_each_other(cluster: Cluster, tmp_path: Path):
    with Cluster(tmp_path / "other", nodes=2, gpus=0, networks=2, name="other") as other:
        assert "other" in other.run("ctl", ["scontrol", "show", "config"]).stdout.partition("ClusterName")[2][:40]
        sbatch(other, "sleep 99", tmp_path)
        assert cluster.run("ctl", ["squeue", "-h"]).stdout == ""
        assert reaches(cluster, "n1", "n3") and not reaches(other, "n1", "n3")
        assert reaches(other, "n1", "n2s")
        with pytest.raises(UserError, match="there is a cluster in"):
            Cluster(tmp_path / "other").up()


def test_nothing_is_left_of_a_cluster_whose_maker_was_killed(tmp_path: Path):
    maker = subprocess.Popen([sys.executable, "-c", MAKE, tmp_path], stdout=subprocess.PIPE, text=True)
    assert maker.stdout.readline() == "up\n"
    assert len(using(tmp_path)) >= 3
    maker.send_signal(signal.SIGKILL)
    maker.communicate()
    give_up = time.monotonic() + 40
    while using(tmp_path):
        assert time.monotonic() < give_up, using(tmp_path)
        time.sleep(0.05)
    with Cluster(tmp_path, nodes=1) as again:
        assert again.state()["n1"].slurm == "idle"


def using(folder: Path) -> list[str]:
    """Processes with the files of a cluster open or mounted."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if str(folder) in (process / "mountinfo").read_text():
                found.append((process / "cmdline").read_bytes().decode().replace("\0", " "))
        except OSError:
            continue
    return found


def test_the_command_line_makes_a_cluster_that_stays(tmp_path: Path):
    def command(*words: str) -> subprocess.CompletedProcess[str]:
        line = [sys.executable, "-m", "meshrun.check.cluster", *words]
        return subprocess.run(line, capture_output=True, text=True, check=False)

    where = str(tmp_path / "kept")
    assert command("up", where, "--nodes", "2").returncode == 0
    try:
        assert command("sh", where, "ctl", "sinfo", "-h", "-p", "main", "-o", "%D %t").stdout == "2 idle\n"
        assert command("power-off", where, "n2").returncode == 0
        assert '"on": false' in command("state", where).stdout
    finally:
        assert command("down", where).returncode == 0
    ended = command("sh", where, "ctl", "true")
    assert (
        ended.returncode == 2 and ended.stderr == f"there is no cluster in {where}: give the folder of one that is up\n"
    )

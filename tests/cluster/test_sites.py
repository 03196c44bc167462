"""A cluster that nobody has described is probed, its profile edited, and its rule followed by the ranks of a job."""

from __future__ import annotations

import json
from pathlib import Path

from meshrun.check.cluster import Cluster
from tests.cluster.jobs import PYTHON

ADDRESS = """
import os
from meshrun.world import detect
from meshrun.world.network import interface_of
from meshrun.world.rendezvous import own_address
for site in (None, "lab"):
    address = own_address(detect(os.environ), site)
    print(site, detect(os.environ).host, address, interface_of(address))
"""


def test_a_real_slurm_is_probed_and_ranks_follow_the_edited_profile(cluster: Cluster, tmp_path: Path):
    env = {"XDG_CONFIG_HOME": str(tmp_path)}
    words = (PYTHON, "-m", "meshrun", "sites", "probe", "--save", "lab", "--json")
    document = json.loads(cluster.run("ctl", words, cwd=tmp_path, env=env, check=True).stdout)
    said = {each["what"]: each["value"] for each in document["values"]}
    assert (said["gpus_per_node"], said["partition"], said["cores_per_node"]) == (4, "main", 8)
    assert said["partition short"] == "at most 00:05:00, 4 GPUs a node, 4 nodes"
    assert said["partition crowded"].startswith("at most UNLIMITED, 4 GPUs a node")

    path = tmp_path / "meshrun/sites/lab.toml"
    path.write_text(path.read_text() + '\n[host_suffix]\nvalue = "i"\n')
    srun = ("srun", "-w", "n1,n2", "-n2", PYTHON, "-c", ADDRESS)
    lines = cluster.run("ctl", srun, cwd=tmp_path, env=env, check=True).stdout.split("\n")
    hosts = sorted(filter(None, lines))
    assert [line.split()[0] for line in hosts] == ["None", "None", "lab", "lab"]
    for line in hosts:
        _, host, address, interface = line.split()
        assert address == f"10.77.0.{host.removeprefix('n')}" and interface == "eth0"

    path.write_text(path.read_text().replace('value = "i"', 'value = "-ib"'))
    refused = cluster.run("ctl", srun, cwd=tmp_path, env=env)
    assert refused.returncode != 0 and "but 'n1-ib' stands for no address here" in refused.stderr

"""What Slurm prints about a cluster becomes a profile: recorded from 22.05, and in the shapes of other versions."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from meshrun.errors import RunFailed
from meshrun.launch.probe import CONFIG, NODE, NODES, PARTITIONS, gpus_in, kinds_of_nodes, probe
from meshrun.world.network import Interface
from meshrun.world.profile_file import from_document, to_text

RECORDED = Path(__file__).parent / "slurm_22_05"


def recorded(*words: str) -> str:
    """Slurm 22.05.8 on a virtual cluster."""
    names = {
        CONFIG: "config.txt", NODES: "nodes.txt", PARTITIONS: "partitions.txt", (*NODE, "n1"): "node.txt",
    }  # fmt: skip
    return (RECORDED / names[words]).read_text()


def recorded_slurm(folder: Path) -> None:
    """Slurm's commands in a folder, which print the same; sbatch takes no job."""
    files = {
        "scontrol show config": "config.txt",
        "scontrol --oneliner show partition": "partitions.txt",
        "scontrol --oneliner show node n1": "node.txt",
    }
    cases = "\n".join(f'  "{words}") exec /bin/cat {RECORDED / file} ;;' for words, file in files.items())
    nodes = f"  sinfo*) exec /bin/cat {RECORDED / 'nodes.txt'} ;;"
    folder.mkdir()
    for name in ("scontrol", "sinfo", "sbatch", "squeue"):
        (folder / name).write_text(f'#!/bin/sh\ncase "${{0##*/}} $*" in\n{cases}\n{nodes}\nesac\nexit 1\n')
        (folder / name).chmod(0o755)


def answering(config: str = "", nodes: str = "", found: str = "", node: str = ""):
    """A Slurm that prints these."""

    def ask(*words: str) -> str:
        if words == CONFIG:
            return config
        if words[: len(NODE)] == NODE:
            if not node:
                raise RunFailed("no such node")
            return node
        return nodes if words == NODES else found

    return ask


def test_a_real_cluster_becomes_a_profile():
    site = probe(recorded)
    assert (site.name, site.title) == ("virtual", "the cluster virtual, Slurm 22.05.8")
    said = {key: site.get(key) for key in site.values}
    assert said == {
        "gpu": "a100", "gpus_per_node": 4, "cores_per_node": 8, "threads_per_core": 1, "cores_per_gpu": 2,
        "partition": "main", "gpu_request": "--gres=gpu:{n}", "chain": "requeue",
    }  # fmt: skip
    main, short = site.partitions
    assert (main.name, main.max_seconds, main.gpus_per_node, main.nodes, main.default) == ("main", 86400, 4, 4, True)
    assert (short.name, short.max_time, short.default) == ("short", "00:05:00", False)
    assert not site.unverified() and all(value.source.endswith("on this machine") for value in site.values.values())
    assert site.detect.matches({}, "virtual", "x") and not site.detect.matches({}, "virtual2", "x")


def test_what_was_probed_can_be_saved_and_read_again():
    site = probe(
        recorded, {"LMOD_CMD": "/usr/share/lmod"}, [Interface("eth0", "10.0.0.1"), Interface("hsn1", "10.1.0.1")]
    )
    again = from_document(site.name, tomllib.loads(to_text(site)))
    assert again == site
    assert again.get("module_system") == "lmod" and again.get("socket_interface") == "hsn"
    assert [name for name, _ in again.unverified()] == ["socket_interface"], "nodes may differ from this machine"


@pytest.mark.parametrize(
    "gres, count, kind",
    [
        ("gpu:a100:4", 4, "a100"),
        ("gpu:4", 4, None),
        ("gpu", 1, None),
        ("gpu:h200:8(S:0-1)", 8, "h200"),
        ("gpu:nvidia_a100-sxm4-40gb:4(S:0,2),nvme:1", 4, "nvidia_a100-sxm4-40gb"),
        ("nvme:1600,gpu:v100:4(IDX:0-3)", 4, "v100"),
        ("gpu:a100:2(S:0),gpu:h100:2(S:1)", 4, None),
        ("gpu:a100:4(S:0-1),gpu:a100:4(S:2-3)", 8, "a100"),
        ("mps:400", 0, None),
        ("(null)", 0, None),
        ("", 0, None),
    ],
)
def test_gpus_are_counted_in_every_form_of_gres(gres: str, count: int, kind: str | None):
    assert gpus_in(gres) == (count, kind)


def test_partitions_of_several_kinds_of_nodes_have_the_most_that_one_has():
    kinds = kinds_of_nodes(
        "gpu|10|gpu:a100:4(S:0-1)|2:24:2|a100,ib\ngpu|2|gpu:h100:8(S:0-1)|2+:48+:2|h100\nlogin||x\n\ncpu|300|(null)|2:64:1|\n"
    )
    assert [(kind.gpus, kind.cores, kind.threads) for kind in kinds] == [(4, 48, 2), (8, 96, 2), (0, 128, 1)]
    found = (
        "PartitionName=cpu Default=YES MaxTime=UNLIMITED MaxNodes=UNLIMITED State=UP TotalNodes=300\n"
        "PartitionName=gpu Default=NO MaxTime=2-00:00:00 MaxNodes=8 OverSubscribe=EXCLUSIVE State=UP TotalNodes=12\n"
        "PartitionName=old Default=NO MaxTime=30 State=DOWN TotalNodes=400\n"
    )
    nodes = "cpu|300|(null)|2:64:1|\ngpu|10|gpu:a100:4|2:24:2|\ngpu|2|gpu:h100:8|2:48:2|\nold|400|gpu:k80:4|2:8:1|\n"
    site = probe(answering(found=found, nodes=nodes))
    cpu, gpu, old = site.partitions
    assert (cpu.max_time, cpu.max_seconds, cpu.gpus_per_node, cpu.nodes) == ("UNLIMITED", None, 0, 300)
    assert (gpu.max_seconds, gpu.gpus_per_node, gpu.nodes, gpu.note) == (
        172800,
        8,
        8,
        "at most 8 nodes a job, whole nodes",
    )
    assert (old.max_seconds, old.note) == (1800, "it is down")
    assert site.get("partition") == "gpu", "Slurm's default has no GPUs, and the larger one takes no jobs"
    assert (site.get("gpus_per_node"), site.get("cores_per_node"), site.get("cores_per_gpu")) == (8, 96, 12)


def test_cores_that_a_site_keeps_for_itself_are_not_counted():
    found = "PartitionName=g Default=YES MaxTime=1:00:00 Nodes=nid[005000-005002] State=UP TotalNodes=3\n"
    node = (
        "NodeName=nid005000 CoresPerSocket=64 CPUAlloc=0 CPUEfctv=112 CPUTot=128 Gres=gpu:mi250:8(S:0) ThreadsPerCore=2"
    )
    ask = answering("ClusterName             = lumi_g\nJobRequeue = 0\n", "g|3|gpu:mi250:8(S:0)|1:64:2|\n", found, node)
    site = probe(ask)
    assert (site.name, site.cluster) == ("lumi-g", "lumi_g") and site.get("chain") == "submit"
    assert (site.get("cores_per_node"), site.get("threads_per_core"), site.get("cores_per_gpu")) == (56, 2, 7)


def test_a_cluster_without_gpus_and_one_that_says_little_are_described_as_far_as_known():
    site = probe(
        answering(nodes="cpu|3|(null)|1:4:1|\n", found="PartitionName=cpu Default=YES MaxTime=INFINITE State=UP")
    )
    assert site.get("gpus_per_node") == 0 and site.get("gpu_request") is None and site.get("cores_per_gpu") is None
    assert site.get("cores_per_node") == 4, "where the node says nothing, sinfo does"
    silent = probe(answering())
    assert (silent.name, silent.values, silent.partitions) == ("here", {}, ())
    assert from_document("here", tomllib.loads(to_text(silent))).title == "the cluster here"

"""From facts to findings: a healthy world says nothing, and each thing that is wrong is named with what mends it."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from meshrun.check.doctor.case import CHECKS, Case, Held, Left
from meshrun.check.doctor.facts import Caches, Cores, Facts, Folder, Gpus, Limits, Memory, Network, Port
from meshrun.check.doctor.links import Clock, Links, Speed, Way, partners
from meshrun.check.doctor.measure import Together, Work, slow
from meshrun.check.doctor.of_node import gpus, slurm_loses_cores
from meshrun.check.doctor.rules import judge
from meshrun.world.network import Interface

GIB = 1 << 30


def facts(rank: int, per_node: int = 2, size: int = 4) -> Facts:
    """A rank of healthy nodes n1, n2, … with 16 cores, 2 GPUs and two networks each."""
    node, local = divmod(rank, per_node)
    network = Network(
        address=f"10.0.0.{node + 1}",
        problem="",
        named=(f"10.0.0.{node + 1}",),
        interfaces=(
            Interface("lo", "127.0.0.1"),
            Interface("ib0", f"10.0.0.{node + 1}", 100_000, infiniband=True),
            Interface("eth0", f"10.1.0.{node + 1}", 1_000),
        ),
        infiniband=(),
        gloo=None,
        nccl=None,
        nccl_without_infiniband=False,
        route=True,
    )
    half = tuple(range(8 * local, 8 * local + 8))
    return Facts(
        rank=rank,
        size=size,
        local_rank=local,
        local_size=per_node,
        node=node,
        nodes=size // per_node,
        host=f"n{node + 1}",
        source="slurm",
        port=4000 + rank,
        cores=Cores(half, existing=16, allowed=16, granted_rank=8, granted_node=16, srun_told=False),
        gpus=Gpus(granted_node=2, granted_rank=None, listed=("0", "1"), listed_by="CUDA_VISIBLE_DEVICES", existing=2),
        network=network,
        memory=Memory(8 * GIB, 8 * GIB),
        folder=Folder("/scratch/runs", "", "lustre", 100 * GIB, 10**6),
        limits=Limits(files=65536, core=0, core_is_file=True, locked=-1),
        caches=Caches({}, {}, offline=False),
        versions={"python": "3.11.2", "torch": "2.13.0"},
        slurm="22.05.8",
        ends_in=3600.0,
        master=None,
    )


def links(node: int, nodes: int = 2) -> Links:
    to = (node + 1) % nodes
    return Links(
        ways=(
            Way(to, "address", f"10.0.0.{to + 1}", f"10.0.0.{to + 1}", works=True),
            Way(to, "name", f"n{to + 1}", f"10.0.0.{to + 1}", works=True),
        ),
        clock=Clock(0.001, 0.0005) if node else None,
        speeds=(Speed(to, "ib0", 2e9), Speed(to, "eth0", 1.1e8)),
        to_itself=4e9,
    )


def healthy() -> Case:
    return Case(
        facts=[facts(rank) for rank in range(4)],
        size=4,
        links={0: links(0), 2: links(1)},
        rounds=[[Work(rank, f"cuda:{rank % 2}", 7e14, 1.0) for rank in range(4)]],
        together={rank: Together("", "cuda", 2, 2e-5, 1e10) for rank in range(4)},
    )


def changed(case: Case, ranks: tuple[int, ...], **parts: dict[str, Any] | object) -> Case:
    """The case in which facts of these ranks are different: a dict changes fields of that part."""

    def other(each: Facts) -> Facts:
        values = {
            name: replace(getattr(each, name), **value) if isinstance(value, dict) and name != "versions" else value
            for name, value in parts.items()
        }
        return replace(each, **values)

    return replace(case, facts=[other(each) if each.rank in ranks else each for each in case.facts])


def linked(case: Case, rank: int, **parts: Any) -> Case:
    return replace(case, links={**case.links, rank: replace(case.links[rank], **parts)})


N2 = (2, 3)
ALL = (0, 1, 2, 3)
NO_ROUTE = {"route": False}
WRONG: dict[str, tuple[Callable[[Case], Case], str, list[str]]] = {
    "one core for all": (
        lambda case: changed(case, N2, cores={"bound": (0,), "granted_rank": None}),
        "cores",
        ["ranks 2, 3 of n2 together may run on 1 core (0) but 16 were granted", "--cpu-bind=none"],
    ),
    "one of two cores for both": (
        lambda case: changed(case, N2, cores=Cores((0,), 2, 2, granted_rank=1, granted_node=2, srun_told=True)),
        "cores",
        ["ranks 2, 3 of n2 together may run on 1 core (0) but 2 were granted there"],
    ),
    "cores lost by Slurm 22.05": (
        lambda case: changed(changed(case, (2,), cores={"bound": (0,)}), (3,), cores={"bound": (1,)}),
        "cores",
        ["1 core but 8 were granted to each task", "export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK"],
    ),
    "one core a rank under mpirun": (
        lambda case: changed(
            case, N2, source="openmpi", cores={"bound": (0,), "granted_rank": None, "granted_node": None}
        ),
        "cores",
        ["16 are there", "mpirun --map-by slot:PE=8"],
    ),
    "hidden GPU": (
        lambda case: changed(case, N2, gpus={"listed": ("0",)}),
        "GPUs",
        ["2 GPUs of n2 were granted but ranks 2, 3 see 1: CUDA_VISIBLE_DEVICES=0", "unset CUDA_VISIBLE_DEVICES"],
    ),
    "GPUs without ranks": (
        lambda case: changed(case, ALL, gpus={"granted_node": 4, "listed": ("0", "1", "2", "3")}),
        "GPUs",
        ["4 GPUs of n1 were granted but 2 ranks run there; the same on 1 more node", "--ntasks-per-node=4"],
    ),
    "torch without CUDA": (
        lambda case: replace(case, together={rank: Together("", "cpu", 0, 1e-4, 1e9) for rank in ALL}),
        "GPUs",
        ["torch sees no GPU on n1, whose driver has 2"],
    ),
    "own name stands for a dead address": (
        lambda case: changed(case, N2, network={"address": "10.0.0.99"}),
        "address",
        ["n2 would tell the others to find it at 10.0.0.99, which no interface of it has", "/etc/hosts"],
    ),
    "no address at all": (
        lambda case: changed(case, N2, network={"address": None, "problem": "host 'n2' has no network address"}),
        "address",
        ["host 'n2' has no network address", "--site NAME"],
    ),
    "name leads astray": (
        lambda case: linked(case, 2, ways=(Way(0, "name", "n1", "10.0.0.99", works=False),)),
        "address",
        ["n2 takes 'n1' for 10.0.0.99, which no interface of n1 has"],
    ),
    "name is loopback": (
        lambda case: linked(case, 2, ways=(Way(0, "master", "n1", "127.0.1.1", works=False),)),
        "address",
        ["n2 takes 'n1' for 127.0.1.1, which is itself and not n1", "export MASTER_ADDR=IP"],
    ),
    "firewall": (
        lambda case: linked(case, 2, ways=(Way(0, "address", "10.0.0.1", "10.0.0.1", works=False),)),
        "address",
        ["n2 does not reach n1 at 10.0.0.1, the address that n1 gives", "firewall"],
    ),
    "interface that is not there": (
        lambda case: changed(case, N2, network={"nccl": "hsn"}),
        "network",
        ["NCCL_SOCKET_IFNAME=hsn names no interface that is up there of n2", "unset NCCL_SOCKET_IFNAME"],
    ),
    "loopback": (
        lambda case: changed(case, N2, network={"gloo": "lo"}),
        "network",
        ["GLOO_SOCKET_IFNAME=lo names the loopback interface of n2", "eth0"],
    ),
    "slow interface": (
        lambda case: changed(case, N2, network={"gloo": "eth0"}),
        "network",
        ["collectives of n2 go over eth0", "110.0 MB/s", "ib0 carries 2.0 GB/s", "GLOO_SOCKET_IFNAME=ib0"],
    ),
    "slow interface, not measured": (
        lambda case: replace(changed(case, N2, network={"address": "10.1.0.2"}), links={}),
        "network",
        ["collectives of n2 go over eth0 (10.1.0.2 is its address)", "ib0 carries 12.5 GB/s"],
    ),
    "slow link": (
        lambda case: linked(case, 2, speeds=(Speed(0, "ib0", 2e7),)),
        "network",
        ["n2 sends 20.0 MB/s to n1 over ib0, where 1.2 GB/s would be usual"],
    ),
    "NCCL over TCP": (
        lambda case: replace(
            changed(case, ALL, network={"infiniband": (Port("mlx5_0", True, 200), Port("mlx5_1", True, 200))}),
            together={rank: Together("", "cuda", 2, 2e-5, 2e9) for rank in ALL},
        ),
        "network",
        ["NCCL sums at 2.0 GB/s a rank, and 2 InfiniBand ports carry 50.0 GB/s", "NCCL_DEBUG=INFO"],
    ),
    "process group fails": (
        lambda case: replace(case, together={**case.together, 3: Together("rank 3 waited for rank 0")}),
        "network",
        ["ranks could not form a process group: rank 3 waited for rank 0"],
    ),
    "clock ahead": (
        lambda case: linked(case, 2, clock=Clock(3.0, 0.01)),
        "clock",
        ["the clock of n2 is 3.0 s ahead of that of n1"],
    ),
    "clock behind": (
        lambda case: linked(case, 2, clock=Clock(-0.7, 0.01)),
        "clock",
        ["the clock of n2 is 0.7 s behind that of n1"],
    ),
    "tiny shared memory": (
        lambda case: changed(case, N2, memory={"total": 1 << 20, "free": 1 << 20}),
        "memory",
        ["/dev/shm of n2 has 1.0 MiB free of 1.0 MiB, and 2 ranks need at least 128.0 MiB", "--shm-size"],
    ),
    "read-only folder": (
        lambda case: changed(case, (3,), folder={"error": "Read-only file system"}),
        "folder",
        ["nothing can be written to /scratch/runs on n2: Read-only file system", "--runs DIR"],
    ),
    "full disk": (
        lambda case: changed(case, N2, folder={"free": 10 << 20}),
        "folder",
        ["/scratch/runs has 10.0 MiB left on n2"],
    ),
    "no files left": (
        lambda case: changed(case, N2, folder={"free_files": 3}),
        "folder",
        ["room for 3 files left on n2"],
    ),
    "folder of its own": (
        lambda case: replace(changed(case, N2, folder={"filesystem": "tmpfs"}), blind=frozenset(N2)),
        "folder",
        ["/scratch/runs of n2 (tmpfs there) is not the one that n1 has"],
    ),
    "folder seen one way": (lambda case: replace(case, unseen=frozenset(N2)), "folder", ["of n2", "n1 has"]),
    "cache missing": (
        lambda case: changed(
            case, N2, caches=Caches({"HF_HOME": "/x"}, {"HF_HOME": "is not there"}, offline=True), network=NO_ROUTE
        ),
        "caches",
        ["HF_HOME=/x is not there on n2", "meshrun stage"],
    ),
    "offline without the switch": (
        lambda case: changed(case, N2, caches=Caches({"HF_HOME": "/x"}, {}, offline=False), network=NO_ROUTE),
        "caches",
        ["n2 has no way to the internet, and HF_HUB_OFFLINE is not set", "export HF_HUB_OFFLINE=1"],
    ),
    "version skew": (
        lambda case: changed(case, N2, versions={"python": "3.11.2", "torch": "2.11.0"}),
        "versions",
        ["torch is 2.11.0 on n2 and 2.13.0 elsewhere"],
    ),
    "one rank with another version": (
        lambda case: changed(case, (0,), versions={"python": "3.11.2", "torch": "2.11.0"}),
        "versions",
        ["torch is 2.11.0 on n1 and 2.13.0 elsewhere"],
    ),
    "slow GPU": (
        lambda case: replace(
            case, rounds=[[*works[:3], replace(works[3], rate=4e14)] for works in [case.rounds[0]] * 3]
        ),
        "speed",
        ["rank 3 on n2 takes 1.8 times as long for a matrix product as the others (cuda:1)", "--exclude=n2"],
    ),
    "port taken": (
        lambda case: replace(case, held=(Held(29500, "MASTER_PORT", "process 17 (python old.py)"),)),
        "ports",
        ["port 29500 of n1, which MASTER_PORT names, is taken by process 17 (python old.py)"],
    ),
    "rendezvous left behind": (
        lambda case: replace(case, left=(Left("runs/.rendezvous/slurm-1.json", "10.0.0.9:4321"),)),
        "ports",
        ["runs/.rendezvous/slurm-1.json", "10.0.0.9:4321", "rm runs/.rendezvous/slurm-1.json"],
    ),
    "few open files": (
        lambda case: changed(case, N2, limits={"files": 128}),
        "limits",
        ["a process of n2 may open 128 files", "ulimit -n"],
    ),
    "core files": (
        lambda case: changed(case, N2, limits={"core": -1}),
        "limits",
        ["a crash on n2 writes core files (ulimit -c is unlimited)", "ulimit -c 0"],
    ),
    "locked memory": (
        lambda case: changed(case, N2, limits={"locked": 65536}, network={"infiniband": (Port("mlx5_0", True, 100),)}),
        "limits",
        ["a process of n2 may lock 64.0 KiB of memory", "ulimit -l unlimited"],
    ),
    "end of the job": (lambda case: changed(case, (0,), ends_in=40.0), "limits", ["the job ends in 40 s"]),
    "silent rank": (
        lambda case: replace(case, facts=case.facts[:3]),
        "ranks",
        ["rank 3 of 4 was not heard", "--timeout"],
    ),
}


def test_a_healthy_world_says_nothing():
    assert judge(healthy()) == []


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_named_once_with_its_place_and_what_mends_it(name: str):
    change, check, words = WRONG[name]
    found = judge(change(healthy()))
    assert [finding.check for finding in found] == [check], found
    text = " | ".join([found[0].what, found[0].where, found[0].why, found[0].fix])
    for word in words:
        assert word in text
    assert found[0].where and found[0].why and found[0].fix and check in CHECKS
    assert "n2" in text or "n1" in text or "rank 3" in text


def test_every_check_has_a_case_here():
    assert {check for _, check, _ in WRONG.values()} == set(CHECKS)


QUIET: dict[str, Callable[[Case], Case]] = {
    # Slurm grants 8 cores a node that has 2, as on a virtual cluster.
    "granted more than there is": lambda case: changed(
        case, ALL, cores=Cores((0, 1), existing=2, allowed=2, granted_rank=4, granted_node=8, srun_told=True)
    ),
    "two cores, one for each of two ranks": lambda case: changed(
        changed(case, ALL, cores=Cores((0,), existing=2, allowed=2, granted_rank=1, granted_node=2, srun_told=True)),
        (1, 3),
        cores={"bound": (1,)},
    ),
    "no hyper-threads": lambda case: changed(
        case, ALL, cores=Cores(tuple(range(64)), 128, 128, granted_rank=None, granted_node=128, srun_told=False)
    ),
    "a GPU for each task": lambda case: changed(case, ALL, gpus={"granted_rank": 1, "listed": ("0",)}),
    "its own GPU for each task": lambda case: changed(
        changed(case, (0, 2), gpus={"listed": ("0",)}), (1, 3), gpus={"listed": ("1",)}
    ),
    "GPUs that no driver knows": lambda case: replace(
        changed(case, ALL, gpus={"existing": 0}),
        together={rank: Together("", "cpu", 0, 1e-4, 1e9) for rank in ALL},
    ),
    "names that nobody needs": lambda case: linked(
        case, 2, ways=(*links(1).ways[:1], Way(0, "name", "n1", None, works=False))
    ),
    "one stream below what the card carries": lambda case: linked(case, 2, speeds=(Speed(0, "ib0", 4e8),)),
    # Four ranks on two cores with much else running: everything is slow, also within the node.
    "a machine that is busy": lambda case: replace(
        linked(case, 2, speeds=(Speed(0, "ib0", 3e7),), to_itself=5e7),
        rounds=[[Work(rank, "cpu", rate, 0.3) for rank, rate in enumerate((9e9, 4e9, 8e9, 7e9))]],
    ),
    "slow for a moment": lambda case: replace(
        case,
        rounds=[
            [Work(rank, "cpu", 1e9 if rank == 3 else 1e10, 0.3) for rank in ALL],
            [Work(rank, "cpu", 1e9 if rank == 2 else 1e10, 0.3) for rank in ALL],
            [Work(rank, "cpu", 1e9 if rank == 3 else 1e10, 0.3) for rank in ALL],
        ],
    ),
    "clock as far off as it can be told": lambda case: linked(case, 2, clock=Clock(1.2, 0.9)),
    "no cache and no route": lambda case: changed(case, ALL, network=NO_ROUTE),
    "core files go to a service": lambda case: changed(case, ALL, limits={"core": -1, "core_is_file": False}),
    "no limit of time": lambda case: changed(case, ALL, ends_in=None),
}


@pytest.mark.parametrize("name", QUIET)
def test_what_is_no_fault_is_not_told(name: str):
    assert judge(QUIET[name](healthy())) == []


def many(nodes: int) -> Case:
    size = 2 * nodes
    return Case(
        facts=[facts(rank, size=size) for rank in range(size)],
        size=size,
        links={2 * node: links(node, nodes) for node in range(nodes)},
    )


def test_the_same_on_many_nodes_is_said_once():
    case = changed(many(64), tuple(range(128)), memory={"free": 0})
    [finding] = judge(case)
    assert "the same on 63 more nodes" in finding.what and len(finding.hosts) == 64 and len(finding.where) < 80


def test_of_many_clocks_the_one_that_is_off_is_named_even_the_first():
    case = many(5)
    off = {rank: replace(each, clock=each.clock and Clock(5.0, 0.001)) for rank, each in case.links.items()}
    [finding] = judge(replace(case, links=off))
    assert finding.what == "the clock of n1 is 5.0 s behind the others'"


def test_of_many_links_the_slow_one_is_named():
    case = many(8)
    slow_one = replace(case.links[6], speeds=(Speed(4, "ib0", 5e7),))
    [finding] = judge(replace(case, links={**case.links, 6: slow_one}))
    assert finding.what.startswith("n4 sends 50.0 MB/s to n5 over ib0, where 2.0 GB/s is usual")


def test_facts_travel_as_json():
    import json

    for rank in range(4):
        mine = facts(rank)
        assert Facts.from_json(json.loads(json.dumps(mine.to_json()))) == mine
    assert Links.from_json(json.loads(json.dumps(links(1).to_json()))) == links(1)
    assert all(dataclasses.is_dataclass(each) for each in (facts(0).cores, links(0)))


def test_a_noisy_machine_calls_nobody_slow():
    """Rates of a fair scheduler that is off by up to half, three rounds: not once in a thousand."""
    noise = random.Random(5)
    alarms = 0
    for _ in range(1000):
        rounds = [[Work(rank, "cpu", noise.uniform(0.5, 1.5), 0.4) for rank in range(4)] for _ in range(3)]
        alarms += bool(slow(rounds))
    assert alarms == 0


def test_every_node_has_a_way_to_every_other_in_a_few_steps():
    assert partners(1, range(4)) == [2, 3, 0]
    tried = {node: partners(node, range(500)) for node in range(500)}
    assert all(0 in others or node == 0 for node, others in tried.items())
    assert max(map(len, tried.values())) <= 11 and {others[0] for others in tried.values()} == set(range(500))


@pytest.mark.parametrize(
    ("version", "loses"),
    [("22.05.8", True), ("23.02.1", True), ("21.08.5", False), ("23.11.0", False), (None, False), ("none", False)],
)
def test_versions_of_slurm_that_do_not_hand_cores_on_are_known(version: str | None, loses: bool):
    assert slurm_loses_cores(version) is loses


@pytest.mark.parametrize(("granted", "told"), [(2, False), (3, True), (4, True)])
def test_a_gpu_without_a_rank_is_found(granted: int, told: bool):
    listed = tuple(map(str, range(granted)))
    ranks = [
        replace(facts(rank), gpus=replace(facts(rank).gpus, granted_node=granted, listed=listed)) for rank in (0, 1)
    ]
    found = [each.what for each in gpus(Case(ranks, 2)) if "ranks run there" in each.what]
    assert found == ([f"{granted} GPUs of n1 were granted but 2 ranks run there"] if told else [])

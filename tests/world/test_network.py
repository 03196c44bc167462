"""The address at which other nodes reach this one, and the interface that gloo and NCCL then use."""

from __future__ import annotations

import ctypes
import fcntl
import ipaddress
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from meshrun.errors import RunFailed, UserError
from meshrun.world import detect, network
from meshrun.world.environment import of_rank
from meshrun.world.network import Interface, address_of, for_nccl, interface_of, interfaces
from meshrun.world.played import Allocation, inherited_by_jobs, of_batch, of_task
from meshrun.world.profile_file import from_document

TWO_NODES = replace(detect({}), size=2, nodes=2)
LOOPBACK = Interface("lo", "127.0.0.1")
SUFFIX = from_document("here", {"host_suffix": {"value": "i"}})
HSN = from_document("here", {"socket_interface": {"value": "hsn"}})


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch):
    """Makes this machine have such interfaces, names and a default route."""

    def make(*found: Interface, routed: str | None = None, names: dict[str, str] | None = None) -> None:
        known = names or {}
        monkeypatch.setattr(network, "interfaces", lambda: [LOOPBACK, *found])
        monkeypatch.setattr(network, "_routed", lambda: [routed] if routed else [])
        monkeypatch.setattr(network, "resolved", lambda name: [known[name]] if name in known else [])

    return make


def test_one_node_meets_on_loopback():
    assert address_of(detect({})) == "127.0.0.1"


def test_a_host_name_that_resolves_is_taken():
    assert address_of(replace(TWO_NODES, host="192.0.2.7")) == "192.0.2.7"


@pytest.mark.parametrize("host", ["127.0.1.1", "localhost", "no-such-host.invalid", "0.0.0.0", "x" * 300])
def test_a_host_name_on_loopback_is_passed_over_for_an_interface(host: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(network, "interfaces", lambda: [LOOPBACK])
    monkeypatch.setattr(network, "_routed", lambda: ["10.1.2.3"])
    assert address_of(replace(TWO_NODES, host=host)) == "10.1.2.3"


def test_without_name_and_route_the_first_interface_that_leads_out_is_taken(machine):
    machine(Interface("eth9", "169.254.1.1"), Interface("docker0", "172.17.0.1", 10000), Interface("eth0", "10.1.2.4"))
    assert address_of(TWO_NODES) == "10.1.2.4"


def test_nodes_that_are_played_on_one_machine_meet_on_loopback(machine):
    machine(Interface("eth0", "10.1.0.1", 1000), routed="10.1.0.1", names={"here": "10.1.0.1"})
    job = Allocation("1", "digits-1", nodes=2)
    task = {**of_batch(job), **of_task(job, step=0, node=1, local=0, tasks_per_node=1, nodes=2)}
    rank = of_rank(1, 2, (0, 1), (1, 2), ("127.0.0.1", 29500), 0, "run")
    for env in (task, {**task, **rank}):
        assert address_of(detect(env, "here")) == "127.0.0.1"
        assert address_of(detect({**env, "SLURM_CLUSTER_NAME": "large"}, "here")) == "10.1.0.1"


def test_a_machine_with_loopback_only_cannot_meet_other_nodes(machine):
    machine()
    with pytest.raises(RunFailed, match="host 'here' has no network address but loopback"):
        address_of(replace(TWO_NODES, host="here"))


FAST = [
    Interface("ib0", "10.2.0.1"),
    Interface("hsn0", "10.2.0.1"),
    Interface("ibp1s0", "10.2.0.1", infiniband=True),
    Interface("eth1", "10.2.0.1", 100_000),
]


@pytest.mark.parametrize("fast", FAST, ids=lambda each: each.name)
def test_the_fastest_interface_wins_over_the_hosts_name_and_the_default_route(machine, fast: Interface):
    slow = Interface("eth0", "10.1.0.1", 1000)
    for order in ((slow, fast), (fast, slow)):
        machine(*order, routed="10.1.0.1", names={"n1": "10.1.0.1"})
        assert address_of(replace(TWO_NODES, host="n1")) == "10.2.0.1"


def test_interfaces_of_equal_or_unknown_speed_leave_it_to_the_hosts_name(machine):
    world = replace(TWO_NODES, host="n1")
    for speed in (0, 10_000):
        machine(Interface("eth0", "10.1.0.1", speed), Interface("eth1", "10.2.0.1", speed), names={"n1": "10.2.0.1"})
        assert address_of(world) == "10.2.0.1"
    machine(Interface("eth0", "10.1.0.1"), Interface("eth1", "10.2.0.1"), routed="10.2.0.1")
    assert address_of(world) == "10.2.0.1"
    machine(Interface("virbr0", "10.9.0.1", 100_000), Interface("eth0", "10.1.0.1", 1000), names={"n1": "10.1.0.1"})
    assert address_of(world) == "10.1.0.1", "however fast, a bridge for virtual machines leads to no other node"


def test_the_sites_suffix_names_the_node_on_its_fast_network(machine):
    machine(Interface("eth0", "10.1.0.1"), names={"jwb0001i": "10.2.0.1", "jwb0001": "10.1.0.1"})
    assert address_of(replace(TWO_NODES, host="jwb0001.juwels"), SUFFIX) == "10.2.0.1"
    named = replace(TWO_NODES, host="other", hosts=("jwb0001", "jwb0002"), node=0)
    assert address_of(named, SUFFIX) == "10.2.0.1", "Slurm's name of the node counts"
    assert address_of(replace(TWO_NODES, host="jwb0001i"), SUFFIX) == "10.2.0.1"


@pytest.mark.parametrize("names", [{}, {"n1i": "127.0.1.1"}, {"n1i": "fd00::1"}])
def test_a_suffix_that_names_nothing_is_said_with_the_rule(machine, names: dict[str, str]):
    machine(Interface("eth0", "10.1.0.1"), names=names)
    with pytest.raises(UserError, match=r"nodes of site here .* 'i' at its end \(host_suffix\), but 'n1i' .*--site"):
        address_of(replace(TWO_NODES, host="n1"), SUFFIX)


def test_the_sites_interface_is_taken_where_it_is_there(machine):
    machine(Interface("ib0", "10.2.0.1"), Interface("hsn1", "10.3.0.1"))
    assert address_of(TWO_NODES, HSN) == "10.3.0.1"
    machine(Interface("ib0", "10.2.0.1"))
    assert address_of(TWO_NODES, HSN) == "10.2.0.1"


@pytest.mark.parametrize(("told", "speed"), [(1000, 1000), (400_000, 400_000), (0xFFFF, 0), (0xFFFF_FFFF, 0)])
def test_a_speed_above_16_bits_is_read_whole(told: int, speed: int, monkeypatch: pytest.MonkeyPatch):
    """The kernel tells its halves apart, and all bits where it does not know."""

    def answer(_probe: object, _question: int, request: bytes) -> None:
        _, address = struct.unpack_from("16sP", request)
        for place, half in ((12, told & 0xFFFF), (28, told >> 16)):
            ctypes.memmove(address + place, struct.pack("H", half), 2)

    monkeypatch.setattr(fcntl, "ioctl", answer)
    with socket.socket() as probe:
        assert network._speed(probe, "hsn0") == speed


def test_nccl_is_told_all_interfaces_of_a_fast_kind_or_one_exactly():
    assert [for_nccl(name) for name in ("ib0", "hsn3", "eth1", "ibp1s0")] == ["ib", "hsn", "=eth1", "=ibp1s0"]


def test_the_addresses_found_on_this_machine_can_be_listened_on():
    found = {each.address for each in interfaces()} | {*network._routed()}
    assert "127.0.0.1" in found and interface_of("127.0.0.1") == "lo" and interface_of("192.0.2.99") is None
    for address in found:
        ipaddress.IPv4Address(address)
        with socket.create_server((address, 0)):
            pass


WHY_NOT = (
    "needs root, for network namespaces"
    if os.geteuid() != 0
    else "needs the command ip (Debian's package iproute2)"
    if shutil.which("ip") is None
    else ""
)

NODE = """
import json, os, sys, torch
import torch.distributed as dist
from meshrun import mesh
from meshrun.world.network import interfaces, interface_of
mesh.use(mesh.Meeting(device="cpu", timeout=30, runs=mesh.Path(sys.argv[1]), site=sys.argv[2] or None))
here = mesh.start()
values = torch.ones(500_000) * (here.rank + 1)
dist.all_reduce(values)
sent = {line.split(":")[0].strip(): int(line.split()[9]) for line in open("/proc/net/dev") if ":" in line}
chosen = {name: os.environ.get(name) for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")}
speeds = {each.name: each.speed for each in interfaces()}
mesh.finish()
print(json.dumps({"sum": values[0].item(), "sent": sent, "speeds": speeds, "address": here.address, **chosen}))
"""


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[list[str]]:
    """Two namespaces joined by two cables, eth0 and hsn0; each host's name stands for loopback there."""
    if WHY_NOT:
        pytest.skip(WHY_NOT)
    names = [f"meshrun-{os.getpid()}-{node}" for node in (1, 2)]
    hosts = [Path("/etc/netns") / name for name in names]

    def ip(*words: str, check: bool = True) -> None:
        subprocess.run(["ip", *words], check=check, capture_output=True, timeout=20)

    try:
        for name, folder in zip(names, hosts, strict=True):
            ip("netns", "add", name)
            folder.mkdir(parents=True)
            mine = [f"127.0.1.1 n{node}\n10.78.1.{node} n{node}i\n10.78.2.{node} n{node}x\n" for node in (1, 2)]
            (folder / "hosts").write_text("127.0.0.1 localhost\n" + "".join(mine))
            ip("-n", name, "link", "set", "lo", "up")
        for network_at, cable in ((1, "eth0"), (2, "hsn0")):
            pair = ("type", "veth", "peer", "name", cable, "netns", names[1])
            ip("link", "add", "name", cable, "netns", names[0], *pair)
            for node, name in enumerate(names, 1):
                ip("-n", name, "addr", "add", f"10.78.{network_at}.{node}/24", "dev", cable)
                ip("-n", name, "link", "set", cable, "up")
        yield names
    finally:
        for name, folder in zip(names, hosts, strict=True):
            ip("netns", "del", name, check=False)
            shutil.rmtree(folder, ignore_errors=True)


def by_slurm(rank: int) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": str(rank), "SLURM_LOCALID": "0",
        "SLURM_NODEID": str(rank), "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
        "SLURM_STEP_NODELIST": "n[1-2]",
    }  # fmt: skip


def by_a_launcher(rank: int) -> dict[str, str]:
    """The first node's rank meets on loopback, where its launcher serves, and the other one comes from outside."""
    return {
        "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": str(rank),
        "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": ("127.0.0.1", "10.78.1.1")[rank], "MASTER_PORT": "29517",
    }  # fmt: skip


def meet(
    nodes: list[str],
    folder: Path,
    site: str = "",
    more: dict[str, str] | None = None,
    place: Callable[[int], dict[str, str]] = by_slurm,
) -> list[dict]:
    """What each of two ranks, one a node, has to say after a sum over the network."""
    ranks = []
    for rank, name in enumerate(nodes):
        env = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **place(rank), **(more or {})}
        kept = {name: value for name, value in os.environ.items() if "SOCKET_IFNAME" not in name}
        inside = ["unshare", "--uts", "sh", "-c", f'hostname n{rank + 1} && exec "$@"', "sh"]
        command = ["ip", "netns", "exec", name, *inside, sys.executable, "-c", NODE, str(folder), site]
        ranks.append(
            subprocess.Popen(command, env=kept | env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
    try:
        ended = [rank.communicate(timeout=60) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(err for _, err in ended)
    return [json.loads(out) for out, _ in ended]


def test_ranks_on_two_nodes_meet_and_sum_over_the_fast_interface(two_nodes: list[str], tmp_path: Path):
    for node, said in enumerate(meet(two_nodes, tmp_path), 1):
        assert said["sum"] == 3 and said["address"] == f"10.78.2.{node}"
        assert (said["GLOO_SOCKET_IFNAME"], said["NCCL_SOCKET_IFNAME"]) == ("hsn0", "hsn")
        assert said["sent"]["hsn0"] > 1_000_000 > 100_000 > said["sent"]["eth0"]
        assert said["speeds"]["eth0"] == 10_000, "the speed of a virtual cable, as ethtool says it"


def test_ranks_that_meet_on_loopback_with_their_launcher_talk_over_the_fast_interface_too(
    two_nodes: list[str], tmp_path: Path
):
    for said in meet(two_nodes, tmp_path, place=by_a_launcher):
        assert said["sum"] == 3
        assert (said["GLOO_SOCKET_IFNAME"], said["NCCL_SOCKET_IFNAME"]) == ("hsn0", "hsn")
        assert said["sent"]["hsn0"] > 1_000_000 > 100_000 > said["sent"]["eth0"]


def test_the_sites_rule_and_the_users_own_choice_are_followed(two_nodes: list[str], tmp_path: Path):
    (tmp_path / "meshrun/sites").mkdir(parents=True)
    (tmp_path / "meshrun/sites/lab.toml").write_text('[host_suffix]\nvalue = "i"\n')
    more = {"XDG_CONFIG_HOME": str(tmp_path), "NCCL_SOCKET_IFNAME": "mine"}
    for node, said in enumerate(meet(two_nodes, tmp_path / "runs", "lab", more), 1):
        assert said["address"] == f"10.78.1.{node}", "host name and suffix, though hsn0 looks faster"
        assert (said["GLOO_SOCKET_IFNAME"], said["NCCL_SOCKET_IFNAME"]) == ("eth0", "mine")
        assert said["sent"]["eth0"] > 1_000_000


@pytest.mark.parametrize(("flags", "is_taken"), [(0x43, True), (0x03, False)])
def test_an_interface_without_a_cable_is_passed_over(monkeypatch: pytest.MonkeyPatch, flags: int, is_taken: bool):
    answers = {
        network._SIOCGIFADDR: bytes(20) + bytes([10, 1, 2, 3]),
        network._SIOCGIFFLAGS: bytes(16) + struct.pack("H", flags),
        network._SIOCGIFHWADDR: bytes(16) + struct.pack("H", network._INFINIBAND),
    }
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "ib0")])
    monkeypatch.setattr(network, "_asked", lambda _probe, number, _name: answers[number])
    monkeypatch.setattr(network, "_speed", lambda *_: 100)
    assert interfaces() == ([Interface("ib0", "10.1.2.3", 100, True)] if is_taken else [])


def test_a_job_that_is_played_has_all_of_its_shell_but_what_belongs_to_another_job(monkeypatch: pytest.MonkeyPatch):
    kept = {"ENVIRONMENT": "1", "ENV_OF_MINE": "2", "HOME": "/home/me"}
    theirs = {"ENV": "a", "BASH_ENV": "b", "SLURM_JOB_ID": "7", "SRUN_DEBUG": "3", "BASH_FUNC_module%%": "() { :; }"}
    monkeypatch.setattr(os, "environ", {**kept, **theirs})
    assert inherited_by_jobs() == kept

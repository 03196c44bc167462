"""What a rank decides by itself when it takes its place: threads, cores, interfaces, and whom it hears. No ranks."""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from meshrun import Here, mesh
from meshrun.layout import parse
from meshrun.mesh import PeerLost
from meshrun.world import World
from meshrun.world.network import LOOPBACK_INTERFACE

CPU = torch.device("cpu")
WORLD = World(1, 4, 1, 4, 0, 1, "node7", "slurm")


def here(**changes: Any) -> Here:
    mesh_of_four: Any = object()
    return Here(WORLD, parse("dp=4"), CPU, **{"mesh": mesh_of_four, **changes})


def test_a_rank_whose_others_are_made_up_hears_itself_from_all_of_them():
    alone = here(alone=True)
    assert alone.gathered("x") == ["x"] * 4 and alone.from_rank_0("x") == "x"


def test_nobody_can_guess_the_secret_of_the_store_that_rank_0_serves(monkeypatch: pytest.MonkeyPatch):
    secrets: list[bytes] = []
    addresses: list[str | None] = []

    def serve(_port: int, address: str | None, secret: bytes) -> dict[str, int]:
        secrets.append(secret)
        addresses.append(address)
        return {"loopback": 4711}

    monkeypatch.setattr(mesh.store_process, "serve", serve)
    monkeypatch.setattr(mesh, "publish", lambda *told: secrets.append(told[-1]))
    monkeypatch.setattr(mesh, "_client", lambda *_: None)
    for _ in range(2):
        mesh._store(replace(WORLD, rank=0, local_rank=0), mesh.Meeting(), None)
    first, told, second, told_then = secrets
    assert len(first) == 32 and first == told and first != second == told_then
    assert addresses == [None, None], "on one machine ranks meet on loopback, where the kernel says whose they are"


@pytest.mark.parametrize(("rank", "agent", "serves"), [(0, False, True), (0, True, False), (1, False, False)])
def test_only_rank_0_serves_a_store_that_the_launcher_names_and_only_where_no_agent_does(
    rank: int, agent: bool, serves: bool, monkeypatch: pytest.MonkeyPatch
):
    asked: list[bool] = []
    monkeypatch.setattr(mesh, "_named_store", lambda *words: asked.append(words[3]))
    mesh._store(replace(WORLD, rank=rank, address="n1", port=29500, agent_store=agent), mesh.Meeting(), None)
    assert asked == [serves]


def test_what_was_started_for_an_address_that_does_not_answer_is_ended(monkeypatch: pytest.MonkeyPatch):
    found, ended = iter([("10.0.0.7", 1, b""), None, ("10.0.0.7", 2, b"")]), list[int]()

    def reached(_world: World, _address: str, port: int, _secret: bytes) -> str:
        if port == 1:
            raise ConnectionRefusedError("left by a launch that died")
        return "the store"

    monkeypatch.setattr(mesh, "lookup_store", lambda *_: next(found))
    monkeypatch.setattr(mesh, "_reached_store", reached)
    monkeypatch.setattr(mesh.store_process, "end", lambda: ended.append(1))
    assert mesh._published_store(WORLD, mesh.Meeting(timeout=5.0)) == "the store"
    assert ended == [1]


def test_rank_0_gives_up_first_since_it_knows_who_is_missing(monkeypatch: pytest.MonkeyPatch):
    waits: list[float] = []

    def wait(_keys: list[str], limit: timedelta) -> None:
        waits.append(limit.total_seconds())

    store: Any = SimpleNamespace(set=lambda *_: None, wait=wait, get=lambda _: b"", check=lambda _: True)
    monkeypatch.setattr(mesh, "PrefixStore", lambda _, found: found)
    for rank in (0, 1):
        mesh._all_arrived(replace(WORLD, rank=rank), store, f"rank {rank}", timeout=60.0)
    assert waits[0] == 60 < waits[1]


@pytest.mark.parametrize(("size", "connected", "closed"), [(3, 2, [{7}]), (3, 1, []), (3, 0, []), (0, 2, [])])
def test_ports_of_a_group_close_once_all_of_its_ranks_are_connected(
    monkeypatch: pytest.MonkeyPatch, size: int, connected: int, closed: list[set[int]]
):
    """A torch that lets ranks connect when they first speak needs them open; so does a group of unknown size."""
    ports, connections = iter([set(), {7}]), iter([(set(), set()), (set(range(connected)), set())])
    monkeypatch.setattr(mesh, "listening_ports", lambda: next(ports))
    monkeypatch.setattr(mesh, "connections_of_gloo", lambda: next(connections))
    monkeypatch.setattr(mesh, "shut_out_strangers", lambda _: 0)
    monkeypatch.setattr(mesh, "_ports_of_groups", set())
    taken: list[set[int]] = []
    monkeypatch.setattr(mesh, "take_no_more", taken.append)
    with mesh._among_own_processes(size):
        pass
    assert taken == closed


def test_after_a_wait_inside_of_another_one_the_outer_one_goes_on(monkeypatch: pytest.MonkeyPatch):
    told: list[str | None] = []
    monkeypatch.setattr(mesh, "_listener", told.append)
    place = here()
    with place.waiting("the gradients"), place.waiting("a word"):
        pass
    assert told == ["the gradients", "a word", "the gradients", None]


@pytest.mark.parametrize("text", ["gloo: Timed out waiting 600000ms", "gloo: Timeout after 5 s", "NCCL timeout"])
def test_a_wait_that_was_given_up_is_told_as_such(text: str):
    with (
        pytest.raises(PeerLost, match="waited 0 s for the sums and gave up: another rank never got there"),
        here().waiting("the sums"),
    ):
        raise RuntimeError(text)


class Machine:
    """Which cores a rank is left with, and how many threads it computes with."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.threads: int | None = None
        self.bound: set[int] | None = None
        self.granted, self.quota = frozenset(range(8)), None
        self.environment: dict[str, str] = {}
        monkeypatch.setattr(torch, "set_num_threads", lambda count: setattr(self, "threads", count))
        monkeypatch.setattr(os, "sched_setaffinity", lambda _, cores: setattr(self, "bound", set(cores)))
        monkeypatch.setattr(mesh.cores, "granted", lambda: self.granted)
        monkeypatch.setattr(mesh.cores, "quota", lambda: self.quota)
        monkeypatch.setattr(mesh, "inherited", lambda: self.environment)

    def start(self, world: World = WORLD, threads: int | None = None, same: bool = True) -> int | None:
        """The threads of a rank, of `local_size` that see the same cores or others."""
        seen = [self.granted if same else frozenset({number}) for number in range(world.local_size)]
        self.threads = self.bound = None
        mesh._use_cores(world, seen, None, threads)
        return self.threads


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def test_ranks_that_see_the_same_cores_share_them_and_compute_with_as_many_threads(machine: Machine):
    assert machine.start() == 2
    assert machine.bound is not None and len(machine.bound) == 2
    machine.granted = frozenset({0, 1})
    assert machine.start() == 1, "each rank has a thread at least"


def test_ranks_with_cores_of_their_own_keep_them_and_torchs_threads(machine: Machine):
    assert machine.start(same=False) is None and machine.bound is None


def test_a_container_that_lets_fewer_run_than_it_shows_has_as_many_threads(machine: Machine):
    machine.quota = 3.5
    assert machine.start(same=False) == 3
    machine.quota = 0.5
    assert machine.start(same=False) == 1
    machine.quota = 6.0
    assert machine.start() == 1, "six for four ranks"


def test_threads_that_the_user_has_chosen_are_left_unless_torchrun_chose_them(machine: Machine):
    machine.environment = {"OMP_NUM_THREADS": "5"}
    assert machine.start() is None
    assert machine.start(threads=3) == 3
    assert machine.start(replace(WORLD, source="torchrun")) == 2


@pytest.mark.parametrize(("nodes", "interface"), [(1, LOOPBACK_INTERFACE), (2, "hsn0")])
def test_ranks_on_one_machine_open_no_port_to_others(nodes: int, interface: str, monkeypatch: pytest.MonkeyPatch):
    chosen: list[str] = []
    monkeypatch.setattr(mesh, "choose_interfaces", lambda name, _: chosen.append(name))
    monkeypatch.setattr(mesh, "address_of", lambda *_: "10.0.0.7")
    monkeypatch.setattr(mesh, "interface_of", lambda _: "hsn0")
    mesh._use_network(replace(WORLD, nodes=nodes), None)
    assert chosen == [interface]


@pytest.mark.parametrize(("owner", "trusted"), [("me", True), (None, True), ("root", False), ("other", False)])
def test_a_store_on_this_machine_that_another_user_serves_is_not_used(
    owner: str | None, trusted: bool, monkeypatch: pytest.MonkeyPatch
):
    owners = {"me": os.geteuid() or 1000, "root": 0, "other": 4711, None: None}
    monkeypatch.setattr(os, "geteuid", lambda: owners["me"])
    monkeypatch.setattr(mesh, "TCPStore", lambda *_, **__: "the store")
    monkeypatch.setattr(mesh, "owner_of_listener", lambda _: owners[owner])
    if trusted:
        assert mesh._client(mesh.LOOPBACK, 1, WORLD, 5.0) == "the store"
    else:
        with pytest.raises(ConnectionRefusedError, match="a process of another user listens on port 1"):
            mesh._client(mesh.LOOPBACK, 1, WORLD, 5.0)
    assert mesh._client("10.0.0.7", 1, WORLD, 5.0) == "the store", "on other machines a relay has proved it"


@pytest.mark.parametrize(("backend", "device"), [("cpu:gloo,cuda:nccl", "cpu"), ("nccl", "cuda:1")])
def test_words_go_through_main_memory_where_the_group_can(backend: str, device: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dist, "get_backend_config", lambda: backend)
    assert str(replace(here(), device=torch.device("cuda", 1))._device_of_words) == device


def test_who_stays_after_the_end_is_a_world_of_one_on_the_same_device(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(mesh, "_here", None)
    site: Any = SimpleNamespace()
    stayed = mesh.stay(here(site=site))
    assert mesh.start() is stayed
    assert (stayed.rank, stayed.size, stayed.mesh, str(stayed.layout)) == (0, 1, None, "dp=1")
    assert stayed.site is site and stayed.world.host == "node7"


def test_a_group_that_a_program_forms_with_a_device_mesh_is_noticed(monkeypatch: pytest.MonkeyPatch):
    formed: list[str] = []
    helper = dist.distributed_c10d._new_process_group_helper
    monkeypatch.setattr(dist.distributed_c10d, "_new_process_group_helper", helper)  # to be put back
    for module in (dist, dist.distributed_c10d, dist.device_mesh):
        monkeypatch.setattr(module, "init_process_group", lambda: None)
    mesh.notice_groups(lambda: formed.append("formed"))
    dist.device_mesh.init_process_group()
    assert formed == ["formed"]
    guarded = dist.distributed_c10d._new_process_group_helper
    mesh._guard_groups()
    assert dist.distributed_c10d._new_process_group_helper is guarded is not helper, "guarded, and only once"


class Groups:
    """A mesh that says which of its axes were made one."""

    def __getitem__(self, axes: tuple[str, ...]) -> Groups:
        return self

    def _flatten(self, _name: str) -> object:
        return object()


def test_axes_are_made_one_once_for_each_mesh(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(mesh, "_flattened", {})
    monkeypatch.setattr(mesh, "_among_own_processes", contextlib.nullcontext)
    first, second = (replace(here(mesh=Groups()), layout=parse("dp=2,fsdp=2")) for _ in range(2))
    assert first.submesh("dp", "fsdp") is first.submesh("dp", "fsdp") is not second.submesh("dp", "fsdp")


def test_ranks_that_each_see_a_gpu_of_their_own_share_none(monkeypatch: pytest.MonkeyPatch):
    uuids = iter(["GPU-1", "GPU-2"])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid=next(uuids)))
    places = [mesh._place_of(replace(WORLD, rank=rank), torch.device("cuda", 0), "auto") for rank in range(2)]
    assert not mesh._shared_places(places)


def test_a_mesh_that_was_left_leaves_no_groups_to_another_one(monkeypatch: pytest.MonkeyPatch):
    flattened: Any = {(1, "dp_fsdp"): object()}
    monkeypatch.setattr(mesh, "_flattened", flattened)
    monkeypatch.setattr(mesh, "_here", here())
    for name in ("all_reduce", "destroy_process_group"):
        monkeypatch.setattr(dist, name, lambda *_: None)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    mesh.finish()
    assert not flattened and mesh._here is None

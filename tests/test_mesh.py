"""The mesh: which device a rank takes, how ranks meet, and what they say when others do not come."""

from __future__ import annotations

import contextlib
import gc
import os
import select
import socket
import threading
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from meshrun import Here, RunFailed, UserError, mesh
from meshrun.layout import AXES, parse
from meshrun.mesh import Meeting, PeerLost, _all_arrived, _backend, _shared_places, choose_device
from meshrun.world import World

CPU = torch.device("cpu")


def world(rank: int, size: int = 4, local_rank: int | None = None, local_size: int | None = None) -> World:
    return World(rank, size, rank if local_rank is None else local_rank, local_size or size, 0, 1, "node7", "slurm")


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch):
    """Makes torch see so many GPUs."""
    return lambda count: monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


def test_without_gpus_ranks_compute_on_the_cpu(gpus):
    gpus(0)
    assert choose_device(world(2), "auto", "auto") == choose_device(world(2), "cpu", "auto") == CPU


def test_a_rank_that_sees_all_gpus_takes_that_of_its_place_on_the_node(gpus):
    gpus(4)
    assert [choose_device(world(5 + n, 8, n, 4), "auto", "auto").index for n in range(4)] == [0, 1, 2, 3]


def test_a_rank_that_sees_one_gpu_takes_it_whatever_its_place_on_the_node(gpus):
    gpus(1)
    assert [choose_device(world(n), "auto", "auto").index for n in range(4)] == [0, 0, 0, 0]


def test_gpus_are_left_alone_when_the_cpu_is_asked_for(gpus):
    gpus(4)
    assert choose_device(world(1), "cpu", "auto") == CPU


def test_no_gpu_where_one_is_asked_for_is_refused(gpus):
    gpus(0)
    with pytest.raises(UserError, match=r"no GPU is visible to rank 3 on node7; --device cpu"):
        choose_device(world(3), "cuda", "auto")


def test_fewer_gpus_than_ranks_on_a_node_are_refused(gpus):
    gpus(2)
    assert choose_device(world(1, 3), "auto", "auto").index == 1
    with pytest.raises(UserError, match=r"node7 shows 2 GPUs but 3 ranks are to run there; .*--procs.*--device cpu"):
        choose_device(world(2, 3), "auto", "auto")


def test_ranks_may_share_gpus_when_gloo_carries_their_words(gpus):
    gpus(2)
    assert [choose_device(world(n), "auto", "gloo").index for n in range(4)] == [0, 1, 0, 1]
    assert [choose_device(world(3 + n, 6, n, 3), "auto", "gloo").index for n in range(3)] == [0, 1, 0]


def test_two_ranks_on_one_gpu_are_refused_by_name():
    assert _shared_places(["GPU a of n1", "GPU b of n1", "GPU a of n2"]) == ""
    said = _shared_places(["GPU a of n1", "GPU b of n1", "GPU b of n1"])
    assert said.startswith("ranks 1 and 2 would share the GPU b of n1, which NCCL refuses: fewer GPUs than ranks")
    assert "--procs" in said and "--backend gloo" in said


def test_nccl_on_the_cpu_is_refused():
    with pytest.raises(UserError, match=r"backend nccl needs GPUs but the device is cpu; use gloo \(--backend\)"):
        _backend(CPU, "nccl")
    assert _backend(CPU, "auto") == _backend(torch.device("cuda", 0), "gloo") == "gloo"
    assert (
        _backend(torch.device("cuda", 0), "auto") == _backend(torch.device("cuda", 0), "nccl") == "cpu:gloo,cuda:nccl"
    )


@pytest.mark.ranks(4)
@pytest.mark.parametrize("text", ["pp=2,fsdp=2", "dp=2,tp=2", "fsdp=2,cp=2", "dp=2,fsdp=2"])
def test_a_rank_knows_its_place_on_every_axis_and_who_shares_it(text: str):
    mesh.use(Meeting(layout=text, device="cpu"))
    here = mesh.start()
    slow, fast = (axis for axis in AXES if here.layout.degree(axis) == 2)
    assert (here.place(slow), here.place(fast)) == divmod(here.rank, 2)
    assert here.mesh is not None and here.mesh.mesh_dim_names == (slow, fast)
    line = here.submesh(fast)
    assert line is not None and line.mesh.tolist() == [here.rank // 2 * 2, here.rank // 2 * 2 + 1]
    both = here.submesh(slow, fast)
    assert both is not None and both.mesh.tolist() == [0, 1, 2, 3]
    assert here.submesh(slow, fast) is both, "a group costs a thread, so it is made once"
    assert here.submesh(*(axis for axis in AXES if axis not in (slow, fast))) is None


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    "text, replica",
    [("dp=2,fsdp=2", [0, 1, 2, 3]), ("pp=2,fsdp=2", [0, 1, 0, 1]), ("dp=2,tp=2", [0, 0, 1, 1]), ("cp=4", [0] * 4)],
)
def test_ranks_that_compute_the_same_samples_are_one_replica(text: str, replica: list[int]):
    mesh.use(Meeting(layout=text, device="cpu"))
    here = mesh.start()
    assert (here.replica, here.replicas) == (replica[here.rank], len(set(replica)))


@pytest.mark.ranks(3)
def test_start_finds_its_place_in_a_group_and_gives_the_same_one_again():
    mesh.use(Meeting(device="cpu"))
    here = mesh.start()
    assert (here.rank, here.size, here.device) == (dist.get_rank(), 3, CPU)
    assert str(here.layout) == "dp=3" and (here.replica, here.replicas) == (here.rank, 3)
    assert here.mesh is not None and here.mesh["dp"].size() == 3
    assert here.mesh.mesh_dim_names == ("dp",), "groups of one rank would cost a thread each"
    mesh.use(Meeting(layout="tp=3"))
    assert mesh.start() is here, "a mesh is met once"


@pytest.mark.ranks(2)
def test_a_layout_that_cannot_be_is_refused_before_any_mesh_is_made():
    for layout, said in (("dp=3", "3"), ("tp=2,pp=2", "4"), ("dp=x", "dp")):
        mesh.use(Meeting(layout=layout, device="cpu"))
        with pytest.raises(UserError, match=said):
            mesh.start()


@pytest.mark.ranks(3)
def test_ranks_hear_each_other():
    mesh.use(Meeting(device="cpu"))
    here = mesh.start()
    values = torch.tensor([1.0, here.rank])
    work = here.sum(values)
    assert work is not None
    work.wait()
    assert values.tolist() == [3, 3]
    assert here.from_rank_0({"rank": here.rank}) == {"rank": 0}
    assert here.gathered(here.rank * "x") == ["", "x", "xx"]


def test_alone_there_is_nobody_to_hear(monkeypatch: pytest.MonkeyPatch):
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"):
        monkeypatch.delenv(name, raising=False)
    mesh.use(Meeting(device="cpu"))
    try:
        here = mesh.start()
        assert (here.rank, here.size, here.mesh, str(here.layout)) == (0, 1, None, "dp=1")
        assert here.sum(torch.ones(2)) is None and here.from_rank_0(5) == 5 and here.gathered(5) == [5]
        assert mesh.start() is here
        mesh.finish()
        assert mesh.start() is not here
    finally:
        mesh.finish()
        mesh.use(Meeting())


def short_group(seconds: float) -> dist.ProcessGroup:
    return dist.new_group(timeout=timedelta(seconds=seconds), backend="gloo")


@pytest.mark.ranks(2)
def test_a_rank_that_never_joins_is_waited_for_and_then_named_by_what_it_missed():
    mesh.use(Meeting(device="cpu"))
    here, group = mesh.start(), short_group(1)
    if here.rank == 0:
        wanted = (
            r"rank 0 on \S+ waited 1 s for the gradients of step 7 and gave up: another rank never got there .--tim"
        )
        with pytest.raises(PeerLost, match=wanted), here.waiting("the gradients of step 7"):
            dist.all_reduce(torch.ones(2), group=group)
        with pytest.raises(PeerLost, match="another rank never got there"), here.waiting("the next word"):
            dist.broadcast(torch.ones(2), src=1, group=group)
    dist.barrier()


@pytest.mark.ranks(2)
def test_a_rank_that_goes_away_is_told_from_one_that_is_late():
    mesh.use(Meeting(device="cpu"))
    here, group = mesh.start(), short_group(50)
    dist.all_reduce(torch.ones(1), group=group)
    if here.rank == 1:
        dist.destroy_process_group(group)
        del group
        gc.collect()
    else:
        began = time.monotonic()
        with (
            pytest.raises(PeerLost, match=r"rank 0 on \S+ lost another rank while it waited for the sums$"),
            here.waiting("the sums"),
        ):
            dist.all_reduce(torch.ones(2), group=group)
        assert time.monotonic() - began < 40
    dist.barrier()


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("skip connection: sizes of peer layers differ"),
        RuntimeError("timeout must be positive"),
        KeyError(),
    ],
)
def test_a_models_own_error_is_left_as_it_is(error: Exception):
    here = Here(world(0), parse("dp=4").resolve(4), CPU, None)
    with pytest.raises(type(error)) as caught, here.waiting("the gradients of step 1"):
        raise error
    assert caught.value is error


def test_a_lost_peer_is_a_failure_of_the_run_and_says_what_was_waited_for():
    here = Here(world(0), parse("dp=4").resolve(4), CPU, None)
    with pytest.raises(RunFailed, match="the gradients of step 1") as caught, here.waiting("the gradients of step 1"):
        raise RuntimeError("[gloo] Connection closed by peer [127.0.0.1]:4711")
    assert isinstance(caught.value, PeerLost)


def serve(size: int) -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, size, True, timedelta(seconds=20), wait_for_workers=False)


def client(store: dist.TCPStore, size: int) -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", store.port, size, False, timedelta(seconds=20), wait_for_workers=False)


def test_ranks_that_do_not_arrive_are_named():
    with pytest.raises(PeerLost, match=r"rank 0 on node7 waited 0 s for ranks 1, 2 of 3 to arrive \(--timeout\)"):
        _all_arrived(world(0, 3), serve(3), "rank 0", timeout=0.3)


def test_of_many_ranks_that_do_not_arrive_the_first_few_are_named():
    with pytest.raises(PeerLost, match=r"for ranks 1, 2, 3, 4, 5, 6, 7, 8, … of 64 to arrive"):
        _all_arrived(world(0, 64), serve(64), "rank 0", timeout=0.3)


def in_thread(rank: int, size: int, store: dist.Store, place: str, ends: dict[int, BaseException | None]):
    def arrive() -> None:
        try:
            _all_arrived(world(rank, size), store, place, timeout=10)
            ends[rank] = None
        except BaseException as error:
            ends[rank] = error

    thread = threading.Thread(target=arrive)
    thread.start()
    return thread


def test_ranks_that_all_arrive_go_on_together():
    store, ends = serve(3), {}
    threads = [in_thread(rank, 3, client(store, 3), f"rank {rank}", ends) for rank in range(3)]
    for thread in threads:
        thread.join()
    assert ends == {0: None, 1: None, 2: None}


def test_all_ranks_hear_that_two_would_share_a_gpu():
    store, ends = serve(2), {}
    threads = [in_thread(rank, 2, client(store, 2), "GPU a of node7", ends) for rank in range(2)]
    for thread in threads:
        thread.join()
    assert all(
        isinstance(end, UserError) and "ranks 0 and 1 would share the GPU a" in str(end) for end in ends.values()
    )


def test_a_later_attempt_does_not_take_an_earlier_arrival_for_its_own():
    store, ends = serve(2), {}
    for thread in [in_thread(rank, 2, client(store, 2), f"rank {rank}", ends) for rank in range(2)]:
        thread.join()
    assert ends == {0: None, 1: None}
    with pytest.raises(PeerLost, match="for rank 1 of 2 to arrive"):
        _all_arrived(replace(world(0, 2), attempt=1), store, "rank 0", timeout=0.3)


def test_a_rank_0_that_goes_away_while_others_arrive_is_named():
    store, ends = serve(3), {}
    thread = in_thread(1, 3, client(store, 3), "rank 1", ends)
    time.sleep(0.3)
    del store
    gc.collect()
    thread.join()
    assert isinstance(ends[1], PeerLost)
    assert str(ends[1]) == "rank 1 on node7 lost rank 0 while it waited for all 3 ranks to arrive"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user to try this")
@pytest.mark.parametrize("place", ["none", "a rank's"])
def test_other_users_are_kept_out_of_the_groups_that_a_program_forms_by_itself(
    place: str, monkeypatch: pytest.MonkeyPatch
):
    """While a group forms, its port takes anybody for a rank who comes first, and what he sends for that rank's."""
    ports: list[socket.socket] = []
    strangers: list[socket.socket] = []
    waited_on = select.epoll()

    def make(*_: object, **__: object) -> None:
        ports.append(socket.create_server(("127.0.0.1", 0)))
        os.seteuid(65534)
        try:
            strangers.append(socket.socket())
        finally:
            os.seteuid(0)
        strangers[0].connect(ports[0].getsockname())
        ports.append(ports[0].accept()[0])
        if place == "a rank's":
            for each in ports:
                waited_on.register(each, select.EPOLLIN)

    monkeypatch.setattr(torch.distributed.distributed_c10d, "_new_process_group_helper", make)
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda: None)
    monkeypatch.setattr(torch.distributed.distributed_c10d, "init_process_group", lambda: None)
    monkeypatch.setattr(torch.distributed.device_mesh, "init_process_group", lambda: None)
    mesh.notice_groups(lambda: None)
    says_so = pytest.raises(
        RuntimeError, match="0 of 1 other ranks are connected to this one; a process of another user"
    )
    with says_so if place == "a rank's" else contextlib.nullcontext():
        torch.distributed.distributed_c10d._new_process_group_helper(2)
    strangers[0].settimeout(5)
    assert strangers[0].recv(1) == b""
    for each in (*ports, *strangers, waited_on):
        each.close()


@pytest.mark.parametrize(("rank", "address"), [(0, None), (1, None), (0, "10.0.0.1")])
def test_ranks_wait_as_long_as_asked_and_the_first_one_withdraws_the_address_that_it_has_published(
    rank: int, address: str | None, monkeypatch: pytest.MonkeyPatch
):
    formed: dict[str, Any] = {}
    withdrawn: list[tuple[Any, ...]] = []
    one_of_two = replace(world(rank, 2), address=address)
    for name, found in {
        "detect": lambda _: one_of_two,
        "_guard_groups": lambda: None,
        "_use_network": lambda *_: None,
        "_store": lambda *_: None,
        "_all_arrived": lambda *_: "where all have arrived",
        "_cores_of_node": lambda *_: [],
        "_use_cores": lambda *_: (),
        "_among_own_processes": contextlib.nullcontext,
        "_mesh_of": lambda *_: None,
        "withdraw": lambda *words: withdrawn.append(words),
    }.items():
        monkeypatch.setattr(mesh, name, found)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **given: formed.update(given, backend=backend))
    mesh._meet(Meeting(device="cpu", timeout=7, runs=Path("there")))
    assert (formed["rank"], formed["world_size"], formed["store"]) == (rank, 2, "where all have arrived")
    assert (formed["timeout"], formed["device_id"]) == (timedelta(seconds=7), None)
    own = (rank, address) == (0, None)
    assert withdrawn == ([(Path("there"), one_of_two.job, one_of_two.attempt)] if own else [])

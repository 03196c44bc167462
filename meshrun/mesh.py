"""Which mesh: the one place where ranks meet, choose their device and form groups.

    here = start()                       # under any launcher, or alone
    here.rank, here.device, here.mesh
    finish()

A rank learns from its launcher who it is (`world`), finds rank 0, waits until all have arrived and says who is missing
if not. After that `here` is all that the rest of meshrun knows about other ranks.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import TCPStore

from meshrun import typed_json
from meshrun.errors import RunFailed, SharedError, UserError, described
from meshrun.layout import AXES, Layout, parse
from meshrun.store import process as store_process
from meshrun.store.owners import (
    connections_of_gloo,
    listening_ports,
    owner_of_listener,
    shut_out_strangers,
    take_no_more,
)
from meshrun.store.server import LOOPBACK
from meshrun.world import World, cores, detect
from meshrun.world.environment import choose_interfaces, inherited
from meshrun.world.network import LOOPBACK_INTERFACE, address_of, for_nccl, interface_of, resolved
from meshrun.world.profile import Site
from meshrun.world.rendezvous import lookup_store, publish, withdraw
from meshrun.world.sites import load


class PeerLost(RunFailed):
    """This rank waited for others that never came: a consequence, so some other rank's error is the cause."""


@dataclass(frozen=True)
class Meeting:
    """How ranks meet and what they compute on. `runs` is a folder that all of them see."""

    layout: str = "dp=*"
    device: str = "auto"
    backend: str = "auto"
    timeout: float = 600.0
    threads: int | None = None
    runs: Path = Path("runs")
    allow_tp_across_nodes: bool = False
    site: str | None = None
    """Whose rules say at which address and over which interface nodes talk, and which cores are near which GPU."""


@dataclass(frozen=True)
class Here:
    """This rank's place: in the world, in the layout, and on a device."""

    world: World
    layout: Layout
    device: torch.device
    mesh: DeviceMesh | None
    """None in a world of one."""
    site: Site | None = None
    notes: tuple[str, ...] = ()
    """What the user should hear of this place, though it works."""
    alone: bool = False
    """Whether the other ranks are only made up (`one_of`): what they would say is what this one says."""

    @property
    def rank(self) -> int:
        return self.world.rank

    @property
    def size(self) -> int:
        return self.world.size

    @property
    def replicas(self) -> int:
        """How many parts a global batch is cut into."""
        return self.layout.dp * self.layout.fsdp

    @property
    def replica(self) -> int:
        """Which of these parts is this rank's."""
        coordinates = self.layout.coordinates(self.rank)
        return coordinates["dp"] * self.layout.fsdp + coordinates["fsdp"]

    def submesh(self, *axes: str) -> DeviceMesh | None:
        """The mesh of these axes as one; None where each of them is of one rank."""
        wide = tuple(axis for axis in axes if self.layout.degree(axis) > 1)
        if self.mesh is None or not wide:
            return None
        if len(wide) == 1:
            return self.mesh[wide[0]]
        name = "_".join(wide)
        key = (id(self.mesh), name)
        if key not in _flattened:
            with _among_own_processes():
                _flattened[key] = self.mesh[wide]._flatten(name)
        return _flattened[key]

    @property
    def store(self) -> Store | None:
        """Where ranks leave words for each other beside the collectives; None in a world of one."""
        return (
            PrefixStore("meshrun/words", dist.distributed_c10d._get_default_store()) if self.mesh is not None else None
        )

    @property
    def address(self) -> str:
        """Where other nodes reach this one."""
        return address_of(self.world, self.site)

    def place(self, axis: str) -> int:
        """This rank's place along an axis."""
        return self.layout.coordinates(self.rank)[axis]

    def sum(self, values: torch.Tensor) -> dist.Work | None:
        """Begin to sum a tensor in place over all ranks; wait on what is returned before reading it."""
        return dist.all_reduce(values, async_op=True) if self.mesh is not None else None

    def from_rank_0(self, value: Any) -> Any:
        """The value that rank 0 has: numbers, texts, None, and collections of them, which travel as JSON."""
        if self.mesh is None or self.alone:
            return value
        raw = _json_bytes(value) if self.rank == 0 else torch.empty(0, dtype=torch.uint8)
        size, device = torch.tensor([len(raw)]), self._device_of_words
        size = size.to(device)
        with self.waiting("rank 0's word"):
            dist.broadcast(size, src=0)
            raw = (raw if self.rank == 0 else torch.empty(int(size), dtype=torch.uint8)).to(device)
            dist.broadcast(raw, src=0)
        return typed_json.decode(raw.cpu().numpy().tobytes())

    def gathered(self, value: Any) -> list[Any]:
        """The value of every rank, in order: numbers, texts, None, and collections of them, which travel as JSON."""
        if self.mesh is None or self.alone:
            return [value] * self.size
        raw, device = _json_bytes(value), self._device_of_words
        own = torch.tensor([len(raw)], device=device)
        sizes = [torch.zeros_like(own) for _ in range(self.size)]
        with self.waiting("a word from every rank"):
            dist.all_gather(sizes, own)
            padded = torch.zeros(int(max(sizes)), dtype=torch.uint8)
            padded[: len(raw)] = raw
            everyone = [torch.empty_like(padded, device=device) for _ in sizes]
            dist.all_gather(everyone, padded.to(device))
        found = zip(everyone, sizes, strict=True)
        return [typed_json.decode(each[: int(size)].cpu().numpy().tobytes()) for each, size in found]

    @property
    def _device_of_words(self) -> torch.device:
        """Where ranks exchange words: in main memory, unless the process group only connects GPUs."""
        return torch.device("cpu") if "cpu:" in dist.get_backend_config() else self.device

    @contextlib.contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Turn the collectives' own errors into a sentence that says what was waited for; tell who listens of it."""
        began = time.monotonic()
        _waits.append(what)
        _listener(what)
        try:
            yield
        except RuntimeError as error:
            if not of_collectives(error):
                raise
            text = str(error).lower()
            me = f"rank {self.rank} on {self.world.host}"
            if "timed out" in text or "timeout" in text:
                waited = time.monotonic() - began
                raise PeerLost(
                    f"{me} waited {waited:.0f} s for {what} and gave up: another rank never got there (--timeout)"
                ) from error
            if any(word in text for word in ("connection", "socket", "peer", "broken pipe", "remote process")):
                raise PeerLost(f"{me} lost another rank while it waited for {what}") from error
            raise
        finally:
            _waits.pop()
            _listener(_waits[-1] if _waits else None)


def _json_bytes(value: Any) -> torch.Tensor:
    """A value as bytes of JSON."""
    try:
        return torch.frombuffer(bytearray(typed_json.encode(value)), dtype=torch.uint8)
    except TypeError as error:
        raise UserError(
            f"a {error} cannot be sent to other ranks; numbers, texts, None, and lists, tuples, sets and dicts of them "
            f"can"
        ) from None


def of_collectives(error: BaseException) -> bool:
    """Whether the ranks' way to each other has failed, and not the user's program."""
    text = described(error).lower()
    # gloo raises plain RuntimeErrors, which name its source files; others may be the user's own.
    return isinstance(error, RuntimeError) and (
        isinstance(error, dist.DistError) or any(word in text for word in ("gloo", "nccl", "pair closure"))
    )


_flattened: dict[tuple[int, str], DeviceMesh] = {}
"""Meshes of several axes as one: each costs a process group, so it is made once."""

_ports_of_groups: set[int] = set()
"""Where this process listens for the connections of other ranks."""

_here: Here | None = None
_meeting = Meeting()
_waits: list[str] = []
"""What this rank waits for just now, the innermost last."""
_listener: Callable[[str | None], None] = lambda _: None  # noqa: E731


def listen(listener: Callable[[str | None], None]) -> None:
    """Have someone told what this rank waits for whenever that changes, and None when it waits for nothing."""
    global _listener
    _listener = listener


def notice_groups(formed: Callable[[], None]) -> None:
    """From now on, call `formed` whenever the program forms a process group, with meshrun or without."""
    form = dist.init_process_group

    @functools.wraps(form)
    def noted(*args: Any, **options: Any) -> None:
        formed()
        form(*args, **options)

    # init_device_mesh has its own name for it.
    for module in (dist, dist.distributed_c10d, dist.device_mesh):
        module.init_process_group = noted  # type: ignore[attr-defined]
    _guard_groups()


def _guard_groups() -> None:
    """From now on, keep other users of this machine out of every process group, also those that the program forms."""
    make = getattr(dist.distributed_c10d, "_new_process_group_helper", None)
    if make is None or hasattr(make, "__wrapped__"):
        return

    @functools.wraps(make)
    def guarded(*args: Any, **options: Any) -> Any:
        with _among_own_processes(size=args[0]):
            return make(*args, **options)

    dist.distributed_c10d._new_process_group_helper = guarded


def use(meeting: Meeting) -> None:
    """Decide how `start()` will meet the others, for a program that calls it without arguments."""
    global _meeting
    _meeting = meeting


def start() -> Here:
    """Find out where this process runs, meet the other ranks, and return this one's place.

    Called again, it returns the same place.
    """
    global _here
    if _here is None:
        _here = _meet(_meeting)
        atexit.register(_finish_at_exit)
    return _here


def meet_for_script(world: World, meeting: Meeting) -> TCPStore:
    """The store of a job whose launcher names none, at a port of this machine, once all ranks have found it.

    For a plain script, which forms its groups by itself.
    """
    _guard_groups()
    store = _store(world, meeting, load(meeting.site) if meeting.site is not None else None)
    _all_arrived(world, PrefixStore("script", store), f"rank {world.rank}", meeting.timeout)
    if world.rank == 0:
        withdraw(meeting.runs, world.job, world.attempt)
    return store


def finish() -> None:
    """Leave the mesh; without others to leave, nothing happens."""
    global _here
    if _here is not None and _here.mesh is not None and dist.is_initialized():
        # A rank that goes while another still reads its last message can take that one down with it.
        with _here.waiting("all ranks to finish"):
            dist.all_reduce(torch.zeros(1))
        dist.destroy_process_group()
        _flattened.clear()
        # Threads of the group may be about to give Python objects back. In an interpreter that is ending they would
        # abort the process, so let them have this one first.
        time.sleep(0.05)
    _here = None


def stay(here: Here) -> Here:
    """After `finish()`: be a world of one where `here` was, for a rank that has more to do when the others are gone."""
    global _here
    world = World(0, 1, 0, 1, 0, 1, here.world.host, "none")
    _here = Here(world, parse("dp=*").resolve(1), here.device, None, here.site)
    return _here


def one_of(layout: Layout, rank: int, device: torch.device) -> Here:
    """Be one rank of a layout whose other ranks are not there: nothing is sent, and what is received is this one's own.

    So the rank computes as much and needs as much memory as in the whole mesh, and the numbers mean nothing.
    """
    global _here
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.size)
    world = World(rank, layout.size, 0, 1, rank, layout.size, os.uname().nodename, "none")
    _here = Here(world, layout, device, _mesh_of(layout, device), alone=True)
    return _here


def _finish_at_exit() -> None:
    """Leave for a program that has come to its end; one that failed may have left others waiting, so it just goes."""
    if getattr(sys, "last_value", None) is None:
        with contextlib.suppress(RuntimeError, RunFailed):
            finish()


def _meet(meeting: Meeting) -> Here:
    joined = dist.is_initialized()
    world = _world_of_group() if joined else detect(os.environ)
    site = load(meeting.site) if meeting.site is not None else None
    layout = _layout_of(world, meeting)
    device = choose_device(world, meeting.device, meeting.backend)
    backend = _backend(device, meeting.backend)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if world.size == 1 or joined:
        notes = _use_cores(world, [cores.granted()], site, meeting.threads)
    if world.size == 1:
        return Here(world, layout, device, None, site, notes)
    if not joined:
        _guard_groups()
        _use_network(world, site)
        store = _store(world, meeting, site)
        arrived = _all_arrived(world, store, _place_of(world, device, meeting.backend), meeting.timeout)
        notes = _use_cores(world, _cores_of_node(world, arrived), site, meeting.threads)
        with _among_own_processes():
            dist.init_process_group(
                backend,
                store=arrived,
                rank=world.rank,
                world_size=world.size,
                timeout=timedelta(seconds=meeting.timeout),
                device_id=device if device.type == "cuda" and meeting.backend != "gloo" else None,
            )
        if world.rank == 0 and world.address is None:
            withdraw(meeting.runs, world.job, world.attempt)
    return Here(world, layout, device, _mesh_of(layout, device), site, notes)


def _mesh_of(layout: Layout, device: torch.device) -> DeviceMesh:
    # Only axes of more than one rank: gloo keeps a thread for each group, which costs time in every step.
    axes = tuple(axis for axis in AXES if layout.degree(axis) > 1)
    with _among_own_processes():
        return init_device_mesh(device.type, tuple(map(layout.degree, axes)), mesh_dim_names=axes)


@contextlib.contextmanager
def _among_own_processes(size: int = 0) -> Iterator[None]:
    """Form groups, then end the connections of other users of this machine to the ports that groups have opened.

    gloo asks nobody for a proof: whoever connects first with the number that it expects is a rank to it, and what he
    has sent by then would be taken for that rank's. Once all ranks of a group of this size are connected, its ports
    take nobody any more; a torch that lets ranks connect when they first speak needs them open.
    """
    before, (ranks_before, others_before) = listening_ports() - _ports_of_groups, connections_of_gloo()
    yield
    opened = listening_ports() - before
    _ports_of_groups.update(opened)
    ranks, others = connections_of_gloo()
    shut_out_strangers(_ports_of_groups)
    connected = len(ranks - ranks_before)
    if connected and connected >= size - 1 > 0:
        take_no_more(opened)
    elif connected < size - 1 and others - others_before:
        raise RuntimeError(
            f"gloo: {connected} of {size - 1} other ranks are connected to this one; a process of another user of this "
            f"machine has taken the place of a rank, or a rank is gone"
        )


def _layout_of(world: World, meeting: Meeting) -> Layout:
    try:
        layout = parse(meeting.layout).resolve(world.size, world.local_size, meeting.allow_tp_across_nodes)
    except UserError as error:
        raise SharedError(str(error)) from error
    return layout


def _world_of_group() -> World:
    """The world of a process group that somebody else has formed in this process."""
    rank, size = dist.get_rank(), dist.get_world_size()
    return World(rank, size, rank, size, 0, 1, os.uname().nodename, "process group")


def choose_device(world: World, device: str, backend: str) -> torch.device:
    """The device of this rank: its own GPU whether it sees all of the node's or only one."""
    gpus = torch.cuda.device_count() if device != "cpu" else 0
    if gpus == 0:
        if device == "cuda":
            raise UserError(f"no GPU is visible to rank {world.rank} on {world.host}; --device cpu trains without")
        return torch.device("cpu")
    if gpus == 1 or backend == "gloo":
        return torch.device("cuda", world.local_rank % gpus)
    if world.local_rank >= gpus:
        raise UserError(too_few_gpus(world.local_size, gpus, world.host))
    return torch.device("cuda", world.local_rank)


def too_few_gpus(ranks: int, gpus: int, host: str) -> str:
    return (
        f"{host} shows {gpus} GPU{'s' * (gpus != 1)} but {ranks} rank{'s are' if ranks > 1 else ' is'} to run there; "
        f"start at most one rank a GPU (--procs), or use --device cpu"
    )


def _use_network(world: World, site: Site | None) -> None:
    """Have gloo and NCCL talk over the interface at whose address other nodes reach this one.

    Where ranks meet says nothing on that: those of the first node meet on loopback, where its launcher serves. A run on
    one machine needs no port that can be reached from others.
    """
    if world.nodes == 1:
        choose_interfaces(LOOPBACK_INTERFACE, for_nccl(LOOPBACK_INTERFACE))
        return
    with contextlib.suppress(RunFailed):
        interface = interface_of(address_of(world, site))
        if interface is not None:
            choose_interfaces(interface, (site and site.get("socket_interface")) or for_nccl(interface))


def _cores_of_node(world: World, store: Store) -> list[frozenset[int]]:
    """The cores that each local rank has said it sees; this one's alone where the others' are not to be found."""
    keys = [f"cores/{world.host}/{rank}" for rank in range(world.local_size)]
    if not store.check(keys):
        return [cores.granted()]
    return [cores.read(store.get(key).decode()) for key in keys]


def _use_cores(world: World, seen: list[frozenset[int]], site: Site | None, threads: int | None) -> tuple[str, ...]:
    """Give each local rank its own cores where the launcher left the same ones to all of them; say what is wrong."""
    granted = cores.granted()
    allowed = int(min(len(granted), cores.quota() or len(granted)))
    if len(seen) > 1 and len(set(seen)) == 1:
        masks = (site and site.get("cpu_masks")) or ()
        os.sched_setaffinity(0, cores.mine(granted, world.local_rank, world.local_size, masks))
        usual = max(1, allowed // world.local_size)
    else:
        # A container may show more cores than it lets run at a time; more threads than those only wait for each other.
        usual = max(1, allowed) if allowed < len(granted) else 0
    # torchrun always sets one thread, other launchers none: there the user has chosen.
    if threads or (usual and (world.source == "torchrun" or not cores.threads_are_chosen(inherited()))):
        torch.set_num_threads(threads or usual)
    note = cores.lost(inherited(), world, seen)
    return (note,) if note else ()


def _backend(device: torch.device, backend: str) -> str:
    if backend == "nccl" and device.type == "cpu":
        raise UserError("backend nccl needs GPUs but the device is cpu; use gloo (--backend)")
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" and backend != "gloo" else "gloo"


def _place_of(world: World, device: torch.device, backend: str) -> str:
    """What no two ranks may have in common: the GPU where NCCL is used, which refuses to share one."""
    if device.type == "cpu" or backend == "gloo":
        return f"rank {world.rank}"
    return f"GPU {torch.cuda.get_device_properties(device).uuid} of {world.host}"


def _store(world: World, meeting: Meeting, site: Site | None) -> TCPStore:
    """The key-value store that rank 0, or the agent that started it, serves."""
    if world.address is not None and world.port is not None:
        serves = world.rank == 0 and not world.agent_store
        try:
            return _named_store(world, world.address, world.port, serves, meeting.timeout)
        except (RuntimeError, OSError) as error:
            doing = "could not serve" if serves else "could not reach rank 0 at"
            raise RunFailed(
                f"rank {world.rank} on {world.host} {doing} {world.address}:{world.port}, which {world.source} names: "
                f"{_first_line(error)}"
            ) from error
    if world.rank == 0:
        address, secret = address_of(world, site), secrets.token_bytes(32)
        # Port 0 lets the system choose: the port is bound before anybody hears of it, so it cannot collide.
        ports = store_process.serve(0, None if address == LOOPBACK else address, secret)
        port = ports.get("network", ports["loopback"])
        publish(meeting.runs, world.job, world.attempt, address, port, secret)
        return _client(LOOPBACK, ports["loopback"], world, meeting.timeout)
    return _published_store(world, meeting)


def _client(address: str, port: int, world: World, timeout: float) -> TCPStore:
    store = TCPStore(address, port, world.size, False, timedelta(seconds=timeout), wait_for_workers=False)
    if address == LOOPBACK and owner_of_listener(port) not in (None, os.geteuid()):
        # Another user may have got the port of a launch that is over. None: torchrun listens on all addresses.
        raise ConnectionRefusedError(f"a process of another user listens on port {port} of this machine")
    return store


def _named_store(world: World, address: str, port: int, serves: bool, timeout: float) -> TCPStore:
    """The store at the address that the launcher names."""
    if not world.agent_store and world.local_size == world.size:
        if serves:
            store_process.serve(port)
        return _client(LOOPBACK, port, world, timeout)
    if not serves:
        return _client(address, port, world, timeout)
    # No secret is shared that nodes could prove, so torch's own server is all that can serve here: at one address
    # where the name stands for an address of this machine that other nodes can reach, else at all.
    own = next((found for found in resolved(address) if interface_of(found) not in (None, LOOPBACK_INTERFACE)), None)
    listener = socket.create_server((own or "", port), backlog=socket.SOMAXCONN)
    limit = timedelta(seconds=timeout)
    return TCPStore(address, port, world.size, True, limit, wait_for_workers=False, master_listen_fd=listener.detach())


def _published_store(world: World, meeting: Meeting) -> TCPStore:
    """Follow what rank 0 publishes; an address that does not answer is a left-over, and is read again."""
    give_up = time.monotonic() + meeting.timeout
    while time.monotonic() < give_up:
        found = lookup_store(meeting.runs, world.job, world.attempt)
        if found is not None:
            try:
                return _reached_store(world, *found)
            except (RuntimeError, OSError):
                store_process.end()
        time.sleep(0.02)
    raise PeerLost(
        f"rank {world.rank} on {world.host} waited {meeting.timeout:.0f} s for rank 0 to publish its address in "
        f"{meeting.runs / '.rendezvous'}, which all nodes must see (--runs, --timeout)"
    )


def _reached_store(world: World, address: str, port: int, secret: bytes) -> TCPStore:
    """The store of rank 0: on this machine at once, on another one through a relay that proves the secret."""
    if address != LOOPBACK:
        port = store_process.relay(address, port, secret)["loopback"]
    return _client(LOOPBACK, port, world, 5.0)


def _all_arrived(world: World, store: Store, place: str, timeout: float) -> Store:
    """Wait until every rank is here, and name those who are not."""
    store = PrefixStore(f"meshrun/{world.attempt}", store)
    keys = [f"arrived/{rank}" for rank in range(world.size)]
    store.set(f"cores/{world.host}/{world.local_rank}", cores.written(cores.granted()))
    store.set(keys[world.rank], place)
    try:
        if world.rank == 0:
            store.wait(keys, timedelta(seconds=timeout))
            store.set("verdict", _shared_places([store.get(key).decode() for key in keys]))
        else:
            store.wait(["verdict"], timedelta(seconds=timeout + 5))
        verdict = store.get("verdict").decode()
    except RuntimeError as error:
        me = f"rank {world.rank} on {world.host}"
        try:
            missing = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
        except RuntimeError:
            raise PeerLost(f"{me} lost rank 0 while it waited for all {world.size} ranks to arrive") from error
        who = f"rank{'s' * (len(missing) > 1)} {', '.join(missing[:8])}{', …' * (len(missing) > 8)}"
        raise PeerLost(f"{me} waited {timeout:.0f} s for {who} of {world.size} to arrive (--timeout)") from error
    if verdict:
        raise SharedError(verdict)
    return store


def _shared_places(places: list[str]) -> str:
    """A sentence on two ranks with the same GPU, or nothing."""
    for rank, place in enumerate(places):
        if (first := places.index(place)) != rank:
            return (
                f"ranks {first} and {rank} would share the {place}, which NCCL refuses: fewer GPUs than ranks; "
                f"start one rank a GPU (--procs), or use --backend gloo or --device cpu"
            )
    return ""


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]

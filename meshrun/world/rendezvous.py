"""How ranks find rank 0 under launchers that do not say where it is: a small file in the run directory.

Rank 0 writes its address, the others look until it answers:

    publish(run, world.job, world.attempt, own_address(world), port)     # rank 0
    where = lookup(run, world.job, world.attempt)                        # the others, until it is not None
    withdraw(run, world.job, world.attempt)                              # rank 0, when all have come

A file left by a launch that died looks like a good one: whoever cannot connect to what it says looks again.
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
import os
import socket
from pathlib import Path
from urllib.parse import quote

from meshrun.config import write_json
from meshrun.errors import RunFailed, UserError
from meshrun.world.detect import World

FOLDER = ".rendezvous"

_ELSEWHERE = ("198.51.100.1", 9)
"""An address that nobody has (RFC 5737): asking for the way to it names the default route's interface."""

_SIOCGIFADDR = 0x8915
"""Linux's number for "which IPv4 address has this interface"."""


def publish(folder: Path, job: str, attempt: int, address: str, port: int) -> Path:
    """Write where rank 0 listens, so that a reader sees all of it or nothing."""
    path = _path(folder, job, attempt)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {"address": address, "port": port})
    except OSError as error:
        raise UserError(
            f"the rendezvous file {path} cannot be written ({error.strerror}); "
            "the run directory must be writable from every node"
        ) from error
    return path


def lookup(folder: Path, job: str, attempt: int) -> tuple[str, int] | None:
    """What stands there now, or None while nothing complete does."""
    path = _path(folder, job, attempt)
    try:
        # NFS remembers for up to a minute that a name was absent; listing the folder asks the server again.
        if path.name not in os.listdir(path.parent):  # noqa: PTH208
            return None
        found = json.loads(path.read_text())
        return str(found["address"]), int(found["port"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def withdraw(folder: Path, job: str, attempt: int) -> None:
    """Take the file away once every rank has come: nobody looks for it any more."""
    _path(folder, job, attempt).unlink(missing_ok=True)


def own_address(world: World) -> str:
    """An address of this machine that all ranks of the world can reach."""
    if world.local_size == world.size:
        return "127.0.0.1"
    for found in (*_named(world.host), *_routed(), *_interfaces()):
        address = ipaddress.ip_address(found)
        if not (address.is_loopback or address.is_link_local or address.is_unspecified):
            return found
    raise RunFailed(f"host {world.host!r} has no network address but loopback, and the other ranks are on other nodes")


def _path(folder: Path, job: str, attempt: int) -> Path:
    if not job:
        raise UserError(
            "the launcher gives its ranks nothing to find each other by (mpiexec over several nodes, outside Slurm); "
            "start with torchrun, mpirun of Open MPI, or inside a Slurm job"
        )
    name = quote(job, safe="")
    if len(name) > 150:
        name = hashlib.sha256(job.encode()).hexdigest()
    return folder / FOLDER / f"{name}-{attempt}.json"


def _named(host: str) -> list[str]:
    """What the host's own name stands for; Debian writes 127.0.1.1 there."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return [str(entry[4][0]) for entry in sorted(found, key=lambda entry: entry[0] != socket.AF_INET)]


def _routed() -> list[str]:
    """The address of the default route's interface; a UDP socket is connected, nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(_ELSEWHERE)
        except OSError:
            return []
        return [str(probe.getsockname()[0])]


def _interfaces() -> list[str]:
    """The IPv4 address of each interface, in their order; none where the system is not Linux."""
    try:
        import fcntl
    except ImportError:
        return []
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, name.encode()[:15].ljust(256, b"\0"))
            except OSError:
                continue
            found.append(socket.inet_ntoa(answer[20:24]))
    return found

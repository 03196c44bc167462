"""Reads what one rank sees of its machine, without torch and without asking another rank.

    mine = read(world, runs, site, port=listener.port)

Nothing here judges, and nothing fails: what cannot be read is a fact too.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import os
import platform
import re
import resource
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import meshrun
from meshrun.check.doctor.facts import Caches, Cores, Facts, Folder, Gpus, Limits, Memory, Network, Port
from meshrun.errors import RunFailed, UserError
from meshrun.world import World, cores, grants
from meshrun.world.disks import file_system_of
from meshrun.world.environment import inherited
from meshrun.world.network import address_of, interfaces
from meshrun.world.profile import Site
from meshrun.world.slurm import end_of_job

SHARED_MEMORY = Path("/dev/shm")
ELSEWHERE = "198.51.100.1"
"""An address that nobody has (RFC 5737): is there a way to it?"""
T = TypeVar("T")


def read(world: World, runs: Path, site: Site | None, port: int) -> Facts:
    """Everything that can be seen without asking another rank."""
    env = inherited()
    granted, asked = grants.granted(env), grants.settings(env)
    return Facts(
        rank=world.rank,
        size=world.size,
        local_rank=world.local_rank,
        local_size=world.local_size,
        node=world.node,
        nodes=world.nodes,
        host=world.host,
        source=world.source,
        port=port,
        cores=_cores(world, granted),
        gpus=_gpus(granted),
        network=_network(world, site, asked),
        memory=_memory(SHARED_MEMORY),
        folder=folder(runs),
        limits=_limits(),
        caches=_caches(asked),
        versions=_versions(),
        slurm=_slurm_version() if granted.slurm_job else None,
        ends_in=_ends_in(env) if granted.slurm_job else None,
        master=f"{world.address}:{world.port}" if world.address and not world.agent_store else None,
    )


def _cores(world: World, granted: grants.Granted) -> Cores:
    of_task = granted.cpus_per_task
    # torchrun is the task, and its ranks have what the task has.
    of_rank = max(1, of_task // world.local_size) if of_task and world.source == "torchrun" else of_task
    return Cores(
        bound=tuple(sorted(cores.granted())),
        existing=os.cpu_count() or 1,
        allowed=cpuset() or os.cpu_count() or 1,
        granted_rank=of_rank,
        granted_node=granted.cpus_on_node,
        srun_told=granted.srun_told,
    )


def cpuset(cgroups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int | None:
    """How many CPUs this process's control group leaves it; None where it cannot be read."""
    for line in _or(own.read_text, "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpuset" not in controllers.split(","):
            continue
        base = cgroups / "cpuset" if controllers else cgroups
        name = "cpuset.effective_cpus" if controllers else "cpuset.cpus.effective"
        group = base / path.lstrip("/")
        # A container may not see its own group, and sees its own limits at the root.
        for folder in (group, base):
            text = _or((folder / name).read_text, "").strip()
            if text:
                ends = [part.partition("-") for part in text.split(",")]
                return sum(int(last or first) - int(first) + 1 for first, _, last in ends)
    return None


def _gpus(granted: grants.Granted) -> Gpus:
    existing = len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
    if not existing and Path("/dev/kfd").exists():
        existing = len(list(Path("/dev/dri").glob("renderD*")))
    return Gpus(granted.gpus_on_node, granted.gpus_per_task, granted.gpus_listed, granted.gpus_listed_by, existing)


def _network(world: World, site: Site | None, asked: grants.Settings) -> Network:
    address, problem = None, ""
    try:
        address = address_of(world, site)
    except (RunFailed, UserError) as error:
        problem = str(error)
    return Network(
        address=address,
        problem=problem,
        named=resolved(world.host),
        interfaces=tuple(interfaces()),
        infiniband=tuple(fabric()),
        gloo=asked.gloo_interface,
        nccl=asked.nccl_interface,
        nccl_without_infiniband=asked.nccl_without_infiniband,
        route=source_for(ELSEWHERE) is not None,
    )


def resolved(host: str) -> tuple[str, ...]:
    """The IPv4 addresses that a name stands for on this machine."""
    with contextlib.suppress(OSError, UnicodeError):
        found = socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)
        return tuple(dict.fromkeys(str(entry[4][0]) for entry in found))
    return ()


def source_for(address: str) -> str | None:
    """This machine's own address on the way to another one; None without a way. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))
        except OSError:
            return None
        return str(probe.getsockname()[0])


def fabric(root: Path = Path("/sys/class/infiniband")) -> list[Port]:
    """Every port of an InfiniBand card."""
    found = []
    for port in sorted(root.glob("*/ports/*")):
        with contextlib.suppress(OSError):
            rate = re.match("[0-9]+", (port / "rate").read_text())
            if "InfiniBand" in (port / "link_layer").read_text() and rate:
                found.append(Port(port.parts[-3], "ACTIVE" in (port / "state").read_text(), int(rate[0])))
    return found


def _memory(where: Path) -> Memory:
    space = _or(lambda: os.statvfs(where), None)
    if space is None:
        return Memory(0, 0)
    return Memory(space.f_blocks * space.f_frsize, space.f_bavail * space.f_frsize)


def folder(runs: Path) -> Folder:
    """Whether run directories can be made there; what was not there is made, as a run would."""
    error = ""
    try:
        runs.mkdir(parents=True, exist_ok=True)
        # Under a name that nobody guesses: where all may write, a link could lie under any other.
        with tempfile.NamedTemporaryFile(dir=runs, prefix=f".doctor-{socket.gethostname()}-") as test:
            # More than a file's name: a full disk takes names, and no bytes.
            test.write(b"\0" * 65536)
            test.flush()
    except OSError as problem:
        error = problem.strerror or str(problem)
    space = _or(lambda: os.statvfs(runs), None)
    free, files = (space.f_bavail * space.f_frsize, space.f_favail) if space else (0, 0)
    # File systems without a table of files have all of these 0.
    return Folder(str(runs.absolute()), error, filesystem(runs), free, files if space and space.f_files else -1)


def filesystem(path: Path, mounts: Path = Path("/proc/self/mounts")) -> str:
    """The kind of file system that a path is on, such as nfs4, lustre or tmpfs."""
    return file_system_of(str(path.absolute()), _or(mounts.read_text, ""))


def _limits() -> Limits:
    return Limits(
        files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        core=resource.getrlimit(resource.RLIMIT_CORE)[0],
        core_is_file=core_is_file(),
        locked=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
    )


def core_is_file(pattern: Path = Path("/proc/sys/kernel/core_pattern")) -> bool:
    """Whether the core of a process that crashes becomes a file; else a program takes it, or nobody does."""
    text = _or(pattern.read_text, "").strip()
    return bool(text) and not text.startswith("|")


def _caches(asked: grants.Settings) -> Caches:
    problems = {}
    for name, place in asked.caches.items():
        path = Path(place)
        if not path.is_dir():
            problems[name] = "is not there"
        elif not os.access(path, os.R_OK | os.X_OK):
            problems[name] = "cannot be read"
    return Caches(asked.caches, problems, asked.offline)


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "meshrun": f"{meshrun.__version__} ({_code()})"}
    for name in ("torch", "numpy"):
        found[name] = _or(lambda name=name: importlib.metadata.version(name), "none")  # type: ignore[misc]
    for name in ("nvidia-nccl-cu12", "nvidia-nccl-cu13"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found["NCCL"] = importlib.metadata.version(name)
    driver = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)", _or(Path("/proc/driver/nvidia/version").read_text, ""))
    if driver:
        found["NVIDIA driver"] = driver[1]
    return found


def _code() -> str:
    """What tells two copies of meshrun's own code apart, whose version may well be the same."""
    digest = hashlib.sha256()
    home = Path(meshrun.__file__).parent
    for path in sorted(home.rglob("*.py")):
        digest.update(str(path.relative_to(home)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:8]


def _slurm_version() -> str | None:
    try:
        ran = subprocess.run(["sinfo", "--version"], capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r"\d+\.\d\S*", ran.stdout)  # after "slurm", or "slurm-wlm" on Debian
    return found[0] if found else None


def _ends_in(env: dict[str, str]) -> float | None:
    end = _or(lambda: end_of_job(env), None)
    return None if end is None else end - time.time()


def _or(read: Callable[[], T], otherwise: T) -> T:
    """What can be read, or something else where the system does not have it."""
    try:
        return read()
    except (OSError, importlib.metadata.PackageNotFoundError):
        return otherwise

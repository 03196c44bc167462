"""Which rank this process is, read from what its launcher left in the environment.

    world = detect(os.environ)
    world.rank, world.size, world.source      # 3, 4, "slurm"

`LAUNCHERS` is asked from top to bottom and the first that answers wins. The order matters: a launcher inside another
one (mpirun in a Slurm job, torchrun in a Slurm step) leaves the variables of both, and the outer ones count the
launcher's own processes, not the ranks. No other module reads launchers' variables.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from meshrun.errors import UserError
from meshrun.world.hostlist import expand_hosts, expand_tasks
from meshrun.world.played import CLUSTER

Env = Mapping[str, str]
T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """One process's place among all of its job.

    torchrun and Slurm say which node a rank is on. For mpirun and mpiexec `node` holds where ranks fill one node
    after the other, as they do by default; for mpiexec outside Slurm `nodes` also supposes equally full ones.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    node: int
    nodes: int
    host: str
    source: str
    """The name of the launcher's row: torchrun, openmpi, pmi, slurm or none."""
    address: str | None = None
    """Where rank 0 listens, when the launcher says so; else `rendezvous` finds out."""
    port: int | None = None
    agent_store: bool = False
    """torchrun's agent already serves the store on address:port: connect to it, do not open it."""
    attempt: int = 0
    """How often this job was restarted before."""
    job: str = ""
    """A key that all ranks of this job share, and no other job; empty if the launcher gives none."""
    hosts: tuple[str, ...] = ()
    """The names of the nodes in order, when the launcher says them (Slurm)."""
    is_played: bool = False
    """Whether all nodes are this machine, on which a job is rehearsed."""


def detect(env: Env, host: str | None = None) -> World:
    """This process's world; a process that no launcher started is alone in its own."""
    host = host or socket.gethostname()
    answers = (read(env, host) for _, read in LAUNCHERS)
    world = next(world for world in answers if world is not None)
    return replace(world, is_played=True) if env.get("SLURM_CLUSTER_NAME") == CLUSTER else world


def _torchrun(env: Env, host: str) -> World | None:
    if not _all_set(env, "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        return None
    rank, size = _place(env, "RANK", "WORLD_SIZE")
    address, port = env["MASTER_ADDR"], _number(env, "MASTER_PORT")
    if not 1 <= port <= 65535:
        raise UserError(f"MASTER_PORT={port} is not a port; it must be between 1 and 65535")
    run = env.get("TORCHELASTIC_RUN_ID", "")
    named = World(
        rank, size, rank, size, 0, 1, host, "torchrun", address=address, port=port,
        agent_store=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        attempt=_attempt(env, "TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"),
        # torchrun calls every run that was given no --rdzv-id "none".
        job=f"torchrun-{run}" if run not in ("", "none") else f"torchrun-{address}:{port}",
    )  # fmt: skip
    if not _all_set(env, "LOCAL_WORLD_SIZE"):
        return _torchrun_by_hand(env, named)
    local_rank, local_size = _place(env, "LOCAL_RANK", "LOCAL_WORLD_SIZE", within=size)
    if _all_set(env, "GROUP_RANK", "GROUP_WORLD_SIZE"):
        node, nodes = _place(env, "GROUP_RANK", "GROUP_WORLD_SIZE")
    else:
        nodes = -(-size // local_size)
        node = _node_in_blocks(rank, size, local_rank, local_size, nodes)
    return replace(named, local_rank=local_rank, local_size=local_size, node=node, nodes=nodes)


def _torchrun_by_hand(env: Env, named: World) -> World:
    """Scripts export torchrun's variables for each srun task themselves, and leave out how many ranks a node has."""
    step = _slurm(env, named.host)
    if step and (step.rank, step.size) == (named.rank, named.size):
        return replace(
            named, local_rank=step.local_rank, local_size=step.local_size, node=step.node, nodes=step.nodes,
            hosts=step.hosts,
        )  # fmt: skip
    local_rank = _number(env, "LOCAL_RANK")
    if local_rank != named.rank:
        raise UserError(
            f"LOCAL_RANK={local_rank} of RANK={named.rank} means several nodes, but LOCAL_WORLD_SIZE is not set; "
            "it must be the number of ranks on this node"
        )
    return named


def _openmpi(env: Env, host: str) -> World | None:
    if not _all_set(env, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"):
        return None
    rank, size = _place(env, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
    local_rank, local_size = _place(env, "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", within=size)
    counted = "OMPI_MCA_orte_num_nodes"
    nodes = (_number(env, counted) if _all_set(env, counted) else 0) or -(-size // local_size)
    # The first is drawn at random for every launch; Open MPI 5 has only the second.
    key = env.get("OMPI_MCA_orte_precondition_transports") or env.get("PMIX_NAMESPACE")
    return World(
        rank, size, local_rank, local_size, _node_in_blocks(rank, size, local_rank, local_size, nodes), nodes, host,
        "openmpi", attempt=_attempt(env, "SLURM_RESTART_COUNT"), job=f"openmpi-{key}" if key else "",
    )  # fmt: skip


def _pmi(env: Env, host: str) -> World | None:
    # srun --mpi=pmi2 sets PMI_RANK too, but only Hydra (MPICH, Intel MPI) sets the local ones.
    if not _all_set(env, "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"):
        return None
    rank, size = _place(env, "PMI_RANK", "PMI_SIZE")
    local_rank, local_size = _place(env, "MPI_LOCALRANKID", "MPI_LOCALNRANKS", within=size)
    attempt = _attempt(env, "SLURM_RESTART_COUNT")
    slurm = env.get("SLURM_JOB_ID", "")
    nodes = -(-size // local_size)
    node = _node_in_blocks(rank, size, local_rank, local_size, nodes)
    hosts: tuple[str, ...] = ()
    job = ""
    if nodes == 1:
        job = "-".join(filter(None, ("pmi", slurm, launch_key(os.getppid()))))
    elif slurm:
        # Hydra starts its proxies, one a node, as a Slurm step of their own; ranks see that step's variables.
        job = f"pmi-{slurm}.{env.get('SLURM_STEP_ID', '')}.{attempt}"
        proxy = _slurm(env, host)
        if proxy and proxy.size == proxy.nodes and proxy.hosts[proxy.node :][:1] == (host.split(".")[0],):
            node, nodes, hosts = proxy.node, proxy.nodes, proxy.hosts
    return World(
        rank, size, local_rank, local_size, node, nodes, host, "pmi", attempt=attempt, job=job, hosts=hosts
    )  # fmt: skip


def _slurm(env: Env, host: str) -> World | None:
    step = env.get("SLURM_STEP_ID") or env.get("SLURM_STEPID") or ""
    # The batch script, extern and interactive steps are shells, not ranks; Slurm numbers them from the top.
    if not _all_set(env, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS") or step in ("", "batch", "extern", "interactive"):
        return None
    if re.fullmatch("[0-9]{1,18}", step) is None:
        raise UserError(f"SLURM_STEP_ID={step!r} is not the number of a Slurm step")
    if int(step) >= _FIRST_RESERVED_STEP:
        return None
    rank, size = _place(env, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
    tasks = _listed(env, "SLURM_STEP_TASKS_PER_NODE", expand_tasks) or [size]
    node, local_rank = _number(env, "SLURM_NODEID"), _number(env, "SLURM_LOCALID")
    if node >= len(tasks) or local_rank >= tasks[node]:
        raise UserError(
            f"SLURM_NODEID={node} and SLURM_LOCALID={local_rank} are not among "
            f"SLURM_STEP_TASKS_PER_NODE={env.get('SLURM_STEP_TASKS_PER_NODE', '')!r}"
        )
    attempt = _attempt(env, "SLURM_RESTART_COUNT")
    job = env.get("SLURM_JOB_ID") or env.get("SLURM_JOBID")
    return World(
        rank, size, local_rank, tasks[node], node, len(tasks), host, "slurm", attempt=attempt,
        job=f"slurm-{job}.{step}.{attempt}" if job else "",
        hosts=tuple(_listed(env, "SLURM_STEP_NODELIST", expand_hosts)),
    )  # fmt: skip


def _alone(env: Env, host: str) -> World:
    return World(0, 1, 0, 1, 0, 1, host, "none", attempt=_attempt(env, "SLURM_RESTART_COUNT"))


LAUNCHERS: tuple[tuple[str, Callable[[Env, str], World | None]], ...] = (
    ("torchrun", _torchrun),
    ("openmpi", _openmpi),
    ("pmi", _pmi),
    ("slurm", _slurm),
    ("none", _alone),
)

_FIRST_RESERVED_STEP = 0xFFFF_FFF0


def launch_key(parent: int) -> str:
    """What tells one mpiexec on this machine from all others: its proxy's process id and start time.

    Ranks are children of the proxy, or further down when a shell script stands between.
    """
    key, pid = str(parent), parent
    while pid > 1:
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            break
        name, _, rest = stat.partition("(")[2].rpartition(")")
        fields = rest.split()
        if pid == parent or name == "hydra_pmi_proxy":
            key = f"{pid}.{fields[19]}"
        if name == "hydra_pmi_proxy":
            break
        pid = int(fields[1])
    return f"{socket.gethostname()}-{key}"


def _node_in_blocks(rank: int, size: int, local_rank: int, local_size: int, nodes: int) -> int:
    """The node of a rank when ranks fill one node after the other; the last one may have fewer."""
    before = max(0, rank - local_rank)
    return nodes - 1 if before + local_size == size else min(before // local_size, nodes - 1)


def _all_set(env: Env, *names: str) -> bool:
    return all(env.get(name) for name in names)


def _attempt(env: Env, *names: str) -> int:
    return next((_number(env, name) for name in names if env.get(name)), 0)


def _number(env: Env, name: str) -> int:
    text = env.get(name, "")
    if re.fullmatch("[0-9]{1,18}", text) is None:
        raise UserError(f"{name}={text!r} is not a whole number of at least 0, which its launcher must set it to")
    return int(text)


def _listed(env: Env, name: str, expand: Callable[[str], list[T]]) -> list[T]:
    """A variable's short form written out; nothing where it is not set."""
    try:
        return expand(env[name]) if env.get(name) else []
    except UserError as error:
        raise UserError(f"{name} cannot be read: {error}") from error


def _place(env: Env, index_name: str, size_name: str, within: int | None = None) -> tuple[int, int]:
    """An index and the size that it must be below; the size must not exceed `within`, the number of all ranks."""
    index, size = _number(env, index_name), _number(env, size_name)
    if index >= size:
        raise UserError(f"{index_name}={index} is not below {size_name}={size}; indices count from 0")
    if within is not None and size > within:
        raise UserError(f"{size_name}={size} on one node is more than all {within} ranks of the job")
    return index, size

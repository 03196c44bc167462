"""Which CPU cores a rank takes of those that all ranks of its node were granted together.

    mine = share(granted(), world.local_rank, world.local_size, topology())
    os.sched_setaffinity(0, mine)

`share` is for ranks that see the same cores. Where the launcher has already bound each rank to cores of its own
(mpirun's default, srun with --cpu-bind), `granted()` differs from rank to rank and is the share. So ranks tell each
other what they see (`written`, `read`), and `lost` has a sentence for a node whose ranks see too little.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from meshrun.errors import UserError
from meshrun.world.detect import World
from meshrun.world.hostlist import expand_tasks

Env = Mapping[str, str]


def share(
    granted: Collection[int], index: int, of: int, siblings: Mapping[int, tuple[int, int]] | None
) -> frozenset[int]:
    """The cores of local rank `index` of `of`; hyper-threads of one physical core go to one rank.

    `siblings` gives (package, physical core) of each CPU; a CPU that is not in it counts as a physical core. With
    fewer physical cores than ranks nothing can be cut, and every rank keeps all of them.
    """
    if not 0 <= index < of:
        raise ValueError(f"local rank {index} is not one of {of}")
    known = siblings or {}
    physical: dict[tuple[int, ...], list[int]] = {}
    for cpu in granted:
        physical.setdefault((0, *known[cpu]) if cpu in known else (1, cpu), []).append(cpu)
    if len(physical) < of:
        return frozenset(granted)
    ordered = sorted(physical)
    first, last = (end * len(ordered) // of for end in (index, index + 1))
    return frozenset(cpu for core in ordered[first:last] for cpu in physical[core])


def mine(granted: Collection[int], index: int, of: int, masks: Sequence[str] = ()) -> frozenset[int]:
    """This rank's share of cores that all ranks of the node see: by the site's masks if they fit, else cut evenly."""
    wanted = [frozenset(bit for bit in range(4 * len(mask)) if int(mask, 16) >> bit & 1) for mask in masks]
    if len(wanted) == of and all(mask and mask <= frozenset(granted) for mask in wanted):
        return wanted[index]
    return share(granted, index, of, topology())


def written(cores: Collection[int]) -> str:
    """Cores as text, for others to `read`."""
    return ",".join(map(str, sorted(cores)))


def read(text: str) -> frozenset[int]:
    return frozenset(int(core) for core in text.split(",") if core)


def granted_to_job(env: Env, world: World, existing: int | None = None) -> int | None:
    """How many cores of this node the job was granted; None where nobody says so."""
    existing = existing or os.cpu_count() or 1
    if env.get("SLURM_JOB_ID"):
        try:
            # Virtual nodes may claim more cores than there are.
            return min(existing, *expand_tasks(env.get("SLURM_JOB_CPUS_PER_NODE", "")))
        except UserError:
            return None
    return existing if world.source in ("openmpi", "pmi") else None


def mended(world: World) -> str:
    """How a launcher that hands on too few cores is told to hand on all."""
    return {
        "openmpi": "start with mpirun --bind-to none",
        "pmi": "start with mpiexec -bind-to none",
    }.get(world.source, "write 'export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK' before srun, or srun --cpus-per-task=N")


def lost(env: Env, world: World, seen: Sequence[Collection[int]], existing: int | None = None) -> str | None:
    """A sentence when a rank has one core though its node was granted more than its ranks have; with what mends it."""
    granted = granted_to_job(env, world, existing)
    if granted is None:
        return None
    have = len(frozenset[int]().union(*seen))
    if world.local_rank != 0 or min(map(len, seen)) > 1 or have >= granted:
        return None
    ranks = "its rank has 1 core" if world.local_size == 1 else f"of its {world.local_size} ranks one has 1 core"
    return (
        f"{world.host} was granted {granted} cores, but {ranks} and all have {have}, which starves readers; "
        f"{mended(world)}"
    )


def threads_are_chosen(env: Env) -> bool:
    """Whether somebody has said how many threads compute."""
    return bool(env.get("OMP_NUM_THREADS"))


def topology(root: Path = Path("/sys/devices/system/cpu")) -> dict[int, tuple[int, int]]:
    """(package, physical core) of every CPU that the kernel describes; empty where it describes none."""
    found = {}
    for folder in root.glob("cpu[0-9]*"):
        try:
            package = int((folder / "topology/physical_package_id").read_text())
            core = int((folder / "topology/core_id").read_text())
            found[int(folder.name.removeprefix("cpu"))] = (package, core)
        except (OSError, ValueError):
            continue
    return found


def granted() -> frozenset[int]:
    """The CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def quota(cgroups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> float | None:
    """How many CPUs' time a container may use at once, or None without a limit: its cores may be more than that."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return None
    limits = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        base = cgroups / "cpu" if controllers else cgroups
        # A limit on any group above this process's own holds for it too.
        group = base / path.lstrip("/")
        for folder in (group, *(above for above in group.parents if above.is_relative_to(base))):
            try:
                if controllers:
                    allowed = (folder / "cpu.cfs_quota_us").read_text()
                    period = (folder / "cpu.cfs_period_us").read_text()
                else:
                    allowed, period = (folder / "cpu.max").read_text().split()
                limits.append(int(allowed) / int(period))
            except (OSError, ValueError):
                continue
    return min((limit for limit in limits if limit > 0), default=None)

"""Which CPU cores a rank takes of those that all ranks of its node were granted together.

    mine = share(granted(), world.local_rank, world.local_size, topology())
    os.sched_setaffinity(0, mine)

`share` is for ranks that see the same cores. Where the launcher has already bound each rank to cores of its own
(mpirun's default, srun with --cpu-bind), `granted()` differs from rank to rank and is the share.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path


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

"""What can be wrong with a node by itself: cores, GPUs, /dev/shm, limits, caches, the folder of runs.

for finding in cores(case): …
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from meshrun.check.doctor.case import Case, Finding, ranks_text, size_text
from meshrun.check.doctor.facts import Facts

MEMORY_A_RANK = 64 << 20
LEAST_SPACE, LEAST_FILES = 1 << 30, 1_000
FILES_A_PROCESS, FILES_A_PEER = 256, 8
LOCKED = 1 << 30
SOON = 120.0
"""Seconds to the time limit in which nothing can be begun."""


def cores(case: Case) -> Iterator[Finding]:
    """Judged by what exists: Slurm may grant more cores than the machine has."""
    for host, ranks in case.nodes().items():
        yield from _cores_of_node(host, ranks)


def _cores_of_node(host: str, ranks: list[Facts]) -> Iterator[Finding]:
    first = ranks[0].cores
    why = "readers of data and all computing threads of a rank take turns on its cores, so training waits for its input"
    starved = []
    for each in ranks:
        share = min(each.cores.granted_rank or 1, max(1, each.cores.existing // each.local_size))
        if len(each.cores.bound) < share:
            starved.append(each)
    if starved:
        granted, bound = starved[0].cores.granted_rank, len(starved[0].cores.bound)
        yield Finding(
            "cores",
            f"{ranks_text(each.rank for each in starved)} of {host} may run on {_cores(bound)} but {granted} "
            f"were granted to each task",
            host,
            why,
            _lost_cores(starved[0]),
            (host,),
        )
        return
    union = {cpu for each in ranks for cpu in each.cores.bound}
    granted_node = first.granted_node or (first.granted_rank or 0) * len(ranks) or first.allowed
    usable = min(granted_node, first.existing)
    # Half of them is what is left without hyper-threads, and sites keep some cores for the system.
    if len(union) < usable / 2 or len(union) == 1 < usable:
        who = f"{ranks_text(each.rank for each in ranks)} of {host}"
        by = "were granted there" if first.granted_node or first.granted_rank else "are there"
        together = "together may run on" if len(ranks) > 1 else "may run on"
        yield Finding(
            "cores",
            f"{who} {together} {_cores(len(union))} ({_listed(union)}) but {usable} {by}",
            host,
            why,
            _binding(ranks[0], usable // len(ranks)),
            (host,),
        )


def _cores(count: int) -> str:
    return f"{count} core{'s' * (count != 1)}"


def _listed(cpus: set[int]) -> str:
    return ", ".join(map(str, sorted(cpus)[:8])) + ", …" * (len(cpus) > 8)


def _lost_cores(rank: Facts) -> str:
    if not rank.cores.srun_told and slurm_loses_cores(rank.slurm):
        return (
            f"export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK before srun (Slurm {rank.slurm} does not hand "
            f"--cpus-per-task on to it)"
        )
    return _binding(rank, rank.cores.granted_rank or 1)


def slurm_loses_cores(version: str | None) -> bool:
    """Whether srun of this version ignores the --cpus-per-task of its job: 22.05 to 23.02."""
    found = re.match(r"(\d+)\.(\d+)", version or "")
    return found is not None and (22, 5) <= (int(found[1]), int(found[2])) <= (23, 2)


def _binding(rank: Facts, cores: int) -> str:
    match rank.source:
        case "slurm":
            return f"srun --cpus-per-task={max(1, cores)} --cpu-bind=cores, or --cpu-bind=none"
        case "openmpi":
            return f"mpirun --map-by slot:PE={max(1, cores)}, or --bind-to none"
        case "pmi":
            return "mpiexec -bind-to none"
    return "start it without taskset, numactl or a cpuset that leaves so few"


def gpus(case: Case) -> Iterator[Finding]:
    for host, ranks in case.nodes().items():
        granted = ranks[0].gpus.granted_node
        yield from _hidden_gpus(host, ranks, granted)
        if granted and 1 < len(ranks) < granted:
            yield Finding(
                "GPUs",
                f"{granted} GPUs of {host} were granted but {len(ranks)} ranks run there",
                host,
                "GPUs without a rank are paid for and do nothing",
                f"--ntasks-per-node={granted}, or ask for {len(ranks)} GPUs a node",
                (host,),
            )
        seen = [case.together[each.rank].gpus for each in ranks if each.rank in case.together]
        if ranks[0].gpus.existing and seen and not any(seen) and ranks[0].gpus.listed != ():
            yield Finding(
                "GPUs",
                f"torch sees no GPU on {host}, whose driver has {ranks[0].gpus.existing}",
                host,
                "training would run on its CPU; most often torch was installed without CUDA",
                "a CUDA build of torch: python -c 'import torch; print(torch.version.cuda)' must not print None",
                (host,),
            )


def _hidden_gpus(host: str, ranks: list[Facts], granted: int | None) -> Iterator[Finding]:
    """A rank may be shown all of the node's GPUs, or its own share of them."""
    if not granted:
        return
    hidden = []
    for each in ranks:
        listed = each.gpus.listed
        if listed is None:
            continue
        share = each.gpus.granted_rank or max(1, granted // len(ranks))
        # The same few for all ranks, where nobody gave each task its own under the same number.
        alike = each.gpus.granted_rank is None and all(other.gpus.listed == listed for other in ranks)
        if len(listed) < share or (alike and len(listed) < min(len(ranks), granted)):
            hidden.append(each)
    if hidden:
        gpus = hidden[0].gpus
        shown = len(gpus.listed or ())
        count = f"{granted} GPU{'s' * (granted != 1)} of {host} {'were' if granted != 1 else 'was'} granted"
        yield Finding(
            "GPUs",
            f"{count} but {ranks_text(each.rank for each in hidden)} {'see' if len(hidden) > 1 else 'sees'} {shown}: "
            f"{gpus.listed_by}={','.join(gpus.listed or ())}",
            host,
            "ranks take the GPU of their local rank, so some would share one (NCCL refuses that) or find none",
            f"unset {gpus.listed_by}, which the launcher sets, or take away --gpus-per-task",
            (host,),
        )


def memory(case: Case) -> Iterator[Finding]:
    for host, ranks in case.nodes().items():
        need, there = MEMORY_A_RANK * len(ranks), ranks[0].memory
        if there.free < need:
            yield Finding(
                "memory",
                f"/dev/shm of {host} has {size_text(there.free)} free of {size_text(there.total)}, "
                f"and {len(ranks)} rank{'s' * (len(ranks) != 1)} need at least {size_text(need)}",
                host,
                "readers hand batches over there, NCCL its buffers, and copies of the state that save a lost rank's "
                "work lie there; when it is full processes die with a bus error",
                "docker/podman --shm-size=8g, apptainer --bind /dev/shm, or mount -o remount,size=8g /dev/shm; "
                "else --workers 0 --no-spare",
                (host,),
            )


def folder(case: Case) -> Iterator[Finding]:
    for host, ranks in case.nodes().items():
        there = next((each.folder for each in ranks if each.folder.error), ranks[0].folder)
        path = there.path
        if there.error:
            yield Finding(
                "folder",
                f"nothing can be written to {path} on {host}: {there.error}",
                host,
                "every rank writes its events, logs and part of a checkpoint there",
                "--runs DIR, a folder that is writable on every node",
                (host,),
            )
        elif there.free < LEAST_SPACE or 0 <= there.free_files < LEAST_FILES:
            left = size_text(there.free) if there.free < LEAST_SPACE else f"room for {there.free_files} files"
            yield Finding(
                "folder",
                f"{path} has {left} left on {host}",
                host,
                "a checkpoint that finds no room is lost",
                "make room, or --runs DIR on a file system that has some",
                (host,),
            )


def limits(case: Case) -> Iterator[Finding]:
    for host, ranks in case.nodes().items():
        has, size = ranks[0].limits, ranks[0].size
        need = FILES_A_PROCESS + FILES_A_PEER * size
        if 0 <= has.files < need:
            yield Finding(
                "limits",
                f"a process of {host} may open {has.files} files, and {size} ranks need about {need}",
                host,
                "each connection to another rank and each file of the data set is one",
                f"ulimit -n {max(65536, need)} in the job's script",
                (host,),
            )
        if has.core and has.core_is_file and size > 1:
            yield Finding(
                "limits",
                f"a crash on {host} writes core files (ulimit -c is {'unlimited' if has.core < 0 else has.core})",
                host,
                "one a rank, each as large as its memory, into the working directory",
                "ulimit -c 0 in the job's script",
                (host,),
            )
        if any(port.active for port in ranks[0].network.infiniband) and 0 <= has.locked < LOCKED:
            yield Finding(
                "limits",
                f"a process of {host} may lock {size_text(has.locked)} of memory",
                host,
                "InfiniBand works on locked memory: NCCL fails, or goes over TCP, several times slower",
                "ulimit -l unlimited, in the job's script or by the site (LimitMEMLOCK of slurmd)",
                (host,),
            )
    yield from _time_limit(case)


def _time_limit(case: Case) -> Iterator[Finding]:
    first = case.rank(0)
    if first is None or first.slurm is None or first.ends_in is None or first.ends_in > SOON:
        return
    yield Finding(
        "limits",
        f"the job ends in {max(0.0, first.ends_in):.0f} s",
        first.host,
        "a training that begins now stops before it has done anything",
        "--time= of sbatch or salloc",
        (first.host,),
    )


def caches(case: Case) -> Iterator[Finding]:
    for host, ranks in case.nodes().items():
        has = ranks[0].caches
        for name, problem in has.problems.items():
            yield Finding(
                "caches",
                f"{name}={has.places[name]} {problem} on {host}",
                host,
                "what was fetched beforehand is not found there, and compute nodes have no internet to fetch it anew",
                f"export {name}=DIR, a folder that every node sees, and meshrun stage TARGET on a node with internet",
                (host,),
            )
        if has.places and not has.offline and not ranks[0].network.route:
            yield Finding(
                "caches",
                f"{host} has no way to the internet, and HF_HUB_OFFLINE is not set",
                host,
                "the hubs' libraries ask their server first and only give up after minutes of waiting",
                "export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 TRANSFORMERS_OFFLINE=1",
                (host,),
            )

"""What Slurm itself says about a cluster of which there is no profile, as a profile.

    site = probe(asking())                   # a Site: its partitions with their limits, GPUs and cores of a node
    site, why_not = found(patience=2.0)      # the same, where nothing may wait for a Slurm that does not answer
    to_text(site)                            # a file to save and edit (meshrun sites probe --save NAME)

Everything but `asking` is a pure function of what sinfo and scontrol print. What they do not say is left out.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from meshrun.errors import RunFailed, UserError
from meshrun.launch.slurm import TIMEOUT, is_here, run_command
from meshrun.world import walltime
from meshrun.world.environment import module_system, of_new_job
from meshrun.world.hostlist import expand_hosts
from meshrun.world.network import Interface
from meshrun.world.profile import Detect, Partition, Site, Value

Ask = Callable[..., str]
"""Runs a command with its words, and returns what it prints."""

NODES = ("sinfo", "--noheader", "--format=%R|%D|%G|%z|%f")
"""A line for each kind of node in each partition: how many, their GPUs, sockets:cores:threads, features."""
PARTITIONS = ("scontrol", "--oneliner", "show", "partition")
CONFIG = ("scontrol", "show", "config")
NODE = ("scontrol", "--oneliner", "show", "node")

_PAIR = re.compile(r"(\w+)=(\S*)")
_IS = "it is "
"""How the note of a partition begins that takes no jobs now."""


@dataclass(frozen=True)
class Kind:
    """Nodes of a partition that are alike."""

    partition: str
    count: int
    gpus: int
    gpu: str | None
    """Slurm's name for the kind of GPU."""
    cores: int | None
    threads: int | None


def asking(patience: float = TIMEOUT) -> Ask:
    """Asks the Slurm of this machine; all questions together have so many seconds from now on."""
    give_up = time.monotonic() + patience

    def ask(*words: str) -> str:
        ended = run_command(words, of_new_job(), max(0.0, give_up - time.monotonic()))
        if ended.returncode:
            said = (ended.stderr or ended.stdout).strip().splitlines() or ["without a word"]
            raise RunFailed(f"{' '.join(words[:3])} failed: {said[-1]}")
        return ended.stdout

    return ask


def found(patience: float) -> tuple[Site | None, str]:
    """What Slurm says of this cluster; else why that is not known, which is no news where there is no Slurm."""
    if not is_here():
        return None, ""
    began = time.monotonic()
    try:
        return probe(asking(patience)), ""
    except RunFailed as error:
        late = time.monotonic() - began >= patience
        return None, f"Slurm has not answered within {patience:g} s" if late else str(error)


def probe(ask: Ask, env: Mapping[str, str] | None = None, interfaces: Sequence[Interface] = ()) -> Site:
    """The profile of the cluster whose Slurm is asked; `env` and `interfaces` are of the machine that asks."""
    # Side by side, since each takes as long as the controller lets it wait.
    with ThreadPoolExecutor() as threads:
        of_cluster, of_nodes, of_partitions = threads.map(lambda words: ask(*words), (CONFIG, NODES, PARTITIONS))
    config, kinds = settings(of_cluster), kinds_of_nodes(of_nodes)
    found = partitions_of(of_partitions, kinds)
    cluster = config.get("ClusterName", "")
    chosen = _to_train_in(found)
    values: dict[str, Value] = {}

    def say(key: str, value: Any, source: str, verified: bool = True) -> None:
        if value is not None:
            values[key] = Value(value, f"{source} on this machine", verified)

    of_chosen = [kind for kind in kinds if chosen is not None and kind.partition == chosen.name]
    kind = max(of_chosen, key=lambda kind: (kind.gpus, kind.count), default=None)
    if chosen is not None and kind is not None:
        with_gpus = kind.gpus > 0
        cores = _usable_cores(ask, _blocks(of_partitions)[chosen.name], kind)
        say("gpu", kind.gpu, "sinfo")
        say("gpus_per_node", kind.gpus, "sinfo")
        say("cores_per_node", cores, "scontrol show node")
        say("threads_per_core", kind.threads, "sinfo")
        say("cores_per_gpu", cores // kind.gpus or None if cores and with_gpus else None, "sinfo, cores by GPUs")
        say("partition", chosen.name, "scontrol show partition")
        say("gpu_request", "--gres=gpu:{n}" if with_gpus else None, "sinfo")
    requeues = {"1": "requeue", "0": "submit"}.get(config.get("JobRequeue", ""))
    say("chain", requeues, "scontrol show config")
    fast = next((each.name for each in interfaces if each.fast), None)
    # A login node's interfaces need not be those of the nodes that compute.
    say("socket_interface", fast and (fast.rstrip("0123456789") or fast), "interfaces", verified=False)
    say("module_system", module_system(env or {}), "variables")
    name = re.sub("[^A-Za-z0-9.-]", "-", cluster).strip(".-") or "here"
    version = next((f", Slurm {value}" for name, value in config.items() if name.endswith("_VERSION")), "")
    detect = Detect(cluster=(f"^{re.escape(cluster)}$",), source="scontrol show config", verified=True)
    title = f"the cluster {cluster or 'here'}{version}"
    return Site(name, title, values, found, detect=detect if cluster else Detect(), cluster=cluster)


def settings(text: str) -> dict[str, str]:
    """`scontrol show config`: lines such as `ClusterName = jsc`."""
    pairs = (line.partition("=") for line in text.splitlines() if "=" in line)
    return {name.strip(): value.strip() for name, _, value in pairs}


def kinds_of_nodes(text: str) -> list[Kind]:
    """The lines that `NODES` prints; one that cannot be read is passed over."""
    found = []
    for line in text.splitlines():
        parts = line.strip().split("|")
        if len(parts) < 4 or not parts[1].isdecimal():
            continue
        gpus, gpu = gpus_in(parts[2])
        # A plus sign means that some nodes have more.
        shape = [int(part) for part in parts[3].replace("+", "").split(":") if part.isdecimal()]
        cores, threads = (shape[0] * shape[1], shape[2]) if len(shape) == 3 else (None, None)
        found.append(Kind(parts[0], int(parts[1]), gpus, gpu, cores, threads))
    return found


def gpus_in(gres: str) -> tuple[int, str | None]:
    """How many GPUs a node has, and their kind where all are of one: `gpu:a100:4(S:0-1),nvme:1` -> 4, a100."""
    # What stands in parentheses are sockets, with commas of their own.
    entries = [entry.split(":") for entry in re.sub(r"\([^)]*\)", "", gres).split(",")]
    gpus = [entry for entry in entries if entry[0] == "gpu"]
    total = sum(int(entry[-1]) if entry[-1].isdecimal() else 1 for entry in gpus)
    kinds = {entry[1] for entry in gpus if len(entry) > 1 and not entry[1].isdecimal()}
    return total, kinds.pop() if len(kinds) == 1 else None


def partitions_of(text: str, kinds: Sequence[Kind]) -> tuple[Partition, ...]:
    """The lines that `PARTITIONS` prints; what a partition's nodes have is in `kinds`."""
    found = []
    for name, about in _blocks(text).items():
        nodes, most = about.get("TotalNodes", ""), about.get("MaxNodes", "")
        total = int(nodes) if nodes.isdecimal() else None
        each_job = int(most) if most.isdecimal() else None
        notes = [
            f"{_IS}{about['State'].lower()}" if about.get("State", "UP") != "UP" else "",
            f"at most {each_job} nodes a job" if each_job is not None and each_job < (total or 0) else "",
            "whole nodes" if about.get("OverSubscribe", "").startswith("EXCLUSIVE") else "",
        ]
        found.append(
            Partition(
                name,
                _time(about.get("MaxTime", "")),
                max((kind.gpus for kind in kinds if kind.partition == name), default=None),
                min(filter(None, (total, each_job)), default=total),
                about.get("Default") == "YES",
                ", ".join(filter(None, notes)),
                "scontrol show partition on this machine",
                True,
            )
        )
    return tuple(found)


def _blocks(text: str) -> dict[str, dict[str, str]]:
    """What is said of each partition, by its name."""
    found = [dict(_PAIR.findall(block)) for block in re.split(r"(?=\bPartitionName=)", text)]
    return {about["PartitionName"]: about for about in found if "PartitionName" in about}


def _time(text: str) -> str | None:
    """In one form, whatever the version; None for what is no time."""
    try:
        return walltime.text(walltime.parse(text))
    except ValueError:
        return None


def _to_train_in(found: Sequence[Partition]) -> Partition | None:
    """Slurm's default if it has GPUs or nothing else has any, else the largest that has."""
    usable = [each for each in found if not each.note.startswith(_IS)]
    return max(usable, key=lambda each: (bool(each.gpus_per_node), each.default, each.nodes or 0), default=None)


def _usable_cores(ask: Ask, partition: Mapping[str, str], kind: Kind) -> int | None:
    """Physical cores that jobs may have: a site may keep some of a node for itself, and only the node says so."""
    threads = kind.threads or 1
    try:
        first = expand_hosts(partition.get("Nodes", ""))[0]
        about = dict(_PAIR.findall(ask(*NODE, first)))
    except (RunFailed, UserError, IndexError):
        return kind.cores
    # Only from 22.05 on nodes say how many CPUs are left to jobs.
    usable, shape = about.get("CPUEfctv", ""), gpus_in(about.get("Gres", ""))[0]
    return int(usable) // threads if usable.isdecimal() and shape == kind.gpus else kind.cores

"""A site's profile: all that we believe about it, each thing with its source.

site = load("juwels-booster")                        # `sites` finds them, `profile_file` reads them
site.get("gpus_per_node")                            # 4, or None where the profile does not know
site.partitions, site.environment, site.srun         # Partitions, {name: Value}, Values
site.unverified()                                    # what to show to the user before it is relied on
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshrun.world import walltime

KEYS: dict[str, str] = {
    "gpu": "which GPU, in words",
    "gpus_per_node": "GPUs of a node",
    "cores_per_node": "physical cores of a node that jobs may use",
    "threads_per_core": "hardware threads of a core",
    "cores_per_gpu": "physical cores to ask for beside each GPU",
    "partition": "the partition to take when none is given",
    "qos": "the quality of service to ask for when none is given",
    "constraint": "the node feature to ask for",
    "needs_account": "whether a job without --account is rejected",
    "gpu_request": "how a job asks for GPUs, with {n} for their number a node; none if every node has them anyway",
    "exclusive": "whether a job gets whole nodes",
    "hint": "Slurm's --hint",
    "host_suffix": "what makes a node's name that of its fast interface",
    "socket_interface": "the interface, or what its name begins with, for gloo and NCCL",
    "cpu_masks": "CPU mask of each local rank, so that it is near its GPU",
    "module_system": "what loads modules: lmod, or tcl",
    "modules": "lines that load modules",
    "internet": "whether compute nodes reach the internet",
    "chain": "how a job goes on after its time limit: requeue, or submit another",
    "monitor": "where to watch jobs",
    "node_folder": "a folder on a node's own disk, with the job's $VARIABLES in it",
    "scratch_note": "what to know about its disks",
}
"""The keys that have one value; beside them stand `partitions`, `environment` and `srun`."""


@dataclass(frozen=True)
class Value:
    """Something that a profile says, and why we believe it."""

    value: Any
    source: str
    verified: bool
    reason: str = ""
    """Why it is wanted, for the comment above its line in a job script."""


@dataclass(frozen=True)
class Partition:
    """A partition as a profile or Slurm describes it; None is what they do not say."""

    name: str
    max_time: str | None = None
    """As Slurm writes it; UNLIMITED where there is no limit."""
    gpus_per_node: int | None = None
    """The most that a node of it has; 0 when Slurm shows none."""
    nodes: int | None = None
    default: bool = False
    note: str = ""
    source: str = ""
    verified: bool = False

    @property
    def max_seconds(self) -> int | None:
        """The longest time of a job; None where there is no limit or none is known."""
        return walltime.parse(self.max_time) if self.max_time is not None else None


@dataclass(frozen=True)
class Detect:
    """Expressions that recognise a site."""

    host: tuple[str, ...] = ()
    cluster: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    source: str = ""
    verified: bool = False

    def matches(self, env: Mapping[str, str], cluster: str | None, host: str) -> bool:
        return (
            any(re.search(pattern, env.get(name, "")) for name, pattern in self.environment.items() if name in env)
            or any(re.search(pattern, cluster or "") for pattern in self.cluster)
            or any(re.search(pattern, host.split(".")[0]) for pattern in self.host)
        )


@dataclass(frozen=True)
class Site:
    """A profile. `values` holds the keys of KEYS that it knows."""

    name: str
    title: str
    values: Mapping[str, Value] = field(default_factory=dict)
    partitions: tuple[Partition, ...] = ()
    environment: Mapping[str, Value] = field(default_factory=dict)
    srun: tuple[Value, ...] = ()
    detect: Detect = Detect()
    file: Path | None = None
    cluster: str = field(default="", compare=False)
    """Slurm's own name of the cluster, where it was asked."""

    def get(self, key: str) -> Any:
        """The value of a key, or None where the profile does not know it."""
        if key not in KEYS:
            raise KeyError(key)
        return self.values[key].value if key in self.values else None

    def partition(self, name: str) -> Partition | None:
        """The partition of that name, if the profile knows it."""
        return next((each for each in self.partitions if each.name == name), None)

    def statements(self) -> Iterator[tuple[str, Value]]:
        """All that the profile says, each with a name that says what it is."""
        yield from self.values.items()
        for each in self.partitions:
            yield f"partition {each.name}", Value(_described(each), each.source, each.verified)
        for name, value in self.environment.items():
            yield f"environment {name}", value
        for value in self.srun:
            yield "srun", value

    def unverified(self) -> list[tuple[str, Value]]:
        """What no page of the site says, for the user to see."""
        return [(name, value) for name, value in self.statements() if not value.verified]


def _described(partition: Partition) -> str:
    """A partition in words."""
    said = [
        f"at most {partition.max_time}" if partition.max_time else "",
        f"{partition.gpus_per_node} GPUs a node" if partition.gpus_per_node is not None else "",
        f"{partition.nodes} nodes" if partition.nodes is not None else "",
        "the default" if partition.default else "",
        partition.note,
    ]
    return ", ".join(filter(None, said)) or "no limits known"

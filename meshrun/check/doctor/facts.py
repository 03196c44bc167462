"""What one rank sees of its machine, as small frozen values that travel as JSON.

    mine.cores.bound, mine.network.address, mine.folder.error
    Facts.from_json(mine.to_json()) == mine

`reading` fills them in, `rules` says what is wrong with them.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from meshrun.world import grants
from meshrun.world.network import Interface


@dataclass(frozen=True)
class Cores:
    bound: tuple[int, ...]
    """CPUs that this rank may run on."""
    existing: int
    """CPUs of the machine."""
    allowed: int
    """CPUs that its container or job may run on, before anything bound this rank further."""
    granted_rank: int | None
    granted_node: int | None
    srun_told: bool


@dataclass(frozen=True)
class Gpus:
    granted_node: int | None
    granted_rank: int | None
    listed: tuple[str, ...] | None
    listed_by: str
    existing: int
    """As the driver counts them; 0 where there is no driver."""


@dataclass(frozen=True)
class Port:
    """One port of an InfiniBand card."""

    device: str
    active: bool
    gbit: int


@dataclass(frozen=True)
class Network:
    address: str | None
    """Where other nodes are told to find this one; None with `problem`."""
    problem: str
    named: tuple[str, ...]
    """What this node's own name stands for here."""
    interfaces: tuple[Interface, ...]
    infiniband: tuple[Port, ...]
    gloo: str | None
    nccl: str | None
    nccl_without_infiniband: bool
    route: bool
    """Whether there is a way out of the networks that nodes are on."""

    def used(self) -> Interface | None:
        """The interface that collectives go over: the one that was asked for, else the one with the address."""
        if self.gloo is not None:
            names = grants.matching(self.gloo, [each.name for each in self.interfaces], prefixes=False)
            return next((each for each in self.interfaces if each.name in names[:1]), None)
        return next((each for each in self.interfaces if each.address == self.address), None)


@dataclass(frozen=True)
class Memory:
    total: int
    free: int


@dataclass(frozen=True)
class Folder:
    """The folder of run directories."""

    path: str
    error: str
    """Why nothing can be written there; empty when it can."""
    filesystem: str
    free: int
    free_files: int


@dataclass(frozen=True)
class Limits:
    """-1 is without limit."""

    files: int
    core: int
    core_is_file: bool
    locked: int


@dataclass(frozen=True)
class Caches:
    places: dict[str, str]
    """Variable and folder, of those that are set."""
    problems: dict[str, str]
    offline: bool


@dataclass(frozen=True)
class Facts:
    """One rank and all that it sees."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    node: int
    nodes: int
    host: str
    source: str
    port: int
    """Where it listens for the others' probes."""
    cores: Cores
    gpus: Gpus
    network: Network
    memory: Memory
    folder: Folder
    limits: Limits
    caches: Caches
    versions: dict[str, str]
    slurm: str | None
    """Version of Slurm, inside a job."""
    ends_in: float | None
    """Seconds until the job's time limit; None when unknown or without one."""
    master: str | None
    """host:port that the launcher names for rank 0."""

    @property
    def who(self) -> str:
        return f"rank {self.rank} on {self.host}" if self.size > 1 else self.host

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Facts:
        """What another rank has sent; KeyError or TypeError where it is something else."""
        network = dict(found["network"])
        network["interfaces"] = tuple(Interface(**each) for each in network["interfaces"])
        network["infiniband"] = tuple(Port(**each) for each in network["infiniband"])
        network["named"] = tuple(network["named"])
        gpus = dict(found["gpus"])
        gpus["listed"] = None if gpus["listed"] is None else tuple(gpus["listed"])
        parts = {
            "cores": Cores(**{**found["cores"], "bound": tuple(found["cores"]["bound"])}),
            "gpus": Gpus(**gpus),
            "network": Network(**network),
            "memory": Memory(**found["memory"]),
            "folder": Folder(**found["folder"]),
            "limits": Limits(**found["limits"]),
            "caches": Caches(**found["caches"]),
        }
        return cls(**{**found, **parts})


def is_loopback(interface: Interface) -> bool:
    return interface.address.startswith("127.")

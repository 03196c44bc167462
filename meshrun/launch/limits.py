"""What a cluster will not give, refused before sbatch is asked: from the site's profile, or from what Slurm says here.

refuse(resources, partitions, known_all=True)        # a UserError that names what would do
node_local("/tmp/runs")                              # why other nodes may not see that folder; "" if they may
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from meshrun.errors import UserError
from meshrun.launch.submission import Resources
from meshrun.world import disks, walltime
from meshrun.world.profile import Partition, Site

_OF_ONE_NODE = ("/tmp", "/var/tmp", "/dev/shm", "/run")


def refuse(asked: Resources, site: Site | None, partitions: Sequence[Partition], known_all: bool) -> None:
    """Refuse what these partitions cannot give; `known_all` if there are no others."""
    partition = _asked_for(asked, partitions)
    if asked.partition is not None and partition is None and known_all and partitions:
        there = ", ".join(each.name for each in partitions)
        raise UserError(f"there is no partition {asked.partition!r}; there are {there} (--partition)")
    most = partition.gpus_per_node if partition is not None and partition.gpus_per_node is not None else None
    most = most if most is not None or site is None else site.get("gpus_per_node")
    if most is not None and asked.gpus_per_node > most:
        where = f"of partition {partition.name}" if partition is not None else f"of {site.title if site else 'it'}"
        raise UserError(
            f"gpus_per_node is {asked.gpus_per_node}, but a node {where} has {most}; "
            f"ask for more nodes instead (--gpus-per-node, --nodes)"
        )
    if partition is not None:
        _refuse_time(asked, partition, partitions)
        if partition.nodes and asked.nodes > partition.nodes:
            raise UserError(
                f"nodes is {asked.nodes}, but partition {partition.name} has {partition.nodes} (--nodes, --partition)"
            )


def refuse_without_account(asked: Resources, site: Site | None, from_environment: bool) -> None:
    if site is not None and site.get("needs_account") and not (asked.account or from_environment):
        raise UserError(f"{site.title} takes no job without an account; give the project to be charged (--account)")


def node_local(folder: Path, mounts: str | None = None) -> str:
    """Why a folder may be one that only this node sees; nothing where it looks shared."""
    path = str(folder.resolve())
    for place in _OF_ONE_NODE:
        if path == place or path.startswith(f"{place}/"):
            return f"{place} is usually a node's own"
    kind = disks.file_system_of(path, mounts if mounts is not None else disks.mounts())
    return f"it is in this node's memory ({kind})" if kind in disks.IN_MEMORY else ""


def _asked_for(asked: Resources, partitions: Sequence[Partition]) -> Partition | None:
    if asked.partition is None:
        return next((each for each in partitions if each.default), None)
    return next((each for each in partitions if each.name == asked.partition), None)


def _refuse_time(asked: Resources, partition: Partition, partitions: Sequence[Partition]) -> None:
    limit = partition.max_seconds
    if limit is None or asked.seconds <= limit:
        return
    longer = [
        each.name
        for each in partitions
        if each.max_time is not None and (each.max_seconds is None or each.max_seconds >= asked.seconds)
    ]
    other = f"; {' or '.join(longer)} would do (--partition)" if longer else ""
    raise UserError(
        f"time is {walltime.text(asked.seconds)}, but partition {partition.name} ends jobs after "
        f"{partition.max_time}{other}; ask for less and go on in further jobs (--time, --until-done)"
    )

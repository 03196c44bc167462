"""What the launcher granted a rank, and what its environment asks of the libraries that it will use.

    found = granted(inherited())
    found.cpus_per_task, found.gpus_on_node, found.gpus_listed      # 8, 4, ("0", "1", "2", "3")
    asked = settings(inherited())
    asked.gloo_interface, asked.offline                             # "ib0", True

Nothing here refuses anything: what a launcher does not say, or says in a way that cannot be read, is None.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

Env = Mapping[str, str]

CACHES = ("HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "TRANSFORMERS_CACHE", "TORCH_HOME")
"""Variables that say where a hub's files are kept."""

PORT_OF_RANK_0 = "MASTER_PORT"

_YES = {"1", "ON", "YES", "TRUE"}


@dataclass(frozen=True)
class Granted:
    """Cores and GPUs as the launcher counts them."""

    slurm_job: str | None = None
    cpus_per_task: int | None = None
    """Cores that were asked for each task."""
    cpus_on_node: int | None = None
    """Cores of the job or step on this node."""
    srun_told: bool = False
    """Whether SRUN_CPUS_PER_TASK hands the cores on to srun, which Slurm 22.05 to 23.02 do not do by themselves."""
    gpus_per_task: int | None = None
    gpus_on_node: int | None = None
    gpus_listed: tuple[str, ...] | None = None
    """The GPUs that this process is shown; None when it is shown all there are."""
    gpus_listed_by: str = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Settings:
    """What was set for gloo, NCCL and the hubs' libraries."""

    gloo_interface: str | None = None
    nccl_interface: str | None = None
    nccl_without_infiniband: bool = False
    caches: dict[str, str] = field(default_factory=dict)
    offline: bool = False


def granted(env: Env) -> Granted:
    """What Slurm says; other launchers say nothing on cores and GPUs, and leave what they start all that they have."""
    by, listed = _listed(env)
    job = env.get("SLURM_JOB_ID") or env.get("SLURM_JOBID") or None
    if job is None:
        return Granted(gpus_listed=listed, gpus_listed_by=by)
    listing = env.get("SLURM_STEP_GPUS") or env.get("SLURM_JOB_GPUS")
    mine = len(listing.split(",")) if listing else None
    on_node = _number(env.get("SLURM_GPUS_ON_NODE")) or mine
    # A task that was given GPUs of its own is told these alone, though it may be shown them under other numbers.
    own = mine if mine is not None and on_node is not None and mine < on_node else None
    return Granted(
        slurm_job=job,
        cpus_per_task=_number(env.get("SLURM_CPUS_PER_TASK")),
        cpus_on_node=_number(env.get("SLURM_CPUS_ON_NODE")),
        srun_told=bool(env.get("SRUN_CPUS_PER_TASK")),
        gpus_per_task=_number(env.get("SLURM_GPUS_PER_TASK")) or own,
        gpus_on_node=on_node,
        gpus_listed=listed,
        gpus_listed_by=by,
    )


def settings(env: Env) -> Settings:
    """What the environment asks of libraries."""
    return Settings(
        gloo_interface=env.get("GLOO_SOCKET_IFNAME") or None,
        nccl_interface=env.get("NCCL_SOCKET_IFNAME") or None,
        nccl_without_infiniband=env.get("NCCL_IB_DISABLE", "").upper() in _YES,
        caches={name: env[name] for name in CACHES if env.get(name)},
        offline=env.get("HF_HUB_OFFLINE", "").upper() in _YES or env.get("TRANSFORMERS_OFFLINE", "").upper() in _YES,
    )


def matching(asked: str, interfaces: list[str], *, prefixes: bool) -> list[str]:
    """The interfaces that a variable such as `ib0,ib1` means.

    NCCL takes beginnings of names (`prefixes`), exact names after `=`, and all others after `^`; gloo names alone.
    """
    sign = asked[:1] if prefixes and asked[:1] in ("=", "^") else ""
    words = [word for word in asked.removeprefix(sign).split(",") if word]

    def means(name: str) -> bool:
        return any(name == word or (prefixes and sign != "=" and name.startswith(word)) for word in words)

    return [name for name in interfaces if means(name) != (sign == "^")]


def _listed(env: Env) -> tuple[str, tuple[str, ...] | None]:
    for name in ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        if name in env:
            # CUDA shows what stands before the first number that is none of a device.
            words = [word.strip() for word in env[name].split(",")]
            end = next((index for index, word in enumerate(words) if word in ("", "-1")), len(words))
            return name, tuple(words[:end])
    return "CUDA_VISIBLE_DEVICES", None


def _number(text: str | None) -> int | None:
    """The count in `4`, `a100:4` or `4(x2)`."""
    found = re.fullmatch(r"(?:[\w.-]+:)?([0-9]{1,9})(?:\(x[0-9]+\))?", text or "")
    return int(found[1]) if found else None

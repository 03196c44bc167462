"""Which collectives a rank has begun and which it still waits in, from the recorder that torch keeps.

    write_own(folder, rank, question)                # on a rank, by a thread beside the stuck one
    groups = read(folder, rank, question)            # on the launcher; None while the rank has not answered
    groups[0].issued, groups[0].pending              # 37, [Call(37, "all_reduce", "[10] Float", …)]

torch numbers the collectives of each process group. Two ranks that are both stuck in a collective look alike, but the
one that has issued fewer of them in their group never came to the one in which the other waits. torch 2.11 and 2.13
have the recorder switched on, for gloo and for NCCL, and it costs nothing that can be measured. It does not see gloo's
messages from one rank to another.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from meshrun import strict_json
from meshrun.config import write_json

RECENT = 1000
"""Calls of each group that are kept: enough for the pattern of a step to show."""


@dataclass(frozen=True)
class Call:
    """A collective as one rank has issued it."""

    number: int
    name: str
    shape: str
    age: float
    """Seconds since it was issued."""
    over: bool

    def __str__(self) -> str:
        return f"{self.name} number {self.number}"

    @property
    def kind(self) -> str:
        """What must be the same on all ranks."""
        return f"{self.name} of {self.shape}" if self.shape else self.name


@dataclass(frozen=True)
class Group:
    """What a rank has issued in one process group."""

    name: str
    ranks: tuple[int, ...]
    calls: tuple[Call, ...]
    """The last ones, in order."""

    @property
    def issued(self) -> int:
        return max((call.number for call in self.calls), default=0)

    @property
    def pending(self) -> list[Call]:
        return [call for call in self.calls if not call.over]


def familiar(groups: Iterable[Group], most: int = 64) -> int:
    """How many of a rank's calls, up to the one that it is stuck in, have come in this order before.

    Programs repeat themselves with each step, so it is few where one has just left its usual way.
    """
    calls = sorted(
        ((call.age, f"{group.name} {call.kind}", call.over) for group in groups for call in group.calls), reverse=True
    )
    stuck = next((index for index, (_, _, over) in enumerate(calls) if not over), len(calls) - 1)
    kinds = [kind for _, kind, _ in calls[: stuck + 1]]
    for length in range(1, most + 1):
        end = kinds[-length:]
        if not any(kinds[start : start + length] == end for start in range(len(kinds) - length)):
            return length - 1
    return most


def path_of(folder: Path, rank: int) -> Path:
    return folder / f"flight-{rank:05d}.json"


def write_own(folder: Path, rank: int, question: int) -> None:
    """Write this process's records; safe beside a thread that waits in a collective."""
    groups = groups_of(_entries(), _members(), time.time_ns())
    write_json(path_of(folder, rank), {"question": question, "groups": [asdict(group) for group in groups]})


def read(folder: Path, rank: int, question: int) -> list[Group] | None:
    """The answer to a question, or None while there is none."""
    try:
        found = strict_json.loads(path_of(folder, rank).read_text())
        if found["question"] != question:
            return None
        return [
            Group(each["name"], tuple(each["ranks"]), tuple(Call(**call) for call in each["calls"]))
            for each in found["groups"]
        ]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def groups_of(entries: Iterable[Mapping[str, Any]], members: Mapping[str, tuple[int, ...]], now: int) -> list[Group]:
    """The recorder's entries by process group. gloo and NCCL count apart where one group has both."""
    calls: dict[tuple[str, str], list[Call]] = {}
    for entry in entries:
        if entry.get("is_p2p"):
            continue
        backend, _, name = str(entry["profiling_name"]).rpartition(":")
        shapes = zip(entry.get("input_sizes", ()), entry.get("input_dtypes", ()), strict=False)
        call = Call(
            number=int(entry["collective_seq_id"]),
            name=name,
            shape=", ".join(f"{sizes} {kind}" for sizes, kind in shapes),
            age=round((now - int(entry["time_created_ns"])) / 1e9, 3),
            over=bool(entry.get("retired")) or entry.get("state") == "completed",
        )
        calls.setdefault((str(entry["process_group"][0]), backend), []).append(call)
    return [
        Group(f"{backend}:{name}", members.get(name, ()), tuple(sorted(made, key=lambda call: call.number)[-RECENT:]))
        for (name, backend), made in sorted(calls.items())
    ]


def _entries() -> list[dict[str, Any]]:
    torch = sys.modules.get("torch")
    parts = getattr(getattr(torch, "_C", None), "_distributed_c10d", None)
    found: list[dict[str, Any]] = []
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        dump = getattr(parts, name, None)
        if dump is not None:
            found += strict_json.loads(dump()).get("entries", [])
    return found


def _members() -> dict[str, tuple[int, ...]]:
    """The ranks of each process group that this process is in."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_initialized():
        return {}
    groups = dict(dist.distributed_c10d._world.pg_names)
    return {str(name): tuple(dist.get_process_group_ranks(group)) for group, name in groups.items()}

"""What the watchers of several nodes show each other when a run hangs, in files that all of them see.

    publish(folder, generation, witnesses)                    # of this node
    all_witnesses(folder, generation, witnesses, give_up)     # of every node that has spoken by then

A watcher sees the ranks of its own node. If the one to blame is elsewhere, all that it sees are ranks that wait.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from meshrun import strict_json
from meshrun.config import write_json
from meshrun.observe.flight import Call, Group
from meshrun.observe.hang import DataReader, Witness
from meshrun.observe.pulse import Reading
from meshrun.observe.stacks import Frame

FRESH = 20.0
"""Seconds between two nodes' testimonies on the same hang, by the clock of the file system: others are left-overs."""


def publish(folder: Path, generation: int, witnesses: Sequence[Witness]) -> Path:
    """Show the other nodes what is seen on this one."""
    folder.mkdir(exist_ok=True)
    path = folder / f"witnesses-{generation}-{min(each.rank for each in witnesses):05d}.json"
    write_json(path, {"witnesses": [asdict(each) for each in witnesses]})
    return path


def all_witnesses(folder: Path, generation: int, own: Sequence[Witness], give_up: float) -> list[Witness]:
    """Own witnesses and those of other nodes, once all ranks are among them or the time has come."""
    try:
        path = publish(folder, generation, own)
    except OSError:  # a full disk: what this node has seen is what there is
        return list(own)
    expected = {rank for each in own for group in each.groups for rank in group.ranks}
    while True:
        found = {each.rank: each for each in (*_others(folder, generation, path), *own)}
        if (expected and expected <= set(found)) or time.monotonic() >= give_up:
            return [found[rank] for rank in sorted(found)]
        time.sleep(0.1)


def _others(folder: Path, generation: int, own: Path) -> list[Witness]:
    found: list[Witness] = []
    for path in folder.glob(f"witnesses-{generation}-*.json"):
        try:
            if path != own and abs(path.stat().st_mtime - own.stat().st_mtime) < FRESH:
                found += map(_witness, strict_json.loads(path.read_text())["witnesses"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return found


def _witness(values: dict[str, Any]) -> Witness:
    return Witness(
        Reading(**values["pulse"]),
        values["host"],
        values["state"],
        _frames(values["frames"]),
        [DataReader(each["pid"], each["state"], _frames(each["frames"])) for each in values["readers"]],
        [
            Group(each["name"], tuple(each["ranks"]), tuple(Call(**call) for call in each["calls"]))
            for each in values["groups"]
        ],
    )


def _frames(values: list[dict[str, Any]]) -> list[Frame]:
    return [Frame(**each) for each in values]

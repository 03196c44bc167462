"""A training of a program as a rank does it that nobody has started, in the process of the test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from meshrun import mesh
from meshrun.cli.rank import work
from meshrun.cli.target import find
from meshrun.config import RunConfig
from meshrun.data import cache
from meshrun.observe.events import Event


def trained(program: str, folder: Path, options: dict[str, Any], **config: Any) -> tuple[dict[str, Any], list[Event]]:
    """What a rank returns, and what it tells."""
    asked = RunConfig(program, options, runs=folder, device="cpu", tensorboard=False, deadline="none", **config)
    told: list[Event] = []
    try:
        return work(asked, find(program), told.append), told
    finally:
        mesh.finish()
        mesh.use(mesh.Meeting())
        cache.use(None, None)  # what data says is for this run's events only

"""Runs a recipe as a user does, in a process of its own, and reads what it prints."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests import warm

LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")


def run(
    folder: Path, *words: str, launcher: tuple[str, ...] = (), **environment: str
) -> subprocess.CompletedProcess[str]:
    """`meshrun run digits WORDS`, or the same under a launcher, which is a module of Python with its options."""
    mine = {name: value for name, value in os.environ.items() if name not in LAUNCHERS}
    command = [sys.executable, *launcher, "-m", "meshrun", "run", "digits", "--runs", str(folder), *words]
    return warm.run(
        command, cwd=folder, env={**mine, **environment}, capture_output=True, text=True, timeout=110, check=False
    )


def result(folder: Path, *words: str, launcher: tuple[str, ...] = (), **environment: str) -> dict[str, Any]:
    """The document of a run that must succeed."""
    done = run(folder, *words, "--json", launcher=launcher, **environment)
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document

"""Runs `meshrun` as people do, in processes of its own, and reads what it leaves behind.

They are forks of a process that has imported torch (`tests/warm.py`), but for those under another launcher.

ended = meshrun(tmp_path, "run", TINY, "--procs", 2, "--json")
ended.status, ended.err, ended.document
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests import warm

PROGRAMS = Path(__file__).parent / "programs"
TINY = str(PROGRAMS / "tiny.py")
SCRIPT = str(PROGRAMS / "script.py")
MODULE = (sys.executable, "-m", "meshrun")


@dataclass(frozen=True)
class Ended:
    """A command that has ended."""

    status: int
    out: str
    err: str
    at: float = 0.0
    """When it ended, in seconds of the clock that events have."""

    @property
    def document(self) -> dict[str, Any]:
        """Standard output, which must be one JSON document and nothing else; NaN is no JSON."""
        found: dict[str, Any] = json.loads(self.out, parse_constant=pytest.fail)
        return found

    @property
    def sentences(self) -> list[str]:
        """What meshrun itself said on standard error."""
        mine = [line for line in self.err.splitlines() if line.startswith("meshrun: ")]
        return [line.removeprefix("meshrun: ") for line in mine]


def meshrun(folder: Path, *words: object, launcher: Sequence[str] = MODULE) -> Ended:
    """Run the command in that folder to its end."""
    command = [*launcher, *map(str, words)]
    ran = warm.run(command, cwd=folder, capture_output=True, text=True, timeout=90, check=False)
    return Ended(ran.returncode, ran.stdout, ran.stderr, time.time())


def started(folder: Path, *words: object, command: Sequence[str] = MODULE) -> subprocess.Popen[str]:
    """Start the command in that folder, in a process group of its own as a shell would, and open to CTRL-C.

    Where the tests run in the background of a shell they ignore it, which the command would inherit.
    """
    return warm.Popen(
        [*command, *map(str, words)],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
        preexec_fn=warm.hear_ctrl_c,
    )


def events(run: Path, rank: int, kind: str) -> list[dict[str, Any]]:
    """A rank's events of one kind; none while there is no file."""
    path = run / "events" / f"rank-{rank:05d}.jsonl"
    if not path.exists():
        return []
    lines = path.read_text().rpartition("\n")[0].splitlines()
    return [event for event in map(json.loads, lines) if event["kind"] == kind]


def log(run: Path, rank: int) -> str:
    return (run / "logs" / f"rank-{rank:05d}.log").read_text()


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until(condition: Callable[[], object], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not reached within {seconds:g} s"
        time.sleep(0.05)

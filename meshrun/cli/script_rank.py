"""A rank that runs a plain script, as if Python had been given it.

run_script(config, target)                         # in this process, whoever has started it
run_watched(config, target, recorder, memory)      # as a rank of our launcher, which watches it through `memory`
"""

from __future__ import annotations

import atexit
import os
import runpy
import sys
import threading
from pathlib import Path
from typing import Any, NoReturn

from meshrun import mesh
from meshrun.cli.configured import meeting_of
from meshrun.cli.recorder import Recorder
from meshrun.cli.target import Target, place_of
from meshrun.config import RunConfig
from meshrun.data.staging import use
from meshrun.observe.pulse import Pulse
from meshrun.world import detect

LONE_AFTER = 60.0
"""Seconds after which ranks of a script that has formed no process group are said to work each by itself."""


_program: list[Any] = []
"""What the script has left behind, which nobody frees: the destructor of a gloo process group, also where it is part
of a model, may wait for ever with the interpreter's lock held (torch 2.13)."""


def run_script(config: RunConfig, target: Target) -> None:
    """Run a plain script; `meshrun.start()` in it finds this rank's place."""
    mesh.use(meeting_of(config))
    use(place_of(target, {}, config.data))
    sys.argv = [str(target.path), *config.arguments]
    sys.path.insert(0, str(target.path.parent))
    _program.append(runpy.run_path(str(target.path), run_name="__main__"))


def run_watched(config: RunConfig, target: Target, recorder: Recorder, memory: Path | None) -> bool:
    """Run a plain script that its launcher watches, and say so if its ranks have nothing to do with each other.

    Returns whether it has formed a process group.
    """
    world = detect(os.environ)
    pulse = Pulse.open(memory, world.rank, world.attempt) if memory is not None else None
    if pulse is not None:
        pulse.mark("script", 0)
    lone = _LoneRanks(target, world.size, recorder if world.rank == 0 else None)
    lone.begin()
    try:
        run_script(config, target)
    except SystemExit as ended:
        if ended.code not in (0, None):
            raise
        _program.append(ended)
    lone.end()
    if pulse is not None:
        pulse.mark("ended", 0)
    return lone.formed


def leave() -> NoReturn:
    """End this process as an interpreter does, but leave the objects of the script to the system."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


class _LoneRanks:
    """Notices that a script on several ranks forms no process group, and tells rank 0's recorder, at most once."""

    def __init__(self, target: Target, size: int, recorder: Recorder | None) -> None:
        self._target, self._size, self._recorder = target, size, recorder
        self.formed = False
        self._timer = threading.Timer(LONE_AFTER, self._tell)
        self._timer.daemon = True

    def begin(self) -> None:
        mesh.notice_groups(self._form)
        self._timer.start()

    def _form(self) -> None:
        self.formed = True

    def end(self) -> None:
        self._timer.cancel()
        self._tell()

    def _tell(self) -> None:
        if self.formed or self._size == 1 or self._recorder is None:
            return
        self._recorder(
            "note",
            text=f"{self._target.label} has formed no process group (neither with meshrun nor with torch.distributed), "
            f"so each of its {self._size} ranks does all of the work by itself; docs/own-loop.md has the lines that "
            f"share it among them",
        )
        self._recorder = None

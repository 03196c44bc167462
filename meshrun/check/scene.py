"""A run seen from outside, by whoever breaks it: where its ranks are, what it has saved, and whether it goes on.

    with Scene(folder, control, document, ranks=2) as scene:
        scene.begin(target)
        rank = scene.until(lambda: scene.at(1, "evaluating"), every=CLOSE)   # Missed if the run ends before that
        os.kill(rank.pid, signal.SIGKILL)
        scene.goes_on(before)                                     # NotSurvived if it does not

All that is read here is what the run shows to its launcher and leaves in its directory.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from meshrun.check.armed import Control
from meshrun.check.disk import Disk
from meshrun.config import RunDirectory, write_whole
from meshrun.observe.events import Event, read_events
from meshrun.observe.pulse import PulseView, Reading
from meshrun.state import catalog
from meshrun.world.environment import python_for

T = TypeVar("T")

NAME = "chaos"
CLOSE = 0.0005
"""Seconds between two looks for a moment that is over soon."""
CALM = 0.01
"""The same for what stays: looking costs the run its processor."""
PATIENCE = 90.0
"""Seconds that a run has to go on: a launcher that is started anew imports torch twice, maybe on a busy machine."""


class Missed(Exception):
    """The moment for a fault did not come."""


class NotSurvived(Exception):
    """What the run did not stand, in a sentence."""


@dataclass(frozen=True)
class Life:
    """One life of all ranks."""

    launcher: int
    generation: int
    last: int
    """The last step that was finished in it."""


class Scene:
    """One run, its launcher, and what is broken around it."""

    patience = PATIENCE

    def __init__(self, folder: Path, control: Control, document: dict[str, Any], ranks: int) -> None:
        """`document` holds the options of the run, as a file for --config does."""
        self.folder, self.control, self.ranks = folder, control, ranks
        self.run = RunDirectory(folder / "runs" / f"{NAME}-1")
        self.disk = Disk(self.run.path.parent)
        self.eval_every = int(document.get("eval_every", 1))
        self.seen: set[int] = set()
        """Every process that this run is known to have had."""
        self._options = folder / "options.json"
        write_whole(self._options, json.dumps(document), 0o600)  # which may hold a secret
        self._log = (folder / "launcher.log").open("ab")
        self.launcher: subprocess.Popen[bytes] | None = None
        self._total = 0

    def __enter__(self) -> Scene:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()
        self.disk.close()
        self._log.close()

    def begin(self, target: Path | str) -> None:
        self._start("run", str(target), "--config", str(self._options), "--name", NAME, "--runs", str(self.disk.folder))

    def resume(self) -> None:
        self._start("resume", str(self.run.path), "--from-start")  # the launcher may be lost before a checkpoint

    def _start(self, *words: str) -> None:
        command = python_for(["-m", "meshrun", *words, "--json"])
        self._log.write(f"--- {' '.join(words)}\n".encode(errors="surrogateescape"))
        self._log.flush()
        # A session of its own: CTRL-C is for whoever injects, who then ends it, and who takes it along in any case.
        self.launcher = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )
        self.seen.add(self.launcher.pid)

    def end(self) -> None:
        """End the launcher at once, and with it all that it has started."""
        if self.launcher is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.launcher.pid, signal.SIGKILL)
            self.launcher.wait()

    @property
    def status(self) -> int | None:
        """How the launcher ended; None while it has not."""
        assert self.launcher is not None
        return self.launcher.poll()

    @property
    def memory(self) -> Path:
        assert self.launcher is not None
        return self.run.memory_of(self.launcher.pid)

    def reading(self, rank: int) -> Reading | None:
        """Where a rank is now; None while it has shown nothing."""
        view = PulseView.open(self.memory, rank)
        if view is None:
            return None
        reading = view.read()
        self.seen.add(reading.pid)
        return reading

    def at(self, rank: int, *phases: str) -> Reading | None:
        """Where a rank is, if it is in one of these phases."""
        reading = self.reading(rank)
        return reading if reading is not None and reading.phase in phases else None

    def life(self) -> Life | None:
        """The present life, once all ranks have finished a step in it."""
        readings = [self.reading(rank) for rank in range(self.ranks)]
        found = [each for each in readings if each is not None and each.finished]
        if len(found) < self.ranks or len({each.generation for each in found}) > 1:
            return None
        assert self.launcher is not None
        return Life(self.launcher.pid, found[0].generation, min(each.last for each in found))

    def until(self, condition: Callable[[], T | None], seconds: float | None = None, every: float = CALM) -> T:
        """Wait for what a condition finds; Missed when the run has ended or the time is over."""
        seconds = self.patience if seconds is None else seconds
        give_up = time.monotonic() + seconds
        while True:
            found = condition()
            if found:
                return found
            if self.status is not None:
                raise Missed(f"the launcher ended with status {self.status} before the moment came")
            if time.monotonic() > give_up:
                raise Missed(f"the moment did not come within {seconds:.0f} s")
            time.sleep(every)

    def goes_on(self, before: Life, in_a_new_life: bool) -> float | None:
        """Wait until steps are finished again; returns when that was, or None if the run has reached its end."""
        give_up = time.monotonic() + self.patience
        while time.monotonic() < give_up:
            if self.status is not None:
                if self.status == 0:
                    return None
                raise NotSurvived(f"the launcher ended with status {self.status}: {self.last_words()}")
            now = self.life()
            if now is not None:
                other = (now.launcher, now.generation) != (before.launcher, before.generation)
                if other or (not in_a_new_life and now.last > before.last):
                    return time.monotonic()
            time.sleep(CALM)
        raise NotSurvived(f"no step was finished within {self.patience:.0f} s: {self.where()}")

    def completes(self) -> None:
        """Wait for the end of the run, however long that is, as long as its ranks make progress."""
        marks: list[tuple[int, int]] | None = None
        give_up = 0.0
        while self.status is None:
            readings = [reading for rank in range(self.ranks) if (reading := self.reading(rank)) is not None]
            now = [(reading.pid, reading.marks) for reading in readings]
            if now != marks:
                marks, give_up = now, time.monotonic() + self.patience
            elif time.monotonic() > give_up:
                raise NotSurvived(f"the run did not come to its end: {self.where()}")
            time.sleep(CALM)
        if self.status != 0:
            raise NotSurvived(f"the launcher ended with status {self.status}: {self.last_words()}")

    def where(self) -> str:
        """Where all ranks are, for people."""
        readings = [self.reading(rank) for rank in range(self.ranks)]
        found = [
            f"rank {each.rank} of generation {each.generation} is {each.phase} at step {each.step}"
            + (f", waiting for {each.what}" if each.what else "")
            for each in readings
            if each is not None
        ]
        return "; ".join(found) or "no rank has shown itself"

    def last_words(self) -> str:
        """What the launcher said last."""
        lines = (self.folder / "launcher.log").read_text(errors="replace").splitlines()
        said = [line.removeprefix("meshrun: ") for line in lines if line.startswith("meshrun: ")]
        return said[-1] if said else (lines[-1] if lines else "it said nothing")

    def kill(self, pid: int, number: int = signal.SIGKILL) -> float:
        """Send a signal; returns when. Missed if the process has gone by itself."""
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            raise Missed("the process had gone already") from None
        return time.monotonic()

    def kill_launcher(self) -> float:
        assert self.launcher is not None
        if self.status is not None:
            raise Missed("the run had ended already")
        when = self.kill(self.launcher.pid)
        self.launcher.wait()
        if self.launcher.returncode == 0:
            raise Missed("the run had ended already")
        return when

    def left_behind(self, seconds: float) -> str:
        """What is still there of a run that is over, after so many seconds in which the last of it may go."""
        give_up = time.monotonic() + seconds
        while (left := processes_about(str(self.folder))) and time.monotonic() < give_up:
            time.sleep(0.02)
        if left:
            return f"processes {', '.join(map(str, left))} were left"
        if self.run.memories.exists():
            return f"{self.run.memories} was left"
        if str(self.folder) in Path("/proc/mounts").read_text():
            return f"a file system was left on {self.disk.folder}"
        return ""

    def events(self, rank: int) -> list[Event]:
        return read_events(self.run.events_of(rank))

    def total_steps(self) -> int:
        """How many steps the run takes in all."""
        if not self._total:
            self._total = next((int(each["total_steps"]) for each in self.events(0) if each["kind"] == "start"), 0)
        return self._total

    def checkpoints(self) -> list[Path]:
        """Complete ones, oldest first."""
        return catalog.complete(self.run.checkpoints)


_libc = ctypes.CDLL(None)


def _die_with_parent() -> None:
    _libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def parent_of(pid: int) -> int | None:
    """The parent of a process; None if it is gone."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, IndexError):
        return None


def processes_about(text: str) -> list[int]:
    """Processes of this machine with a text in their command line, that are no zombies."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (folder / "cmdline").read_bytes().decode(errors="replace")
            if text in words and int(folder.name) != os.getpid():
                found.append(int(folder.name))
    return found

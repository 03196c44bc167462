"""Plays Slurm for one job on this machine: runs its script as it is, and whatever the script asks for after it.

    slurm = Rehearsal(folder)
    for link in slurm.links(run / "job.sh", gpus_per_node=4, tell=print):
        link.status, link.log                    # of the job's shell

The script is run by bash with `stand_in`'s commands first in its PATH. In the first link, Slurm's warning that the time
is nearly up comes as soon as the training's step has begun, so that stopping in time and going on are played too.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from meshrun import strict_json
from meshrun.launch.stand_in import REQUEUED, SUBMITTED, PlayedJob, put_up
from meshrun.world import walltime
from meshrun.world.played import Allocation, inherited_by_jobs, of_batch

FIRST_ID = 1
MOST_LINKS = 4
"""Of a training of few steps: one that stops in each of them makes no progress."""
GRACE = 5.0
"""Seconds for a job that is interrupted to end by itself."""
LOOK_EVERY = 0.05


@dataclass(frozen=True)
class Link:
    """One start of the job's script."""

    job: str
    status: int
    log: str
    told: bool
    """Whether it was told that its time is nearly up."""


class Rehearsal:
    """Slurm, as far as one job sees it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._bin = put_up(folder)

    def links(
        self, script: Path, gpus_per_node: int, tell: Callable[[str], None], warn_first: bool = True
    ) -> Iterator[Link]:
        """Play the script, then what it has put into the queue or would go on as, while links are asked for."""
        job, told = self._granted(script, gpus_per_node), warn_first
        for _ in range(MOST_LINKS):
            link = self._play(job, tell, told)
            yield link
            job, told = self._next(job), False

    def _granted(self, script: Path, gpus_per_node: int) -> PlayedJob:
        asked = requests(script.read_text())
        array = re.fullmatch(r"(\d+)-(\d+).*", asked.get("--array", ""))
        cpus = asked.get("--cpus-per-task")
        now = time.time()
        granted = Allocation(
            id=str(FIRST_ID),
            name=asked.get("--job-name", script.name),
            nodes=int(asked.get("--nodes", "1")),
            tasks_per_node=int(asked.get("--ntasks-per-node", "1")),
            cpus_per_task=int(cpus) if cpus else None,
            gpus_per_node=gpus_per_node,
            partition=asked.get("--partition", "rehearsal"),
            folder=str(Path.cwd()),
            array=(int(array[1]), int(array[2])) if array else None,
        )
        # Other machines are slower than the job's: a short limit must not end the rehearsal.
        seconds = max(walltime.parse(asked.get("--time", "1:00:00")) or 0, 3600)
        return PlayedJob(granted, str(script), now, now + seconds)

    def _play(self, job: PlayedJob, tell: Callable[[str], None], warn: bool) -> Link:
        for left in (*self.folder.glob("step-*/argv.json"), self.folder / REQUEUED, self.folder / SUBMITTED):
            left.unlink(missing_ok=True)
        for step in self.folder.glob("step-*"):
            step.rmdir()
        job.save(self.folder)
        inherited = inherited_by_jobs()
        path = f"{self._bin}:{inherited.get('PATH', os.defpath)}"
        log = _output(job)
        log.parent.mkdir(parents=True, exist_ok=True)
        before = log.stat().st_size if log.exists() else 0
        with log.open("ab") as out, log.open("rb") as seen:
            seen.seek(before)
            shell = subprocess.Popen(
                ["/bin/bash", job.script],
                env={**inherited, **of_batch(job.granted), "PATH": path},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                told = self._wait(shell, warn, lambda: _pass_on(seen.read(), tell))
            except BaseException:
                _end(shell)
                raise
            finally:
                _pass_on(seen.read(), tell)
        text = log.read_bytes()[before:].decode(errors="replace")
        return Link(job.granted.id, shell.returncode, text, told)

    def _wait(self, shell: subprocess.Popen[bytes], warn: bool, look: Callable[[], None]) -> bool:
        """Until the script is over; returns whether the shell was told that its time is nearly up."""
        told = False
        while shell.poll() is None:
            if warn and not told and self._is_training():
                told = True
                shell.send_signal(signal.SIGUSR2)  # as `--signal=B:USR2@…` asks for: to the shell, and to it alone
            look()
            time.sleep(LOOK_EVERY)
        return told

    def _is_training(self) -> bool:
        for file in self.folder.glob("step-*/argv.json"):
            argv = strict_json.loads(file.read_text())["argv"]
            if ["-m", "meshrun", "resume"] in [argv[at : at + 3] for at in range(len(argv))]:
                return True
        return False

    def _next(self, job: PlayedJob) -> PlayedJob:
        """The job as it comes next: submitted anew, or under its own id, as after `scontrol requeue`."""
        now = time.time()
        again = replace(job, began=now, ends=now + job.ends - job.began)
        try:
            submitted = strict_json.loads((self.folder / SUBMITTED).read_text())
            granted = replace(job.granted, id=submitted["id"], restarts=0)
            return replace(again, granted=granted, script=submitted["script"])
        except FileNotFoundError:
            return replace(again, granted=replace(job.granted, restarts=job.granted.restarts + 1))


def requests(text: str) -> dict[str, str]:
    """The #SBATCH lines of a script, which end where its first command is; a flag without a value has none."""
    found = {}
    for line in text.splitlines():
        if line.strip() and not line.startswith("#"):
            break
        if line.startswith("#SBATCH"):
            for word in shlex.split(line.removeprefix("#SBATCH")):
                name, _, value = word.partition("=")
                found[name] = value
    return found


def _output(job: PlayedJob) -> Path:
    """The file that Slurm would write the job's output into."""
    granted = job.granted
    values = {"%%": "%", "%j": granted.id, "%A": granted.id, "%a": str(granted.array[0] if granted.array else 0)}
    asked = requests(Path(job.script).read_text()).get("--output", "slurm-%j.out")
    return Path(re.sub("%.", lambda found: values.get(found[0], found[0]), asked))


def _pass_on(data: bytes, tell: Callable[[str], None]) -> None:
    for line in data.decode(errors="replace").splitlines():
        tell(line)


def _end(shell: subprocess.Popen[bytes]) -> None:
    """End the job's shell, and with it all that it has started."""
    for number, patience in ((signal.SIGTERM, GRACE), (signal.SIGKILL, None)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(shell.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            shell.wait(patience)
            return

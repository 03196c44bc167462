"""One process with torch that stands in for many: it forks a rank for every environment that it finds in a folder.

python warm.py FOLDER N             # as soon as there are N of them; ends when the ranks have

A rank is started in the environment of the Slurm task that wrote it, and does what any program does: meshrun.start().
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch

import meshrun
from meshrun.mesh import Meeting, use


def rank(folder: Path, given: Path) -> None:
    os.environ.clear()
    os.environ.update(line.partition("=")[::2] for line in given.read_text().split("\0") if line)
    use(Meeting(runs=folder, timeout=60.0))
    here = meshrun.start()
    job = torch.tensor([float(os.environ["SLURM_JOB_ID"])])
    torch.distributed.all_reduce(job)
    own = int(job) == 2 * int(os.environ["SLURM_JOB_ID"])  # whoever met a rank of another job has another sum
    given.with_suffix(".said").write_text(f"{here.rank} of {here.size}: {own}\n")
    meshrun.finish()


def main(folder: Path, count: int) -> None:
    (folder / "warm").touch()
    while len(given := list(folder.glob("*.env"))) < count:
        time.sleep(0.01)
    for each in given:
        if os.fork() == 0:
            status = 1
            try:
                rank(folder, each)
                status = 0
            finally:
                each.with_suffix(".done").write_text(str(status))
                os._exit(status)
    for _ in given:
        os.wait()


main(Path(sys.argv[1]), int(sys.argv[2]))

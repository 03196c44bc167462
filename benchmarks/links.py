"""A training that is longer than its job: how long the pauses between links are, and whether a step is lost or changed.

    python benchmarks/links.py                       # a limit of 1 minute on a training of 5: takes 8 minutes
    python benchmarks/links.py --kinds limit --minutes 2 --training 10 --json

On a virtual cluster with the real Slurm (root, Slurm and munge are needed) jobs of two nodes, one rank each, are
submitted with `meshrun submit --until-done`, side by side: one that meets its time limit again and again, one that is
requeued (`scontrol requeue`), one with a rank that gets SIGTERM, and one whose first node is powered off and comes
back. Each ends in its own time; then its losses are held against those of one training that nobody interrupts.

`unused` is the time between the last step of a link and its limit, `pause` the time from a link's last step to the next
one's first, with Slurm's own delay for requeued jobs (6 s on this cluster), the start of Python and loading in it;
`again` counts steps that were computed twice, `training` is the share of the time that went into steps. The first node
is powered off before the first checkpoint, so what it had reached by then is computed again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from meshrun.check.cluster import Cluster

PAUSE = 0.25
"""Seconds that a step takes."""
STRIKE_AFTER = 40
"""Steps after which a job is struck."""
OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "GONE")
PROGRAM = f"""
import time
import torch
from torch import nn
from meshrun import Experiment, cross_entropy

class Points:
    def __init__(self, length):
        self.inputs = torch.randn(length, 16, generator=torch.Generator().manual_seed(length))
    def __len__(self):
        return len(self.inputs)
    def __getitem__(self, index):
        return self.inputs[index], (self.inputs[index, 0] > 0).long()

class Net(nn.Sequential):
    def __init__(self, pause):
        super().__init__(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 2))
        self.pause = pause
    def forward(self, inputs):
        time.sleep(self.pause if self.training else 0)
        return super().forward(inputs)

def experiment(pause: float = {PAUSE}) -> Experiment:
    return Experiment(model=lambda: Net(pause), train=Points(512), evals={{"val": Points(64)}}, loss=cross_entropy,
                      optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3), batch=16, steps=100)
"""


@dataclass(frozen=True)
class Course:
    """A submitted training."""

    run: Path
    job: str

    def events(self, kind: str, rank: int = 0) -> list[dict[str, Any]]:
        path = self.run / f"events/rank-{rank:05d}.jsonl"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [event for event in map(json.loads, lines) if event["kind"] == kind]

    def start(self, rank: int) -> dict[str, Any]:
        """Where a rank runs, once it has done some steps."""
        while len(self.events("step", rank)) < STRIKE_AFTER:
            time.sleep(0.2)
        return self.events("start", rank)[-1]


def nothing(_cluster: Cluster, _course: Course) -> None:
    """The limit strikes by itself."""


def requeue(cluster: Cluster, course: Course) -> None:
    course.start(1)
    cluster.run("ctl", ["scontrol", "requeue", course.job], check=True)


def terminate(cluster: Cluster, course: Course) -> None:
    rank = course.start(1)
    cluster.run(rank["host"], ["kill", "-TERM", rank["pid"]], check=True)


def power_off(cluster: Cluster, course: Course) -> None:
    host = course.start(0)["host"]
    cluster.power_off(host)
    time.sleep(2)
    cluster.power_on(host)


KINDS: dict[str, Callable[[Cluster, Course], None]] = {
    "limit": nothing,
    "requeue": requeue,
    "SIGTERM": terminate,
    "power-off": power_off,
}


def submit(cluster: Cluster, folder: Path, kind: str, minutes: int, steps: int) -> Course:
    limit = minutes if kind == "limit" else 60
    words = ["--nodes", 2, "--gpus-per-node", 1, "--time", f"{limit}min", "--until-done", "--links", 50]
    # Else the node that one of them loses would be that of others too.
    words += ["--sbatch=--exclusive"]
    words += ["--steps", steps, "--record-ids", "--no-tensorboard", "--name", kind, "--json"]
    command = [sys.executable, "-m", "meshrun", "submit", folder / "training.py", *words]
    said = json.loads(cluster.run("ctl", command, cwd=folder, check=True).stdout)
    return Course(Path(said["run"]), str(said["job"]))


def figures(course: Course, losses: list[float]) -> dict[str, Any]:
    """What one of them went through."""
    result = json.loads((course.run / "result.json").read_text())
    steps = course.events("step")
    starts = [event["time"] for event in course.events("start")]
    lives = [[each for each in steps if began <= each["time"] < ended] for began, ended in _between(starts)]
    lives = [life for life in lives if life]
    pauses = [after[0]["time"] - before[-1]["time"] for before, after in itertools.pairwise(lives)]
    left = [float(each["why"].split()[-2]) for each in course.events("stopped") if each["why"].startswith("the job")]
    used = [event["step"] for event in course.events("ids")]
    difference = max(abs(a - b) / abs(b) for a, b in zip(result["losses"], losses, strict=True))
    return {
        "links": len(lives),
        "steps": [len(life) for life in lives],
        "unused": statistics.median(left) if left else None,
        "pause": statistics.median(pauses) if pauses else None,
        "lost": len(set(range(1, len(losses) + 1)) - set(used)),
        "again": len(used) - len(set(used)),
        "loss_diff": difference,
        "trained": len(losses) * PAUSE / (steps[-1]["time"] - steps[0]["time"]),
    }


def _between(times: list[float]) -> list[tuple[float, float]]:
    return list(zip(times, [*times[1:], float("inf")], strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", default=",".join(KINDS), help="which of them, with commas between")
    parser.add_argument("--minutes", type=int, default=1, help="time limit of a job")
    parser.add_argument("--training", type=float, default=5.0, help="minutes that the training takes")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    if why := Cluster.missing():
        raise SystemExit(f"needs a virtual Slurm cluster: {why}")
    kinds, steps = asked.kinds.split(","), round(60 * asked.training / PAUSE)
    with tempfile.TemporaryDirectory(prefix="meshrun-bench-") as name:
        folder = Path(name)
        (folder / "training.py").write_text(PROGRAM)
        words = ["--procs", "2", "--pause", "0", "--steps", str(steps), "--no-tensorboard", "--json"]
        alone = subprocess.run(
            [sys.executable, "-m", "meshrun", "run", "training.py", *words],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            check=True,
        )
        losses = json.loads(alone.stdout)["losses"]
        with Cluster(folder / "cluster", nodes=2 * len(kinds)) as cluster:
            courses = {}
            for kind in kinds:
                courses[kind] = submit(cluster, folder, kind, asked.minutes, steps)
                courses[kind].start(0)  # one after the other: starts would keep each other's cores busy
                KINDS[kind](cluster, courses[kind])
            while left := [kind for kind, each in courses.items() if not (each.run / "result.json").exists()]:
                for kind in left:
                    state = cluster.job(courses[kind].job).get("JobState", "GONE")
                    if state in OVER and not (courses[kind].run / "result.json").exists():
                        raise SystemExit(f"the job {kind} did not reach its end: it is {state}")
                time.sleep(1)
            rows = {kind: figures(course, losses) for kind, course in courses.items()}
    if asked.json:
        print(json.dumps({"rows": rows}))
        return
    table = Table("job", "links", "steps", "unused, s", "pause, s", "lost", "again", "losses differ", "training")
    for kind, row in rows.items():
        numbers = [f"{row[key]:.1f}" if row[key] is not None else "-" for key in ("unused", "pause")]
        steps_of = ", ".join(map(str, row["steps"]))
        shown = [str(row["links"]), steps_of, *numbers, str(row["lost"]), str(row["again"])]
        table.add_row(kind, *shown, f"{row['loss_diff']:.1g}", f"{row['trained']:.0%}")
    Console().print(table)
    print("wanted: no step lost, and losses that are the same")


if __name__ == "__main__":
    main()

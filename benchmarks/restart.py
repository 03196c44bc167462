"""How long a lost rank holds up a training: meshrun beside torchrun with torch.save and torch.load.

    python benchmarks/restart.py --rounds 5
    python benchmarks/restart.py --width 2048 --ranks 4 --json

A multilayer perceptron is trained data-parallel with AdamW by both, on the same ranks, in turns. In each round one rank
is killed with SIGKILL in the middle of a step; what counts is the time from the kill to the next finished step. The
script for torchrun is as its documentation writes it: it saves with torch.save on rank 0 every ten steps and loads
what is there when it starts. meshrun goes on after the last finished step; torchrun's script has to make up to ten
steps again, which are not counted against it. `lost` says how many.

torchrun with gloo only restarts at all with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, so it has that.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

STEPS, SAVE_EVERY, KILL_BETWEEN = 60, 10, (22, 28)

MODEL = """
import torch
from torch import nn

class Data:
    def __len__(self):
        return 100_000
    def __getitem__(self, number):
        return torch.full((WIDTH,), number % 13 / 13), torch.tensor([number % 7 / 7])

def model():
    layers = [layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 1))
"""
MESHRUN = """
from meshrun import Experiment, mean_squared_error

def experiment() -> Experiment:
    return Experiment(model=model, train=Data(), loss=mean_squared_error, batch=16, steps=STEPS,
                      optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-4))
"""
TORCHRUN = """
import os, sys, time
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group("gloo")
rank, path, log = dist.get_rank(), sys.argv[1], open(sys.argv[2] + str(dist.get_rank()), "a", buffering=1)
log.write(f"start {os.getpid()} {time.time()}\\n")
net = DistributedDataParallel(model())
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
step = 0
if os.path.exists(path):
    state = torch.load(path, weights_only=True)
    net.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    step = state["step"]
data = Data()
loader = DataLoader(data, batch_size=16 // dist.get_world_size(), sampler=DistributedSampler(data))
for inputs, targets in loader:
    nn.functional.mse_loss(net(inputs), targets).backward()
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    log.write(f"step {step} {time.time()}\\n")
    if step % SAVE_EVERY == 0 and rank == 0:
        torch.save({"model": net.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, path + ".new")
        os.replace(path + ".new", path)
    if step >= STEPS:
        break
"""


class Side:
    """One way to train, and where it writes down its steps."""

    def __init__(self, name: str, ranks: int, width: int, folder: Path) -> None:
        self.name, self.ranks, self.folder = name, ranks, folder
        head = f"WIDTH, STEPS, SAVE_EVERY = {width}, {STEPS}, {SAVE_EVERY}\n{MODEL}"
        self.program = folder / f"{name}.py"
        self.program.write_text(head + textwrap.dedent(MESHRUN if name == "meshrun" else TORCHRUN))

    def start(self) -> subprocess.Popen[bytes]:
        nothing = subprocess.DEVNULL
        if self.name == "meshrun":
            words = ["meshrun", "run", str(self.program), "--procs", str(self.ranks), "--checkpoint", str(SAVE_EVERY)]
            words += ["--runs", str(self.folder / "runs"), "--name", "bench", "--no-tensorboard"]
        else:
            words = ["torch.distributed.run", "--nproc-per-node", str(self.ranks), "--max-restarts", "2"]
            words += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", str(self.program)]
            words += [str(self.folder / "state.pt"), str(self.folder / "log-")]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        return subprocess.Popen([sys.executable, "-m", *words], env=environment, stdout=nothing, stderr=nothing)

    def clear(self) -> None:
        shutil.rmtree(self.folder / "runs", ignore_errors=True)
        for path in [*self.folder.glob("log-*"), *self.folder.glob("state.pt*")]:
            path.unlink()

    def events(self, rank: int) -> Iterator[tuple[str, int, float]]:
        """(start, pid, time) and (step, number, time) of a rank, over all of its lives."""
        if self.name == "meshrun":
            runs = sorted((self.folder / "runs").glob("bench-*"), key=lambda path: int(path.name.split("-")[1]))
            path = runs[-1] / "events" / f"rank-{rank:05d}.jsonl" if runs else Path("none")
            for line in _lines(path):
                event = json.loads(line)
                if event["kind"] in ("start", "step"):
                    yield event["kind"], event["pid" if event["kind"] == "start" else "step"], event["time"]
        else:
            for line in _lines(self.folder / f"log-{rank}"):
                kind, number, at = line.split()
                yield kind, int(number), float(at)


def _lines(path: Path) -> list[str]:
    """Complete lines of a file that is being written."""
    try:
        return path.read_text().split("\n")[:-1]
    except FileNotFoundError:
        return []


def measure(side: Side, draw: random.Random) -> tuple[float, int]:
    """Seconds from the kill of a rank to the next finished step, and how many steps were made again."""
    side.clear()
    victim, wait_for = draw.randrange(side.ranks), draw.randrange(*KILL_BETWEEN)
    process = side.start()
    try:
        pid = 0
        while True:
            seen = list(side.events(victim))
            if any(kind == "step" and number >= wait_for for kind, number, _ in seen):
                pid = next(number for kind, number, _ in seen if kind == "start")
                break
            time.sleep(0.005)
        os.kill(pid, signal.SIGKILL)
        killed = time.time()
        before = max(number for kind, number, _ in side.events(victim) if kind == "step")
        while True:
            found = list(side.events(victim))
            lives = [number for number, (kind, *_) in enumerate(found) if kind == "start"]
            after = [each for each in found[lives[1] :] if each[0] == "step"] if len(lives) > 1 else []
            if after:
                return after[0][2] - killed, before - after[0][1] + 1
            if process.poll() is not None:
                raise SystemExit(f"{side.name} ended with status {process.returncode} and did not go on")
            time.sleep(0.005)
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    draw = random.Random(0)
    with tempfile.TemporaryDirectory(prefix="meshrun-bench-") as folder:
        sides = [Side(name, asked.ranks, asked.width, Path(folder)) for name in ("torchrun", "meshrun")]
        found: dict[str, list[tuple[float, int]]] = {side.name: [] for side in sides}
        for number in range(asked.rounds):
            for side in draw.sample(sides, 2):
                found[side.name].append(measure(side, draw))
            if not asked.json:
                last = ", ".join(f"{name} {each[-1][0]:.2f} s" for name, each in found.items())
                print(f"round {number + 1} of {asked.rounds}: {last}", file=sys.stderr)
    ratios = [mine[0] / theirs[0] for mine, theirs in zip(found["meshrun"], found["torchrun"], strict=True)]
    rows = {
        name: {
            "seconds": statistics.median(each[0] for each in values),
            "least": min(each[0] for each in values),
            "most": max(each[0] for each in values),
            "lost": statistics.mean(each[1] for each in values),
        }
        for name, values in found.items()
    }
    ratio = {"median": statistics.median(ratios), "least": min(ratios), "most": max(ratios)}
    if asked.json:
        print(json.dumps({"rows": rows, "ratios": {"meshrun_vs_torchrun": ratio}}))
        return
    table = Table("side", "kill to next step, s", "least", "most", "steps made again")
    for name, row in rows.items():
        table.add_row(name, *(f"{row[key]:.2f}" for key in ("seconds", "least", "most")), f"{row['lost']:.1f}")
    Console().print(table)
    print(f"meshrun / torchrun: {ratio['median']:.2f} ({ratio['least']:.2f}-{ratio['most']:.2f}); wanted: below 0.5")


if __name__ == "__main__":
    main()

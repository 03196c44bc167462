"""How fast each rank computes, and all of them together sum: the same small work everywhere, compared with the others.

    rounds = [works of every rank, …]        # `work(world)` on each rank at the same time
    slow(rounds)                             # those that stood out in every round
    together(world, runs, site)              # on all ranks: forms the process group that training would

Machines are noisy: what counts is the median of several windows, against the median of the other ranks, and only who
stands out in round after round is called slow.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshrun.errors import RunFailed, UserError
from meshrun.world import World

if TYPE_CHECKING:
    import torch

WINDOWS, WINDOW_S = 5, 0.12
ROUNDS = 3
SLOW_CPU, SLOW_GPU = 2.5, 1.25
"""Times slower than the others that is no accident. Cores are shared with whatever else runs there, GPUs are not."""
CPU_SIZE, GPU_SIZE = 192, 4096
MEETING_S = 25.0


@dataclass(frozen=True)
class Work:
    """Matrix products on one device of a rank."""

    rank: int
    device: str
    rate: float
    """FLOP/s: the median of the windows."""
    share: float
    """Of its core's time that the rank really got; 1 on GPUs."""

    @property
    def on_gpu(self) -> bool:
        return self.device != "cpu"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Together:
    """What came of forming the process group."""

    error: str = ""
    device: str = ""
    gpus: int = 0
    """GPUs that torch sees."""
    latency: float | None = None
    """Seconds of the smallest all-reduce: the median."""
    bytes_per_s: float | None = None
    """Of a large all-reduce: what each rank sends or receives, the best of some."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def slow(rounds: Sequence[Sequence[Work]]) -> list[tuple[Work, float]]:
    """Who stood out in every round, and how many times slower it was in the one where it was least so."""
    if not rounds:
        return []
    ratios = [_ratios(works) for works in rounds]
    found = []
    for work in rounds[-1]:
        least = min(each.get((work.rank, work.device), 0.0) for each in ratios)
        if least > (SLOW_GPU if work.on_gpu else SLOW_CPU):
            found.append((work, least))
    return found


def _ratios(works: Sequence[Work]) -> dict[tuple[int, str], float]:
    """How many times slower each is than the median of the others of its kind."""
    found = {}
    for work in works:
        others = [each.rate for each in works if each is not work and each.on_gpu == work.on_gpu]
        if others and work.rate:
            found[work.rank, work.device] = statistics.median(others) / work.rate
    return found


def work(world: World) -> list[Work]:
    """Measure this rank's own device, or all that it sees where it is its node's only rank."""
    import torch

    gpus = torch.cuda.device_count()
    if not gpus:
        return [_on_cpu(world.rank)]
    own = range(gpus) if world.local_size == 1 else [world.local_rank % gpus]
    return [_on_gpu(world.rank, torch.device("cuda", index)) for index in own]


def _on_cpu(rank: int) -> Work:
    import torch

    # One thread: how many cores a rank has is looked at elsewhere, and threads that wait for each other add noise.
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        matrix = torch.full((CPU_SIZE, CPU_SIZE), 0.5)
        with torch.no_grad():
            began, used = time.perf_counter(), time.thread_time()
            rates = [_rate(lambda: matrix @ matrix, CPU_SIZE) for _ in range(WINDOWS)]
            share = (time.thread_time() - used) / (time.perf_counter() - began)
    finally:
        torch.set_num_threads(before)
    return Work(rank, "cpu", statistics.median(rates), min(1.0, share))


def _on_gpu(rank: int, device: torch.device) -> Work:
    import torch

    matrix = torch.full((GPU_SIZE, GPU_SIZE), 0.5, device=device, dtype=torch.bfloat16)

    def product() -> None:
        for _ in range(8):
            matrix @ matrix
        torch.cuda.synchronize(device)

    with torch.no_grad():
        product()
        rates = [8 * _rate(product, GPU_SIZE) for _ in range(WINDOWS)]
    return Work(rank, str(device), statistics.median(rates), 1.0)


def _rate(product: Callable[[], object], size: int) -> float:
    """FLOP/s over one window, which takes in whatever held the product up."""
    began, count = time.perf_counter(), 0
    while (took := time.perf_counter() - began) < WINDOW_S or not count:
        product()
        count += 1
    return count * 2 * size**3 / took


def alone() -> Together:
    """What can be told without the others."""
    import torch

    return Together(gpus=torch.cuda.device_count())


def together(world: World, runs: Path, site: str | None) -> Together:
    """Meet as a training would, and time sums over all ranks."""
    import torch

    from meshrun import mesh

    gpus = torch.cuda.device_count()
    try:
        mesh.use(mesh.Meeting(timeout=MEETING_S, runs=runs, site=site))
        here = mesh.start()
        if here.mesh is None:
            return Together(device=here.device.type, gpus=gpus)
        small = torch.zeros(1, device=here.device)
        large = torch.zeros((256 << 20 if here.device.type == "cuda" else 4 << 20) // 4, device=here.device)
        latency = statistics.median(_summed(small) for _ in range(15))
        took = min(_summed(large) for _ in range(4))
        sent = 2 * (world.size - 1) / world.size * large.nbytes
        return Together("", here.device.type, gpus, latency, sent / took)
    except (RunFailed, UserError, RuntimeError) as error:
        return Together(error=str(error).strip().partition("\n")[0], gpus=gpus)


def leave() -> None:
    """Leave the process group, if one was formed."""
    from meshrun import mesh

    with contextlib.suppress(RunFailed, RuntimeError):
        mesh.finish()


def _summed(values: torch.Tensor) -> float:
    import torch
    import torch.distributed as dist

    began = time.perf_counter()
    dist.all_reduce(values)
    if values.device.type == "cuda":
        torch.cuda.synchronize(values.device)
    return time.perf_counter() - began

"""Ranks that hold the others up while the run still goes on.

    straggling = Straggling(host)
    straggling.look(pulses)              # every 10 s: sentences on ranks that were slow three times in a row
    pulse.sniff = sniff_on(device)       # on a rank: times a small product now and then

In synchronous training all ranks take equally long for a step, so their step times say nothing. What differs: how long
a rank waits for its own data, how much processor time it spends, and how long it takes for the same small product.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from meshrun.observe.pulse import Reading

LOOK_EVERY = 10.0
RATIO = 1.5
LOOKS = 3


@dataclass(frozen=True)
class Sample:
    """One rank between two looks: seconds a step for its data, of processor time and in all, and of its sniff test."""

    rank: int
    step: float
    data_wait: float
    cpu: float
    sniff: float


@dataclass(frozen=True)
class Slow:
    """A rank that stands out, and in what."""

    rank: int
    kind: str
    ratio: float
    text: str


def stragglers(samples: Sequence[Sample]) -> list[Slow]:
    """Who stands out in one look. Of two ranks the slower can be told as well as of a thousand."""
    if len(samples) < 2:
        return []
    found = []
    for kind, seconds_of, least, text in _KINDS:
        if kind == "device" and not all(sample.sniff for sample in samples):
            continue  # not every rank has done its test yet
        for sample in samples:
            own = seconds_of(sample)
            usual = statistics.median(seconds_of(each) for each in samples if each is not sample)
            # What is too short to hold anybody up is not worth a sentence, whatever its ratio.
            if own > RATIO * usual and own - usual > least(sample):
                told = text.format(own=_seconds(own), usual=_seconds(usual))
                found.append(Slow(sample.rank, kind, own / usual if usual else float("inf"), told))
    return found


_KINDS: tuple[tuple[str, Callable[[Sample], float], Callable[[Sample], float], str], ...] = (
    (
        "data",
        lambda sample: sample.data_wait,
        lambda sample: max(0.001, 0.1 * sample.step),
        "it waits {own} a step for its data, the others {usual}",
    ),
    (
        "compute",
        lambda sample: sample.cpu,
        lambda sample: max(0.001, 0.1 * sample.step),
        "it computes {own} a step, the others {usual}",
    ),
    (
        "device",
        lambda sample: sample.sniff,
        lambda _: 0.0002,
        "it takes {own} for a small matrix product that takes the others {usual}",
    ),
)


class Straggling:
    """Remembers looks: a sentence once a rank was slow in three in a row, and once more only if it changes."""

    def __init__(self, host: str, by_stage: bool = False) -> None:
        """`by_stage`: ranks have different parts of the model, so their work may well differ."""
        self._host, self._by_stage = host, by_stage
        self.restart()

    def restart(self) -> None:
        """Forget: other processes run now."""
        self._before: dict[int, Reading] = {}
        self._in_a_row: dict[tuple[int, str], int] = {}
        self._told: dict[tuple[int, str], float] = {}

    def look(self, pulses: Sequence[Reading]) -> list[str]:
        before, self._before = self._before, {pulse.rank: pulse for pulse in pulses}
        samples = [_between(before[pulse.rank], pulse) for pulse in pulses if pulse.rank in before]
        slow = [] if None in samples else stragglers([sample for sample in samples if sample is not None])
        slow = [each for each in slow if not (self._by_stage and each.kind == "compute")]
        self._in_a_row = {(each.rank, each.kind): self._in_a_row.get((each.rank, each.kind), 0) + 1 for each in slow}
        return [sentence for each in slow if (sentence := self._news(each))]

    def _news(self, slow: Slow) -> str:
        key = slow.rank, slow.kind
        told = self._told.get(key)
        if self._in_a_row[key] < LOOKS or (told is not None and 0.5 < slow.ratio / told < 2):
            return ""
        self._told[key] = min(slow.ratio, 1e9)
        return f"rank {slow.rank} on {self._host} is slow: {slow.text}"


def _between(before: Reading, now: Reading) -> Sample | None:
    """Means over the steps between two looks; None where there was none."""
    steps = now.finished - before.finished
    if steps <= 0:
        return None
    return Sample(
        now.rank,
        (now.seconds - before.seconds) / steps,
        (now.data_wait - before.data_wait) / steps,
        (now.cpu - before.cpu) / steps,
        now.sniff,
    )


def sniff_on(device: Any) -> Callable[[], float]:
    """A fixed product on the device, and how long it took: on a GPU the time of the one before, as nobody waits."""
    import torch

    if device.type == "cuda":
        return _GpuSniff(device)
    matrix = torch.full((192, 192), 0.5)

    def sniff() -> float:
        with torch.no_grad():
            return min(_timed(lambda: matrix @ matrix) for _ in range(3))

    return sniff


class _GpuSniff:
    """Queues a product between two events, and reads the pair that it queued the time before: 0 if that is not over."""

    def __init__(self, device: Any) -> None:
        import torch

        self._torch, self._matrix = torch, torch.full((1024, 1024), 0.5, device=device)
        self._queued: tuple[Any, Any] | None = None

    def __call__(self) -> float:
        cuda = self._torch.cuda
        over = self._queued is not None and self._queued[1].query()
        took = self._queued[0].elapsed_time(self._queued[1]) / 1000 if self._queued and over else 0.0
        begin, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
        begin.record()
        with self._torch.no_grad():
            self._matrix @ self._matrix
        end.record()
        self._queued = begin, end
        return took


def _timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1000 * seconds:.1f} ms"

"""What bounds a step, and how far it is from that: counts of the step against what this device can do.

    device = measured(torch.device("cuda"), "bf16")
    shares = shares_of(counts, device, step_s=0.39, precision="bf16")
    sentence(shares)       # bound by matrix products: at the pace of a large one they take 71 % of the step, …

A share is the time that a part of the step would take at the device's own pace, of the time that the step took. What
goes through memory is counted before operations are fused, so it may be more than there is.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from meshrun.check.bench_count import Counts
from meshrun.experiment import in_halves

HALF = 0.5
"""Of a step, from which on something is said to bound it."""
WORTH_A_WORD = 0.005
UNSTEADY = 1.5
"""Times as long that a try may take as the fastest before that is told."""


@dataclass(frozen=True)
class Device:
    """What was measured of a device."""

    name: str
    products: float
    """Floating-point operations a second of a large matrix product, in the precision that is computed in."""
    float8: float | None
    """And in 8 bits, where the device has that."""
    bandwidth: float
    """Bytes a second that a copy reads and writes."""
    call_s: float
    """Seconds that the host needs to start an operation."""
    varied: float = 1.0
    """Times as long that the slowest try of the large product took as the fastest."""
    lasting: float | None = None
    """Operations a second of large products for a second on end, on a GPU: it has a limit of power, and then slows."""


@dataclass(frozen=True)
class Shares:
    """Of the time of a step."""

    step_s: float
    mfu: float
    """All that must be multiplied, of what the device could have multiplied in that time."""
    products: float
    attention: float
    traffic: float
    optimizer: float
    host: float
    data: float
    """The training waited for data."""


def shares_of(counts: Counts, device: Device, step_s: float, precision: str, data_wait: float = 0.0) -> Shares:
    """What each part would take at the device's own pace."""
    pace = device.float8 if precision == "float8" and device.float8 else device.products
    return Shares(
        step_s=step_s,
        mfu=counts.flops / device.products / step_s,
        products=counts.products / pace / step_s,
        attention=counts.attention / device.products / step_s,
        traffic=counts.traffic / device.bandwidth / step_s,
        optimizer=counts.optimizer / device.bandwidth / step_s,
        host=counts.calls * device.call_s / step_s,
        data=data_wait,
    )


def sentence(shares: Shares) -> str:
    """What bounds the step, and what else there is in it; nothing does that takes less than half of it."""
    computing, memory = shares.products + shares.attention, shares.traffic + shares.optimizer
    taking = f"take {_percent(shares.products)} of the step at the pace of a large one"
    rest = ", ".join([f"matrix products {taking}", *_others(shares)])
    host = f"up to {_percent(min(shares.host, 1.0))} of the step"
    if shares.data >= HALF and shares.data > computing:
        return f"bound by data, which the step waits for {_percent(shares.data)} of its time (--workers): {rest}"
    if computing >= HALF:
        return f"bound by matrix products: {', '.join([f'they {taking}', *_others(shares)])}"
    if memory >= HALF and memory >= shares.host:
        return f"bound by memory traffic: {rest}"
    if shares.host >= HALF:
        return f"bound by the host, which takes {host} to start operations (--compile, --graphs, --batch): {rest}"
    # The host works beside a GPU and between the operations of a CPU: it is told, and not added.
    explained = _percent(min(computing + memory + shares.data, 1.0))
    starting = f"; the host takes {host} to start operations" if shares.host >= WORTH_A_WORD else ""
    return f"of the measured step, {explained} is explained, and nothing takes half of it: {rest}{starting}"


def unsteady(device: Device) -> str | None:
    """A sentence where the device was not equally fast all the time that it was measured."""
    if device.varied < UNSTEADY:
        return None
    return (
        f"the device itself was up to {device.varied:.1f} times slower from one try to the next, as where something "
        f"else computes on it: shares are that uncertain"
    )


def _others(shares: Shares) -> list[str]:
    """What beside matrix products is worth a word."""
    parts = {
        "attention": (shares.attention, ""),
        "memory traffic of other operations": (min(shares.traffic, 1.0), "at most "),
        "that of the optimizer": (shares.optimizer, ""),
        "waiting for data": (shares.data, ""),
    }
    return [f"{name} {most}{_percent(share)}" for name, (share, most) in parts.items() if share >= WORTH_A_WORD]


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def facts(counts: Counts, device: Device) -> list[str]:
    """The numbers that the shares are made of, a line each."""
    eight = f", {_si(device.float8)}FLOP/s in 8 bits" if device.float8 else ""
    lasting = f" ({_si(device.lasting)}FLOP/s for a second on end)" if device.lasting else ""
    return [
        f"{device.name}: {_si(device.products)}FLOP/s in large matrix products{lasting}{eight}, "
        f"{_si(device.bandwidth)}B/s of memory, {device.call_s * 1e6:.1f} µs to start an operation",
        f"a step: {_si(counts.products)}FLOP in matrix products, {_si(counts.attention)}FLOP in attention; "
        f"{_si(counts.traffic)}B through other operations (before any are fused), "
        f"{_si(counts.optimizer)}B through the update; {counts.calls:,} operations",
    ]


def _si(number: float) -> str:
    """With three digits, and the letter of its size: 788 T."""
    for letter in ("", "k", "M", "G", "T"):
        if abs(number) < 999.5:
            return f"{number:.3g} {letter}"
        number /= 1000
    return f"{number:.3g} P"


def product_size(device: torch.device) -> int:
    """Rows and columns of what is multiplied to see how fast a device can."""
    return 8192 if device.type == "cuda" else 768


def measured(device: torch.device, precision: str) -> Device:
    """Measure a device, in some seconds."""
    on_gpu = device.type == "cuda"
    kind = torch.bfloat16 if in_halves(precision) else torch.float32
    name = torch.cuda.get_device_name(device) if on_gpu else _cpu()
    size = product_size(device)
    a, b = (torch.randn(size, size, device=device, dtype=kind) for _ in range(2))
    tries = _tries(lambda: torch.mm(a, b), device)
    big = torch.empty((1 << 30) if on_gpu else (1 << 26), dtype=torch.uint8, device=device).zero_()
    other = torch.empty_like(big)
    copied = min(_tries(lambda: other.copy_(big), device))
    tries += _tries(lambda: torch.mm(a, b), device)  # once more, since what else runs here comes and goes
    return Device(
        name=name,
        products=2 * size**3 / min(tries),
        float8=_float8(size, device) if precision == "float8" else None,
        bandwidth=2 * big.numel() / copied,
        call_s=_call_s(device),
        varied=max(tries) / min(tries),
        lasting=2 * size**3 / _on_end(lambda: torch.mm(a, b), device) if on_gpu else None,
    )


def _cpu() -> str:
    threads = torch.get_num_threads()
    return f"CPU, {threads} thread{'' if threads == 1 else 's'}"


def _float8(size: int, device: torch.device) -> float | None:
    """Operations a second of a product in 8 bits; None where the device has none."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 9):
        return None
    a, b = (torch.randn(size, size, device=device).to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device=device)

    def product() -> None:
        torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)

    return 2 * size**3 / min(_tries(product, device))


def _tries(act: Callable[[], object], device: torch.device, times: int = 5, at_once: int = 10) -> list[float]:
    """Seconds of some tries."""
    found = []
    at_once = at_once if device.type == "cuda" else 2
    for _ in range(times + 1):  # the first is to warm up
        _wait(device)
        began = time.perf_counter()
        for _ in range(at_once):
            act()
        _wait(device)
        found.append((time.perf_counter() - began) / at_once)
    return found[1:]


def _on_end(act: Callable[[], object], device: torch.device, seconds: float = 1.0) -> float:
    """Seconds of one after it was done for so long."""
    began = time.perf_counter()
    while time.perf_counter() - began < seconds:
        _tries(act, device, times=1)
    return statistics.median(_tries(act, device))


def _call_s(device: torch.device, calls: int = 500) -> float:
    """Seconds of the host for one small operation."""
    small = torch.zeros(8, device=device)
    found = []
    for _ in range(4):
        _wait(device)
        began = time.perf_counter()
        for _ in range(calls):
            small.add_(1.0)
        found.append((time.perf_counter() - began) / calls)
    return min(found)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

"""What was looked at and measured, node by node: as a JSON document, and as lines for people.

checked(case)["n1"]["bytes_per_s"]          # {"eth0": 1310720000}
lines(case)                                 # "n1: ranks 0, 1; 16 of 16 cores; 4 of 4 GPUs; 10.0.0.1 on ib0; …"
looked_at(case, "speed")                    # not with --quick
"""

from __future__ import annotations

from typing import Any

from meshrun.check.doctor.case import Case, ranks_text, size_text
from meshrun.check.doctor.facts import Facts
from meshrun.check.doctor.links import Links

SHOWN = 16


def checked(case: Case) -> dict[str, dict[str, Any]]:
    """The figures, for each node."""
    found = {}
    for host, ranks in case.nodes().items():
        first = ranks[0]
        links = case.links.get(first.rank, Links())
        used = first.network.used()
        works = [work for works in case.rounds[-1:] for work in works if work.rank in {each.rank for each in ranks}]
        together = [case.together[each.rank] for each in ranks if each.rank in case.together]
        found[host] = {
            "ranks": [each.rank for each in ranks],
            "cores": {
                "bound": len({cpu for each in ranks for cpu in each.cores.bound}),
                "granted": first.cores.granted_node,
                "existing": first.cores.existing,
            },
            "gpus": {
                "granted": first.gpus.granted_node,
                "listed": None if first.gpus.listed is None else len(first.gpus.listed),
                "seen": max((each.gpus for each in together), default=None),
            },
            "address": first.network.address,
            "interface": used.name if used else None,
            "bytes_per_s": {speed.interface: round(speed.bytes_per_s) for speed in links.speeds},
            "clock_ahead_s": round(links.clock.ahead, 6) if links.clock else 0.0,
            "shared_memory": first.memory.free,
            "folder": {"path": first.folder.path, "free": first.folder.free, "filesystem": first.folder.filesystem},
            "flops": {f"{work.rank}/{work.device}": round(work.rate) for work in works},
            "all_reduce": {
                "latency_s": next((each.latency for each in together if each.latency is not None), None),
                "bytes_per_s": next((each.bytes_per_s for each in together if each.bytes_per_s is not None), None),
            },
            "versions": first.versions,
            "slurm": first.slurm,
            "ends_in_s": first.ends_in,
        }
    return found


def looked_at(case: Case, check: str) -> bool:
    """Whether there was anything to look at: one node has no other to reach, and --quick measures nothing."""
    match check:
        case "address" | "network" | "clock":
            return case.several_nodes
        case "ranks" | "versions":
            return case.size > 1
        case "GPUs":
            return any(each.gpus.granted_node or each.gpus.existing for each in case.facts)
        case "speed":
            return any(len(works) > 1 for works in case.rounds)
        case "caches":
            return any(each.caches.places for each in case.facts)
    return True


def lines(case: Case) -> list[str]:
    """A line of figures for each node, for the first of them."""
    found = [_line(host, ranks, figures, case.size) for (host, ranks), figures in zip(
        case.nodes().items(), checked(case).values(), strict=True
    )]  # fmt: skip
    return found[:SHOWN] + ([f"… and {len(found) - SHOWN} more nodes (--json has all)"] if len(found) > SHOWN else [])


def _line(host: str, ranks: list[Facts], figures: dict[str, Any], size: int) -> str:
    cores, gpus, sums = figures["cores"], figures["gpus"], figures["all_reduce"]
    beside = [f"{cores['granted']} granted"] if cores["granted"] is not None else []
    beside += [f"the machine has {cores['existing']}"] if cores["existing"] != cores["bound"] else []
    words = [f"{cores['bound']} cores" + (f" ({', '.join(beside)})" if beside else "")]
    if gpus["granted"] is not None:
        words.append(f"{'all' if gpus['listed'] is None else gpus['listed']} of {gpus['granted']} GPUs shown")
    if figures["interface"] and len(ranks) < size:
        words.append(f"{figures['address']}, collectives over {figures['interface']}")
    words += [f"{name} {rate / 1e6:,.0f} MB/s" for name, rate in figures["bytes_per_s"].items()]
    if len(ranks) < size:
        words.append(f"clock {1000 * figures['clock_ahead_s']:+.1f} ms")
    words.append(f"/dev/shm {size_text(figures['shared_memory'])}")
    words.append(f"{figures['folder']['filesystem'] or 'runs'} {size_text(figures['folder']['free'])} free")
    if figures["flops"]:
        slowest, fastest = min(figures["flops"].values()), max(figures["flops"].values())
        words.append(f"{slowest / 1e9:,.0f} to {fastest / 1e9:,.0f} GFLOP/s")
    if sums["latency_s"] is not None:
        words.append(f"all-reduce {1e6 * sums['latency_s']:,.0f} µs, {sums['bytes_per_s'] / 1e6:,.0f} MB/s")
    if figures["ends_in_s"] is not None:
        words.append(f"job ends in {figures['ends_in_s'] / 60:,.0f} min")
    who = f"{host} ({ranks_text(figures['ranks'])})" if size > 1 else host
    return f"{who}: " + "; ".join(words)
